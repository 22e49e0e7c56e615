"""Kernels for CPUs, compiled by Numba: bfloat16, float16 and float32 blocks, keys channel-major, values token-major.

    K of a head  [head_size][block_size]   one channel of many tokens is one vector: scores need no sum across lanes
    V of a head  [block_size][head_size]   one token's channels: outputs need none either

Read in this order: `vector` and `product` (the only code that writes LLVM instructions), `softmax`, `tiles` (queries
against 64 keys), `plan` (what a launch computes, in units), `attention` (a unit), `blocks` (writing, copying,
clearing), `backend` (what Python calls).
"""
