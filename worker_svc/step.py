"""One step, from request to result, on the device thread: deltas, seals, block operations, forward, sampling.

A row that cannot be computed fails alone. When a step fails as a whole, what its rows and blocks hold is not known:
from then on steps are skipped, until one marked `restart` begins without rows.
"""

import logging
import time
import traceback

import torch
from torch import Tensor

from protos import common_pb2
from protos import worker_pb2 as pb
from worker_svc.batch import StepBatch, build_batch
from worker_svc.compute import Compute
from worker_svc.entries import SealBook
from worker_svc.errors import DeviceFaultError
from worker_svc.mirror import Mirror, ScheduledRows
from worker_svc.sampler import Choice, Logprobs, SamplingRow, TokenSampler

logger = logging.getLogger(__name__)


class StepRunner:
    """Runs steps. Not thread-safe: the device thread alone calls it."""

    def __init__(self, mirror: Mirror, compute: Compute, sampler: TokenSampler) -> None:
        self._mirror = mirror
        self._compute = compute
        self._sampler = sampler
        self._seals = SealBook()
        self._skipping = False

    def forget_rows(self) -> None:
        """Forget every row, and that a step failed; seals stay."""
        self._mirror.clear()
        self._skipping = False

    def fence(self) -> list[pb.ManifestPart]:
        """Forget every row and return every seal."""
        self.forget_rows()
        return list(self._seals.parts())

    def run(self, request: pb.StepRequest) -> pb.StepResult:
        """Run a step. Raises DeviceFaultError when the process should end; all else is told in the result."""
        begin = time.perf_counter()
        result = pb.StepResult(lane_epoch=request.lane_epoch, step_id=request.step_id, status=pb.STEP_STATUS_OK)
        try:
            self._run(request, result)
        except torch.AcceleratorError as error:
            raise DeviceFaultError(f"step {request.step_id}: {_one_line(error)}") from error
        except Exception as error:
            self._skipping = True
            where = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("step %d failed at %s:%s: %s", request.step_id, where.filename, where.lineno, _one_line(error))
            logger.debug("step %d failed", request.step_id, exc_info=True)
            result = pb.StepResult(
                lane_epoch=request.lane_epoch,
                step_id=request.step_id,
                status=pb.STEP_STATUS_FAILED,
                error=_one_line(error),
            )
        result.step_ms = (time.perf_counter() - begin) * 1000
        return result

    def _run(self, request: pb.StepRequest, result: pb.StepResult) -> None:
        if request.restart:
            self.forget_rows()
        if self._skipping:
            # The blocks that it seals were computed by earlier steps.
            self._record_seals(request)
            result.status = pb.STEP_STATUS_SKIPPED
            return
        rows = self._mirror.apply(request)
        result.failed_rows.extend(rows.failed)
        self._record_seals(request)
        if request.HasField("ops"):
            self._run_ops(request.ops)
        num_sampling = self._forward(rows, result) if len(rows.slots) else 0
        if not num_sampling:
            # A result says that its step was computed, and how long that took: the scheduler seals blocks by the one
            # and sets deadlines by the other. A step that samples has waited for its tokens.
            self._compute.wait()

    def _forward(self, rows: ScheduledRows, result: pb.StepResult) -> int:
        """Compute the rows and sample; return how many sampled."""
        batch = build_batch(self._mirror, rows)
        self._seals.void(batch.written_entries.tolist())
        logits = self._compute.forward(batch)
        self._mirror.advance(rows)
        if len(batch.sampling_slots):
            self._sample(batch, logits, result)
        return len(batch.sampling_slots)

    def _record_seals(self, request: pb.StepRequest) -> None:
        if request.seals.entries:
            self._mirror.limits.entries.check(request.seals.entries)
            self._seals.record(request.seals)

    def _run_ops(self, ops: pb.BlockOps) -> None:
        """Run a step's block operations; places that they write lose their seals first."""
        bounds = self._mirror.limits.entries
        bounds.check(ops.zero_entries)
        bounds.check_copies(ops.copy_src_entries, ops.copy_dst_entries)
        bounds.check_requantizations(ops.requantize_src_entries, ops.requantize_dst_entries)
        for written in (ops.zero_entries, ops.copy_dst_entries, ops.requantize_dst_entries):
            self._seals.void(written)
        if ops.zero_entries:
            self._compute.zero_blocks(ops.zero_entries)
        if ops.copy_src_entries:
            self._compute.copy_blocks(ops.copy_src_entries, ops.copy_dst_entries)
        if ops.requantize_src_entries:
            self._compute.requantize_blocks(ops.requantize_src_entries, ops.requantize_dst_entries)

    def _sample(self, batch: StepBatch, logits: Tensor, result: pb.StepResult) -> None:
        mirror, slots = self._mirror, batch.sampling_slots.tolist()
        num_tokens = mirror.num_tokens[slots].tolist()
        num_prompt_tokens = mirror.num_prompt_tokens[slots].tolist()
        rows = [
            SamplingRow(mirror.sampling(slot), mirror.tokens[slot, :length], prompt_length, mirror.sequence_idxs[slot])
            for slot, length, prompt_length in zip(slots, num_tokens, num_prompt_tokens, strict=True)
        ]
        kept: list[int] = []
        choices: list[Choice] = []
        for slot, choice in zip(slots, self._sampler.sample(logits, rows), strict=True):
            if choice.token_id is None:
                result.failed_rows.append(mirror.fail(slot, "its logits are not finite"))
                continue
            mirror.append_token(slot, choice.token_id)
            kept.append(slot)
            choices.append(choice)
        _fill_sampled(result.sampled, [mirror.seq_ids[slot] for slot in kept], choices)
        result.sampled.seq_epochs.extend([mirror.seq_epochs[slot] for slot in kept])


def _fill_sampled(sampled: pb.SampledRows, seq_ids: list[int], choices: list[Choice]) -> None:
    """Write tokens, and log probabilities where a row asked for them; other rows of such a step have 0 there."""
    sampled.seq_ids.extend(seq_ids)
    sampled.token_ids.extend([choice.token_id or 0 for choice in choices])
    if all(choice.logprobs is None for choice in choices):
        return
    sampled.logprobs.extend([choice.logprobs.logprob if choice.logprobs else 0.0 for choice in choices])
    for seq_id, choice in zip(seq_ids, choices, strict=True):
        if choice.logprobs and choice.logprobs.top_token_ids:
            sampled.row_logprobs.add(seq_id=seq_id, tokens=[_logprobs_message(choice.logprobs)])


def _logprobs_message(logprobs: Logprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_token_ids=logprobs.top_token_ids, top_logprobs=logprobs.top_logprobs
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
