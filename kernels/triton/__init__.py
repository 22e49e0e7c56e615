"""Kernels for GPUs (NVIDIA's and AMD's), in Triton: bfloat16, float16 and float32 blocks, keys and values token-major.

    K of a head  [block_size][head_size]   a token's channels are one run of bytes: a tile is fetched in 16-byte copies
    V of a head  [block_size][head_size]   the same, from the same addresses plus the bytes of the K plane

Read in this order: `places` (where a block lies), `tiles` (queries against a run of blocks, the loop that all time is
spent in), `prefill` and `decode` (which queries meet which keys), `blocks` (writing, copying, clearing), `tuning` (tile
sizes by chip), `backend` (what Python calls), `report` (what the compiler makes of it all, no GPU needed).

Names in capitals are known when a kernel is compiled. `import triton` means the compiler, not this package.
"""
