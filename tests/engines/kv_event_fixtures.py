# SPDX-License-Identifier: Apache-2.0
"""Make the KV event payloads of tests/fixtures/wire with vLLM's own block pool and encoder.

    python kv_event_fixtures.py FILE

Run it in the engines' environment. Blocks of 4 tokens; every payload is what vLLM's ZMQ publisher
sends as the last frame for the events of one step. The same versions write the same bytes: block
hashes start from vLLM's fixed seed, and the time is 1.0.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_SIZE: Final = 4
# Dynamo's mark of a routing hash: 16 digits and 48 zeros.
IMAGE_A: Final = f"{0xA0001:016x}{'0' * 48}"
IMAGE_B: Final = f"{0xB0001:016x}{'0' * 48}"
PLACEHOLDER: Final = 9
TEXT: Final = list(range(1, 13))
PROMPT: Final = list(range(1, 9))


def pool(blocks: int = 64) -> BlockPool:
    """Make a pool that announces what it caches."""
    return BlockPool(
        blocks, enable_caching=True, hash_block_size=BLOCK_SIZE, enable_kv_cache_events=True
    )


def request(
    tokens: list[int],
    *,
    image: str | None = None,
    salt: str | None = None,
    adapter: LoRARequest | None = None,
) -> Request:
    """Make a request; an image lies in its blocks 1 and 2."""
    features = None
    if image is not None:
        where = PlaceholderRange(BLOCK_SIZE, 2 * BLOCK_SIZE)
        features = [MultiModalFeatureSpec(None, "image", image, where)]
    return Request(
        "request",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        mm_features=features,
        cache_salt=salt,
        lora_request=adapter,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def store(
    into: BlockPool, of: Request, steps: list[int] | None = None, group: int = 0
) -> list[KVCacheBlock]:
    """Cache all whole blocks of a request, in steps that end at these blocks."""
    whole = len(of.prompt_token_ids or []) // BLOCK_SIZE
    blocks: list[KVCacheBlock] = into.get_new_blocks(whole)
    cached = 0
    for end in steps or [whole]:
        into.cache_full_blocks(of, blocks, cached, end, BLOCK_SIZE, group)
        cached = end
    return blocks


def payload(events: list[KVCacheEvent], rank: int | None = 0) -> str:
    """Encode one batch, with the kind of a plain model's group as vLLM's cache manager adds it."""
    for event in events:
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind is None:
            event.kv_cache_spec_kind = "full_attention"
    batch = KVEventBatch(ts=1.0, events=events, data_parallel_rank=rank)
    encoded: bytes = msgspec.msgpack.Encoder().encode(batch)
    return encoded.hex()


def stored(of: Request, steps: list[int] | None = None, rank: int | None = 0) -> str:
    """Store a request's blocks in an empty pool."""
    into = pool()
    store(into, of, steps)
    return payload(into.take_events(), rank)


def two_copies() -> list[str]:
    """Store two blocks twice, then evict one copy of the second."""
    into = pool(8)
    first = store(into, request(PROMPT))
    store(into, request(PROMPT))
    payloads = [payload(into.take_events())]
    into.free_blocks(reversed(first))
    # 7 usable blocks, 3 never used: the fourth evicts the tail of the first copy.
    into.get_new_blocks(4)
    payloads.append(payload(into.take_events()))
    return payloads


def bytes_hashes() -> str:
    """Name blocks by bytes instead of integers."""
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    try:
        return stored(request(TEXT))
    finally:
        del os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"]


def hybrid() -> str:
    """Store in a group of one state and in one of full attention, which share the last hash."""
    into = pool()
    store(into, request(list(range(1, 21))), group=1)
    (attention,) = into.take_events()
    attention.kv_cache_spec_kind = "full_attention"
    state = msgspec.structs.replace(
        attention,
        block_hashes=attention.block_hashes[-1:],
        group_idx=0,
        kv_cache_spec_kind="mamba",
        extra_keys=None,
    )
    removed = [BlockRemoved(state.block_hashes, "GPU", group_idx=group) for group in (0, 7)]
    return payload([state, attention, *removed])


def cleared() -> str:
    """Reset an idle cache."""
    into = pool()
    into.free_blocks(store(into, request(PROMPT)))
    into.take_events()
    assert into.reset_prefix_cache()
    return payload(into.take_events())


def main() -> None:
    """Write all payloads by name."""
    init_none_hash(sha256)
    images = [1, 2, 3, 4] + [PLACEHOLDER] * 8
    salt = "dynamo-cache-salt:A"
    adapter = LoRARequest("A", 1, "/adapter")
    both, evicted = two_copies()
    payloads = {
        "text": stored(request(TEXT)),
        "rank_1": stored(request(PROMPT), rank=1),
        "byte_hashes": bytes_hashes(),
        "two_copies": both,
        "first_copy_evicted": evicted,
        "cleared": cleared(),
        "salt_by_dynamo_in_two_steps": stored(request(PROMPT, salt=salt), [1, 2]),
        "salt_untagged": stored(request(PROMPT, salt="A")),
        "lora": stored(request(PROMPT, adapter=adapter)),
        "lora_and_salt_of_one_name": stored(request(PROMPT, adapter=adapter, salt=salt)),
        "image_of_dynamo": stored(request(images, image=IMAGE_A)),
        "other_image_of_dynamo": stored(request(images, image=IMAGE_B)),
        "image_by_vllm": stored(request(images, image="5d" * 32)),
        "hybrid": hybrid(),
    }
    Path(sys.argv[1]).write_text(json.dumps(payloads, indent=1) + "\n")


if __name__ == "__main__":
    main()
