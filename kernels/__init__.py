"""Kernels on the paged KV cache: attention, and what writes, copies and clears blocks.

`formats` says how blocks lie in the arena, `dispatch` names the operations and finds the backend of a device,
`reference` is the plain torch oracle, `cpu` is compiled by Numba, `triton` (for GPUs) by Triton. This package shares
its name with an unrelated one on PyPI, so nothing heavy is imported here.
"""

__version__ = "0.1.0"
