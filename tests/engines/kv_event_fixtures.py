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
from typing import Any, Final

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_SIZE: Final = 4
# Dynamo's mark of a routing hash: 16 digits and 48 zeros.
IMAGE_A: Final = f"{0xA0001:016x}{'0' * 48}"
IMAGE_B: Final = f"{0xB0001:016x}{'0' * 48}"
PLACEHOLDER: Final = 9


def pool(blocks: int = 64) -> BlockPool:
    return BlockPool(blocks, True, BLOCK_SIZE, enable_kv_cache_events=True)


def request(tokens: list[int], image: tuple[str, int, int] | None = None, **rest: Any) -> Request:
    features = None
    if image is not None:
        identifier, offset, length = image
        features = [
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
        ]
    return Request(
        "request",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        **rest,
    )


def store(into: BlockPool, of: Request, steps: list[int] | None = None, group: int = 0) -> list[Any]:
    """Cache all whole blocks of a request, in steps that end at these blocks."""
    whole = len(of.prompt_token_ids or []) // BLOCK_SIZE
    blocks = into.get_new_blocks(whole)
    cached = 0
    for end in steps or [whole]:
        into.cache_full_blocks(of, blocks, cached, end, BLOCK_SIZE, group)
        cached = end
    return blocks


def payload(events: list[Any], rank: int | None = 0) -> str:
    for event in events:
        # As KVCacheManager.take_events does for a model of one full attention group.
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind is None:
            event.kv_cache_spec_kind = "full_attention"
    batch = KVEventBatch(ts=1.0, events=events, data_parallel_rank=rank)
    return msgspec.msgpack.Encoder().encode(batch).hex()


def stored(of: Request, steps: list[int] | None = None, rank: int | None = 0) -> str:
    into = pool()
    store(into, of, steps)
    return payload(into.take_events(), rank)


def text() -> str:
    return stored(request(list(range(1, 13))))


def two_copies() -> list[str]:
    """Store two blocks twice, then evict one copy of the second."""
    into = pool(8)
    first = store(into, request(list(range(1, 9))))
    store(into, request(list(range(1, 9))))
    payloads = [payload(into.take_events())]
    into.free_blocks(reversed(first))
    # 7 usable blocks, 3 never used: the fourth evicts the tail of the first copy.
    into.get_new_blocks(4)
    payloads.append(payload(into.take_events()))
    return payloads


def bytes_hashes() -> str:
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    try:
        return text()
    finally:
        del os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"]


def hybrid() -> str:
    """A group of one state and one of full attention, named by the same hash."""
    tokens = list(range(1, 21))
    into = pool()
    store(into, request(tokens), group=1)
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


def main() -> None:
    init_none_hash(sha256)
    prompt = list(range(1, 9))
    images = [1, 2, 3, 4] + [PLACEHOLDER] * 8
    salted = {"cache_salt": "dynamo-cache-salt:A"}
    adapter = LoRARequest("A", 1, "/adapter")
    first, evicted = two_copies()
    cleared = pool()
    store(cleared, request(prompt))
    cleared.take_events()
    cleared.free_blocks([block for block in cleared.blocks if block.ref_cnt and not block.is_null])
    assert cleared.reset_prefix_cache()
    payloads = {
        "text": text(),
        "rank_1": stored(request(prompt), rank=1),
        "byte_hashes": bytes_hashes(),
        "two_copies": first,
        "first_copy_evicted": evicted,
        "cleared": payload(cleared.take_events()),
        "salt_by_dynamo_in_two_steps": stored(request(prompt, **salted), [1, 2]),
        "salt_untagged": stored(request(prompt, cache_salt="A")),
        "lora": stored(request(prompt, lora_request=adapter)),
        "lora_and_salt_of_one_name": stored(request(prompt, lora_request=adapter, **salted)),
        "image_of_dynamo": stored(request(images, (IMAGE_A, 4, 8))),
        "other_image_of_dynamo": stored(request(images, (IMAGE_B, 4, 8))),
        "image_by_vllm": stored(request(images, ("5d" * 32, 4, 8))),
        "hybrid": hybrid(),
    }
    Path(sys.argv[1]).write_text(json.dumps(payloads, indent=1) + "\n")


if __name__ == "__main__":
    main()
