# SPDX-License-Identifier: Apache-2.0
"""The Python module: every call gives what its Rust function gives, and every refusal is its exception."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import kvdelta

if TYPE_CHECKING:
    from collections.abc import Callable

HASH = 2**63 + 5
CLAIM = {
    "version": 1,
    "claim_id": "a",
    "decode_worker_id": 2**64 - 1,
    "decode_dp_rank": 3,
    "cached_prefix_blocks": 64,
    "block_size": 32,
    "prefix_hash": HASH,
}
HEAD = {
    "version": 1,
    "claim_id": "a",
    "decode_worker_id": 2**64 - 1,
    "prefix_hash": HASH,
    "block_size": 32,
    "first_block": 64,
    "group_first_blocks": [64],
}


def claim() -> kvdelta.Claim:
    """Return a claim of 64 of 125 blocks."""
    return kvdelta.Claim(CLAIM, 4000)


def group(kind: kvdelta.GroupKind = "full_attention", blocks: int = 125) -> kvdelta.Group:
    """Return the group of a prompt of 125 blocks, of 10 bytes each."""
    return kvdelta.Group(kind, block_size=32, first_block=0, blocks=blocks, bytes_per_block=10)


def plan(
    *,
    own_hash: int | None = HASH,
    block_size: int = 32,
    prefix_caching: bool = True,
    groups: list[kvdelta.Group] | None = None,
) -> kvdelta.OfferPlan:
    """Plan by the claim."""
    return kvdelta.plan_offer(
        claim(),
        block_size=block_size,
        prefix_caching=prefix_caching,
        own_hash=own_hash,
        groups=[group()] if groups is None else groups,
    )


def test_constants() -> None:
    """What stands on the wire."""
    assert (kvdelta.PROTOCOL_VERSION, kvdelta.OFFER_KEY, kvdelta.CLAIM_KEY) == (1, "kvdelta", "decode_cache_info")
    assert kvdelta.__version__.count(".") == 2  # noqa: PLR2004


def test_a_claim_is_read() -> None:
    """All 64 bits of ids and hashes come through; what is not of it is ignored."""
    read = kvdelta.Claim({**CLAIM, "later": {"anything": [None]}}, 4000)
    names = CLAIM.keys() - {"version"}
    assert {name: getattr(read, name) for name in names} == {name: CLAIM[name] for name in names}


@pytest.mark.parametrize(
    "value",
    [
        None,
        "claim",
        [],
        {},
        {**CLAIM, "version": 2},
        {**CLAIM, "claim_id": ""},
        {**CLAIM, "claim_id": "\ud800"},
        {**CLAIM, "cached_prefix_blocks": 0},
        {**CLAIM, "cached_prefix_blocks": -1},
        {**CLAIM, "cached_prefix_blocks": 125},
        {**CLAIM, "cached_prefix_blocks": 2**32 - 1},
        {**CLAIM, "block_size": 0},
        {**CLAIM, "prefix_hash": 2**64},
        {**CLAIM, "prefix_hash": 1.5},
        {**CLAIM, "decode_worker_id": None},
    ],
)
def test_a_bad_claim_is_refused(value: object) -> None:
    """Whatever comes over the wire, with what is done instead."""
    with pytest.raises(kvdelta.BadClaim, match=r"sending all$"):
        kvdelta.Claim(value, 4000)


def test_a_plan() -> None:
    """A group skips what is claimed, windows are offered whole."""
    made = plan(groups=[group(), group("sliding_window", 4), group("mla")])
    assert made.first_block == CLAIM["cached_prefix_blocks"]
    assert (made.skip, made.group_first_blocks) == ([64, 0, 64], [64, 0, 64])
    assert (made.skipped_blocks, made.offered_blocks) == (128, 126)
    assert (made.skipped_bytes, made.offered_bytes) == (1280, 1260)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (lambda: plan(own_hash=1), "content"),
        (lambda: plan(own_hash=None), "content"),
        (lambda: plan(block_size=16), "capability"),
        (lambda: plan(prefix_caching=False), "capability"),
        (lambda: plan(groups=[group("unknown")]), "capability"),
        (lambda: plan(groups=[group("mamba")]), "capability"),
        (lambda: plan(groups=[]), "capability"),
        (lambda: plan(groups=[group(blocks=1)]), "invalid"),
    ],
)
def test_a_refusal_has_its_label(refused: Callable[[], object], reason: str) -> None:
    """Metrics count by it."""
    with pytest.raises(kvdelta.Refused, match=r"sending all$") as error:
        refused()
    assert error.value.reason == reason


def test_an_offer_goes_over_the_wire() -> None:
    """What one worker writes the other reads, whatever the caller puts beside it."""
    offer = kvdelta.Offer.cut(claim(), plan(), 32)
    assert offer.head() == HEAD
    beside: dict[str, Any] = {**offer.head(), "params": {"remote_block_ids": [[1, 2]]}, "lease": None}
    read = kvdelta.Offer(json.loads(json.dumps(beside)))
    assert read.head() == HEAD
    names = HEAD.keys() - {"version"}
    assert {name: getattr(read, name) for name in names} == {name: HEAD[name] for name in names}


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {**HEAD, "version": 0},
        {**HEAD, "claim_id": ""},
        {**HEAD, "first_block": 0},
        {**HEAD, "first_block": "64"},
        {**HEAD, "group_first_blocks": []},
        {**HEAD, "group_first_blocks": [-1]},
        {**HEAD, "group_first_blocks": 64},
        {**HEAD, "block_size": 0},
    ],
)
def test_a_bad_offer_is_refused(value: object) -> None:
    """Whatever comes over the wire, with what is done instead."""
    with pytest.raises(kvdelta.BadOffer, match=r"computing all here$"):
        kvdelta.Offer(value)


def test_an_offer_is_not_cut_in_blocks_of_another_size() -> None:
    """No plan is made for one."""
    with pytest.raises(kvdelta.BadOffer):
        kvdelta.Offer.cut(claim(), plan(), 16)


@pytest.mark.parametrize(
    ("held_tokens", "own_hash", "block_size", "expected"),
    [
        (2048, HASH, 32, ("covered", 64, 0)),
        (10**9, HASH, 32, ("covered", 64, 0)),
        (2047, HASH, 32, ("stale", 63, 1)),
        (0, HASH, 32, ("stale", 0, 64)),
        (2048, 1, 32, ("content", 0, 64)),
        (2048, None, 32, ("content", 0, 64)),
        (2048, HASH, 16, ("content", 0, 64)),
    ],
)
def test_confirm(held_tokens: int, own_hash: int | None, block_size: int, expected: tuple[str, int, int]) -> None:
    """An offer against what a worker found."""
    offer = kvdelta.Offer(HEAD)
    said = kvdelta.confirm(offer, block_size=block_size, held_tokens=held_tokens, own_hash=own_hash)
    assert (said.kind, said.held_blocks, said.short_blocks) == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((64, 61, 60, 66), (0, 4, 61)),
        ((60, 10, 64, 3), (4, 0, 3)),
        ((0, 4, 4, 4), (0, 0, 0)),
        ((2**32 - 1, 2**32 - 1, 2**32 - 1, 1), (0, 0, 1)),
    ],
)
def test_pair(blocks: tuple[int, int, int, int], expected: tuple[int, int, int]) -> None:
    """Two lists by index."""
    assert kvdelta.pair(*blocks) == expected


def test_a_ledger() -> None:
    """Every way in and out of it."""
    ledger = kvdelta.Ledger(2)
    assert ledger.open("a", 64, 61, 0, 100)
    assert not ledger.open("a", 1, 1, 0, 100)
    assert (ledger.release_skipped("a"), ledger.release_skipped("a")) == (64, 0)
    assert (len(ledger), ledger.pinned_blocks()) == (1, 61)
    assert ledger.notice("a", 0, 10) is None
    closed = ledger.notice("a", 1, 10)
    assert closed is not None
    assert (closed.ending, closed.pinned_block_ms) == ("notice", 610)
    assert ledger.close("a", "abort", 11) is None
    for request in ("b", "c", "d"):
        assert ledger.open(request, 0, 2, 0, 100)
    assert ledger.extend("c", 50, 100)
    assert not ledger.extend("a", 50, 100)
    released = ledger.close("d", "release", 20)
    assert released is not None
    assert (released.ending, released.pinned_block_ms) == ("release", 40)
    assert [(request, each.ending) for request, each in ledger.expire(100)] == [("b", "expiry")]
    assert len(ledger) == 1


def test_a_ledger_takes_several_threads() -> None:
    """In some engines the scheduler and the notices of its workers are different ones."""
    ledger = kvdelta.Ledger(1)
    names = [str(number) for number in range(1000)]
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda name: ledger.open(name, 0, 1, 0, 1), names * 2))
        closed = list(threads.map(lambda name: ledger.notice(name, 0, 1), names * 2))
    assert sum(opened) == len(names)
    assert sum(each is not None for each in closed) == len(names)
    assert ledger.pinned_blocks() == 0


def test_recovery() -> None:
    """The choice, its budget, and what is measured."""
    recovery = kvdelta.Recovery(budget=1, budget_per_second=0.0, share=1.0)
    much = {"missing_tokens": 100_000, "context_tokens": 100_000, "offered_bytes": 10, "skipped_bytes": 10}
    little = {**much, "missing_tokens": 1}
    assert recovery.choose(**little, now_ms=0) == "recompute"
    assert [recovery.choose(**much, now_ms=0) for _ in range(2)] == ["ask_again", "recompute"]
    recovery.confirmed(0)
    assert recovery.choose(**much, now_ms=0) == "ask_again"
    before = (recovery.decode_tokens_per_second, recovery.link_bytes_per_second)
    recovery.observe_decode_prefill(1000, float("nan"))
    recovery.observe_transfer(10**9, -1.0)
    assert (recovery.decode_tokens_per_second, recovery.link_bytes_per_second) == before
    recovery.observe_decode_prefill(100_000, 1000.0)
    recovery.observe_transfer(10**12, 1000.0)
    assert recovery.decode_tokens_per_second > before[0]
    assert recovery.link_bytes_per_second > before[1]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: kvdelta.Ledger(0),
        lambda: kvdelta.Ledger(1).close("a", "later", 0),  # type: ignore[arg-type]
        lambda: kvdelta.Recovery(share=-1.0),
        lambda: kvdelta.Recovery(link_bytes_per_second=float("nan")),
        lambda: group("window"),  # type: ignore[arg-type]
        lambda: kvdelta.Group("mla", 0, 0, 1, 1),
        lambda: plan(block_size=0),
        lambda: kvdelta.confirm(kvdelta.Offer(HEAD), block_size=0, held_tokens=0, own_hash=None),
    ],
)
def test_a_bad_argument_is_refused(refused: Callable[[], object]) -> None:
    """By the base of all exceptions, which is a ValueError."""
    with pytest.raises(kvdelta.KvdeltaError) as error:
        refused()
    assert isinstance(error.value, ValueError)
    assert type(error.value) is kvdelta.KvdeltaError
