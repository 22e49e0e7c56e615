"""Triton's kernels compiled ahead of time, for chips that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interpreted import SWITCH, import_interpreted

pytest.importorskip("triton", reason="Triton is for Linux")
report = import_interpreted("kernels.triton.report")

DOC = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def usages() -> list[dict[str, Any]]:
    """Return what every kernel takes on every chip; another process compiles, for this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.triton.report", "--json"],
        capture_output=True, text=True, env=environment, cwd=DOC.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def of_target(usages: list[dict[str, Any]], target: Any, *kernels: str) -> list[dict[str, Any]]:
    """Return what the kernels named take on a chip, or all where none is named."""
    return [usage for usage in usages if usage["target"] == target.name and (not kernels or usage["kernel"] in kernels)]


ATTENTION = ("prefill", "decode", *report.FORMATS)

each_target = pytest.mark.parametrize("target", report.TARGETS, ids=lambda target: target.name)

pytestmark = pytest.mark.timeout(900)  # all compile in the first test


@each_target
def test_every_kernel_keeps_to_its_registers(usages: list[dict[str, Any]], target: Any) -> None:
    found = of_target(usages, target)
    assert len(found) == len([item for item in report.compilations() if item[2] is target])
    assert not [usage for usage in found if usage["spills"] > 0]


@each_target
def test_shared_memory_fits_the_chip(usages: list[dict[str, Any]], target: Any) -> None:
    found = of_target(usages, target)
    assert not [usage for usage in found if usage["shared_bytes"] > target.shared_bytes]


@each_target
def test_attention_is_computed_on_tensor_cores(usages: list[dict[str, Any]], target: Any) -> None:
    for usage in of_target(usages, target, *ATTENTION):
        assert usage["matrix_instructions"] > 0, usage


# gfx942 has no asynchronous copies of 16 bytes: there a tile waits in registers.
@pytest.mark.parametrize("target", [target for target in report.TARGETS if target.chip.backend == "cuda"])
def test_keys_and_values_are_copied_while_others_are_multiplied(usages: list[dict[str, Any]], target: Any) -> None:
    for usage in of_target(usages, target, *ATTENTION):
        assert usage["async_copies"] >= 16, usage


@pytest.mark.parametrize("target", [target for target in report.TARGETS if target.chip.backend == "cuda"])
def test_codes_are_copied_as_early_as_native_keys_and_values(usages: list[dict[str, Any]], target: Any) -> None:
    copies = {(usage["kernel"], usage["model"]): usage["async_copies"] for usage in of_target(usages, target)}
    for kernel, model in copies:
        if kernel in report.FORMATS:  # the native loop's copies, and then those of each other format's loop
            assert copies[kernel, model] > copies[kernel.split()[0], model], kernel


def test_document_has_a_line_for_each_compiled_kernel() -> None:
    lines = {tuple(cell.strip() for cell in line.split("|")[1:4]) for line in DOC.read_text().splitlines()}
    for kernel, model, target in report.compilations():
        assert (kernel, model.name, target.name) in lines, "run python -m kernels.triton.report"
