# SPDX-License-Identifier: Apache-2.0
"""P cuts and releases, D confirms and pairs, on vLLM's scheduler and block manager."""

from __future__ import annotations

from factory import Engine, full, window
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

BLOCK = 4


def prompt(tokens: int, start: int = 100) -> list[int]:
    return [(start + 3 * index) % 500 for index in range(tokens)]


def claim(engine: Engine, tokens: list[int], blocks: int, **changes: object) -> dict[str, object]:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    probe = Request("probe", list(tokens), SamplingParams(max_tokens=1), None, block_hasher=engine._hasher)
    own = maybe_convert_block_hash(probe.block_hashes[blocks - 1])
    return {
        "version": 1,
        "claim_id": "claim-1",
        "decode_worker_id": 42,
        "decode_dp_rank": 0,
        "cached_prefix_blocks": blocks,
        "block_size": BLOCK,
        "prefix_hash": own,
        **changes,
    }


def prefill(engine: Engine, name: str, tokens: list[int], claimed: object = None) -> dict:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    if claimed is not None:
        params["decode_cache_info"] = claimed
    engine.add(name, list(tokens), params)
    return engine.run(name).kv_transfer_params


def test_cut_and_release() -> None:
    p = Engine()
    start = p.free
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    assert answer["do_remote_prefill"] is False
    offer = answer["kvdelta"]
    assert offer["first_block"] == 6
    assert len(offer["params"]["remote_block_ids"][0]) == 2
    assert p.free == start - 2
    # Still in the prefix cache.
    p.add("again", list(tokens), {})
    p.step()
    assert p.scheduler.kv_cache_manager.make_prefix_cache_stats().hits == 28
    p.step(sent={"p1"})
    assert p.free == start
    assert p.count("claims", "skipped") == 1
