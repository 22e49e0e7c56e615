"""`python -m bench.gpu`: what a GPU makes of the kernels and of the engine, in at most six minutes, as one table.

Every kernel is checked against the reference and timed against its floor (the rates of a copy and of a matrix product,
measured first) and against torch (SDPA); then the engine serves a model of random weights in the shape of Llama 3.1 8B.
Each part begins only while the time budget lasts. It needs torch, triton, numpy, numba, grpcio, protobuf and aiohttp;
no files and no network.

Exit codes: 0 all is right, 1 a check failed, 2 there is no GPU. `--dry-run` runs everything at tiny sizes on the CPU,
with the kernels in Triton's interpreter: it tries the script.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.gpu_device import Bench, Ceilings, DryBench, measure_ceilings
from bench.gpu_engine import ENGINE_HEADER, Engine
from bench.gpu_kernels import (
    TIME_HEADER,
    Heads,
    Row,
    check_attention,
    check_block_operations,
    check_elementwise,
    check_formats,
    check_sampler,
    time_attention,
    time_copies,
    time_elementwise,
    time_formats,
    time_writes,
)
from bench.report import say, table
from kernels.dispatch import Backend
from kernels.formats import Format
from worker_svc.engine import StepLimits
from worker_svc.models.config import ModelConfig

BUDGET_S = 330.0
_MIN_KV_BYTES = 1 << 30  # of all layers that a measurement goes through: many times any cache

# Kernels for more formats at once take long to compile.
_CHECKED_FORMATS = ((Format.INT8, Format.INT4), (Format.FP8, Format.K8V4))
_TIMED_FORMATS = (
    (Format.INT8,),
    (Format.INT4,),
    (Format.INT4, Format.INT8, Format.NATIVE),
    (Format.FP8,),
    (Format.K8V4,),
)

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    copy_bytes: int
    product_size: int
    heads: Heads  # of the kernels that are timed
    other_heads: Sequence[Heads]  # that are checked as well
    checked_rows: Sequence[Row]
    write_tokens: int
    copied_blocks: int
    decodes: Sequence[tuple[int, int]]  # rows, context
    prefills: Sequence[tuple[int, Row]]  # rows, (context, query)
    formats_decode: tuple[int, int]  # rows, context
    sampler: tuple[int, int]  # vocabulary, rows
    model: ModelConfig
    limits: StepLimits
    decode_rows: Sequence[int]
    decode_context: int
    decode_steps: int
    prompts: Sequence[tuple[int, int]]  # rows, tokens


REAL = Sizes(
    copy_bytes=4 << 30,
    product_size=8192,
    heads=Heads(32, 8, 128),
    other_heads=(
        Heads(9, 3, 64),
        Heads(32, 8, 128, block_size=32, sliding_window=100),
        Heads(16, 8, 256, soft_cap=30.0),
        Heads(24, 24, 96, block_size=8),
        Heads(8, 1, 128),
    ),
    checked_rows=((1, 1), (700, 1), (333, 40), (65, 64), (17, 17), (300, 2), (64, 1), (5000, 1), (2000, 130)),
    write_tokens=8192,
    copied_blocks=1024,
    decodes=((1, 8192), (8, 4096), (64, 2048), (256, 1024), (1, 65536)),
    prefills=((1, (8192, 8192)), (8, (1024, 1024)), (1, (8192, 512)), (4, (16384, 512))),
    formats_decode=(64, 4096),
    sampler=(128256, 96),
    model=ModelConfig.from_hf(_LLAMA_8B),
    limits=StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, block_size=16),
    decode_rows=(1, 8, 64, 256),
    decode_context=512,
    decode_steps=48,
    prompts=((1, 8191), (8, 1023), (1, 512)),
)
TINY = Sizes(
    copy_bytes=1 << 16,
    product_size=32,
    heads=Heads(4, 2, 16),
    other_heads=(Heads(2, 1, 32, block_size=8, sliding_window=9), Heads(2, 2, 16, soft_cap=5.0)),
    checked_rows=((1, 1), (40, 1), (33, 5), (17, 17)),
    write_tokens=32,
    copied_blocks=4,
    decodes=((1, 40), (3, 20)),
    prefills=((1, (32, 32)), (2, (40, 8))),
    formats_decode=(1, 48),
    sampler=(97, 30),
    model=ModelConfig.from_hf(_TINY),
    limits=StepLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, block_size=16),
    decode_rows=(1, 3),
    decode_context=16,
    decode_steps=4,
    prompts=((1, 20), (2, 16)),
)


class Budget:
    """The time that is left."""

    def __init__(self, total_s: float) -> None:
        self._end_s = time.monotonic() + total_s
        self._left_out: list[str] = []

    def allows(self, what: str, needed_s: float) -> bool:
        """Return whether there is time for something, and remember what there was none for."""
        if time.monotonic() + needed_s <= self._end_s:
            return True
        self._left_out.append(what)
        return False

    @property
    def left_out(self) -> Sequence[str]:
        """What there was no time for."""
        return self._left_out


class Run:
    """One run of the script: its lines, and what is wrong."""

    def __init__(self, bench: Bench, sizes: Sizes, budget: Budget) -> None:
        self._bench, self._sizes, self._budget = bench, sizes, budget
        self._backend: Backend = bench.backend()
        self._ceilings = measure_ceilings(bench, sizes.copy_bytes, sizes.product_size)
        self.wrong: list[str] = []
        rates = f"{self._ceilings.bytes_per_s / 1e12:.3g} TB/s copied, {self._ceilings.flops_per_s / 1e12:.3g} TFLOP/s"
        self.summary = [f"{bench.describe()}; {rates} in bfloat16"]

    @property
    def ceilings(self) -> Ceilings:
        """What the device can do at best."""
        return self._ceilings

    def all_parts(self) -> None:
        """Run every part for which there is time: what matters most comes first."""
        sizes = self._sizes
        self._check(f"{sizes.heads}, bfloat16", self._check_heads(sizes.heads, torch.bfloat16))
        for dtype in self._bench.dtypes:
            words = f"norm, rotation and gate, {_name(dtype)}"
            self._check(words, check_elementwise(sizes.model, 33, dtype, self._bench))
        self._check("sampler", check_sampler(*sizes.sampler, self._bench))
        for formats in _CHECKED_FORMATS:
            if self._budget.allows(f"check of {_names(formats)}", 30):
                wrong = check_formats(sizes.heads, formats, sizes.checked_rows, self._bench)
                self._check(f"{sizes.heads}, {_names(formats)}", wrong)
        self.summary.append(table([TIME_HEADER, *self._kernel_times(), *self._format_times()]))
        if self._budget.allows("the engine", 60):
            self._release()
            self.summary.append(table([ENGINE_HEADER, *self._engine_times()]))
            self._release()
        for heads, dtype in self._other_checks():
            if self._budget.allows(f"check of {heads}, {dtype}", 15):
                self._check(f"{heads}, {_name(dtype)}", self._check_heads(heads, dtype))
        self.summary += [f"left out for lack of time: {what}" for what in self._budget.left_out]

    def _check_heads(self, heads: Heads, dtype: torch.dtype) -> str:
        wrong = check_attention(self._backend, heads, dtype, self._sizes.checked_rows, self._bench)
        return wrong or check_block_operations(self._backend, heads, dtype, self._bench)

    def _check(self, what: str, wrong: str) -> None:
        say(f"{what}: {f'WRONG, {wrong}' if wrong else 'as the reference'}")
        if wrong:
            self.wrong.append(f"{what}: {wrong}")

    def _other_checks(self) -> Iterator[tuple[Heads, torch.dtype]]:
        others = self._bench.dtypes[1:]
        yield from ((self._sizes.heads, dtype) for dtype in others)
        yield from ((heads, torch.bfloat16) for heads in self._sizes.other_heads)
        yield from ((heads, dtype) for heads in self._sizes.other_heads for dtype in others)

    def _kernel_times(self) -> Iterator[tuple[str, ...]]:
        sizes, bench, ceilings = self._sizes, self._bench, self._ceilings
        times = [time_writes(self._backend, sizes.heads, sizes.write_tokens, bench, ceilings)]
        times += time_elementwise(sizes.model, sizes.write_tokens, bench, ceilings)
        times += time_copies(self._backend, sizes.heads, sizes.copied_blocks, bench, ceilings)
        loads = [(num_rows, (context_len, 1)) for num_rows, context_len in sizes.decodes] + list(sizes.prefills)
        for num_rows, row in loads:
            if self._budget.allows(f"attention of {num_rows} x {row}", 10):
                layer_bytes = 4 * num_rows * row[0] * sizes.heads.num_kv_heads * sizes.heads.head_size
                num_layers = min(16, -(-_MIN_KV_BYTES // layer_bytes)) if bench.device.type == "cuda" else 2
                times.append(time_attention(self._backend, sizes.heads, num_rows, row, bench, ceilings, num_layers))
                say("  ".join(times[-1].cells()))
        return iter([measured.cells() for measured in times])

    def _format_times(self) -> Iterator[tuple[str, ...]]:
        for formats in _TIMED_FORMATS:
            if self._budget.allows(f"blocks of {_names(formats)}", 15):
                num_rows, context_len = self._sizes.formats_decode
                times = time_formats(
                    self._sizes.heads, formats, num_rows, context_len, self._bench, self._ceilings
                )  # fmt: skip
                for measured in times:
                    say("  ".join(measured.cells()))
                    yield measured.cells()

    def _engine_times(self) -> Iterator[tuple[str, ...]]:
        sizes, ceilings = self._sizes, self._ceilings
        say("making the model and its engine")
        engine = Engine(sizes.model, sizes.limits, tuple(sizes.decode_rows), self._bench)
        tokens: dict[int, list[list[int]]] = {num_rows: [] for num_rows in sizes.decode_rows}
        cells = []
        for how in ("launched", "graphs"):
            if how == "graphs":
                engine.record_graphs()
            for num_rows in sizes.decode_rows:
                if self._budget.allows(f"decode of {num_rows} rows, {how}", 10):
                    found, last = engine.decode(num_rows, sizes.decode_context, sizes.decode_steps, ceilings)
                    tokens[num_rows].append(last)
                    cells.append((f"{found.name}, {how}", *found.cells()[1:]))
                    say("  ".join(cells[-1]))
        if self._budget.allows("decode with top-p", 10):
            num_rows = sizes.decode_rows[-2]
            found, _ = engine.decode(num_rows, sizes.decode_context, sizes.decode_steps, ceilings, top_p=0.9)
            cells.append((f"{found.name}, graphs", *found.cells()[1:]))
        for num_rows, num_tokens in sizes.prompts:
            if self._budget.allows(f"prefill of {num_rows} x {num_tokens}", 10):
                cells.append(engine.prefill(num_rows, num_tokens, 3, ceilings).cells())
                say("  ".join(cells[-1]))
        for num_rows, (launched, *by_graphs) in tokens.items():
            if by_graphs:
                self._check(
                    f"graph of {num_rows} rows", "" if by_graphs == [launched] else "other tokens than launched"
                )
        return iter(cells)

    def _release(self) -> None:
        if self._bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _names(formats: Sequence[Format]) -> str:
    return " and ".join(fmt.name.lower() for fmt in formats)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds in which parts may begin")
    parser.add_argument("--dry-run", action="store_true", help="try the script on the CPU, at tiny sizes")
    flags = parser.parse_args(arguments)
    if not flags.dry_run and not torch.cuda.is_available():
        print("bench.gpu: this machine has no GPU that torch can use (--dry-run tries the script)", file=sys.stderr)
        return 2
    if flags.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads it when it is imported, which torch may have done.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench.gpu", *arguments])
    torch.manual_seed(0)
    bench, sizes = (DryBench(), TINY) if flags.dry_run else (Bench(), REAL)
    run = Run(bench, sizes, Budget(flags.budget_s))
    run.all_parts()
    for lines in run.summary:
        say(f"\n{lines}")
    for line in run.wrong:
        say(f"WRONG: {line}")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
