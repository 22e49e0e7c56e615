"""A plan as text: a table for people, JSON for programs."""

import json
from collections.abc import Sequence

from kernels.formats import Format
from worker_svc.plan.memory import FormatPlan, MemoryPlan

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_GAP = "  "


def show_bytes(num_bytes: float) -> str:
    """Return a number of bytes in the largest binary unit of which it is at least one."""
    exponent = 0
    while num_bytes >= 1024 and exponent < len(_UNITS) - 1:
        num_bytes /= 1024
        exponent += 1
    return f"{num_bytes:,.2f} {_UNITS[exponent]}" if exponent else f"{num_bytes:,.0f} {_UNITS[0]}"


def format_name(plan: FormatPlan) -> str:
    """Return a format's name; native has its dtype's beside it."""
    return f"native ({plan.arena.layout.native_dtype})" if plan.fmt is Format.NATIVE else plan.fmt.name.lower()


def to_table(plan: MemoryPlan) -> str:
    """Return the plan as lines for a terminal."""
    length = plan.mean_length_tokens
    header = [
        "format",
        "KV a token",
        "of native",
        f"{length:,} tokens",
        "blocks a slab",
        "blocks in the pool",
        "sequences",
        "in whole blocks",
    ]
    rows = [
        [
            format_name(fmt),
            show_bytes(fmt.token_bytes),
            f"{fmt.native_share:.1%}",
            show_bytes(fmt.sequence_bytes(length)),
            f"{fmt.blocks_per_slab:,}",
            f"{fmt.num_blocks:,}",
            f"{fmt.num_sequences(length):,}",
            f"{fmt.num_sequences_in_blocks(length):,}",
        ]
        for fmt in plan.formats
    ]
    notes = [
        f"sequences: what is there for KV / (KV a token x {length:,}).",
        f"in whole blocks: sequences of {length:,} tokens in slabs, with the blocks that every policy keeps native.",
        "Activations, graphs, the driver and what the scheduler keeps in reserve come off both.",
    ]
    return "\n".join([*_headline(plan), "", *_align([header, *rows]), "", *notes])


def to_json(plan: MemoryPlan) -> str:
    """Return the plan as a JSON object; units are in the names."""
    length, shape, budget, arena = plan.mean_length_tokens, plan.shape, plan.budget, plan.arena
    value = {
        "model": shape.name,
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "num_parameters": shape.num_parameters,
        "dtype": arena.layout.native_dtype,
        "block_size": arena.layout.block_size,
        "mean_length_tokens": length,
        "memory_bytes": budget.memory_bytes,
        "utilization": budget.utilization,
        "weight_bytes": budget.weight_bytes,
        "kv_bytes": budget.kv_bytes,
        "num_slabs": arena.num_slabs,
        "slab_bytes": arena.layout.slab_bytes * arena.num_layers,
        "formats": {
            fmt.fmt.name.lower(): {
                "token_bytes": fmt.token_bytes,
                "block_bytes": fmt.block_bytes,
                "native_share": fmt.native_share,
                "sequence_bytes": fmt.sequence_bytes(length),
                "blocks_per_slab": fmt.blocks_per_slab,
                "num_blocks": fmt.num_blocks,
                "num_sequences": fmt.num_sequences(length),
                "num_sequences_in_blocks": fmt.num_sequences_in_blocks(length),
            }
            for fmt in plan.formats
        },
    }
    return json.dumps(value, indent=2)


def _headline(plan: MemoryPlan) -> list[str]:
    budget, arena = plan.budget, plan.arena
    for_kv = f"{show_bytes(budget.kv_bytes)} for KV"
    if budget.weight_bytes:
        for_kv = (
            f"{show_bytes(budget.memory_bytes)} x {budget.utilization:g} - {show_bytes(budget.weight_bytes)} of weights"
            f" = {for_kv}"
        )
    slab_bytes = arena.layout.slab_bytes * arena.num_layers
    return [
        plan.shape.description,
        f"{for_kv}: {arena.num_slabs:,} slabs of {show_bytes(slab_bytes)}, blocks of {arena.layout.block_size} tokens",
    ]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append(_GAP.join(cells))
    return lines
