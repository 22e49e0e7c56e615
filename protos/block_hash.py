"""The hash chain that names a block by all the tokens up to its end.

h_i = H(h_{i-1} || token ids of block i), h_{-1} = H(extra). Gateways (to find the cell that holds a prefix) and
schedulers (to find the block) must agree on it to the bit, so this is the only place that knows it.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 32
_DOMAIN = b"quire/block-hash/1"


def root_hash(model_fingerprint: bytes, tenant_salt: bytes, cache_salt: str) -> BlockHash:
    """Return the parent of a sequence's first block: what may share a prefix has the same root.

    Every part is length-prefixed, so that no two different triples give the same input.
    """
    digest = hashlib.sha256(_DOMAIN + b"/root")
    for part in (model_fingerprint, tenant_salt, cache_salt.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return BlockHash(digest.digest())


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a full block from its predecessor's and its own token ids (each below 2**32)."""
    num_tokens = len(token_ids)
    body = struct.pack(f"<{num_tokens + 1}I", num_tokens, *token_ids)
    return BlockHash(hashlib.sha256(_DOMAIN + parent + body).digest())
