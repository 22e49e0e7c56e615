"""Implementations of core.types.PrefixIndex, which says which lanes hold which blocks.

`memory` knows one cell; `redis` adds, behind it, what the cells of a cluster tell one another.
"""
