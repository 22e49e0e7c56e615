"""Precision policies: what they say of a block's format, and which ones are refused."""

import re

import pytest

from scheduler_svc.core.precision import (
    NATIVE_ONLY,
    POLICY_OF_DTYPE,
    PrecisionError,
    Tier,
    parse_policy,
    policy_of_dtype,
)
from scheduler_svc.core.types import Format

NATIVE, INT8, FP8, K8V4, INT4 = Format


def test_a_list_names_tiers_from_the_newest_blocks_on() -> None:
    policy = parse_policy("native:16, int8:48, int4")
    assert policy.tiers == (Tier(NATIVE, 0), Tier(INT8, 16), Tier(INT4, 64))
    assert policy.floor is INT4
    assert policy.formats == [NATIVE, INT8, INT4]


def test_a_blocks_format_follows_its_age() -> None:
    policy = parse_policy("native:1,int8:2,int4")
    assert [policy.format_of(idx, 7) for idx in range(8)] == [NATIVE, INT4, INT4, INT4, INT8, INT8, NATIVE, NATIVE]
    assert [policy.format_of(idx, 2) for idx in range(3)] == [NATIVE] * 3


def test_pressure_may_narrow_all_but_the_first_block_and_the_tail() -> None:
    policy = parse_policy("native:4,int8", "int4")
    assert [policy.pressed_format_of(idx, 3) for idx in range(4)] == [NATIVE, INT4, INT4, NATIVE]
    assert policy.formats == [NATIVE, INT8, INT4]


def test_every_cache_dtype_is_a_policy() -> None:
    assert policy_of_dtype("auto") == policy_of_dtype("fp16") == NATIVE_ONLY
    assert policy_of_dtype("k8v4").tiers == (Tier(NATIVE, 0), Tier(K8V4, 1))
    assert all(policy_of_dtype(dtype).tiers[0].fmt is NATIVE for dtype in POLICY_OF_DTYPE)


def test_a_requests_floor_cuts_what_is_narrower() -> None:
    policy = parse_policy("native:16,int8:48,int4")
    assert policy.limited_to(None) is policy.limited_to(INT4) is policy
    assert policy.limited_to(INT8).tiers == (Tier(NATIVE, 0), Tier(INT8, 16))
    assert policy.limited_to(FP8) == policy.limited_to(INT8)  # a request brings no format into the cell
    assert policy.limited_to(INT8).floor is INT8
    assert policy.limited_to(NATIVE) == NATIVE_ONLY
    pressed = parse_policy("native:16,int8", "int4")
    assert pressed.limited_to(K8V4) == parse_policy("native:16,int8")


@pytest.mark.parametrize("text", ["native", "native:1,int8", "native:2,int8:3,int4"])
def test_formats_are_counted_as_they_are_told_block_by_block(text: str) -> None:
    policy = parse_policy(text)
    for num_full in range(12):
        for first in range(12):
            formats = [policy.format_of(idx, num_full) for idx in range(first, 12)]
            assert policy.count_formats(first, 12, num_full) == [formats.count(fmt) for fmt in Format]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a KV format: there are native, int8, fp8, k8v4, int4"),
        ("native:4,int3", "'int3' is not a KV format"),
        ("Native", "'Native' is not a KV format"),
        ("int8", "begin with native"),
        ("native,int8", "'native' needs a number of blocks"),
        ("native:0,int8", "'0' is not a number of blocks"),
        ("native:-1,int8", "'-1' is not a number"),
        ("native:1_0,int8", "'1_0' is not a number"),
        ("native:1,int8:4", "takes no number"),
        ("native:1,int4:4,int8", "int8 is not narrower than the int4 before it"),
        ("native:1,native", "native is not narrower than the native before it"),
        ("native:1,int8,", "'int8' needs a number of blocks"),
    ],
)
def test_a_senseless_policy_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(PrecisionError, match=re.escape(words)):
        parse_policy(text)


def test_a_floor_wider_than_the_policy_is_refused() -> None:
    with pytest.raises(PrecisionError, match="floor int8 is wider than int4"):
        parse_policy("native:1,int4", "int8")


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(PrecisionError, match="'int2' is not a KV cache dtype: there are auto, bf16"):
        policy_of_dtype("int2")
