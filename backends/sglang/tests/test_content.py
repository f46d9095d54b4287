# SPDX-License-Identifier: Apache-2.0
"""Our hash of a block is the one in SGLang's events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvdelta_sglang.content import event_hash

TOKENS = list(range(100, 100 + 64 * 10 + 7))


@pytest.mark.parametrize("salt", [None, "a", "ä"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_each_block_has_sglangs_own_hash(block_size: int, salt: str | None) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415
    from sglang.srt.mem_cache.utils import compute_node_event_hash_values, hash_str_to_int64  # noqa: PLC0415

    key = RadixKey(TOKENS[: 64 * 10], None, cache_salt=salt)
    node = SimpleNamespace(key=key, parent=None, hash_value=None, event_hash_value=None)
    theirs = [hash_str_to_int64(text) % 2**64 for text in compute_node_event_hash_values(node, block_size)]
    ours = [event_hash(TOKENS, block_size, blocks, salt) for blocks in range(1, 64 * 10 // block_size + 1)]
    assert ours == theirs


def test_the_hash_does_not_change_unseen() -> None:
    assert event_hash(TOKENS, 64, 3, None) == 0x76A18451696167C4
    assert event_hash(TOKENS, 64, 3, "a") == 0x339F8569FCF4FF38
