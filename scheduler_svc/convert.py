"""Between the wire's messages and the core's values. Pure functions; nothing here decides anything."""

import hashlib
import hmac
from collections.abc import Sequence
from itertools import repeat

from protos import common_pb2, scheduler_pb2, worker_pb2
from protos.block_hash import HASH_BYTES, BlockHash, root_hash
from scheduler_svc.core import types

# What the core hands through as a token's logprobs: the chosen token's alone, or alternatives too.
Logprobs = float | common_pb2.TokenLogprobs

FINISH_REASON_TO_WIRE = {
    types.FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    types.FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    types.FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_REASON_FROM_WIRE = {wire: reason for reason, wire in FINISH_REASON_TO_WIRE.items()}
_ERROR_CODE_TO_WIRE = {
    types.ErrorCode.INVALID_ARGUMENT: common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    types.ErrorCode.RESOURCE_EXHAUSTED: common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
    types.ErrorCode.UNAVAILABLE: common_pb2.ERROR_CODE_UNAVAILABLE,
    types.ErrorCode.DEADLINE_EXCEEDED: common_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    types.ErrorCode.INTERNAL: common_pb2.ERROR_CODE_INTERNAL,
}
_STEP_STATUS_FROM_WIRE = {
    worker_pb2.STEP_STATUS_OK: types.StepStatus.OK,
    worker_pb2.STEP_STATUS_FAILED: types.StepStatus.FAILED,
    worker_pb2.STEP_STATUS_SKIPPED: types.StepStatus.SKIPPED,
}


class MalformedMessageError(Exception):
    """A worker's message contradicts itself, or says something that this version does not know."""


# ---- gateway to core


def tenant_salt(cluster_secret: str, tenant: str) -> bytes:
    """Return what keeps a tenant's prefixes its own: 32 bytes, the same in every scheduler with this secret.

    Without a secret (`""`, loopback only) the salt is still stable, but anybody can derive it.
    """
    return hmac.new(cluster_secret.encode(), b"quire/tenant-salt/1" + tenant.encode(), hashlib.sha256).digest()


def shared_salt(cluster_secret: str) -> bytes:
    """Return what stands for `tenant_salt` in a cell whose tenants share prefixes: 32 bytes, the same for all."""
    return hmac.new(cluster_secret.encode(), b"quire/shared-salt/1", hashlib.sha256).digest()


def request_from_wire(
    submit: scheduler_pb2.Submit, model: common_pb2.ModelInfo, salt: bytes, now_ms: int
) -> types.Request:
    """Return the core's request; its deadline is on the clock of `now_ms`.

    Prefixes are shared with requests of the same `salt` (`tenant_salt` or `shared_salt`) and `cache_salt`.

    Raises SchedulerError when it names a KV format that this version does not know.
    """
    sampling = submit.sampling
    is_beam_search = submit.HasField("beam_search")
    eos_token_ids = () if sampling.ignore_eos else model.eos_token_ids
    has_deadline = submit.HasField("remaining_deadline_ms")
    return types.Request(
        request_id=types.RequestId(submit.request_id),
        prompt_token_ids=list(submit.token_ids),
        ending=types.EndingRules(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset((*sampling.stop_token_ids, *eos_token_ids)),
        ),
        sampling=_beam_sampling(submit) if is_beam_search else sampling,
        cache_root=root_hash(model.fingerprint, salt, submit.cache_salt),
        n=submit.n,
        beam_search=_beam_params(submit) if is_beam_search else None,
        tenant=submit.tenant,
        priority=submit.priority,
        deadline_ms=now_ms + submit.remaining_deadline_ms if has_deadline else None,
        skip_cache_read=submit.skip_cache_read,
        kv_precision_floor=_precision_floor(submit),
        is_resubmit=submit.is_resubmit,
        delivered={
            delivered.index: types.Delivered(
                token_ids=list(delivered.token_ids),
                finish_reason=_FINISH_REASON_FROM_WIRE.get(delivered.finish_reason),
            )
            for delivered in submit.delivered
        },
    )


def _beam_params(submit: scheduler_pb2.Submit) -> types.BeamParams:
    sampling = submit.sampling
    num_logprobs = sampling.num_logprobs if sampling.HasField("num_logprobs") else None
    return types.BeamParams(submit.beam_search.length_penalty, num_logprobs)


def _beam_sampling(submit: scheduler_pb2.Submit) -> common_pb2.SamplingParams:
    """Return what a worker is told of each beam: to report twice as many tokens as there are beams.

    The token that it samples does not count.
    """
    sampling = submit.sampling
    return common_pb2.SamplingParams(
        top_p=1.0,
        repetition_penalty=1.0,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=max(2 * submit.n, sampling.num_logprobs),
    )


def _precision_floor(submit: scheduler_pb2.Submit) -> types.Format | None:
    if not submit.HasField("kv_precision_floor"):
        return None
    try:
        return types.Format(submit.kv_precision_floor)
    except ValueError:
        raise types.SchedulerError(
            types.ErrorCode.INVALID_ARGUMENT,
            f"there is no KV format with the code {submit.kv_precision_floor}",
            "kv_precision_floor",
        ) from None


# ---- core to gateway


def logprobs_to_wire(logprobs: object) -> common_pb2.TokenLogprobs:
    """Return the message of one token's logprobs: as `step_result_from_wire` gave them to the core, or of a beam's."""
    if isinstance(logprobs, common_pb2.TokenLogprobs):
        return logprobs
    if isinstance(logprobs, types.PickedLogprobs):
        return common_pb2.TokenLogprobs(
            logprob=logprobs.logprob,
            top_token_ids=logprobs.top.top_token_ids[: logprobs.num_top],
            top_logprobs=logprobs.top.top_logprobs[: logprobs.num_top],
        )
    assert isinstance(logprobs, float), logprobs
    return common_pb2.TokenLogprobs(logprob=logprobs)


def error_to_wire(error: types.SchedulerError) -> common_pb2.Error:
    """Return the message of an error that ends a sequence."""
    return common_pb2.Error(code=_ERROR_CODE_TO_WIRE[error.code], message=error.message, param=error.param or "")


def usage_to_wire(usage: types.Usage) -> scheduler_pb2.Usage:
    """Return the message of a sequence's token counts."""
    return scheduler_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
    )


