"""How much KV takes, and how many sequences fit: figures that are known, and the worker's own cut of the arena."""

from pathlib import Path
from typing import Any

import pytest

from kernels.formats import Format
from scheduler_svc.core.precision import policy_of_dtype
from tests.worker.models.checkpoints import save
from tests.worker.plan.cases import (
    GIB,
    KIB,
    LLAMA_2_7B,
    LLAMA_2_70B,
    MIB,
    MISTRAL_7B,
    QWEN2_7B,
    SMOLLM2_135M,
    make_plan,
    plan_of_flags,
)
from worker_svc.arena_plan import plan_arena
from worker_svc.errors import OutOfMemoryAtStartError, StartupError
from worker_svc.plan.memory import FormatPlan, MemoryPlan

NARROW_FORMATS = [fmt for fmt in Format if fmt is not Format.NATIVE]


def plan_in(plan: MemoryPlan, fmt: Format) -> FormatPlan:
    (found,) = (candidate for candidate in plan.formats if candidate.fmt is fmt)
    return found


def native(plan: MemoryPlan) -> FormatPlan:
    return plan_in(plan, Format.NATIVE)


@pytest.mark.parametrize(
    ("hf_config", "token_bytes"),
    [
        (LLAMA_2_7B, 512 * KIB),
        (LLAMA_2_70B, 320 * KIB),  # 8 KV heads for 64 query heads
        (MISTRAL_7B, 128 * KIB),
        (QWEN2_7B, 56 * KIB),
        (SMOLLM2_135M, 22.5 * KIB),
    ],
    ids=["llama-2-7b", "llama-2-70b", "mistral-7b", "qwen2-7b", "smollm2-135m"],
)
def test_native_kv_of_a_token(hf_config: dict[str, Any], token_bytes: int) -> None:
    plan = native(make_plan(hf_config, "--memory", "320GiB", "--dtype", "float16"))
    assert plan.token_bytes == token_bytes
    assert plan.native_share == 1.0


def test_llama_2_7b_takes_one_gib_at_2048_tokens() -> None:
    plan = native(make_plan(LLAMA_2_7B, "--memory", "80GiB", "--dtype", "float16"))
    assert plan.sequence_bytes(2048) == GIB


def test_float32_takes_twice_as_much() -> None:
    plan = make_plan(LLAMA_2_7B, "--memory", "80GiB", "--dtype", "float32")
    assert native(plan).token_bytes == MIB
    assert plan.budget.weight_bytes == 4 * 6_738_415_616


def test_sequences_are_what_weights_leave_over_the_kv_of_one() -> None:
    plan = make_plan(LLAMA_2_7B, "--memory", "80GiB", "--gpu-memory-utilization", "0.9", "--mean-length", "2048")
    assert plan.budget.weight_bytes == 2 * 6_738_415_616
    assert plan.budget.kv_bytes == int(80 * GIB * 0.9) - 2 * 6_738_415_616
    assert native(plan).num_sequences(2048) == 59  # (72 - 12.55) GiB / 1 GiB
    assert native(plan).num_sequences(1024) == 118
    assert native(plan).num_sequences(200_000) == 0


def test_shape_from_flags_equals_the_model_of_that_shape() -> None:
    flags = ("--layers", "80", "--kv-heads", "8", "--head-size", "128", "--memory", "320GiB")
    by_flags = plan_of_flags(*flags, "--parameters", "68.976648192B")
    by_model = make_plan(LLAMA_2_70B, "--memory", "320GiB")
    assert (by_flags.budget, by_flags.arena) == (by_model.budget, by_model.arena)
    assert plan_of_flags(*flags, "--weights-memory", "137953296384").budget == by_model.budget


def test_arena_is_cut_as_the_worker_cuts_it(tmp_path: Path) -> None:
    saved = save("llama-tied", tmp_path)
    decoder = saved.load()
    for memory in ("1MiB", "300KiB"):
        flags = ("--model", str(tmp_path), "--dtype", "float32", "--mean-length", "64")
        plan = plan_of_flags(*flags, "--kv-cache-memory", memory)
        of_worker = plan_arena(
            plan.budget.kv_bytes, decoder.config.num_layers, lambda blocks: decoder.layout(16, blocks)
        )
        assert plan.arena == of_worker


