"""What the compiler makes of the kernels for chips that need not be there: `python -m kernels.triton.report`.

Prints the tables of docs/kernels.md: bytes and operations of each kernel for some models, then registers, spills,
shared memory, asynchronous copies and tensor-core instructions of each kernel on each chip. `--json` prints the latter
for programs to read.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.dispatch import AttentionParams
from kernels.formats import Format, KVLayout
from kernels.triton.backend import (
    TRITON_DTYPES,
    attention_of,
    block_constants,
    requantize_constants,
    write_constants,
)
from kernels.triton.blocks import copy_kernel, write_kernel, zero_kernel
from kernels.triton.decode import MIN_SPLIT, decode_kernel, merge_kernel
from kernels.triton.prefill import prefill_kernel
from kernels.triton.requantize import requantize_kernel
from kernels.triton.tuning import Chip

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
_INTEGER_POINTERS = ("block_table", "context_lens", "cu_seqlens_q", "entries", "src_entries", "dst_entries")


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of one layer of a model, as one GPU sees it."""

    name: str
    layout: KVLayout
    num_query_heads: int
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def params(self) -> AttentionParams:
        """What its attention computes."""
        return AttentionParams(self.layout.head_size**-0.5, self.sliding_window, self.soft_cap)


@dataclass(frozen=True, slots=True)
class Target:
    """A chip to compile for."""

    name: str
    chip: Chip
    warp_size: int
    shared_bytes: int  # that one program may use


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes and does on one chip."""

    kernel: str
    model: str
    target: str
    registers: int  # of a thread
    spills: int  # bytes of a thread's stack on NVIDIA's chips, registers on AMD's
    shared_bytes: int
    async_copies: int  # instructions that copy 4 bytes or more from global to shared memory
    matrix_instructions: int  # of tensor cores


MODELS = (
    Model("Llama 3 8B", KVLayout(8, 128, 16, "bfloat16"), 32),
    Model("Llama 3 70B on 8 GPUs", KVLayout(1, 128, 16, "bfloat16"), 8),
    Model("SmolLM2 135M", KVLayout(3, 64, 16, "bfloat16"), 9),
    Model("Gemma 2 9B, local layer", KVLayout(8, 256, 16, "bfloat16"), 16, sliding_window=4096, soft_cap=50.0),
)
TARGETS = (
    Target("sm_80", Chip("cuda", 80), 32, 163 * 1024),
    Target("sm_90", Chip("cuda", 90), 32, 227 * 1024),
    Target("sm_100", Chip("cuda", 100), 32, 227 * 1024),
    Target("gfx942", Chip("hip", "gfx942"), 64, 64 * 1024),
)
# That blocks may have besides native, by kernel: of the policy native:16,int8:48,int4, and of one for 8 bits.
FORMATS = {
    "prefill mixed": (Format.INT8, Format.INT4),
    "decode mixed": (Format.INT8, Format.INT4),
    "decode fp8": (Format.FP8,),
}


def compile_kernel(name: str, model: Model, target: Target) -> Usage:
    """Compile a kernel as the backend launches it, and return what it takes."""
    kernel, constants = _kernel(name, model, target.chip)
    constexprs = {key: value for key, value in constants.items() if key in kernel.arg_names}
    options = {key: value for key, value in constants.items() if key not in kernel.arg_names}
    types = {key: "constexpr" if key in constexprs else _type(key, model.layout) for key in kernel.arg_names}
    aligned = {
        (idx,): [["tt.divisibility", 16]]
        for idx, key in enumerate(kernel.arg_names)
        if key not in constexprs and key not in kernel.do_not_specialize
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constexprs, attrs=aligned)
    binary = triton.compile(
        source, target=GPUTarget(target.chip.backend, target.chip.arch, target.warp_size), options=options
    )
    shared_bytes = binary.metadata.shared
    if target.chip.backend == "cuda":
        registers, spills = _cuda_registers(binary.asm["cubin"])
        async_copies = _count(r"\bcp\.async\.c[ag]", binary.asm["ptx"])
        matrix_instructions = _count(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", binary.asm["ptx"])
    else:
        code = binary.asm["amdgcn"]
        registers, spills = _number("vgpr_count", code), _number("vgpr_spill_count", code)
        spills += _number("sgpr_spill_count", code)
        async_copies, matrix_instructions = (
            _count(r"\b(?:global|buffer)_load\S* .*\blds$", code),
            _count(r"\bv_mfma_", code),
        )
    return Usage(
        name, model.name, target.name, registers, spills, shared_bytes, async_copies, matrix_instructions
    )  # fmt: skip


def _kernel(name: str, model: Model, chip: Chip) -> tuple[Any, Mapping[str, Any]]:
    """Return a kernel and what the backend fixes about it: constants and launch options."""
    layout = model.layout
    dtype, formats = TRITON_DTYPES[layout.native_dtype], FORMATS.get(name, ())
    attention = attention_of(layout, model.num_query_heads, model.params, chip, dtype, formats)
    return {
        "prefill": (prefill_kernel, attention.prefill),
        "prefill mixed": (prefill_kernel, attention.prefill),
        "decode": (decode_kernel, attention.decode),
        "decode mixed": (decode_kernel, attention.decode),
        "decode fp8": (decode_kernel, attention.decode),
        "merge": (merge_kernel, attention.merge),
        "requantize": (requantize_kernel, requantize_constants(layout)),
        "write": (write_kernel, write_constants(layout)),
        "copy": (copy_kernel, block_constants(layout)),
        "zero": (zero_kernel, block_constants(layout)),
    }[name]


def _type(argument: str, layout: KVLayout) -> str:
    if argument in ("query", "out", "key", "value"):
        return _POINTERS[layout.native_dtype]
    if argument in ("arena", "layer_arena"):
        return "*u8"
    if argument in ("split_outs", "split_sums"):
        return "*fp32"
    if argument == "slot_mapping":
        return "*i64"
    return "*i32" if argument in _INTEGER_POINTERS else "i32"


def _cuda_registers(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it keeps on its stack for want of more."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _number(field: str, code: str) -> int:
    found = re.search(rf"\.{field}:\s+(\d+)", code)
    assert found is not None, f"the code names no {field}"
    return int(found[1])


def _count(pattern: str, code: str) -> int:
    return len(re.findall(pattern, code, re.MULTILINE))


def compilations() -> list[tuple[str, Model, Target]]:
    """Return what is compiled: attention for every model and chip, what is the same for all models for one of them.

    Kernels for several formats take long: they are compiled for one model, some for the chips least alike.
    """
    return [
        *itertools.product(("prefill mixed", "decode mixed"), MODELS[:1], TARGETS),
        *itertools.product(("decode fp8", "requantize"), MODELS[:1], (TARGETS[0], TARGETS[-1])),
        *itertools.product(("prefill", "decode"), MODELS, TARGETS),
        *itertools.product(("merge", "write", "copy", "zero"), MODELS[:1], TARGETS),
    ]


def compile_all() -> list[Usage]:
    """Compile it all, in as many processes as there are cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(compile_kernel, *zip(*compilations(), strict=True)))