# ---- core to worker


def step_to_wire(plan: types.StepPlan, lane_epoch: int) -> worker_pb2.StepRequest:
    """Return the message of a step. Parts without content stay unset: a decode step is its row ids and little else."""
    request = worker_pb2.StepRequest(
        lane_epoch=lane_epoch,
        step_id=plan.step_id,
        restart=plan.restart,
        finished_seq_ids=plan.finished_seq_ids,
        resumed_rows=[_resumed_row(row) for row in plan.resumed_rows],
        new_rows=[_new_row(row) for row in plan.new_rows],
    )
    if plan.patches:
        request.patches.seq_ids.extend([patch.seq_id for patch in plan.patches])
        request.patches.block_idxs.extend([patch.block_idx for patch in plan.patches])
        request.patches.entries.extend([patch.entry for patch in plan.patches])
    if plan.continued_rows or plan.settled_seq_ids:
        _fill_continued(request.continued, plan.continued_rows, plan.settled_seq_ids)
    if plan.picked_tokens:
        request.continued.token_seq_ids.extend([seq_id for seq_id, _ in plan.picked_tokens])
        request.continued.token_ids.extend([token_id for _, token_id in plan.picked_tokens])
    if plan.seals:
        request.seals.CopyFrom(seals_to_wire(plan.seals))
    if plan.ops.zero:
        request.ops.zero_entries.extend(plan.ops.zero)
    if plan.ops.copy:
        request.ops.copy_src_entries.extend([source for source, _ in plan.ops.copy])
        request.ops.copy_dst_entries.extend([destination for _, destination in plan.ops.copy])
    if plan.ops.requantize:
        request.ops.requantize_src_entries.extend([source for source, _ in plan.ops.requantize])
        request.ops.requantize_dst_entries.extend([destination for _, destination in plan.ops.requantize])
    return request


def num_scheduled_tokens(plan: types.StepPlan) -> int:
    """Return the tokens that a step computes."""
    return (
        len(plan.settled_seq_ids)
        + sum([row.num_scheduled_tokens for row in plan.continued_rows])
        + sum([row.num_scheduled_tokens for row in plan.new_rows])
        + sum([row.num_scheduled_tokens for row in plan.resumed_rows])
    )


def seals_to_wire(seals: Sequence[types.Seal]) -> worker_pb2.Seals:
    """Return seals as parallel arrays."""
    versions = [seal.recipe_version for seal in seals]
    return worker_pb2.Seals(
        entries=[seal.entry for seal in seals],
        block_hashes=b"".join([seal.block_hash for seal in seals]),
        recipe_versions=versions[:1] if len(set(versions)) == 1 else versions,
    )


def _new_row(row: types.NewRow) -> worker_pb2.NewRow:
    assert isinstance(row.sampling, common_pb2.SamplingParams), row.sampling
    return worker_pb2.NewRow(
        seq_id=row.seq_id,
        seq_epoch=row.seq_epoch,
        token_ids=row.token_ids,
        num_prompt_tokens=row.num_prompt_tokens,
        entries=row.entries,
        num_computed_tokens=row.num_computed_tokens,
        num_scheduled_tokens=row.num_scheduled_tokens,
        sampling=row.sampling,
        sequence_idx=row.sequence_idx,
    )


def _resumed_row(row: types.ResumedRow) -> worker_pb2.ResumedRow:
    return worker_pb2.ResumedRow(
        seq_id=row.seq_id,
        seq_epoch=row.seq_epoch,
        num_tokens=row.num_tokens,
        entries=row.entries,
        num_computed_tokens=row.num_computed_tokens,
        num_scheduled_tokens=row.num_scheduled_tokens,
    )


