"""Messages and the core's values: nothing is lost, and nothing malformed gets in."""

import pytest

from protos import common_pb2, scheduler_pb2, worker_pb2
from protos.block_hash import HASH_BYTES, BlockHash
from scheduler_svc import convert
from scheduler_svc.core.types import (
    BeamParams,
    BlockOps,
    ContinuedRow,
    Entry,
    EntryPatch,
    FinishReason,
    Format,
    NewRow,
    PickedLogprobs,
    ResumedRow,
    SchedulerError,
    Seal,
    SeqId,
    StepId,
    StepPlan,
    StepStatus,
)

from .fake_worker import EOS_TOKEN_ID, make_model


def make_plan(**parts: object) -> StepPlan:
    rows = ("finished_seq_ids", "resumed_rows", "new_rows", "continued_rows", "settled_seq_ids", "picked_tokens")
    empty: dict[str, object] = dict.fromkeys((*rows, "patches", "seals"), ())
    fields: dict[str, object] = {"step_id": StepId(1), "restart": False, "ops": BlockOps()}
    return StepPlan(**(fields | empty | parts))  # type: ignore[arg-type]


def make_submit(**fields: object) -> scheduler_pb2.Submit:
    submit = scheduler_pb2.Submit(request_id="a", token_ids=[1, 2], n=1)
    submit.sampling.max_tokens = 5
    for name, value in fields.items():
        setattr(submit, name, value)
    return submit


def test_tenant_salt_depends_on_secret_and_tenant_alone() -> None:
    salts = {convert.tenant_salt(secret, tenant) for secret in ("", "x") for tenant in ("", "a", "b")}
    assert len(salts) == 6
    # Written down, because schedulers of different versions share an index.
    assert convert.tenant_salt("", "").hex()[:16] == "c2bbed7db6fbb609"
    assert convert.tenant_salt("x", "a") == convert.tenant_salt("x", "a")


def test_shared_salt_is_no_tenants() -> None:
    shared = convert.shared_salt("x")
    assert shared == convert.shared_salt("x")
    assert len({shared, convert.shared_salt(""), *(convert.tenant_salt("x", tenant) for tenant in ("", "a"))}) == 4


def test_prefixes_are_shared_under_the_same_salt_and_cache_salt_alone() -> None:
    def root(salt: bytes, cache_salt: str) -> bytes:
        return convert.request_from_wire(make_submit(cache_salt=cache_salt), make_model(), salt, now_ms=0).cache_root

    roots = {
        (who, cache_salt): root(salt, cache_salt)
        for who, salt in (
            ("a", convert.tenant_salt("x", "a")),
            ("b", convert.tenant_salt("x", "b")),
            ("all", convert.shared_salt("x")),
        )
        for cache_salt in ("", "y")
    }
    assert len(set(roots.values())) == 6
    assert root(convert.tenant_salt("x", "a"), "y") == roots["a", "y"]


def test_request_has_the_models_stop_tokens_unless_it_ignores_them() -> None:
    submit = make_submit()
    submit.sampling.stop_token_ids.append(9)
    request = convert.request_from_wire(submit, make_model(), b"", now_ms=0)
    assert request.ending.stop_token_ids == {9, EOS_TOKEN_ID}
    submit.sampling.ignore_eos = True
    request = convert.request_from_wire(submit, make_model(), b"", now_ms=0)
    assert request.ending.stop_token_ids == {9}


def test_deadline_is_on_the_schedulers_clock() -> None:
    assert convert.request_from_wire(make_submit(), make_model(), b"", now_ms=7).deadline_ms is None
    submit = make_submit(remaining_deadline_ms=0)
    assert convert.request_from_wire(submit, make_model(), b"", now_ms=7).deadline_ms == 7


def test_a_requests_precision_floor_is_a_format_that_is_known() -> None:
    assert convert.request_from_wire(make_submit(), make_model(), b"", now_ms=0).kv_precision_floor is None
    native = make_submit(kv_precision_floor=0)
    assert convert.request_from_wire(native, make_model(), b"", now_ms=0).kv_precision_floor is Format.NATIVE
    with pytest.raises(SchedulerError, match="code 7") as caught:
        convert.request_from_wire(make_submit(kv_precision_floor=7), make_model(), b"", now_ms=0)
    assert caught.value.param == "kv_precision_floor"


