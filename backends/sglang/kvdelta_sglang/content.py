# SPDX-License-Identifier: Apache-2.0
"""The hash under which SGLang's KV events name a block."""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKEN = 4
"""Bytes of a token in what is hashed."""


def event_hash(tokens: Sequence[int], block_size: int, blocks: int, cache_salt: str | None) -> int:
    """Return the hash of block ``blocks - 1`` of a prompt as an unsigned 64-bit number.

    As SGLang 0.5.21 hashes without speculative decoding: SHA-256 over the digest before and the block's tokens; a salt
    is the digest before the first. An adapter is in no such hash.
    """
    ids = array("I", tokens[: blocks * block_size])
    if sys.byteorder == "big":
        ids.byteswap()
    raw = ids.tobytes()
    digest = b"" if cache_salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()
    step = block_size * _TOKEN
    for start in range(0, blocks * step, step):
        digest = hashlib.sha256(digest + raw[start : start + step]).digest()
    return int.from_bytes(digest[:8], "big")
