# SPDX-License-Identifier: Apache-2.0
"""A prefill worker cuts and releases, a decode worker confirms and pairs, on vLLM's scheduler and block manager."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from factory import TABLES, Engine, chunked, claim, decode, full, hold, mla, prefill, prompt, state, window
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from kvdelta_vllm.shared import groups_of


def test_a_cut_offer_and_its_release() -> None:
    p = Engine(tables=TABLES)
    start = p.free
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    own = answer["kvdelta"]["params"]
    assert answer["kvdelta"] == {
        "version": 1,
        "claim_id": "claim-1",
        "decode_worker_id": 42,
        "prefix_hash": claim(p, tokens, 6)["prefix_hash"],
        "block_size": 4,
        "first_block": 6,
        "group_first_blocks": [6],
        "params": own,
        "lease": {"slot": 7, "generation": p.half.prefill._generation, "tables": {"0,0": [4096, 0]}},
    }
    assert (answer["do_remote_prefill"], answer["do_remote_decode"]) == (False, False)
    assert own["remote_num_tokens"] == 30
    assert len(own["remote_block_ids"][0]) == 2
    assert p.free == start - 2
    assert p.cached(tokens) == 28
    p.step(sent={"p1"})
    assert p.free == start
    assert [p.count(name) for name in ("claimed_blocks", "skipped_blocks", "offered_blocks")] == [6, 6, 2]
    assert p.count("skipped_bytes") == 6 * full().page_size_bytes
    assert p.count("claims", "skipped") == 1


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"prefix_hash": 1}, "refused_content"),
        ({"block_size": 8, "cached_prefix_blocks": 3}, "refused_capability"),
        ({"version": 2}, "refused_invalid"),
        ({"cached_prefix_blocks": 8}, "refused_invalid"),
        ({"cached_prefix_blocks": -1}, "refused_invalid"),
        ({"claim_id": 3}, "refused_invalid"),
    ],
)
def test_a_claim_that_is_refused(changes: dict[str, object], label: str) -> None:
    p = Engine()
    start = p.free
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6, **changes))
    assert answer["do_remote_prefill"] is True
    assert "kvdelta" not in answer
    assert len(answer["remote_block_ids"][0]) == 8
    assert p.free == start - 8
    assert p.count("claims", label) == 1


@pytest.mark.parametrize("value", [3, "x", [], [1], {}, {"version": 1}])
def test_a_claim_that_is_none(value: object) -> None:
    p = Engine()
    assert "kvdelta" not in prefill(p, "p1", prompt(30), value)
    assert p.count("claims", "refused_invalid") == 1


def test_no_cut_without_prefix_caching() -> None:
    p = Engine(caching=False)
    tokens = prompt(30)
    assert "kvdelta" not in prefill(p, "p1", tokens, claim(p, tokens, 6))
    assert p.count("claims", "refused_capability") == 1


def test_no_cut_of_an_abort() -> None:
    p = Engine(chunk=16, tables=TABLES)
    start = p.free
    tokens = prompt(30)
    p.add("p1", tokens, {"do_remote_decode": True, "decode_cache_info": claim(p, tokens, 6)})
    p.step()
    assert p.meta.lease_words["p1"].slot == 7
    p.abort("p1")
    p.step()
    assert p.meta.reqs_not_processed == {"p1"}
    assert p.free == start
    assert p.count("claims", "skipped") == 0
    assert len(p.half.prefill._free_slots) == 8


def test_shared_blocks_are_released_once() -> None:
    p = Engine()
    start = p.free
    tokens = prompt(30)
    for name in ("p1", "p2"):
        prefill(p, name, tokens, claim(p, tokens, 6))
    # Both leases are of block 6, which they share, and of a last block each.
    assert p.free == start - 3
    prefill(p, "p3", tokens)
    assert p.free == start - 10
    for name in ("p2", "p3", "p1"):
        p.step(sent={name})
    assert p.free == start
    assert all(block.ref_cnt == 0 for block in p.pool.blocks if not block.is_null)


@pytest.mark.parametrize("order", list(itertools.permutations(["p1", "p2", "p3"])))
def test_every_order_of_the_ends_returns_all_blocks(order: tuple[str, ...]) -> None:
    p = Engine(tables=TABLES)
    start = p.free
    tokens = prompt(30)
    for name in order:
        prefill(p, name, tokens, claim(p, tokens, 6) if name != "p3" else None)
    p.add("p4", prompt(30, 8), {"do_remote_decode": True, "kvdelta": {"release": order[0]}})
    p.run("p4")
    assert p.released == [order[0]]
    # The worker half reports a release as it does a notice or an expiry.
    for name in [*order, "p4"]:
        p.step(sent={name})
    assert p.free == start
    assert p.count("released_offers") == 1
    assert len(p.half.prefill._ledger) == 0
    assert len(p.half.prefill._free_slots) == 8
    assert not p.half.prefill._sent


def test_a_release_of_what_is_not_leased_is_ignored() -> None:
    p = Engine()
    for release in ("nobody", 3, None, ["p1"], "p1"):
        prefill(p, "p1", prompt(30), kvdelta={"release": release})
        p.outputs.clear()
        p.step(sent={"p1"})
    assert p.released == []


def test_a_cut_offer_in_stock_hands_is_nothing_to_load() -> None:
    p, d = Engine(), Engine(stock=True)
    tokens = prompt(30)
    start = d.free
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    decode(d, "d1", tokens, answer)
    d.step()
    assert not d.meta.reqs_to_recv
    d.run("d1")
    d.step()
    assert d.free == start


def test_a_lease_in_stock_hands_changes_nothing() -> None:
    p, d = Engine(tables=TABLES), Engine(stock=True)
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens)
    assert answer["kvdelta_lease"]["slot"] == 7
    decode(d, "d1", tokens, answer)
    d.step()
    assert len(d.meta.reqs_to_recv["d1"].local_block_ids[0]) == 8


def cut(tokens: list[int], blocks: int, **more: Any) -> dict[str, Any]:
    p = Engine(tables=TABLES, **more)
    return prefill(p, "p1", tokens, claim(p, tokens, blocks))


def test_a_covered_offer_is_read_paired() -> None:
    d = Engine()
    start = d.free
    tokens = prompt(30)
    answer = cut(tokens, 4)
    # Two more blocks than the claim said.
    hold(d, tokens, 6)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    assert entry.remote.block_ids == [answer["kvdelta"]["params"]["remote_block_ids"][0][2:]]
    assert len(entry.local_block_ids[0]) == 2
    assert d.meta.leases["d1"].tables == {(0, 0): (4096, 0)}
    d.step(received={"d1"})
    assert d.run("d1").kv_transfer_params is None
    d.step()
    assert d.free == start
    assert d.count("offers", "confirmed") == 1
    assert d.count("blocks_read") == 2
    assert d.count("bytes_saved") == 6 * full().page_size_bytes


@pytest.mark.parametrize(("held", "had"), [(0, 0), (3, 3), (5, 5)])
@pytest.mark.parametrize("push", [False, True])
def test_a_stale_claim_is_recomputed(held: int, had: int, *, push: bool) -> None:
    d = Engine(extra={"kvdelta_recovery": "recompute"}, push=push)
    tokens = prompt(30)
    answer = cut(tokens, 6, push=push)
    if held:
        hold(d, tokens, held)
    decode(d, "d1", tokens, answer)
    d.step()
    notice = d.meta.notices["d1"] if push else d.meta.reqs_to_recv["d1"]
    assert not any(notice.local_block_ids)
    assert not notice.awaiting_kvs
    assert notice.remote.request_id == "p1"
    assert not d.meta.fail_now
    assert d.run("d1").kv_transfer_params == {
        "kvdelta": {
            "stale_claim": {
                "version": 1,
                "claim_id": "claim-1",
                "decode_worker_id": 42,
                "said_blocks": 6,
                "had_blocks": had,
                "reason": "stale",
                "recovered": "recompute",
            }
        }
    }
    assert d.count("offers", "stale") == 1
    assert d.count("stale_blocks") == 6 - had
    assert d.count("recoveries", "recompute") == 1


@pytest.mark.parametrize("push", [False, True])
def test_a_stale_claim_is_asked_again(*, push: bool) -> None:
    d = Engine(extra={"kvdelta_recovery": "ask_again"}, push=push)
    start = d.free
    tokens = prompt(30)
    decode(d, "d1", tokens, cut(tokens, 6, push=push))
    d.step()
    assert d.meta.fail_now == {"d1"}
    assert not any((d.meta.notices if push else d.meta.reqs_to_recv)["d1"].local_block_ids)
    assert not d.meta.push_registrations
    d.step(failed={"d1"})
    assert str(d.run("d1").finish_reason) == "error"
    d.step()
    assert d.free == start
    assert d.count("recoveries", "ask_again") == 1


def test_with_the_policy_to_recompute_nothing_is_asked_again() -> None:
    d = Engine(extra={"kvdelta_recovery": "ask_again"}, policy="recompute")
    tokens = prompt(30)
    decode(d, "d1", tokens, cut(tokens, 6))
    assert str(d.run("d1").finish_reason) == "length"
    assert d.count("recoveries", "recompute") == 1


@pytest.mark.parametrize("evicted", [range(6), [5], [2]])
def test_evicted_between_claim_and_offer(evicted: Any) -> None:
    d = Engine(extra={"kvdelta_recovery": "recompute"})
    tokens = prompt(30)
    hold(d, tokens, 6)
    answer = cut(tokens, 6)
    d.evict(tokens, evicted)
    decode(d, "d1", tokens, answer)
    report = d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]
    assert report["had_blocks"] == min(evicted)


def test_evicted_between_lookup_and_allocation() -> None:
    d = Engine(extra={"kvdelta_recovery": "recompute"})
    tokens = prompt(30)
    hold(d, tokens, 6)
    request = decode(d, "d1", tokens, cut(tokens, 6))
    # A lookup whose allocation did not fit.
    assert d.half.get_num_new_matched_tokens(request, 24) == (6, True)
    d.evict(tokens, [4])
    assert d.half.get_num_new_matched_tokens(request, 16) == (0, False)
    assert d.half.get_num_new_matched_tokens(request, 24) == (6, True)
    assert d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]["had_blocks"] == 4


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_b25c_block_5_is_dropped_on_the_prefill_worker_before_the_delta_arrives(policy: str) -> None:
    p, d = Engine(blocks=13, tables=TABLES), Engine(policy=policy)
    starts = p.free, d.free
    tokens = prompt(30)
    hold(d, tokens, 3)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 3))
    offered = answer["kvdelta"]["params"]["remote_block_ids"][0]
    assert len(offered) == 5
    # Out of the prefix cache, and all others in use: under its lease it stays.
    p.evict(tokens, [5])
    others = prefill(p, "p2", prompt(28, 9))["remote_block_ids"][0]
    assert p.free == 0
    assert not set(offered) & set(others)
    # Then the lease ends, and it is another prompt's.
    p.step(sent={"p1", "p2"})
    assert offered[5 - 3] in prefill(p, "p3", prompt(48, 8))["remote_block_ids"][0]
    assert p.half.prefill._generation != answer["kvdelta"]["lease"]["generation"]
    decode(d, "d1", tokens, answer)
    d.step()
    assert d.meta.leases["d1"].generation == answer["kvdelta"]["lease"]["generation"]
    d.step(failed={"d1"})
    assert str(d.run("d1").finish_reason) == ("error" if policy == "fail" else "length")
    assert d.count("recoveries", "failed" if policy == "fail" else "recompute") == 1
    assert d.count("blocks_read") == 0
    d.step()
    assert d.free == starts[1]
    # The same once more, without a claim.
    p.step(sent={"p3"})
    again = prefill(p, "p4", tokens)
    assert len(again["remote_block_ids"][0]) == 8
    decode(d, "d2", tokens, again)
    d.step()
    if d.meta.reqs_to_recv["d2"].awaiting_kvs:
        d.step(received={"d2"})
    assert str(d.run("d2").finish_reason) == "length"
    p.step(sent={"p4"})
    d.step()
    assert (p.free, d.free) == starts


def test_other_content() -> None:
    d = Engine(extra={"kvdelta_recovery": "recompute"})
    tokens, others = prompt(30), prompt(30, 9)
    hold(d, others, 6)
    answer = cut(tokens, 6)
    decode(d, "d1", others, answer)
    report = d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]
    assert (report["reason"], report["had_blocks"]) == ("content", 0)
    assert d.count("offers", "content") == 1


def test_another_salt_is_other_content() -> None:
    d = Engine(extra={"kvdelta_recovery": "recompute"})
    tokens = prompt(30)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, cut(tokens, 6), cache_salt="other")
    assert d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]["reason"] == "content"


LORA = LoRARequest("one", 1, "/adapters/one")
OTHER_LORAS = {
    "none": None,
    "another": LoRARequest("two", 2, "/adapters/two"),
    # vLLM hashes the adapter's path, too.
    "elsewhere": LoRARequest("one", 1, "/mnt/adapters/one"),
}


@pytest.mark.parametrize("other", OTHER_LORAS)
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_claim_of_another_lora_is_refused(other: str, *, is_asked: bool) -> None:
    p = Engine()
    start = p.free
    tokens = prompt(30)
    claimed, asked = (OTHER_LORAS[other], LORA) if is_asked else (LORA, OTHER_LORAS[other])
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6, lora=claimed), lora=asked)
    assert answer["do_remote_prefill"] is True
    assert "kvdelta" not in answer
    assert len(answer["remote_block_ids"][0]) == 8
    assert p.free == start - 8
    assert p.count("claims", "refused_content") == 1


def test_a_claim_with_the_loras_own_hash_is_cut_and_confirmed() -> None:
    p, d = Engine(), Engine()
    starts = p.free, d.free
    tokens = prompt(30)
    hold(d, tokens, 6, LORA)
    answer = prefill(p, "p1", tokens, claim(d, tokens, 6, lora=LORA), lora=LORA)
    offered = answer["kvdelta"]["params"]["remote_block_ids"][0]
    assert len(offered) == 2
    assert p.free == starts[0] - 2
    decode(d, "d1", tokens, answer, lora_request=LORA)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    assert entry.remote.block_ids == [offered]
    assert len(entry.local_block_ids[0]) == 2
    d.step(received={"d1"})
    d.run("d1")
    d.step()
    p.step(sent={"p1"})
    assert (p.free, d.free) == starts
    assert p.count("claims", "skipped") == 1
    assert d.count("offers", "confirmed") == 1


@pytest.mark.parametrize("other", OTHER_LORAS)
@pytest.mark.parametrize("is_asked", [False, True])
def test_another_lora_is_other_content(other: str, *, is_asked: bool) -> None:
    p, d = Engine(), Engine(extra={"kvdelta_recovery": "recompute"})
    tokens = prompt(30)
    offered, asked = (OTHER_LORAS[other], LORA) if is_asked else (LORA, OTHER_LORAS[other])
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6, lora=offered), lora=offered)
    # As many blocks as were skipped, of the same tokens.
    hold(d, tokens, 6, asked)
    decode(d, "d1", tokens, answer, lora_request=asked)
    d.step()
    assert not any(d.meta.reqs_to_recv["d1"].local_block_ids)
    assert d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]["reason"] == "content"
    assert d.count("offers", "content") == 1


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("length", [32, 33])
def test_b22_a_full_hit_tells_the_prefill_worker_at_once(length: int, *, push: bool) -> None:
    """B20 and B22: all that a lookup may find is held; the rest is one block, or what it samples from."""
    d = Engine(push=push)
    start = d.free
    tokens = prompt(length)
    answer = prefill(Engine(push=push), "p1", tokens[:32])
    hold(d, tokens, 8)
    held = (length - 1) // 4
    decode(d, "d1", tokens, answer)
    d.step()
    if held == 8:
        entry = d.meta.notices["d1"] if push else d.meta.reqs_to_recv["d1"]
        assert (any(entry.local_block_ids), entry.awaiting_kvs) == (False, False)
        assert d.count("full_hits") == 1
        assert "d1" in d.outputs
    else:
        assert [len(ids) for ids in d.meta.reqs_to_recv["d1"].local_block_ids] == [1]
        d.step(received={"d1"})
        d.run("d1")
    d.step()
    assert d.free == start


def test_b20_an_aligned_prompt_and_a_claim_of_all_but_the_last_block() -> None:
    d = Engine()
    tokens = prompt(32)
    answer = cut(tokens, 7)
    assert answer["kvdelta"]["params"]["remote_block_ids"][0][1:] == []
    hold(d, tokens, 8)
    for _ in range(2):
        d.outputs.clear()
        decode(d, "d1", tokens, answer)
        d.step(received=set())
        if "d1" in d.meta.reqs_to_recv and d.meta.reqs_to_recv["d1"].awaiting_kvs:
            d.step(received={"d1"})
        d.run("d1")
        d.step()


def test_b20_a_prompt_of_one_token() -> None:
    d = Engine()
    answer = prefill(Engine(), "p1", [5])
    decode(d, "d1", [5], answer)
    d.step()
    d.step(received={"d1"})
    d.run("d1")


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(
    ("cached", "read"),
    [(0, [0, 1]), (1, [1]), (2, [])],
    ids=["a", "b", "c"],
)
def test_b19_a_decode_prompt_longer_than_what_was_prefilled(cached: int, read: list[int], *, push: bool) -> None:
    d = Engine(push=push)
    start = d.free
    tokens = prompt(9)
    answer = prefill(Engine(push=push), "p1", tokens[:8])
    offered = answer["remote_block_ids"][0]
    if cached:
        hold(d, tokens, cached)
    decode(d, "d1", tokens, answer)
    d.step()
    if read:
        assert len(d.meta.reqs_to_recv["d1"].local_block_ids[0]) == len(read)
        if push:
            assert len(d.meta.push_registrations["d1"]["local_block_ids"][0]) == len(read)
        else:
            assert d.meta.reqs_to_recv["d1"].remote.block_ids == [[offered[index] for index in read]]
        d.step(received={"d1"})
    else:
        assert d.count("full_hits") == 1
    d.run("d1")
    d.step()
    assert d.free == start


def test_b19_d_a_group_that_needs_nothing_reads_nothing() -> None:
    d = Engine(specs=(full(), full(8)))
    tokens = prompt(12)
    answer = prefill(Engine(specs=(full(), full(8))), "p1", tokens)
    decode(d, "d1", tokens, answer)
    d.step()
    request = d.scheduler.requests["d1"]
    received = d.half.decode._received["d1"]
    tables = d.scheduler.kv_cache_manager.get_blocks("d1")
    wanted = d.meta.reqs_to_recv["d1"].local_block_ids
    assert d.half.decode.pair(request, received, tables, [[], list(wanted[1])]) == [[], received.lists[1]]


def test_a_longer_prefilled_prompt_is_paired_from_the_start() -> None:
    d = Engine()
    tokens = prompt(30)
    answer = prefill(Engine(), "p1", tokens)
    decode(d, "d1", tokens[:21], answer)
    d.step()
    assert d.meta.reqs_to_recv["d1"].remote.block_ids == [answer["remote_block_ids"][0][:6]]


def test_in_push_mode_a_longer_prefilled_prompt_fails_the_request() -> None:
    d = Engine(push=True)
    tokens = prompt(30)
    decode(d, "d1", tokens[:21], prefill(Engine(push=True), "p1", tokens))
    d.step()
    assert (d.meta.fail_now, set(d.meta.notices), d.meta.push_registrations) == ({"d1"}, {"d1"}, {})
    d.step(failed={"d1"})
    assert str(d.run("d1").finish_reason) == "error"


@pytest.mark.parametrize("held", [0, 2])
def test_b29_blocks_of_another_size(held: int) -> None:
    """Upstream loads all of it into an empty cache; where some is cached it would pair the wrong blocks."""
    d = Engine(specs=(full(8),))
    tokens = prompt(30)
    answer = prefill(Engine(), "p1", tokens)
    if held:
        hold(d, tokens, held)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    if held:
        assert not any(entry.local_block_ids)
        assert d.count("offers", "invalid") == 1
        assert "d1" in d.outputs
    else:
        assert (len(entry.local_block_ids[0]), len(entry.remote.block_ids[0])) == (4, 8)
        assert entry.remote.num_tokens == 30


def test_b29_smaller_blocks_than_the_prefill_workers_are_computed_here() -> None:
    d = Engine()
    tokens = prompt(30)
    decode(d, "d1", tokens, prefill(Engine(specs=(full(8),)), "p1", tokens))
    d.step()
    assert not any(d.meta.reqs_to_recv["d1"].local_block_ids)
    assert "d1" in d.outputs


WINDOWS = (full(), window(8))


def test_b28_the_window_is_offered_whole() -> None:
    tokens = prompt(24)
    answer = cut(tokens, 5, specs=WINDOWS)
    head = answer["kvdelta"]
    blocks = head["params"]["remote_block_ids"]
    assert [len(ids) for ids in blocks] == [1, 3]
    assert head["group_first_blocks"] == [5, 3]
    d = Engine(specs=WINDOWS)
    hold(d, tokens, 5)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    assert [len(ids) for ids in entry.local_block_ids] == [1, 1]
    assert entry.remote.block_ids == [blocks[0], blocks[1][2:]]


def test_b28_a_window_that_is_gone_is_a_stale_claim() -> None:
    tokens = prompt(24)
    answer = cut(tokens, 5, specs=WINDOWS)
    d = Engine(specs=WINDOWS, extra={"kvdelta_recovery": "recompute"})
    hold(d, tokens, 5)
    d.evict(tokens, range(2, 5), group=1)
    decode(d, "d1", tokens, answer)
    report = d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]
    assert report["had_blocks"] < 5


def test_b28_a_whole_offer_to_an_empty_cache_reads_the_window_only() -> None:
    tokens = prompt(24)
    answer = prefill(Engine(specs=WINDOWS), "p1", tokens)
    d = Engine(specs=WINDOWS)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    assert entry.remote.block_ids[0] == answer["remote_block_ids"][0]
    assert len(entry.remote.block_ids[1]) == len(entry.local_block_ids[1]) > 0
    assert entry.remote.block_ids[1] == answer["remote_block_ids"][1][-len(entry.local_block_ids[1]) :]


def test_a_preempted_request_loads_once() -> None:
    d = Engine()
    tokens = prompt(30)
    hold(d, tokens, 6)
    request = decode(d, "d1", tokens, cut(tokens, 6), max_tokens=5)
    d.step()
    d.step(received={"d1"})
    d.step()
    d.scheduler.reset_prefix_cache(reset_running_requests=True)
    d.step()
    assert not d.meta.reqs_to_recv
    d.run("d1")
    assert request.num_preemptions == 1


def test_without_a_lookup_all_is_computed_and_the_prefill_worker_told() -> None:
    d = Engine()
    tokens = prompt(30)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, cut(tokens, 6), sampling={"skip_reading_prefix_cache": True})
    d.step()
    assert not any(d.meta.reqs_to_recv["d1"].local_block_ids)
    assert d.outputs["d1"].kv_transfer_params is None


@pytest.mark.parametrize("push", [False, True])
def test_an_abort_before_it_is_scheduled_tells_the_prefill_worker(*, push: bool) -> None:
    d = Engine(push=push)
    tokens = prompt(30)
    decode(d, "d1", tokens, cut(tokens, 6, push=push))
    d.abort("d1")
    d.step()
    entries = d.meta.notices if push else d.meta.reqs_to_recv
    assert entries["d1"].remote.request_id == "p1"
    assert not (push and d.meta.reqs_to_recv)
    assert not d.half.decode._received


def test_a_lease_that_is_gone_fails_the_request() -> None:
    d = Engine()
    tokens = prompt(30)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, cut(tokens, 6))
    d.step()
    d.step(failed={"d1"})
    assert str(d.run("d1").finish_reason) == "error"
    assert d.count("recoveries", "failed") == 1
    assert d.count("blocks_read") == 0


def test_a_lease_that_is_gone_is_recomputed_by_policy() -> None:
    d = Engine(policy="recompute")
    start = d.free
    tokens = prompt(30)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, cut(tokens, 6))
    d.step()
    d.step(failed={"d1"})
    report = d.run("d1").kv_transfer_params["kvdelta"]["stale_claim"]
    assert (report["reason"], report["recovered"]) == ("expired", "recompute")
    d.step()
    assert d.free == start


def test_an_offer_is_read_once() -> None:
    d = Engine()
    tokens = prompt(30)
    answer = prefill(Engine(), "p1", tokens)
    decode(d, "d1", tokens, answer)
    decode(d, "d2", prompt(30), answer)
    d.step()
    # A notice of the second would free what the first is reading.
    assert set(d.meta.reqs_to_recv) == {"d1"}
    assert "d2" in d.outputs
    assert d.count("offers", "repeated") == 1


def test_push_cuts_what_is_written() -> None:
    p = Engine(push=True)
    start = p.free
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    p.step()
    blocks = answer["kvdelta"]["params"]["remote_block_ids"]
    assert [list(ids) for ids in p.meta_of("push_finished_blocks")["p1"]] == blocks
    assert not p.metas[0].lease_words
    p.step(sent={"p1"})
    assert p.free == start
    assert not p.half.has_pending_push_work()


def test_push_registers_what_is_missing() -> None:
    d = Engine(push=True)
    tokens = prompt(30)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, cut(tokens, 6, push=True))
    d.step()
    assert len(d.meta.push_registrations["d1"]["local_block_ids"][0]) == 2
    d.step(received={"d1"})
    d.run("d1")


def test_a_model_with_states_reads_the_last_state_and_what_is_missing() -> None:
    """The prefill worker stops one token short, and the claim counts that token."""
    specs = (full(), state())
    tokens = prompt(30)
    answer = cut(tokens, 6, specs=specs)
    head = answer["kvdelta"]
    assert head["params"]["remote_num_tokens"] == 29
    assert [len(ids) for ids in head["params"]["remote_block_ids"]] == [2, 1]
    d = Engine(specs=specs)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    assert [len(ids) for ids in entry.local_block_ids] == [2, 1]
    assert entry.remote.block_ids == head["params"]["remote_block_ids"]
    d.step(received={"d1"})
    d.run("d1")


def test_latent_attention_is_cut_like_full() -> None:
    tokens = prompt(30)
    answer = cut(tokens, 6, specs=(mla(),))
    d = Engine(specs=(mla(),))
    hold(d, tokens, 6)
    decode(d, "d1", tokens, answer)
    d.step()
    assert d.meta.reqs_to_recv["d1"].remote.block_ids == answer["kvdelta"]["params"]["remote_block_ids"]


def test_a_kind_of_group_that_is_not_known_is_offered_whole() -> None:
    specs = (full(), chunked(8))
    p = Engine(specs=specs)
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    assert "kvdelta" not in answer
    assert p.count("claims", "refused_capability") == 1
    d = Engine(specs=specs)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    assert [len(ids) for ids in entry.local_block_ids] == [len(ids) for ids in entry.remote.block_ids]


def test_groups_of_several_block_sizes() -> None:
    specs = (full(4), full(8))
    tokens = prompt(30)
    answer = cut(tokens, 5, specs=specs)
    head = answer["kvdelta"]
    # 20 tokens are five blocks of four, and two whole blocks of eight.
    assert head["group_first_blocks"] == [5, 2]
    assert [len(ids) for ids in head["params"]["remote_block_ids"]] == [3, 2]
    d = Engine(specs=specs)
    hold(d, tokens, 6)
    decode(d, "d1", tokens, answer)
    d.step()
    entry = d.meta.reqs_to_recv["d1"]
    blocks = head["params"]["remote_block_ids"]
    assert entry.remote.block_ids == [blocks[0][1:], blocks[1][1:]]


@pytest.mark.parametrize("chunk", [16, 1024])
def test_what_is_skipped_is_not_staged_in_a_host_buffer(chunk: int) -> None:
    p = Engine(chunk=chunk)
    # No platform of this machine stages.
    p.half.use_host_buffer = True
    tokens = prompt(62)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    offered = answer["kvdelta"]["params"]["remote_block_ids"][0]
    assert len(offered) == 10
    assert p.staged("p1") == offered
    whole = prefill(p, "p2", prompt(62, 9))["remote_block_ids"][0]
    assert p.staged("p2") == whole


def test_not_staged_and_not_cut_is_not_offered() -> None:
    p = Engine()
    start = p.free
    p.half.use_host_buffer = True
    tokens = prompt(30)
    request = p.add("p1", tokens, {"do_remote_decode": True, "decode_cache_info": claim(p, tokens, 6)})
    p.scheduler.schedule()
    request.resumable = True
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    blocks = p.scheduler.kv_cache_manager.get_block_ids("p1")
    assert p.half.request_finished(request, blocks) == (False, None)
    p.scheduler.kv_cache_manager.free(request)
    assert p.free == start


@pytest.mark.parametrize("tokens", [30, 32])
def test_steps_that_run_ahead(tokens: int) -> None:
    p, d = Engine(ahead=True), Engine(ahead=True)
    starts = p.free, d.free
    words = prompt(tokens)
    hold(d, words, 6)
    answer = prefill(p, "p1", words, claim(p, words, 6))
    assert answer["kvdelta"]["params"]["remote_num_tokens"] == tokens
    decode(d, "d1", words, answer, max_tokens=3)
    d.step()
    assert [len(ids) for ids in d.meta_of("reqs_to_recv")["d1"].local_block_ids] == [2]
    d.step(received={"d1"})
    d.run("d1")
    for _ in range(3):
        d.step()
        p.step()
    p.step(sent={"p1"})
    p.step()
    assert (p.free, d.free) == starts


def test_a_decode_worker_with_several_ranks_counts_all_of_them() -> None:
    assert groups_of(Engine().kv_cache_config, 4)[0].bytes_per_block == 4 * full().page_size_bytes


def test_a_stale_claim_is_recovered_from_in_one_way_however_often_it_is_looked_at() -> None:
    d = Engine()
    tokens = prompt(30)
    request = decode(d, "d1", tokens, cut(tokens, 6))
    answers = {d.half.get_num_new_matched_tokens(request, 0) for _ in range(20)}
    assert len(answers) == 1
    d.step()
    again = d.meta.fail_now == {"d1"}
    assert answers == {(30, True) if again else (0, False)}
    assert d.count("recoveries", "ask_again" if again else "recompute") == 1


def test_asking_again_has_a_budget() -> None:
    d = Engine(blocks=512)
    kinds = []
    for index in range(14):
        tokens = prompt(30, index)
        answer = cut(tokens, 6)
        answer["kvdelta"]["params"]["remote_request_id"] = f"p{index}"
        name = f"d{index}"
        request = decode(d, name, tokens, answer)
        # Nothing of it is there: all of a long prompt would have to be computed here.
        request.num_prompt_tokens = 1_000_000
        d.half.get_num_new_matched_tokens(request, 0)
        kinds.append(d.half.decode._received[name].choice)
    assert set(kinds[:10]) == {"ask_again"}
    assert kinds[-1] == "recompute"