def test_beam_search_has_its_rows_report_twice_its_width() -> None:
    submit = make_submit(n=4)
    submit.sampling.MergeFrom(common_pb2.SamplingParams(temperature=0.7, ignore_eos=True, stop_token_ids=[8], seed=3))
    assert convert.request_from_wire(submit, make_model(), b"", now_ms=0).beam_search is None
    submit.beam_search.length_penalty = 0.5
    request = convert.request_from_wire(submit, make_model(), b"", now_ms=0)
    assert request.beam_search == BeamParams(0.5, num_logprobs=None)
    assert request.ending.stop_token_ids == {8}
    sampling = request.sampling
    assert isinstance(sampling, common_pb2.SamplingParams)
    assert (sampling.num_logprobs, sampling.temperature, sampling.repetition_penalty) == (8, 0.0, 1.0)
    assert not submit.sampling.HasField("num_logprobs")
    # A client that wants more alternatives than that gets them.
    submit.sampling.num_logprobs = 20
    request = convert.request_from_wire(submit, make_model(), b"", now_ms=0)
    assert request.beam_search == BeamParams(0.5, num_logprobs=20)
    assert isinstance(request.sampling, common_pb2.SamplingParams)
    assert request.sampling.num_logprobs == 20


def test_logprobs_of_a_beams_token_are_cut_to_what_the_client_wants() -> None:
    top = common_pb2.TokenLogprobs(top_token_ids=[5, 9, 2], top_logprobs=[-0.5, -1.5, -2.5])
    wire = convert.logprobs_to_wire(PickedLogprobs(-1.5, top, num_top=1))
    assert wire == common_pb2.TokenLogprobs(logprob=-1.5, top_token_ids=[5], top_logprobs=[-0.5])


def test_delivered_is_by_index() -> None:
    submit = make_submit(n=3)
    submit.delivered.add(index=1, token_ids=[4, 5])
    submit.delivered.add(index=2, finish_reason=common_pb2.FINISH_REASON_STOP)
    delivered = convert.request_from_wire(submit, make_model(), b"", now_ms=0).delivered
    assert delivered[1].token_ids == [4, 5]
    assert delivered[1].finish_reason is None
    assert delivered[2].finish_reason is FinishReason.STOP


def test_decode_step_is_its_rows_and_nothing_else() -> None:
    seq_ids = [SeqId(seq_id) for seq_id in range(300, 308)]
    request = convert.step_to_wire(make_plan(settled_seq_ids=seq_ids), lane_epoch=1)
    assert list(request.continued.seq_ids) == list(range(300, 308))
    assert not request.continued.num_scheduled_tokens
    assert not request.continued.num_new_entries
    assert request.ByteSize() < 32


def test_step_carries_every_part() -> None:
    sampling = common_pb2.SamplingParams(max_tokens=3)
    plan = make_plan(
        restart=True,
        finished_seq_ids=[SeqId(1)],
        new_rows=[NewRow(SeqId(2), 1, (5, 6, 7), 3, [Entry(8)], 0, 3, 1, sampling)],
        resumed_rows=[ResumedRow(SeqId(3), 2, 9, [Entry(16), Entry(24)], 4, 5)],
        continued_rows=[ContinuedRow(SeqId(4), 1, (Entry(32),)), ContinuedRow(SeqId(5), 6)],
        settled_seq_ids=[SeqId(6), SeqId(7)],
        picked_tokens=[(SeqId(5), 44)],
        patches=[EntryPatch(SeqId(4), 0, Entry(40))],
        seals=[Seal(Entry(48), BlockHash(b"h" * HASH_BYTES))],
        ops=BlockOps(
            zero=[Entry(32)],
            copy=[(Entry(48), Entry(40))],
            requantize=[(Entry(56), Entry(2049)), (Entry(64), Entry(2057))],
        ),
    )
    request = convert.step_to_wire(plan, lane_epoch=7)
    assert (request.lane_epoch, request.step_id, request.restart) == (7, 1, True)
    assert list(request.finished_seq_ids) == [1]
    (new,) = request.new_rows
    assert (new.seq_id, new.seq_epoch, list(new.token_ids), new.num_prompt_tokens) == (2, 1, [5, 6, 7], 3)
    assert (list(new.entries), new.num_computed_tokens, new.num_scheduled_tokens) == ([8], 0, 3)
    assert (new.sequence_idx, new.sampling) == (1, sampling)
    assert (list(request.continued.token_seq_ids), list(request.continued.token_ids)) == ([5], [44])
    (resumed,) = request.resumed_rows
    assert (resumed.seq_id, resumed.seq_epoch, resumed.num_tokens, list(resumed.entries)) == (3, 2, 9, [16, 24])
    assert (resumed.num_computed_tokens, resumed.num_scheduled_tokens) == (4, 5)
    continued = request.continued
    assert (list(continued.seq_ids), list(continued.num_scheduled_tokens)) == ([4, 5, 6, 7], [1, 6, 1, 1])
    assert (list(continued.num_new_entries), list(continued.new_entries)) == ([1, 0, 0, 0], [32])
    patches = request.patches
    assert (list(patches.seq_ids), list(patches.block_idxs), list(patches.entries)) == ([4], [0], [40])
    assert list(request.ops.zero_entries) == [32]
    assert (list(request.ops.copy_src_entries), list(request.ops.copy_dst_entries)) == ([48], [40])
    assert list(request.ops.requantize_src_entries) == [56, 64]
    assert list(request.ops.requantize_dst_entries) == [2049, 2057]
    assert convert.seals_from_wire(request.seals) == plan.seals
    assert convert.num_scheduled_tokens(plan) == 3 + 5 + 1 + 6 + 2


