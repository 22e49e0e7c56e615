"""`bench.gpu`, part 1: every kernel against the reference, then its time against its floor and against torch's SDPA.

The floor is the larger of the bytes that must move over the rate of a copy, and the operations over the rate of a
matrix product, both measured in the same run.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from bench.gpu_device import Bench, Ceilings
from kernels.dispatch import AttentionBatch, AttentionParams, Backend
from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, Format, KVLayout, entry
from kernels.reference import ReferenceBackend
from worker_svc.models.config import ModelConfig
from worker_svc.models.elementwise import Elementwise, TorchElementwise
from worker_svc.sampler import Sampler, SamplingRow
from worker_svc.sampling import RowSampling
from worker_svc.torch_sampler import TorchSampler

Row = tuple[int, int]  # context length, query length

# Of the norm of the difference to the norm of the reference. Weights of keys are rounded to the product's dtype.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """Return how its KV lies in native blocks of a dtype."""
        return KVLayout(self.num_kv_heads, self.head_size, self.block_size, str(dtype).removeprefix("torch."))

    @property
    def params(self) -> AttentionParams:
        """What it computes."""
        return AttentionParams(self.head_size**-0.5, self.sliding_window, self.soft_cap)

    def __str__(self) -> str:
        """Return it in a few words."""
        words = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}, blocks of {self.block_size}"
        words += f", window {self.sliding_window}" if self.sliding_window else ""
        return words + (f", cap {self.soft_cap:g}" if self.soft_cap else "")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's time for a layer, beside what it should be."""

    name: str
    ms: float
    floor_ms: float
    torch_ms: float | None = None  # SDPA; for what is no attention, torch's own operations

    def cells(self) -> tuple[str, ...]:
        """Return it as a row of a table."""
        torchs = ("-", "-") if self.torch_ms is None else (f"{self.torch_ms:.4f}", f"{self.ms / self.torch_ms:.2f}")
        return self.name, f"{self.ms:.4f}", f"{self.floor_ms:.4f}", f"{self.ms / self.floor_ms:.2f}", *torchs


TIME_HEADER = ("kernel, for one layer", "ms", "floor ms", "ms / floor", "torch ms", "ms / torch")


