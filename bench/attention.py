"""`python -m bench.attention`: the CPU kernels alone, over 30 distinct layers, so that no KV waits in a cache.

The kernels run in turn with a plain read of the same bytes (what no decode should beat on this machine), or with
torch's float32 matrix product (a measure for prefill). Last come the cost of a launch, what it costs to take turns with
torch's products, and the time to compile or to load the kernels.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.report import say, spread, table
from kernels.dispatch import AttentionBatch, AttentionParams, Backend, backend_for
from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, entry

NUM_LAYERS = 30
GROUP = 3  # query heads a KV head
LAYOUT = KVLayout(num_kv_heads=3, head_size=64, block_size=16, native_dtype="bfloat16")
PARAMS = AttentionParams(scale=LAYOUT.head_size**-0.5)

Row = tuple[int, int]  # context length, query length

FORMAT_BATCHES: dict[str, Sequence[Row]] = {
    "8 rows x 4096": [(4096, 1)] * 8,
    "64 tokens of 4096": [(4096, 64)],
}

DECODES: dict[str, Sequence[Row]] = {
    "8 rows x 512": [(512, 1)] * 8,
    "64 rows x 128": [(128, 1)] * 64,
    "1 row x 4096": [(4096, 1)],
    "7 rows x 64, 1 x 3648": [(64, 1)] * 7 + [(3648, 1)],
}
PREFILLS: dict[str, Sequence[Row]] = {
    "512 tokens of 512": [(512, 512)],
    "512 tokens of 4096": [(4096, 512)],
    "32 tokens of 4096": [(4096, 32)],
    "8 x 64 tokens of 64": [(64, 64)] * 8,
    "512 of 2048, and 8 decodes x 512": [(2048, 512), *[(512, 1)] * 8],
}


class Launches:
    """One batch on 30 layers of random KV, its blocks scattered, all of one format."""

    def __init__(self, rows: Sequence[Row], fmt: Format = Format.NATIVE) -> None:
        counts = [-(-context_len // LAYOUT.block_size) for context_len, _ in rows]
        places = scattered_entries(sum(counts), fmt)
        block_table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        begin = 0
        for row, count in enumerate(counts):
            block_table[row, :count] = places[begin : begin + count]
            begin += count
        query_lens = [query_len for _, query_len in rows]
        self._batch = AttentionBatch(
            block_table,
            torch.tensor([context_len for context_len, _ in rows], dtype=torch.int32),
            torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
            max(query_lens),
        )
        self._query = torch.randn(sum(query_lens), LAYOUT.num_kv_heads * GROUP, LAYOUT.head_size)
        self._out = torch.empty_like(self._query)
        self._backend = backend_for(torch.device("cpu"))
        self.layers = [random_layer(self._backend, places, fmt) for _ in range(NUM_LAYERS)]
        pairs = sum(n - i for n, q in rows for i in range(q))  # of a query and a key that it sees
        self.flops = NUM_LAYERS * 4 * LAYOUT.head_size * LAYOUT.num_kv_heads * GROUP * pairs

    def run(self) -> None:
        """Attend in every layer."""
        for layer in self.layers:
            self.run_layer(layer)

    def run_layer(self, layer: Tensor) -> None:
        """Attend in one layer."""
        self._backend.paged_attention(self._query, layer, self._batch, PARAMS, LAYOUT, self._out)

    def read(self) -> None:
        """Read every byte of every layer's arena, in order, on all threads."""
        for layer in self.layers:
            layer.view(torch.int64).sum()