def test_result_is_cut_into_rows() -> None:
    result = worker_pb2.StepResult(step_id=3, status=worker_pb2.STEP_STATUS_OK, step_ms=1.5)
    result.sampled.seq_ids.extend([1, 2])
    result.sampled.seq_epochs.extend([0, 4])
    result.sampled.num_tokens.extend([2, 1])
    result.sampled.token_ids.extend([7, 8, 9])
    result.sampled.logprobs.extend([-1.0, -2.0, -3.0])
    alternatives = common_pb2.TokenLogprobs(logprob=-3.0, top_token_ids=[9], top_logprobs=[-3.0])
    result.sampled.row_logprobs.add(seq_id=2, tokens=[alternatives])
    result.failed_rows.add(seq_id=5, seq_epoch=1, error="nan")
    converted = convert.step_result_from_wire(result)
    assert (converted.step_id, converted.status, converted.step_ms) == (3, StepStatus.OK, 1.5)
    first, second = converted.sampled.rows()
    assert first == (1, 0, [7, 8], [-1.0, -2.0])
    assert second == (2, 4, [9], [alternatives])
    assert [(row.seq_id, row.seq_epoch, row.error) for row in converted.failed_rows] == [(5, 1, "nan")]


def test_malformed_results_are_refused() -> None:
    with pytest.raises(convert.MalformedMessageError, match="status"):
        convert.step_result_from_wire(worker_pb2.StepResult(step_id=1))
    result = worker_pb2.StepResult(step_id=1, status=worker_pb2.STEP_STATUS_OK)
    result.sampled.seq_ids.extend([1, 2])
    result.sampled.seq_epochs.extend([0, 0])
    result.sampled.token_ids.append(7)
    with pytest.raises(convert.MalformedMessageError, match="length"):
        convert.step_result_from_wire(result)
    result.sampled.token_ids.append(8)
    result.sampled.logprobs.append(-1.0)
    with pytest.raises(convert.MalformedMessageError, match="parallel"):
        convert.step_result_from_wire(result)


def test_malformed_manifest_is_refused() -> None:
    seals = worker_pb2.Seals(entries=[8, 16], block_hashes=b"h" * HASH_BYTES, recipe_versions=[0])
    with pytest.raises(convert.MalformedMessageError):
        convert.seals_from_wire(seals)


def test_lane_spec_has_the_formats_that_the_worker_has() -> None:
    registration = scheduler_pb2.RegisterRequest(num_slabs=3, native_blocks_per_slab=16)
    spec = convert.lane_spec_from_wire(registration)
    assert (spec.num_blocks, spec.num_slabs, spec.capacities) == (48, 3, {Format.NATIVE: 16})
    registration.blocks_per_slab.extend([16, 31, 0, 0, 49, 77])  # one that this version does not know
    spec = convert.lane_spec_from_wire(registration)
    assert spec.capacities == {Format.NATIVE: 16, Format.INT8: 31, Format.INT4: 49}
