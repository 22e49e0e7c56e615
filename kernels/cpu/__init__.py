"""Kernels for CPUs, compiled by Numba: blocks of every format, keys channel-major, values token-major.

    K of a head  [head_size][block_size]   one channel of many tokens is one vector: scores need no sum across lanes
    V of a head  [block_size][head_size]   one token's channels: outputs need none either

Read in this order: `vector` and `product` (which write LLVM instructions; so do `codes` and `code_product` for blocks
that are not native), `softmax`, `tiles` (queries against 64 keys of native blocks), `plan` (what a launch computes, in
units), `attention` (a unit), `mixed` (tiles of blocks of any format), `dequantize`, `blocks` (writing, copying,
clearing), `requantize`, `backend` (what Python calls).
"""