def scattered_entries(num_blocks: int, fmt: Format) -> Tensor:
    """Return int32 [num_blocks] entries of as few slabs as hold them, in random order."""
    capacity = LAYOUT.blocks_per_slab(fmt)
    places = torch.randperm(-(-num_blocks // capacity) * capacity)[:num_blocks].tolist()
    block_ids = [place // capacity * PLACES_PER_SLAB + place % capacity for place in places]
    return torch.tensor([entry(block_id, fmt) for block_id in block_ids], dtype=torch.int32)


def random_layer(backend: Backend, places: Tensor, fmt: Format) -> Tensor:
    """Return a layer's arena whose blocks at the places, all of one format, hold random KV."""
    num_slabs = -(-places.shape[0] // LAYOUT.blocks_per_slab(fmt))
    num_native = -(-places.shape[0] // LAYOUT.slab_blocks) if fmt is not Format.NATIVE else num_slabs
    numbers = torch.randn(num_native, LAYOUT.slab_bytes // LAYOUT.element_bytes)
    native = numbers.to(getattr(torch, LAYOUT.native_dtype)).view(torch.uint8)
    if fmt is Format.NATIVE:
        return native
    arena = torch.cat([torch.zeros(num_slabs, LAYOUT.slab_bytes, dtype=torch.uint8), native])
    sources = [
        entry((num_slabs + i // LAYOUT.slab_blocks) * PLACES_PER_SLAB + i % LAYOUT.slab_blocks, Format.NATIVE)
        for i in range(places.shape[0])
    ]
    backend.requantize_blocks(arena.unsqueeze(0), torch.tensor(sources, dtype=torch.int32), places, LAYOUT)
    return arena[:num_slabs].clone()


def measure_in_turn(actions: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return each action's milliseconds, one value a round; a round runs all, and the first does not count."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            begin_s = time.perf_counter()
            action()
            if repeat > 0:
                times[name].append(1e3 * (time.perf_counter() - begin_s))
    return times


def compare_decodes(repeats: int) -> None:
    rows = [("decode", "ms for 30 layers", "ms to read them", "ratio")]
    for name, batch in DECODES.items():
        launches = Launches(batch)
        times = measure_in_turn({"run": launches.run, "read": launches.read}, repeats)
        ratios = [run / read for run, read in zip(times["run"], times["read"], strict=True)]
        rows.append((name, spread(times["run"]), spread(times["read"]), spread(ratios)))
    say(table(rows))


def compare_formats(repeats: int) -> None:
    """Say what decodes and a prefill chunk cost over blocks of each format, against native blocks."""
    for what, batch in FORMAT_BATCHES.items():
        launches = {fmt.name.lower(): Launches(batch, fmt) for fmt in Format}
        times = measure_in_turn({name: each.run for name, each in launches.items()}, repeats)
        rows = [(what, "ms for 30 layers", "of native's", "bytes of native's")]
        for fmt, (name, ms) in zip(Format, times.items(), strict=True):
            ratios = [time_ms / native_ms for time_ms, native_ms in zip(ms, times["native"], strict=True)]
            size = LAYOUT.block_bytes(fmt) / LAYOUT.block_bytes(Format.NATIVE)
            rows.append((name, spread(ms), spread(ratios), f"{size:.3f}"))
        say(table(rows))


def measure_requantization(repeats: int) -> None:
    """Say what it costs to make 32 blocks of 30 layers narrower: those of a prefill chunk of 512 tokens."""
    num_native = 2  # slabs
    arena = torch.randn(NUM_LAYERS, num_native + 2, LAYOUT.slab_bytes // LAYOUT.element_bytes)
    arena = arena.to(getattr(torch, LAYOUT.native_dtype)).view(torch.uint8)
    sources = [entry(i // 16 * PLACES_PER_SLAB + i % 16, Format.NATIVE) for i in range(32)]
    backend = backend_for(torch.device("cpu"))
    actions: dict[str, Callable[[], None]] = {}
    for fmt in list(Format)[1:]:
        capacity = LAYOUT.blocks_per_slab(fmt)
        places = [(num_native + i // capacity) * PLACES_PER_SLAB + i % capacity for i in range(32)]
        targets = [entry(block_id, fmt) for block_id in places]
        pair = torch.tensor([sources, targets], dtype=torch.int32)
        actions[fmt.name.lower()] = partial(backend.requantize_blocks, arena, pair[0], pair[1], LAYOUT)
    times = measure_in_turn(actions, repeats)
    say("32 blocks of 30 layers made narrower, ms: " + ", ".join(f"{name} {spread(ms)}" for name, ms in times.items()))


def compare_prefills(repeats: int) -> None:
    rows = [("prefill", "ms for 30 layers", "GFLOP/s", "of a float32 product's")]
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    products = 20

    def multiply() -> None:
        for _ in range(products):
            left @ right

    for name, batch in PREFILLS.items():
        launches = Launches(batch)
        times = measure_in_turn({"run": launches.run, "multiply": multiply}, repeats)
        rates = [launches.flops / ms / 1e6 for ms in times["run"]]
        product_rates = [products * 2 * 512**3 / ms / 1e6 for ms in times["multiply"]]
        shares = [rate / product for rate, product in zip(rates, product_rates, strict=True)]
        rows.append((name, spread(times["run"]), spread(rates), spread(shares)))
    say(table(rows))


def compare_turns(repeats: int) -> None:
    """Say what attention and torch's products cost in turn, over the sum of both alone."""
    launches = Launches(DECODES["8 rows x 512"])
    x, weights = torch.randn(8, 576), [torch.randn(1536, 576) for _ in range(NUM_LAYERS)]

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    def both() -> None:
        for layer, weight in zip(launches.layers, weights, strict=True):
            torch.nn.functional.linear(x, weight)
            launches.run_layer(layer)

    times = measure_in_turn({"attention": launches.run, "products": products, "both": both}, repeats)
    alone = zip(times["attention"], times["products"], strict=True)
    ratios = [both_ms / sum(parts) for both_ms, parts in zip(times["both"], alone, strict=True)]
    say(f"in turn with products, over the sum of both: {spread(ratios)}")


def measure_launch(repeats: int) -> None:
    launches = Launches([(1, 1)])
    times = measure_in_turn({"run": launches.run}, max(repeats, 20))
    say(f"a launch for one token: {spread([1e3 * ms / NUM_LAYERS for ms in times['run']])} microseconds")


def measure_compilation() -> None:
    code = (
        "import time, torch; from kernels.dispatch import backend_for; from bench.attention import *;"
        "backend = backend_for(torch.device('cpu')); begin = time.perf_counter();"
        "backend.warm_up(LAYOUT, GROUP * LAYOUT.num_kv_heads, PARAMS); print(time.perf_counter() - begin)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiling", "loading"):
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
            )
            say(f"{what} the kernels of one KV dtype: {float(done.stdout):.2f} s")


def main() -> None:
    """Measure, and print medians with the lowest and highest value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="rounds of each measurement")
    repeats = parser.parse_args().repeats
    say(f"{torch.get_num_threads()} threads; 9 query and 3 KV heads of 64, bfloat16 blocks of 16 tokens, 30 layers")
    compare_decodes(repeats)
    compare_formats(repeats)
    measure_requantization(repeats)
    compare_prefills(max(3, repeats // 3))
    compare_turns(repeats)
    measure_launch(repeats)
    measure_compilation()


if __name__ == "__main__":
    main()
