# SPDX-License-Identifier: Apache-2.0
"""Make the KV event payloads of tests/fixtures/wire with SGLang's own radix tree and encoder.

    python sglang_event_fixtures.py FILE

Run it in the engines' environment with the folders that `cargo xtask env` prints for SGLang in
PYTHONPATH. Pages of 4 tokens; every payload is what SGLang's ZMQ publisher sends as the last frame.
The same version writes the same bytes: hashes are of the tokens, and the time is 1.0.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from pathlib import Path
from typing import Any, Final

os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    # SGLang compiles its hash of a block, for which it needs ninja.
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}

import msgspec
import torch
from sglang.srt.disaggregation.kv_events import KVCacheEvent, KVEventBatch, StorageMedium
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

PAGE: Final = 4
TOKENS: Final = 64
WINDOW: Final = 8
TEXT: Final = list(range(1, 13))
OTHER_END: Final = [*range(1, 9), *range(21, 25)]
"""Has the first two pages of `TEXT`."""
LONG: Final = list(range(1, 25))
LONG_OTHER_END: Final = [*range(1, 17), *range(31, 39)]
HEADS: Final[dict[str, Any]] = {"head_num": 1, "head_dim": 4, "device": "cpu"}


class Tree:
    """A radix tree that announces what it caches, over pools of CPU memory."""

    def __init__(self, *, window: bool = False) -> None:
        """Make an empty tree, of a model with a sliding window or of a plain one."""
        dtype = torch.float32
        components: tuple[ComponentType, ...] = (ComponentType.FULL,)
        if window:
            components = (ComponentType.FULL, ComponentType.SWA)
            pool = SWAKVPool(
                size=TOKENS,
                size_swa=TOKENS,
                page_size=PAGE,
                dtype=dtype,
                swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0],
                **HEADS,
            )
            self.slots = SWATokenToKVPoolAllocator(
                TOKENS, TOKENS, PAGE, dtype, "cpu", pool, need_sort=False
            )
        else:
            pool = MHATokenToKVPool(
                TOKENS, PAGE, dtype, layer_num=1, enable_memory_saver=False, **HEADS
            )
            self.slots = PagedTokenToKVPoolAllocator(
                TOKENS, PAGE, dtype, "cpu", pool, need_sort=False
            )
        requests = ReqToTokenPool(4, TOKENS, "cpu", enable_memory_saver=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=requests,
                token_to_kv_pool_allocator=self.slots,
                page_size=PAGE,
                enable_kv_cache_events=True,
                tree_components=components,
                sliding_window_size=WINDOW if window else None,
            )
        )
        self.tree.take_events()

    def insert(self, tokens: list[int], **namespace: str) -> None:
        """Cache the tokens, whose pages are taken from the pool."""
        nothing, whole = torch.tensor([0]), torch.tensor([len(tokens)])
        before = torch.tensor([-1])
        slots = self.slots.alloc_extend(nothing, nothing, whole, whole, before, len(tokens))
        self.tree.insert(InsertParams(key=key(tokens, **namespace), value=slots))

    def cached(self, tokens: list[int]) -> int:
        """How many of the tokens a request would reuse."""
        found = self.tree.match_prefix(MatchPrefixParams(key=key(tokens)))
        return len(found.device_indices)

    def payload(self, rank: int = 0) -> str:
        """Encode what happened since the last call."""
        return encode(self.tree.take_events(), rank)


def encode(events: list[KVCacheEvent], rank: int = 0) -> str:
    """Encode events as the publisher does."""
    batch = KVEventBatch(ts=1.0, events=events, attn_dp_rank=rank)
    encoded: bytes = msgspec.msgpack.Encoder().encode(batch)
    return encoded.hex()


def key(tokens: list[int], extra_key: str | None = None, salt: str | None = None) -> RadixKey:
    """Name the tokens as the tree does."""
    return RadixKey(token_ids=array("q", tokens), extra_key=extra_key, cache_salt=salt)


def stored(tokens: list[int], rank: int = 0, **namespace: str) -> str:
    """Store the tokens in an empty tree."""
    tree = Tree()
    tree.insert(tokens, **namespace)
    return tree.payload(rank)


def split() -> dict[str, str]:
    """Split a node by a second prompt, then evict the ends, then store the first end again."""
    tree = Tree()
    tree.insert(TEXT)
    payloads = {"text": tree.payload()}
    tree.insert(OTHER_END)
    payloads["split_by_another_end"] = tree.payload()
    tree.tree.evict(EvictParams(num_tokens=2 * PAGE))
    payloads["both_ends_evicted"] = tree.payload()
    tree.insert(TEXT)
    payloads["first_end_again"] = tree.payload()
    tree.tree.reset()
    payloads["cleared"] = tree.payload()
    return payloads


def sliding_window() -> dict[str, str]:
    """Store two prompts that are longer than the window, then make the window layers give room."""
    tree = Tree(window=True)
    for prompt in (LONG, LONG_OTHER_END):
        tree.insert(prompt)
    payloads = {"with_sliding_window": tree.payload()}
    # Takes the first one's end, whole, and the window of the pages that both have, which stay.
    tree.tree.evict(EvictParams(swa_num_tokens=3 * PAGE))
    payloads["window_evicted"] = tree.payload()
    assert tree.tree.full_evictable_size() == len(LONG_OTHER_END)
    assert (tree.cached(LONG), tree.cached(LONG_OTHER_END)) == (0, len(LONG_OTHER_END))
    return payloads


def lower_tier() -> dict[str, str]:
    """Copy pages to host memory, then give up those in device memory.

    The recorder of SGLang's trees is driven by hand: a host pool needs a GPU.
    """
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE)
    root, node = TreeNode(), TreeNode()
    root.key, root.hash_value = key([]), []
    node.key, node.parent = key(TEXT), root
    payloads = {}
    recorder.record_store(node)
    recorder.record_store(node, medium=StorageMedium.CPU)
    payloads["with_host_copy"] = encode(recorder.take())
    recorder.record_remove(node)
    payloads["host_copy_alone"] = encode(recorder.take())
    return payloads


def main() -> None:
    """Write all payloads by name."""
    payloads = split() | {
        "rank_1": stored(TEXT, rank=1),
        "salt": stored(TEXT, salt="A"),
        "extra_key": stored(TEXT, extra_key="adapter"),
    }
    payloads |= sliding_window() | lower_tier()
    Path(sys.argv[1]).write_text(json.dumps(payloads, indent=1) + "\n")


if __name__ == "__main__":
    main()
