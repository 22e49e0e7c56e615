"""Implementations of core.types.PrefixIndex: which lanes hold which blocks."""