@dataclass
class Case:
    """A ragged batch on scattered blocks of one layer, and all keys and values of its rows."""

    heads: Heads
    dtype: torch.dtype
    rows: Sequence[Row]
    device: torch.device
    num_layers: int = 1
    layout: KVLayout = field(init=False)
    num_slabs: int = field(init=False)
    batch: AttentionBatch = field(init=False)
    slots: Tensor = field(init=False)  # of every token of every row

    def __post_init__(self) -> None:
        self.layout = self.heads.layout(self.dtype)
        block_size = self.layout.block_size
        counts = [-(-context_len // block_size) for context_len, _ in self.rows]
        self.num_slabs = -(-sum(counts) // self.layout.slab_blocks) + 1
        places = np.random.default_rng(0).permutation(self.num_slabs * self.layout.slab_blocks)[: sum(counts)]
        slabs, offsets = np.divmod(places, self.layout.slab_blocks)
        block_ids = slabs * PLACES_PER_SLAB + offsets
        table = np.zeros((len(self.rows), max(1, *counts)), dtype=np.int32)
        slots = []
        for row, begin in enumerate(itertools.accumulate(counts[:-1], initial=0)):
            own = block_ids[begin : begin + counts[row]]
            table[row, : counts[row]] = [entry(int(block_id), Format.NATIVE) for block_id in own]
            tokens = np.arange(self.rows[row][0])
            slots.append(own[tokens // block_size] * block_size + tokens % block_size if len(own) else tokens)
        query_lens = [query_len for _, query_len in self.rows]
        self.batch = AttentionBatch(
            self._send(table),
            self._send(np.array([context_len for context_len, _ in self.rows], dtype=np.int32)),
            self._send(np.array([0, *itertools.accumulate(query_lens)], dtype=np.int32)),
            max(query_lens),
        )
        self.slots = self._send(np.concatenate(slots).astype(np.int64))

    @property
    def num_queries(self) -> int:
        """Query tokens of all rows."""
        return sum(query_len for _, query_len in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all rows."""
        return 2 * len(self.slots) * self.heads.num_kv_heads * self.heads.head_size * self.layout.element_bytes

    @property
    def flops(self) -> int:
        """Operations of a query and each key that it sees, over all heads."""
        pairs = sum(query_len * (2 * context_len - query_len + 1) // 2 for context_len, query_len in self.rows)
        return 4 * self.heads.head_size * self.heads.num_heads * pairs

    def noise(self, num_tokens: int, num_heads: int) -> Tensor:
        """Return random activations [num_tokens, num_heads, head_size]."""
        return torch.randn(num_tokens, num_heads, self.heads.head_size, device=self.device).to(self.dtype)

    def empty_arena(self) -> Tensor:
        """Return the arena, every byte of it part of a NaN."""
        shape = (self.num_layers, self.num_slabs, self.layout.slab_bytes)
        return torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device)

    def _send(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        return torch.from_numpy(array).to(self.device)


# ---- correctness


def check_attention(backend: Backend, heads: Heads, dtype: torch.dtype, rows: Sequence[Row], bench: Bench) -> str:
    """Write and attend with both backends, padding rows included; return "" or what is wrong."""
    case = Case(heads, dtype, rows, bench.device)
    key, value = (case.noise(len(case.slots), heads.num_kv_heads) for _ in range(2))
    query = case.noise(case.num_queries, heads.num_heads)
    outs = []
    for one in (backend, ReferenceBackend()):
        arena = case.empty_arena()[0]
        one.write_kv(arena, key, value, case.slots, case.layout)
        out = torch.full_like(query, float("nan"))
        one.paged_attention(query, arena, case.batch, heads.params, case.layout, out)
        outs.append(out.float())
    error = float((outs[0] - outs[1]).norm() / outs[1].norm())
    wrong = "" if error <= _TOLERANCE[dtype] else f"attention is off by {error:.2g} of its norm"
    return wrong or _check_padding(backend, case, key, value, query)


def _check_padding(backend: Backend, case: Case, key: Tensor, value: Tensor, query: Tensor) -> str:
    arena = case.empty_arena()[0]
    before = arena.clone()
    backend.write_kv(arena, key, value, torch.full_like(case.slots, -1), case.layout)
    if not torch.equal(arena, before):
        return "slot -1 is written"
    out = torch.full_like(query, float("nan"))
    empty = replace(case.batch, context_lens=torch.zeros_like(case.batch.context_lens))
    backend.paged_attention(query, arena, empty, case.heads.params, case.layout, out)
    return "" if not out.any() else "a row without context is not zero"


def check_block_operations(backend: Backend, heads: Heads, dtype: torch.dtype, bench: Bench) -> str:
    """Copy and zero blocks of two layers; return "" or what is wrong."""
    case = Case(heads, dtype, [(20 * heads.block_size, 1)], bench.device, num_layers=2)
    shape = case.empty_arena().shape
    arena = torch.randint(0, 256, shape, dtype=torch.uint8, device=bench.device)
    entries = case.batch.block_table[0]
    wanted = arena.clone()
    size = case.layout.block_bytes(Format.NATIVE)

    def block(of: Tensor, index: int) -> Tensor:
        begin = case.layout.byte_offset(int(entries[index]))
        return of.view(2, -1)[:, begin : begin + size]

    for index in range(4):
        block(wanted, 4 + index).copy_(block(wanted, index))
        block(wanted, 8 + index).zero_()
    backend.copy_blocks(arena, entries[0:4].contiguous(), entries[4:8].contiguous(), case.layout)
    backend.zero_blocks(arena, entries[8:12].contiguous(), case.layout)
    return "" if torch.equal(arena, wanted) else "copied or zeroed blocks hold other bytes"


def check_formats(heads: Heads, formats: Sequence[Format], rows: Sequence[Row], bench: Bench) -> str:
    """Narrow blocks to the formats in turn and attend to them with both backends; return "" or what is wrong."""
    case = Case(heads, torch.bfloat16, rows, bench.device)
    entries, table, num_slabs = _narrowed(case, lambda block: (Format.NATIVE, *formats)[block % (len(formats) + 1)])
    batch = replace(case.batch, block_table=table)
    key, value = (case.noise(len(case.slots), heads.num_kv_heads) for _ in range(2))
    query = case.noise(case.num_queries, heads.num_heads)
    arenas, outs = [], []
    for one in (bench.backend_of(formats), ReferenceBackend()):
        arenas.append(torch.zeros(1, num_slabs, case.layout.slab_bytes, dtype=torch.uint8, device=bench.device))
        one.write_kv(arenas[-1][0], key, value, case.slots, case.layout)
        one.requantize_blocks(arenas[-1], *entries, case.layout)
        outs.append(torch.empty_like(query))
        one.paged_attention(query, arenas[-1][0], batch, heads.params, case.layout, outs[-1])
    if not torch.equal(*arenas):
        return f"{int((arenas[0] != arenas[1]).sum())} bytes of narrowed blocks differ"
    error = float((outs[0].float() - outs[1].float()).norm() / outs[1].float().norm())
    return "" if error <= _TOLERANCE[torch.bfloat16] else f"attention is off by {error:.2g} of its norm"


def _narrowed(case: Case, choose: Callable[[int], Format]) -> tuple[tuple[Tensor, Tensor], Tensor, int]:
    """Give a row's full blocks the formats chosen by their position, in slabs behind the native ones.

    Returns the entries of blocks to narrow and where to, the table after it, and the slabs that it takes.
    """
    layout, before = case.layout, case.batch.block_table.cpu()
    after, num_slabs = before.clone(), case.num_slabs
    where: dict[Format, list[tuple[int, int]]] = {}
    for row, (context_len, _) in enumerate(case.rows):
        for block in range(context_len // layout.block_size):
            where.setdefault(choose(block), []).append((row, block))
    for fmt, blocks in sorted(where.items()):
        if fmt is not Format.NATIVE:
            capacity = layout.blocks_per_slab(fmt)
            for idx, (row, block) in enumerate(blocks):
                slab_idx, place = divmod(idx, capacity)
                after[row, block] = entry((num_slabs + slab_idx) * PLACES_PER_SLAB + place, fmt)
            num_slabs += -(-len(blocks) // capacity)
    changed = before != after
    entries = before[changed].to(case.device), after[changed].to(case.device)
    return entries, after.to(case.device), num_slabs


class Activations:
    """A step's tensors between matrix products."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        hidden, inner, half = config.hidden_size, config.intermediate_size, config.head_size // 2
        self.num_rotated = config.num_heads + config.num_kv_heads
        self.residual, self.delta, self.normed = (noise(num_tokens, hidden) for _ in range(3))
        self.weight = noise(hidden)
        self.heads = noise(num_tokens, self.num_rotated + config.num_kv_heads, config.head_size)
        angles = torch.randn(num_tokens, half, device=device) * 100
        self.cos, self.sin = angles.cos(), angles.sin()
        self.gate_up, self.gated = noise(num_tokens, 2 * inner), noise(num_tokens, inner)

    def add_rms_norm(self, operations: Elementwise) -> Tensor:
        """Run the operation on them, and return what it wrote last."""
        operations.add_rms_norm(self.residual, self.delta, self.weight, 1e-5, self.normed)
        return self.normed

    def rotate(self, operations: Elementwise) -> Tensor:
        """As add_rms_norm."""
        return operations.rotate(self.heads, self.num_rotated, self.cos, self.sin)

    def silu_mul(self, operations: Elementwise) -> Tensor:
        """As add_rms_norm."""
        operations.silu_mul(self.gate_up, self.gated)
        return self.gated


def check_elementwise(config: ModelConfig, num_tokens: int, dtype: torch.dtype, bench: Bench) -> str:
    """Run the operations between products, and torch's on the same numbers in float32; return "" or what is wrong."""
    ours, reference = bench.elementwise(), TorchElementwise()
    for run in (Activations.add_rms_norm, Activations.rotate, Activations.silu_mul):
        torch.manual_seed(1)
        found = run(Activations(config, num_tokens, dtype, bench.device), ours).float()
        torch.manual_seed(1)
        wanted = run(_widened(Activations(config, num_tokens, dtype, bench.device)), reference)
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= _TOLERANCE[dtype]:
            return f"{run.__name__} is off by {error:.2g} of its norm"
    return ""


def _widened(activations: Activations) -> Activations:
    for name in ("residual", "delta", "normed", "weight", "heads", "gate_up", "gated"):
        setattr(activations, name, getattr(activations, name).float())
    return activations


def check_sampler(vocab_size: int, num_rows: int, bench: Bench) -> str:
    """Sample with the device's sampler and with the CPU's; return "" or what is wrong."""
    no_ids = np.zeros(0, dtype=np.int64)
    rows = []
    for idx in range(num_rows):
        sampling = RowSampling(
            temperature=(0.0, 0.7, 1.0)[idx % 3],
            top_k=(0, 40)[idx // 3 % 2],
            top_p=(1.0, 0.9)[idx // 6 % 2],
            min_p=0.0,
            repetition_penalty=(1.0, 1.2)[idx // 12 % 2],
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=idx,
            min_tokens=0,
            stop_ids=no_ids,
            bias_ids=no_ids,
            bias_values=np.zeros(0, dtype=np.float32),
            num_logprobs=None,
        )
        rows.append(SamplingRow(sampling, np.arange(50, dtype=np.int32), 20, 0))
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)).mul(2).round(decimals=2)
    found = TorchSampler(vocab_size, bench.device).sample(logits.clone().to(bench.device), rows)
    wanted = Sampler(vocab_size).sample(logits.clone(), rows)
    differing = sum(one.token_id != other.token_id for one, other in zip(found, wanted, strict=True))
    # The last bits of exponentials differ: once in a hundred thousand draws that decides.
    return "" if differing <= 1 else f"{differing} of {num_rows} tokens differ from the CPU's"


# ---- times


def time_writes(backend: Backend, heads: Heads, num_tokens: int, bench: Bench, ceilings: Ceilings) -> KernelTime:
    """Time write_kv of one prefill chunk."""
    case = Case(heads, torch.bfloat16, [(num_tokens, 1)], bench.device, num_layers=4)
    arena = case.empty_arena()
    key, value = (case.noise(num_tokens, heads.num_kv_heads) for _ in range(2))

    def write() -> Tensor:
        for layer in arena.unbind(0):
            backend.write_kv(layer, key, value, case.slots, case.layout)
        return key

    ms = bench.recorded_milliseconds(write, 10) / case.num_layers
    return KernelTime(f"write_kv, {num_tokens} tokens", ms, 2e3 * case.kv_bytes / ceilings.bytes_per_s)


def time_elementwise(config: ModelConfig, num_tokens: int, bench: Bench, ceilings: Ceilings) -> list[KernelTime]:
    """Time the operations between products, torch's beside them."""
    ours, reference = bench.elementwise(), TorchElementwise()
    activations = Activations(config, num_tokens, torch.bfloat16, bench.device)
    rotated = activations.num_rotated * config.head_size
    passes = {  # elements of a token that are read or written
        Activations.add_rms_norm: 4 * config.hidden_size,
        Activations.rotate: 2 * rotated,
        Activations.silu_mul: 3 * config.intermediate_size,
    }
    return [
        KernelTime(
            f"{run.__name__}, {num_tokens} tokens",
            bench.recorded_milliseconds(partial(run, activations, ours), 10),
            2e3 * num_tokens * elements / ceilings.bytes_per_s,
            bench.recorded_milliseconds(partial(run, activations, reference), 10),
        )
        for run, elements in passes.items()
    ]


def time_copies(backend: Backend, heads: Heads, num_blocks: int, bench: Bench, ceilings: Ceilings) -> list[KernelTime]:
    """Time copy_blocks and zero_blocks."""
    case = Case(heads, torch.bfloat16, [(2 * num_blocks * heads.block_size, 1)], bench.device, num_layers=4)
    arena, entries = case.empty_arena(), case.batch.block_table[0]
    sources, targets = entries[:num_blocks].contiguous(), entries[num_blocks:].contiguous()

    def copy() -> Tensor:
        backend.copy_blocks(arena, sources, targets, case.layout)
        return entries

    def zero() -> Tensor:
        backend.zero_blocks(arena, targets, case.layout)
        return entries

    block_bytes = num_blocks * case.layout.block_bytes(Format.NATIVE)
    actions: list[tuple[str, Callable[[], Tensor], int]] = [("copy", copy, 2), ("zero", zero, 1)]
    return [
        KernelTime(
            f"{name}_blocks, {num_blocks} blocks",
            bench.recorded_milliseconds(action, 10) / case.num_layers,
            1e3 * passes * block_bytes / ceilings.bytes_per_s,
        )
        for name, action, passes in actions
    ]


def time_formats(
    heads: Heads, formats: Sequence[Format], num_rows: int, context_len: int, bench: Bench, ceilings: Ceilings
) -> list[KernelTime]:
    """Time narrowing to the formats, and decodes over blocks of them, in runs as long as each other."""
    case = Case(heads, torch.bfloat16, [(context_len, 1)] * num_rows, bench.device, num_layers=2)
    layout, num_blocks = case.layout, context_len // heads.block_size
    run_blocks = -(-num_blocks // len(formats))
    (sources, targets), table, num_slabs = _narrowed(case, lambda block: formats[block // run_blocks])
    batch = replace(case.batch, block_table=table)
    shape = case.num_layers, num_slabs, layout.slab_bytes // 2
    arena = torch.randn(shape, device=bench.device, dtype=torch.bfloat16).view(torch.uint8)
    backend, name = bench.backend_of(formats), " and ".join(fmt.name.lower() for fmt in formats)
    query = case.noise(num_rows, heads.num_heads)
    out = torch.empty_like(query)

    def narrow() -> Tensor:
        backend.requantize_blocks(arena, sources, targets, layout)
        return out

    def attend() -> Tensor:
        for layer in arena.unbind(0):
            backend.paged_attention(query, layer, batch, heads.params, layout, out)
        return out

    counts = torch.bincount(table[:, :num_blocks].cpu().flatten() & (1 << ENTRY_FORMAT_BITS) - 1).tolist()
    read_bytes = sum(count * layout.block_bytes(Format(code)) for code, count in enumerate(counts))
    native_bytes = layout.block_bytes(Format.NATIVE)
    narrowed_bytes = read_bytes + (len(sources) - counts[0]) * native_bytes  # written, and read before
    actions = [
        (f"requantize_blocks, {len(sources)} to {name}", narrow, narrowed_bytes),
        (f"decode, {num_rows} x {context_len}, {name}", attend, read_bytes),
    ]
    return [
        KernelTime(
            what,
            bench.recorded_milliseconds(action, 10) / case.num_layers,
            1e3 * num_bytes / ceilings.bytes_per_s,
        )
        for what, action, num_bytes in actions
    ]


def time_attention(
    backend: Backend, heads: Heads, num_rows: int, row: Row, bench: Bench, ceilings: Ceilings, num_layers: int
) -> KernelTime:
    """Time attention of equal rows over several layers' KV, so that none waits in a cache."""
    case = Case(heads, torch.bfloat16, [row] * num_rows, bench.device, num_layers)
    floor_s = max(case.kv_bytes / ceilings.bytes_per_s, case.flops / ceilings.flops_per_s)
    context_len, query_len = row
    kind = "decode" if query_len == 1 else f"prefill of {query_len}"
    ms = _attention_ms(backend, case, bench)
    return KernelTime(f"{kind}, {num_rows} x {context_len}", ms, 1e3 * floor_s, _sdpa_ms(case, num_rows, row, bench))


def _attention_ms(backend: Backend, case: Case, bench: Bench) -> float:
    shape = (case.num_layers, case.num_slabs, case.layout.slab_bytes // 2)
    layers = torch.randn(shape, device=bench.device, dtype=torch.bfloat16).view(torch.uint8).unbind(0)
    query = case.noise(case.num_queries, case.heads.num_heads)
    out = torch.empty_like(query)

    def attend() -> Tensor:
        for layer in layers:
            backend.paged_attention(query, layer, case.batch, case.heads.params, case.layout, out)
        return out

    return bench.recorded_milliseconds(attend, 10) / case.num_layers


def _sdpa_ms(case: Case, num_rows: int, row: Row, bench: Bench) -> float | None:
    """Return the time of torch's attention over contiguous keys and values; None where it has none."""
    context_len, query_len = row

    def noise(num_heads: int, length: int) -> Tensor:
        shape = (num_rows, num_heads, length, case.heads.head_size)
        return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)

    query, num_kv_heads = noise(case.heads.num_heads, query_len), case.heads.num_kv_heads
    layers = [(noise(num_kv_heads, context_len), noise(num_kv_heads, context_len)) for _ in range(case.num_layers)]
    mask = causal_lower_right(query_len, context_len) if 1 < query_len < context_len else None

    def attend() -> Tensor:
        out = query
        for key, value in layers:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=query_len == context_len, enable_gqa=True
            )
        return out

    try:
        return bench.recorded_milliseconds(attend, 10) / case.num_layers
    except RuntimeError:
        return None
