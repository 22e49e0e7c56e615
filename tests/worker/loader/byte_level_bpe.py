"""Byte-level BPE in its plainest form, as an oracle: no pre-tokenizer (tests cut the text themselves), no cache."""

import itertools


def byte_names() -> dict[int, str]:
    """Return the character that stands for each byte in a vocabulary: itself where it prints, else U+0100 onwards."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(256 + idx) for idx, byte in enumerate(others)}


class BytePairs:
    """A vocabulary and its merges, best first."""

    def __init__(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        self._vocabulary = vocabulary
        self._rank = {pair: idx for idx, pair in enumerate(merges)}
        self._names = byte_names()

    def ids(self, piece: str) -> list[int]:
        """Return the token ids of one piece: merge the best neighbours, the leftmost first, until none may merge."""
        parts = [self._names[byte] for byte in piece.encode()]
        while True:
            pairs = list(itertools.pairwise(parts))
            ranked = [(self._rank[pair], idx) for idx, pair in enumerate(pairs) if pair in self._rank]
            if not ranked:
                return [self._vocabulary[part] for part in parts]
            _, idx = min(ranked)
            parts[idx : idx + 2] = ["".join(pairs[idx])]
