"""Rows under policies: their blocks' formats at every step, what is written anew, and what forks share."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.formats import Format, KVLayout, format_of
from quire.eval.paged import PagedRows
from scheduler_svc.core.precision import parse_policy
from tests.eval.conftest import BLOCK_SIZE, Tiny

TOKENS = [(7 * idx * idx + 3) % 97 for idx in range(10 * BLOCK_SIZE)]
POLICIES = ["native", "native:1,int8", "native:1,int4", "native:2,int8:3,int4", "native:1,int8:1,fp8:1,k8v4:1,int4"]


def run_all(rows: PagedRows, policy: str, tokens: Sequence[int]) -> Tensor:
    row = rows.start(parse_policy(policy))
    return torch.cat([hidden[0] for hidden in rows.run([(row, tokens)])])


@pytest.mark.parametrize("policy", POLICIES)
def test_formats_are_the_policys_at_every_step(tiny: Tiny, policy: str) -> None:
    rows, parsed = tiny.rows(), parse_policy(policy)
    row = rows.start(parsed)
    for num_full, _ in enumerate(rows.run([(row, TOKENS)])):
        expected = [parsed.format_of(block_idx, num_full) for block_idx in range(num_full)]
        assert row.formats == [*expected, Format.NATIVE]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_decoding_narrows_at_block_borders_as_prompts_do(tiny: Tiny, num_tokens: int) -> None:
    rows, policy = tiny.rows(), parse_policy("native:2,int8:2,int4")
    row = rows.start(policy)
    while row.num_computed_tokens < len(TOKENS):
        num_full, offset = divmod(row.num_computed_tokens, BLOCK_SIZE)
        rows.step([(row, TOKENS[row.num_computed_tokens :][: min(num_tokens, BLOCK_SIZE - offset)])])
        assert row.formats == [policy.format_of(idx, num_full) for idx in range(num_full)] + [Format.NATIVE]


class Spy:
    """A backend that notes down which formats blocks are written anew from and to."""

    def __init__(self, backend: object) -> None:
        self._backend = backend
        self.narrowed: list[tuple[Format, Format]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def requantize_blocks(self, arena: Tensor, sources: Tensor, targets: Tensor, layout: KVLayout) -> None:
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        self.narrowed += [(format_of(source), format_of(target)) for source, target in pairs]
        self._backend.requantize_blocks(arena, sources, targets, layout)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_block_is_written_anew_once_for_each_tier_that_it_reaches(tiny: Tiny, policy: str) -> None:
    rows = tiny.rows()
    spy = Spy(rows._backend)
    rows._backend = spy  # type: ignore[assignment]
    run_all(rows, policy, TOKENS)
    tiers = parse_policy(policy).tiers
    num_full = len(TOKENS) // BLOCK_SIZE - 1  # when the last step began
    assert sorted(spy.narrowed) == sorted(
        (Format(wider.fmt), Format(tier.fmt))
        for wider, tier in pairwise(tiers)
        for _ in range(1, num_full - tier.from_age_blocks)
    )


def test_places_come_back_when_blocks_were_narrowed(tiny: Tiny) -> None:
    rows = tiny.rows()
    row = rows.start(parse_policy("native:1,int8:1,int4"))
    for _ in rows.run([(row, TOKENS)]):
        pass
    assert rows.store.num_used_blocks == len(row.entries) == len({*row.entries}) == 10
    rows.release([row])
    assert rows.store.num_used_blocks == 0


def test_arena_grows_and_keeps_what_it_holds(tiny: Tiny) -> None:
    rows = tiny.rows()
    first = rows.start(parse_policy("native"))
    list(rows.run([(first, TOKENS[:BLOCK_SIZE])]))
    num_slabs = rows.store.arena.shape[1]
    many = [rows.start(parse_policy("native")) for _ in range(num_slabs * 16 // 10 + 1)]
    for _ in rows.run([(row, TOKENS) for row in many]):
        pass
    assert rows.store.arena.shape[1] > num_slabs
    after_growth = torch.cat([hidden[0] for hidden in rows.run([(first, TOKENS[BLOCK_SIZE:])])])
    torch.testing.assert_close(after_growth, run_all(tiny.rows(), "native", TOKENS)[BLOCK_SIZE:])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_shared", [3 * BLOCK_SIZE, 5 * BLOCK_SIZE + 3])
def test_fork_goes_on_as_if_it_had_computed_all_itself(tiny: Tiny, policy: str, num_shared: int) -> None:
    rows = tiny.rows()
    base = rows.start(parse_policy(policy))
    list(rows.run([(base, TOKENS[:num_shared])]))
    others = [(token + 5) % 97 for token in TOKENS[num_shared:]]
    fork, other = rows.fork(base), rows.fork(base)
    hidden = list(rows.run([(fork, TOKENS[num_shared:]), (other, others)]))
    torch.testing.assert_close(
        torch.cat([each[0] for each in hidden]), run_all(tiny.rows(), policy, TOKENS)[num_shared:]
    )
    rows.release([base, fork, other])
    assert rows.store.num_used_blocks == 0


def test_rows_of_other_lengths_end_by_themselves(tiny: Tiny) -> None:
    rows = tiny.rows()
    short, long = rows.start(parse_policy("native:1,int8")), rows.start(parse_policy("native"))
    hidden = list(rows.run([(short, TOKENS[:11]), (long, TOKENS)]))
    assert [len(each[0]) for each in hidden] == [8, 3] + [0] * 8
    torch.testing.assert_close(torch.cat([each[1] for each in hidden]), run_all(tiny.rows(), "native", TOKENS))
