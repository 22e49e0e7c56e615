"""Which policies words name, and what bytes and blocks are reckoned for them."""

import pytest

from kernels.formats import Format
from quire.eval.errors import EvalMistakeError
from quire.eval.policies import AGE_POLICIES, UNIFORM, read_policies
from quire.eval.sizes import KVShape, native_ratio, pool_blocks, sequence_bytes
from quire.eval.summary import PolicySummary, smallest_within
from scheduler_svc.core.precision import POLICY_OF_DTYPE, parse_policy

SMOLLM2 = KVShape(num_layers=30, num_kv_heads=3, head_size=64, block_size=16, native_dtype="bfloat16")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def names(text: str) -> list[tuple[str, str]]:
    return [(policy.name, policy.tiers) for policy in read_policies(text)]


def test_native_comes_first_and_nothing_twice() -> None:
    assert names("") == [("native", "native")]
    assert names("int4 native:2,int8 bf16 int4 native") == [
        ("native", "native"),
        ("int4", "native:1,int4"),
        ("native:2,int8", "native:2,int8"),
    ]


def test_policy_is_called_by_its_dtype_where_it_has_one() -> None:
    mixed = POLICY_OF_DTYPE["mixed"]
    assert names(f"{mixed} mixed") == names("mixed") == [("native", "native"), ("mixed", mixed)]


def test_curve_stands_for_uniform_formats_and_policies_by_age() -> None:
    policies = read_policies("curve")
    assert {*UNIFORM, "mixed", "native"} <= {policy.name for policy in policies}
    assert {POLICY_OF_DTYPE.get(name, name) for name in AGE_POLICIES} <= {policy.tiers for policy in policies}
    assert [policy.name for policy in policies if policy.is_uniform] == ["native", *UNIFORM]


@pytest.mark.parametrize("text", ["int5", "int8:1,native", "native:0,int8", "native:1,int4,int8"])
def test_senseless_policy_is_named(text: str) -> None:
    with pytest.raises(EvalMistakeError, match=r"^--policies: ") as caught:
        read_policies(text)
    assert text.partition(",")[0].partition(":")[0] in str(caught.value)


def test_bytes_of_a_sequence_are_those_of_its_blocks() -> None:
    layout = SMOLLM2.layout()
    native, int8, int4 = (30 * layout.block_bytes(fmt) for fmt in (Format.NATIVE, Format.INT8, Format.INT4))
    assert native == 16 * 22.5 * KIB
    assert sequence_bytes(SMOLLM2, parse_policy("native"), 2048) == 128 * native
    # 125 blocks of 2,000 tokens: the first and the newest are native.
    assert sequence_bytes(SMOLLM2, parse_policy("native:1,int8"), 2000) == 2 * native + 123 * int8
    # The tail that is not full is native besides.
    assert sequence_bytes(SMOLLM2, parse_policy("native:1,int8"), 2001) == 3 * native + 123 * int8
    mixed = sequence_bytes(SMOLLM2, parse_policy("native:16,int8:48,int4"), 2048)
    assert mixed == 17 * native + 48 * int8 + 63 * int4
    assert native_ratio(SMOLLM2, parse_policy("native:16,int8:48,int4"), 2048) == 128 * native / mixed


def test_pool_holds_more_blocks_of_narrower_formats() -> None:
    blocks = {policy: pool_blocks(SMOLLM2, parse_policy(policy), GIB) for policy in ("native", "native:1,int4")}
    num_slabs = GIB // (16 * 16 * 22.5 * KIB)
    assert blocks["native"] == 16 * num_slabs
    places = SMOLLM2.layout().blocks_per_slab(Format.INT4)
    assert blocks["native:1,int4"] == int(num_slabs / (2 / 16 + 126 / places) * 128)


def summary(tiers: str, num_bytes: int, kl: float | None) -> PolicySummary:
    return PolicySummary(tiers, tiers, False, {2048: num_bytes}, {2048: 1.0}, 1, kl=kl)


def test_smallest_policy_within_a_divergence_is_found() -> None:
    policies = [summary("a", 9, 0.0), summary("b", 4, 0.001), summary("c", 3, 0.0011), summary("d", 1, None)]
    best = smallest_within(policies, 2048, 0.001)
    assert best is not None
    assert best.tiers == "b"
    assert smallest_within(policies[2:], 2048, 0.001) is None