def test_pool_is_whole_slabs() -> None:
    plan = make_plan(LLAMA_2_7B, "--kv-cache-memory", str(10 * 128 * MIB + 1))
    assert plan.arena.num_slabs == 10  # of 16 blocks of 16 tokens of 512 KiB
    assert (native(plan).blocks_per_slab, native(plan).num_blocks) == (16, 160)


def test_kv_memory_on_its_own_is_all_for_kv() -> None:
    plan = make_plan(SMOLLM2_135M, "--kv-cache-memory", "1GiB")
    assert (plan.budget.kv_bytes, plan.budget.weight_bytes) == (GIB, 0)


def test_a_sequence_begins_a_block_with_its_first_token() -> None:
    plan = native(make_plan(LLAMA_2_7B, "--kv-cache-memory", str(10 * 128 * MIB)))
    assert plan.num_sequences_in_blocks(16) == 160
    assert plan.num_sequences_in_blocks(17) == 80
    assert plan.num_sequences(17) == 150
    assert plan.num_sequences_in_blocks(2560) == 1
    assert plan.num_sequences_in_blocks(2561) == 0


@pytest.mark.parametrize("fmt", NARROW_FORMATS)
@pytest.mark.parametrize("num_tokens", [8, 16, 32, 33, 512, 2048, 20_001])
def test_blocks_of_a_sequence_that_its_policy_keeps_native_count_as_that(fmt: Format, num_tokens: int) -> None:
    plan = plan_in(make_plan(LLAMA_2_70B, "--kv-cache-memory", "64GiB"), fmt)
    num_sequences = plan.num_sequences_in_blocks(num_tokens)

    def num_slabs(num_sequences: int) -> int:
        blocks, full = -(-num_tokens // 16), num_tokens // 16
        num_native = policy_of_dtype(fmt.name.lower()).count_formats(0, blocks, full)[Format.NATIVE]
        native_slabs = -(-num_sequences * num_native // 16)
        return native_slabs - (-num_sequences * (blocks - num_native) // plan.blocks_per_slab)

    assert num_slabs(num_sequences) <= plan.arena.num_slabs < num_slabs(num_sequences + 1)
    assert num_sequences <= plan.num_sequences(num_tokens)


@pytest.mark.parametrize("fmt", NARROW_FORMATS)
def test_narrow_formats_hold_more(fmt: Format) -> None:
    plan = make_plan(LLAMA_2_70B, "--memory", "320GiB")
    narrow = plan_in(plan, fmt)
    assert narrow.block_bytes == plan.arena.layout.block_bytes(fmt) * 80
    assert narrow.native_share < 0.6
    assert narrow.num_sequences(2048) > 1.6 * native(plan).num_sequences(2048)
    assert narrow.num_sequences_in_blocks(2048) > 1.6 * native(plan).num_sequences_in_blocks(2048)


def test_block_larger_than_a_slab_fits_nowhere() -> None:
    flags = ("--layers", "1", "--kv-heads", "1", "--head-size", "1", "--block-size", "8", "--kv-cache-memory", "200")
    plan = plan_of_flags(*flags)
    for fmt in plan.formats:
        assert fmt.num_sequences_in_blocks(100) == 0


def test_weights_larger_than_the_memory_are_refused_with_both_numbers() -> None:
    with pytest.raises(OutOfMemoryAtStartError, match=r"weights needs .* raise --memory") as caught:
        make_plan(LLAMA_2_70B, "--memory", "80GiB")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (137_953_296_384, int(80 * GIB * 0.9))


def test_too_little_for_two_blocks_is_refused() -> None:
    with pytest.raises(OutOfMemoryAtStartError, match="a KV arena of 2 blocks"):
        make_plan(LLAMA_2_7B, "--kv-cache-memory", "1MiB")


def test_sequences_longer_than_the_model_allows_are_refused() -> None:
    with pytest.raises(StartupError, match="--mean-length 4097: model was made for 4096 tokens"):
        make_plan(LLAMA_2_7B, "--memory", "80GiB", "--mean-length", "4097")