def _decode_of(fmt: Format) -> str:
    return "decode" if fmt is Format.NATIVE else f"decode {fmt.name.lower()}"


UNITS = {
    "prefill": "pair of a query token and a key",
    **{_decode_of(fmt): "token of context" for fmt in Format},
    "merge": f"token of context, in splits of {MIN_SPLIT}",
    "write": "token",
    "requantize": "token of a block, native to int4",
    "copy": "token of a block",
    "zero": "token of a block",
}


def traffic(model: Model, chip: Chip) -> dict[str, tuple[float, int]]:
    """Return the bytes that each kernel moves to and from memory in a layer, and its operations, for a unit of work."""
    layout, heads = model.layout, model.num_query_heads
    sizes = {fmt: layout.block_bytes(fmt) / layout.block_size for fmt in Format}  # keys and values of all heads
    token_bytes = sizes[Format.NATIVE]
    pair_operations = 4 * heads * layout.head_size  # a multiplication and an addition, for the score and for the value
    attention = attention_of(layout, heads, model.params, chip, TRITON_DTYPES[layout.native_dtype])
    return {
        "prefill": (token_bytes / attention.tile_queries, pair_operations),
        **{_decode_of(fmt): (size, pair_operations) for fmt, size in sizes.items()},
        "merge": (2 * 4 * heads * (layout.head_size + 1) / MIN_SPLIT, 0),  # float32, written and read
        "write": (2 * token_bytes, 0),
        "requantize": (token_bytes + sizes[Format.INT4], 0),
        "copy": (2 * token_bytes, 0),
        "zero": (token_bytes, 0),
    }


def traffic_table() -> str:
    """Return the table of bytes and operations; how often prefill reads a key is the first chip's tile size."""
    found = [traffic(model, TARGETS[0].chip) for model in MODELS]

    def cell(num_bytes: float, operations: int) -> str:
        return f"{num_bytes:,.0f} B" + (f", {operations:,} op" if operations else "")

    rows = [(kernel, unit, *(cell(*of_model[kernel]) for of_model in found)) for kernel, unit in UNITS.items()]
    return _table([("kernel", "for each", *(model.name for model in MODELS)), *rows])


def usage_table() -> str:
    """Return the table of what compiling gave."""
    names = ("kernel", "model", "chip", "registers", "spills", "shared bytes", "async copies", "matrix instructions")
    return _table([names, *(dataclasses.astuple(usage) for usage in compile_all())])


def _table(rows: list[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print what compiling gave, as JSON")
    if parser.parse_args().json:
        print(json.dumps([dataclasses.asdict(usage) for usage in compile_all()]))
        return
    print(traffic_table(), usage_table(), sep="\n\n")


if __name__ == "__main__":
    main()