def _fill_continued(
    continued: worker_pb2.ContinuedRows, rows: Sequence[types.ContinuedRow], settled_seq_ids: Sequence[types.SeqId]
) -> None:
    """Fill the packed arrays; one that would say the same of every row stays empty."""
    continued.seq_ids.extend([row.seq_id for row in rows])
    continued.seq_ids.extend(settled_seq_ids)
    scheduled = [row.num_scheduled_tokens for row in rows]
    if scheduled.count(1) != len(scheduled):
        continued.num_scheduled_tokens.extend(scheduled + [1] * len(settled_seq_ids))
    new_entries = [entry for row in rows for entry in row.new_entries]
    if new_entries:
        continued.num_new_entries.extend([len(row.new_entries) for row in rows] + [0] * len(settled_seq_ids))
        continued.new_entries.extend(new_entries)


# ---- worker to core


def step_result_from_wire(result: worker_pb2.StepResult) -> types.StepResult:
    """Return the core's result; raises MalformedMessageError."""
    status = _STEP_STATUS_FROM_WIRE.get(result.status)
    if status is None:
        raise MalformedMessageError(f"step {result.step_id} has the unknown status {result.status}")
    return types.StepResult(
        step_id=types.StepId(result.step_id),
        status=status,
        error=result.error,
        sampled=_sampled_rows(result.sampled) if result.HasField("sampled") else types.SampledRows(),
        failed_rows=[
            types.FailedRow(seq_id=types.SeqId(row.seq_id), seq_epoch=row.seq_epoch, error=row.error)
            for row in result.failed_rows
        ],
        step_ms=result.step_ms,
    )


def _sampled_rows(sampled: worker_pb2.SampledRows) -> types.SampledRows:
    rows = types.SampledRows(
        seq_ids=[types.SeqId(seq_id) for seq_id in sampled.seq_ids],
        seq_epochs=list(sampled.seq_epochs),
        token_ids=list(sampled.token_ids),
        nums_tokens=list(sampled.num_tokens),
        logprobs=_logprobs_from_wire(sampled),
    )
    num_tokens = sum(rows.nums_tokens) if rows.nums_tokens else len(rows.seq_ids)
    if (
        len(rows.seq_epochs) != len(rows.seq_ids)
        or (rows.nums_tokens and len(rows.nums_tokens) != len(rows.seq_ids))
        or len(rows.token_ids) != num_tokens
    ):
        raise MalformedMessageError("the arrays of a step's sampled rows do not have the same length")
    if rows.logprobs and len(rows.logprobs) != num_tokens:
        raise MalformedMessageError("a step's logprobs are not parallel to its tokens")
    return rows


def _logprobs_from_wire(sampled: worker_pb2.SampledRows) -> list[Logprobs]:
    """Return each token's logprobs: the chosen token's alone, but alternatives too in rows that asked for them."""
    logprobs: list[Logprobs] = list(sampled.logprobs)
    if sampled.row_logprobs:
        with_alternatives = {row.seq_id: row.tokens for row in sampled.row_logprobs}
        for token in (token for tokens in with_alternatives.values() for token in tokens):
            if len(token.top_token_ids) != len(token.top_logprobs):
                raise MalformedMessageError("a row's likeliest tokens and their logprobs are not of the same number")
        start = 0
        for seq_id, num_tokens in zip(sampled.seq_ids, sampled.num_tokens or repeat(1), strict=False):
            end = start + num_tokens
            logprobs[start:end] = with_alternatives.get(seq_id) or logprobs[start:end]
            start = end
    return logprobs


def seals_from_wire(seals: worker_pb2.Seals) -> list[types.Seal]:
    """Return the seals of a manifest's part; raises MalformedMessageError."""
    num_seals = len(seals.entries)
    versions = list(seals.recipe_versions)
    if len(versions) == 1:
        versions *= num_seals
    if len(seals.block_hashes) != num_seals * HASH_BYTES or len(versions) != num_seals:
        raise MalformedMessageError("the arrays of a manifest's part do not have the same length")
    return [
        types.Seal(
            entry=types.Entry(entry),
            block_hash=BlockHash(seals.block_hashes[idx * HASH_BYTES : (idx + 1) * HASH_BYTES]),
            recipe_version=versions[idx],
        )
        for idx, entry in enumerate(seals.entries)
    ]


def lane_spec_from_wire(registration: scheduler_pb2.RegisterRequest) -> types.LaneSpec:
    """Return what a worker offers."""
    return types.LaneSpec(
        num_blocks=registration.num_slabs * registration.native_blocks_per_slab,
        blocks_per_slab=registration.native_blocks_per_slab,
        block_size=registration.model.block_size,
        max_num_seqs=registration.max_num_seqs,
        max_num_batched_tokens=registration.max_num_batched_tokens,
        max_model_len=registration.model.max_model_len,
        quantized_blocks_per_slab={
            fmt: num_blocks
            for fmt, num_blocks in zip(types.Format, registration.blocks_per_slab, strict=False)
            if fmt is not types.Format.NATIVE and num_blocks
        },
        recipe_versions=dict(zip(types.Format, registration.recipe_versions, strict=False)),
    )
