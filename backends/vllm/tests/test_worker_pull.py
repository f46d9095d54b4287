# SPDX-License-Identifier: Apache-2.0
"""Reads between real NIXL agents: what is read, what is told, and what a lease word proves (CASES B22, B23, B25)."""

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
from nixl_pair import BLOCKS, Side, Worker, Workers, free_port, run, tensor_parallel
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvdelta_vllm.metadata import KvdeltaConnectorMetadata, KvdeltaHandshakePayload, Lease, LeaseWord
from kvdelta_vllm.worker import KvdeltaPullWorker

NAMES = itertools.count()
SLOTS = itertools.count(1)


def ours(**options: Any) -> Side:
    """Make one of our workers."""
    return Side(Worker(KvdeltaPullWorker, **options), KvdeltaConnectorMetadata)


def stock(**options: Any) -> Side:
    """Make one of upstream's workers."""
    return Side(Worker(NixlPullConnectorWorker, **options), NixlConnectorMetadata)


def names() -> tuple[str, str]:
    """Ids of a request, on the prefill and on the decode worker."""
    number = next(NAMES)
    return f"p-{number}", f"d-{number}"


class Pair(Workers):
    """Prefill workers, the ranks of one engine, and decode workers."""

    def lease(self, request: str) -> Lease:
        """Write the word of a request on all ranks, with the prefill worker's next step."""
        word = LeaseWord(next(SLOTS), 1 << 60 | next(NAMES))
        tables = {}
        for rank, side in enumerate(self.prefills):
            side.next.lease_words[request] = word
            tables[0, rank] = side.worker.payload.lease_table[:2]
        return Lease(word.slot, word.generation, tables)

    def words(self, lease: Lease) -> list[int]:
        """What stands in the slot of a lease, by rank."""
        return [side.worker.half._lease_words.table[lease.slot] for side in self.prefills]

    def offer(self, request: str, *, seconds: float = 3600.0) -> Lease:
        """Have all ranks of the prefill worker hold blocks under a lease with a word."""
        lease = self.lease(request)
        for side in self.prefills:
            side.offer(request, lease=seconds)
            side.step()
        return lease

    def fetch(self, request: str, own: list[int], params: dict[str, Any], lease: Lease | None = None) -> None:
        """Have all ranks of the decode worker read."""
        for side in self.decodes:
            side.fetch(request, (own,), dict(params))
            if lease is not None:
                side.next.leases[request] = lease

    def ended(self, request: str) -> bool:
        """Whether each rank of the decode worker reported a request."""
        return all(request in side.results.received + side.results.failed for side in self.decodes)

    def kept(self, half: Any) -> list[Any]:
        """What a worker half keeps of requests; upstream's own has less."""
        return [*super().kept(half), *(getattr(half, name, ()) for name in ("_checks", "_leases", "_abandoned"))]


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    """Two of our workers."""
    pair = Pair([ours()], [ours()])
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Two of our workers that must have forgotten everything after a test."""
    shared.decode.worker.fill(list(range(BLOCKS)), -1.0)
    yield shared
    shared.run(shared.is_idle)
    assert len(shared.prefill.worker.half._lease_words) == 0
    half = shared.decode.worker.half
    assert len(half._landing) == len(half._landing.table)


def test_only_the_paired_blocks_are_read_and_the_word_is_cleared_after(pair: Pair) -> None:
    p, d = names()
    pair.prefill.worker.fill([3, 4, 5, 6], 7.0)
    lease = pair.offer(p)
    assert pair.words(lease) == [lease.generation]
    before = len(pair.decode.worker.half.xfer_stats.data["bytes_transferred"])
    pair.fetch(d, [10, 11], pair.prefill.params(p, [[4, 5]]), lease)
    pair.run(lambda: d in pair.decode.results.received and pair.sent(p) == [1])
    assert pair.decode.worker.holds(10, 7.0, 4)
    assert pair.decode.worker.holds(11, 7.0, 5)
    assert all(pair.decode.worker.holds(block, -1.0, block) for block in range(BLOCKS) if block not in (10, 11))
    stats = pair.decode.worker.half.xfer_stats.data
    # The read of the word is none of upstream's transfers.
    assert stats["bytes_transferred"][before:] == [2 * pair.decode.worker.block_bytes]
    assert stats["kvdelta_lease_checks/held"] == [1]
    assert pair.words(lease) == [0]


def test_the_prefill_worker_keeps_its_blocks_until_the_word_was_read(pair: Pair, monkeypatch: Any) -> None:
    p, d = names()
    lease = pair.offer(p)
    half = pair.decode.worker.half
    with monkeypatch.context() as patch:
        patch.setattr(half, "_post_word_reads", lambda *_: None)
        pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
        pair.run(lambda: half._checks.get(d) is not None and half._checks[d].deadline is not None)
        pair.steps()
        assert pair.sent(p) == [0]
        assert not pair.ended(d)
        assert pair.words(lease) == [lease.generation]
    pair.run(lambda: d in pair.decode.results.received and pair.sent(p) == [1])


def test_what_was_overwritten_between_read_and_check_is_not_used(pair: Pair, monkeypatch: Any) -> None:
    p, d = names()
    lease = pair.offer(p, seconds=5.0)
    half = pair.decode.worker.half
    with monkeypatch.context() as patch:
        patch.setattr(half, "_post_word_reads", lambda *_: None)
        pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
        pair.run(lambda: half._checks.get(d) is not None and half._checks[d].deadline is not None)
        # The notice of the read has renewed the lease.
        pair.run(lambda: pair.prefill.worker.half._reqs_to_send[p] > time.perf_counter() + 10)
        pair.prefill.worker.half._reqs_to_send[p] = 0.0
        pair.run(lambda: pair.sent(p) == [1])
    pair.run(lambda: pair.ended(d))
    assert d in pair.decode.results.failed
    assert pair.sent(p) == [1]


@pytest.mark.parametrize("parked", [False, True])
def test_a_request_that_needs_nothing_tells_at_once(pair: Pair, *, parked: bool) -> None:
    requests = [names() for _ in range(100)]
    for p, _ in requests:
        pair.lease(p)
        pair.prefill.offer(p)
    pair.prefill.step()
    assert len(pair.prefill.worker.half._lease_words) == len(requests)
    for p, d in requests:
        pair.decode.fetch(d, (), pair.prefill.params(p, [[4]]), parked=parked)
    pair.run(lambda: all(pair.sent(p) == [1] for p, _ in requests))
    pair.steps()
    assert all(pair.sent(p) == [1] for p, _ in requests)
    # What nobody waits for must not be reported: vLLM asserts on it.
    assert [d for _, d in requests if pair.ended(d)] == ([d for _, d in requests] if parked else [])


def test_a_lost_notice_ends_with_the_lease(pair: Pair) -> None:
    p, _ = names()
    lease = pair.offer(p, seconds=0.2)
    pair.run(lambda: pair.sent(p) == [1])
    assert pair.words(lease) == [0]
    assert pair.prefill.worker.half.xfer_stats.data["kvdelta_leases_expired"]


def test_blocks_of_another_prompt_never_arrive_as_read(pair: Pair) -> None:
    p, d = names()
    pair.prefill.worker.fill([4, 5], 7.0)
    lease = pair.offer(p, seconds=0.0)
    pair.run(lambda: pair.sent(p) == [1])
    # Its blocks, and its slot, are another prompt's now.
    other, _ = names()
    pair.prefill.next.lease_words[other] = LeaseWord(lease.slot, lease.generation + 1)
    pair.prefill.offer(other)
    pair.prefill.worker.fill([4, 5], 9.0)
    pair.prefill.step()
    pair.fetch(d, [10, 11], pair.prefill.params(p, [[4, 5]]), lease)
    pair.run(lambda: pair.ended(d))
    assert d in pair.decode.results.failed
    assert {10, 11} <= pair.decode.results.bad_blocks
    assert pair.sent(p) == [1]
    assert pair.words(lease) == [lease.generation + 1]
    pair.prefill.next.releases.add(other)
    pair.run(lambda: pair.sent(other) == [1])


@pytest.mark.parametrize("is_read", [False, True])
def test_b25c_block_5_is_dropped_on_the_prefill_worker_before_the_delta_arrives(
    pair: Pair, monkeypatch: Any, *, is_read: bool
) -> None:
    """Blocks 0 to 2 are skipped, 3 to 7 offered; block 5 goes before the read, or between read and check."""
    (p, d), (again_p, again) = names(), names()
    prefill, decode = pair.prefill.worker, pair.decode.worker
    skipped, offered = [10, 11, 12], [13, 14, 15, 16, 17]
    prefill.fill(list(range(8)), 7.0)
    lease = pair.offer(p, seconds=5.0)
    with monkeypatch.context() as patch:
        if is_read:
            patch.setattr(decode.half, "_post_word_reads", lambda *_: None)
            pair.fetch(d, offered, pair.prefill.params(p, [[3, 4, 5, 6, 7]]), lease)
            pair.run(lambda: decode.half._checks.get(d) is not None and decode.half._checks[d].deadline is not None)
            # The notice of the read has renewed the lease.
            pair.run(lambda: prefill.half._reqs_to_send[p] > time.perf_counter() + 10)
        prefill.half._reqs_to_send[p] = 0.0
        pair.run(lambda: pair.sent(p) == [1])
        prefill.fill([5], 9.0)
    if not is_read:
        pair.fetch(d, offered, pair.prefill.params(p, [[3, 4, 5, 6, 7]]), lease)
    pair.run(lambda: pair.ended(d))
    assert d in pair.decode.results.failed
    assert d not in pair.decode.results.received
    assert set(offered) <= pair.decode.results.bad_blocks
    # The same once more, without a claim.
    prefill.fill(list(range(8)), 8.0)
    lease = pair.offer(again_p)
    pair.fetch(again, skipped + offered, pair.prefill.params(again_p, [list(range(8))]), lease)
    pair.run(lambda: again in pair.decode.results.received and pair.sent(again_p) == [1])
    assert all(decode.holds(block + 10, 8.0, block) for block in range(8))


def test_a_reference_that_is_used_twice_fails_the_second_time(pair: Pair) -> None:
    p, first = names()
    _, second = names()
    lease = pair.offer(p)
    params = pair.prefill.params(p, [[4]])
    pair.fetch(first, [10], params, lease)
    pair.run(lambda: first in pair.decode.results.received and pair.sent(p) == [1])
    pair.fetch(second, [11], params, lease)
    pair.run(lambda: pair.ended(second))
    assert second in pair.decode.results.failed
    assert pair.sent(p) == [1]


def test_an_id_that_the_prefill_worker_does_not_know_fails(pair: Pair) -> None:
    p, d = names()
    lease = Lease(next(SLOTS), 77, {(0, 0): pair.prefill.worker.payload.lease_table[:2]})
    pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
    pair.run(lambda: pair.ended(d))
    assert d in pair.decode.results.failed
    assert pair.sent(p) == [0]


BAD_OFFERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "behind the pool": ([[4, BLOCKS]], {}),
    "negative": ([[4, -1]], {}),
    "not a number": ([[4, "5"]], {}),
    "a truth value": ([[True, False]], {}),
    "too large a number": ([[4, 1 << 70]], {}),
    "nested": ([[[4], [5]]], {}),
    "fewer than needed": ([[4]], {}),
    "no group": ([], {}),
    "two groups": ([[4, 5], [6]], {}),
    "flat": ([4, 5], {}),
    "no lists": ({"a": 1}, {}),
    "no port": ([[4, 5]], {"remote_port": "x"}),
    "no host": ([[4, 5]], {"remote_host": None}),
    "no engine": ([[4, 5]], {"remote_engine_id": ["e"]}),
    "no request": ([[4, 5]], {"remote_request_id": None}),
    "no ranks": ([[4, 5]], {"tp_size": 0}),
    "ranks without end": ([[4, 5]], {"tp_size": 1 << 40}),
    "pipeline ranks without end": ([[4, 5]], {"pp_size": 1 << 40}),
    "text for ranks": ([[4, 5]], {"dcp_size": "1"}),
}


@pytest.mark.parametrize("with_lease", [False, True])
@pytest.mark.parametrize("case", BAD_OFFERS)
def test_what_cannot_be_read_fails_alone(pair: Pair, case: str, *, with_lease: bool) -> None:
    blocks, changes = BAD_OFFERS[case]
    (p, bad), (good_p, good) = names(), names()
    pair.prefill.worker.fill([6], 7.0)
    lease, good_lease = pair.offer(p), pair.offer(good_p)
    pair.fetch(bad, [10, 11], pair.prefill.params(p, blocks, **changes), lease if with_lease else None)
    pair.fetch(good, [12], pair.prefill.params(good_p, [[6]]), good_lease)
    pair.run(lambda: pair.ended(bad) and pair.ended(good))
    assert bad in pair.decode.results.failed
    assert good in pair.decode.results.received
    assert pair.decode.worker.holds(12, 7.0, 6)
    assert pair.decode.worker.holds(10, -1.0, 10)
    if not changes and case not in ("flat", "no lists"):
        # Known well enough to say that nothing will be read.
        pair.run(lambda: pair.sent(p) == [1])
    else:
        pair.prefill.next.releases.add(p)
        pair.run(lambda: pair.sent(p) == [1])


@pytest.mark.parametrize("case", ["behind the pool", "no ranks", "no lists"])
def test_what_nobody_waits_for_is_not_reported_when_it_cannot_be_told(pair: Pair, case: str) -> None:
    blocks, changes = BAD_OFFERS[case]
    p, d = names()
    pair.decode.fetch(d, (), pair.prefill.params(p, blocks, **changes), parked=False)
    pair.steps()
    assert not pair.ended(d)


def test_what_is_to_fail_fails_at_once_and_the_prefill_worker_is_told(pair: Pair) -> None:
    (p, told), (_, untold) = names(), names()
    lease = pair.offer(p)
    pair.decode.fetch(told, (), pair.prefill.params(p, [[4]]), parked=False)
    pair.decode.next.fail_now |= {told, untold}
    pair.decode.step()
    assert {told, untold} <= set(pair.decode.results.failed)
    pair.run(lambda: pair.sent(p) == [1])
    assert pair.words(lease) == [0]
    pair.steps()
    assert pair.decode.results.failed.count(told) == 1
    assert pair.decode.worker.holds(10, -1.0, 10)


def test_an_offer_is_released_once_and_no_read_of_it_counts(pair: Pair) -> None:
    (p, d), (running, _) = names(), names()
    lease = pair.offer(p)
    pair.prefill.next.reqs_in_batch.add(running)
    pair.prefill.next.releases |= {p, running, "unknown"}
    pair.prefill.step()
    assert pair.sent(p) == [1]
    assert pair.words(lease) == [0]
    pair.prefill.next.releases.add(p)
    pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
    pair.run(lambda: pair.ended(d))
    assert d in pair.decode.results.failed
    pair.steps()
    assert pair.sent(p) == [1]
    # It is still being computed, so its blocks are its own.
    assert pair.sent(running) == [0]
    pair.prefill.next.reqs_not_processed.add(running)
    pair.prefill.step()


def test_an_aborted_prompt_clears_its_word_and_keeps_that_of_the_next_in_its_slot(pair: Pair) -> None:
    (aborted, _), (following, _) = names(), names()
    lease = pair.lease(aborted)
    pair.prefill.next.reqs_in_batch.add(aborted)
    pair.prefill.step()
    assert pair.words(lease) == [lease.generation]
    pair.prefill.next.reqs_not_processed.add(aborted)
    pair.prefill.next.lease_words[following] = LeaseWord(lease.slot, lease.generation + 1)
    pair.prefill.offer(following)
    pair.prefill.step()
    assert pair.words(lease) == [lease.generation + 1]
    pair.prefill.next.releases.add(following)
    pair.prefill.step()
    assert pair.words(lease) == [0]


class Faulty:
    """A NIXL agent of which one method is replaced."""

    def __init__(self, agent: Any, name: str, method: Callable[..., Any]) -> None:
        self._agent = agent
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("method", ["make_prepped_xfer", "transfer"])
def test_a_read_that_cannot_start_fails_and_the_prefill_worker_is_told(
    pair: Pair,
    monkeypatch: Any,
    method: str,
) -> None:
    p, d = names()
    lease = pair.offer(p)
    half = pair.decode.worker.half
    with monkeypatch.context() as patch:
        patch.setattr(half, "nixl_wrapper", Faulty(half.nixl_wrapper, method, _raise))
        pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
        pair.run(lambda: pair.ended(d) and pair.sent(p) == [1])
    assert d in pair.decode.results.failed


def test_a_read_that_fails_on_the_way_fails_its_request(pair: Pair, monkeypatch: Any) -> None:
    p, d = names()
    lease = pair.offer(p)
    half = pair.decode.worker.half
    with monkeypatch.context() as patch:
        patch.setattr(half, "nixl_wrapper", Faulty(half.nixl_wrapper, "check_xfer_state", lambda _: "ERR"))
        pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
        pair.run(lambda: pair.ended(d) and pair.sent(p) == [1])
    assert d in pair.decode.results.failed


@pytest.mark.parametrize("address", [8, -8, 1 << 63, None])
def test_a_lease_word_that_is_nowhere_fails_the_request(pair: Pair, address: int | None) -> None:
    p, d = names()
    lease = pair.offer(p)._replace(tables={} if address is None else {(0, 0): (address, 0)})
    pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
    pair.run(lambda: pair.ended(d) and pair.sent(p) == [1])
    assert d in pair.decode.results.failed


@pytest.mark.parametrize("method", ["initialize_xfer", "check_xfer_state"])
def test_a_check_that_fails_fails_the_request(pair: Pair, monkeypatch: Any, method: str) -> None:
    p, d = names()
    lease = pair.offer(p)
    half = pair.decode.worker.half
    agent = half.nixl_wrapper

    def failing(handle: Any, *rest: Any) -> Any:
        if method == "check_xfer_state" and handle in {h for hs in half._recving_transfers.values() for h in hs}:
            return agent.check_xfer_state(handle)
        return _raise(handle, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(half, "nixl_wrapper", Faulty(agent, method, failing))
        pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
        pair.run(lambda: pair.ended(d) and pair.sent(p) == [1])
    assert d in pair.decode.results.failed


def test_a_check_without_an_answer_ends_at_its_limit(pair: Pair, monkeypatch: Any) -> None:
    p, d = names()
    lease = pair.offer(p)
    half = pair.decode.worker.half
    agent = half.nixl_wrapper
    now = 1000.0

    def silent(handle: Any) -> Any:
        if handle in {h for hs in half._recving_transfers.values() for h in hs}:
            return agent.check_xfer_state(handle)
        return "PROC"

    with monkeypatch.context() as patch:
        patch.setattr(half, "nixl_wrapper", Faulty(agent, "check_xfer_state", silent))
        patch.setattr(half, "clock", lambda: now)
        pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
        pair.run(lambda: d in half._checks and half._checks[d].deadline is not None)
        now += half.lease_check_seconds - 0.001
        pair.steps()
        assert not pair.ended(d)
        now += 0.002
        pair.steps(2)
        assert d in pair.decode.results.failed
        # Its word is not used again while it may still be written.
        assert len(half._landing) == len(half._landing.table) - 1
    # The read has carried the notice after all.
    pair.run(lambda: pair.sent(p) == [1])


def test_more_checks_than_words_wait_for_one_another(pair: Pair, monkeypatch: Any) -> None:
    landing = pair.decode.worker.half._landing
    monkeypatch.setattr(landing, "_free", landing._free[:2])
    monkeypatch.setattr(type(landing), "__len__", lambda _: len(landing.table))
    requests = [(*names(), 4 + number) for number in range(8)]
    for p, d, block in requests:
        pair.prefill.worker.fill([block], 7.0)
        pair.fetch(d, [block + 10], pair.prefill.params(p, [[block]]), pair.offer(p))
    pair.run(lambda: all(d in pair.decode.results.received and pair.sent(p) == [1] for p, d, _ in requests))
    assert all(pair.decode.worker.holds(block + 10, 7.0, block) for _, _, block in requests)


@pytest.mark.parametrize(
    "notice",
    [
        b"",
        b":",
        b"p",
        b"p:",
        b"p:x",
        b"p:-1",
        b"p:0",
        b"p:99999999999",
        b"\xff\xfe:1",
        b":1",
        b"HB:",
        b"HB:,,",
        b"PUSH_REG:",
    ],
)
def test_no_notice_ends_the_engine(pair: Pair, notice: bytes) -> None:
    p, d = names()
    lease = pair.offer(p)
    pair.fetch(d, [10], pair.prefill.params(p, [[4]]), lease)
    pair.run(lambda: pair.sent(p) == [1] and pair.ended(d))
    agent = pair.decode.worker.half._remote_agents[pair.prefill.worker.engine_id][0, 0]
    following, _ = names()
    pair.offer(following)
    pair.decode.worker.half.nixl_wrapper.send_notif(agent, notif_msg=notice)
    pair.decode.worker.half.nixl_wrapper.send_notif(agent, notif_msg=f"{following}:1".encode())
    pair.run(lambda: pair.sent(following) == [1])


def test_a_stock_decode_worker_decodes_our_payload() -> None:
    payload = KvdeltaHandshakePayload("hash", b"metadata", lease_table=(1 << 63, 0, 16))
    decoded = msgspec.msgpack.Decoder(NixlHandshakePayload).decode(msgspec.msgpack.encode(payload))
    assert decoded == NixlHandshakePayload("hash", b"metadata")


@pytest.mark.parametrize(("prefill", "decode"), [(ours, stock), (stock, ours), (stock, stock)])
def test_with_one_of_upstreams_workers_it_is_as_upstream(
    prefill: Callable[[], Side], decode: Callable[[], Side]
) -> None:
    pair = Pair([prefill()], [decode()])
    try:
        (p, d), (full_p, full_d) = names(), names()
        pair.prefill.worker.fill([4, 5, 6], 7.0)
        lease = pair.lease(p) if prefill is ours else None
        for request in (p, full_p):
            pair.prefill.offer(request)
        pair.prefill.step()
        # The prefix is held: upstream trims the list itself.
        pair.fetch(d, [10, 11], pair.prefill.params(p, [[4, 5, 6]]))
        pair.decode.fetch(full_d, (), pair.prefill.params(full_p, [[4]]), parked=False)
        pair.run(lambda: d in pair.decode.results.received and pair.sent(p) == [1] and pair.sent(full_p) == [1])
        assert pair.decode.worker.holds(10, 7.0, 5)
        assert pair.decode.worker.holds(11, 7.0, 6)
        assert not pair.ended(full_d)
        stats = pair.decode.worker.half.xfer_stats.data
        assert stats["bytes_transferred"] == [2 * pair.decode.worker.block_bytes]
        assert stats["num_descriptors"] == [2]
        assert pair.is_idle()
        if lease is not None:
            assert pair.words(lease) == [0]
    finally:
        pair.close()


def test_the_descriptors_are_those_of_upstream(pair: Pair) -> None:
    (p, d) = names()
    lease = pair.offer(p)
    before = len(pair.decode.worker.half.xfer_stats.data["num_descriptors"])
    pair.fetch(d, [10, 11, 14], pair.prefill.params(p, [[4, 5, 6]]), lease)
    pair.run(lambda: d in pair.decode.results.received and pair.sent(p) == [1])
    ours_read = pair.decode.worker.half.xfer_stats.data["num_descriptors"][before:]
    upstream = Pair([pair.prefill], [stock()])
    try:
        p, d = names()
        pair.offer(p)
        upstream.fetch(d, [10, 11, 14], pair.prefill.params(p, [[4, 5, 6]]))
        upstream.run(lambda: d in upstream.decode.results.received and upstream.sent(p) == [1])
        assert ours_read == upstream.decode.worker.half.xfer_stats.data["num_descriptors"]
    finally:
        upstream.decode.worker.close()


def test_a_prefill_worker_that_was_replaced_fails_what_the_old_one_offered() -> None:
    pair = Pair([ours()], [ours()])
    try:
        (p, d), (_, again), (new_p, new_d) = names(), names(), names()
        first = pair.offer(p)
        params = pair.prefill.params(p, [[4]])
        pair.fetch(d, [10], params, first)
        pair.run(lambda: d in pair.decode.results.received)
        old = pair.prefill.worker
        lease = pair.offer("lost")
        old.close()
        pair.prefill = Side(Worker(KvdeltaPullWorker, port=free_port()), KvdeltaConnectorMetadata)
        pair.prefills = [pair.prefill]
        pair.fetch(again, [11], {**params, "remote_request_id": "lost"}, lease)
        pair.prefill.worker.fill([4], 8.0)
        new_lease = pair.offer(new_p)
        pair.fetch(new_d, [12], pair.prefill.params(new_p, [[4]]), new_lease)
        pair.run(lambda: pair.ended(again) and new_d in pair.decode.results.received)
        assert again in pair.decode.results.failed
        assert pair.decode.worker.holds(12, 8.0, 4)
    finally:
        pair.close()


@pytest.mark.parametrize("same_id", [False, True])
def test_an_offer_from_before_a_restart_fails_on_a_decode_worker_that_meets_the_new_one(*, same_id: bool) -> None:
    old = ours()
    pair = Pair([old], [ours()])
    try:
        p, d = names()
        lease = pair.offer(p)
        params = old.params(p, [[4]])
        old.worker.close()
        pair.prefill = Side(
            Worker(KvdeltaPullWorker, engine_id=old.worker.engine_id if same_id else None), KvdeltaConnectorMetadata
        )
        pair.prefills = [pair.prefill]
        # The first prompts of the new one may have the same slot.
        pair.prefill.next.lease_words["other"] = LeaseWord(lease.slot, lease.generation - 1)
        pair.fetch(d, [10], {**params, "remote_port": pair.prefill.worker.port}, lease)
        pair.run(lambda: pair.ended(d))
        assert d in pair.decode.results.failed
    finally:
        pair.close()


def _serve_until_killed(pipe: Connection) -> None:
    side = ours()
    side.worker.fill([4, 5], 7.0)
    for request in range(8):
        side.next.lease_words[f"k-{request}"] = LeaseWord(request, 100 + request)
        side.offer(f"k-{request}")
    side.step()
    pipe.send((side.worker.engine_id, side.worker.port, side.worker.payload.lease_table))
    # Also ends with the test's own process.
    while not pipe.poll():
        side.step()


def test_a_prefill_worker_that_dies_after_half_fails_the_other_half() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_until_killed, args=(there,), daemon=True)
    process.start()
    decode = ours()
    try:
        assert here.poll(600)
        engine_id, port, table = here.recv()

        def fetch(request: int) -> None:
            params = {
                "remote_block_ids": [[4, 5]],
                "remote_engine_id": engine_id,
                "remote_request_id": f"k-{request}",
                "remote_host": "127.0.0.1",
                "remote_port": port,
                "tp_size": 1,
            }
            decode.fetch(f"r-{request}", ([8 + request, 16 + request],), params)
            decode.next.leases[f"r-{request}"] = Lease(request, 100 + request, {(0, 0): table[:2]})

        for request in range(4):
            fetch(request)
        run([decode], lambda: len(decode.results.received) == 4)
        assert all(decode.worker.holds(8 + request, 7.0, 4) for request in range(4))
        process.kill()
        process.join()
        for request in range(4, 8):
            fetch(request)
        run([decode], lambda: len(decode.results.failed) == 4, seconds=240.0)
        assert sorted(decode.results.failed) == [f"r-{request}" for request in range(4, 8)]
        assert not decode.worker.half._recving_metadata
    finally:
        process.kill()
        decode.worker.close()


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_reads_checks_and_tells_its_own(prefill_ranks: int, decode_ranks: int) -> None:
    pair = Pair(
        tensor_parallel(KvdeltaPullWorker, KvdeltaConnectorMetadata, prefill_ranks),
        tensor_parallel(KvdeltaPullWorker, KvdeltaConnectorMetadata, decode_ranks),
    )
    try:
        (p, d), (full_p, full_d), (bad_p, bad_d) = names(), names(), names()
        for rank, side in enumerate(pair.prefills):
            side.worker.fill([4, 5], 7.0 + 100 * rank)
        if prefill_ranks == 1:
            for cache in pair.prefill.worker.caches.values():
                cache[:, 1] += 100
        lease, full, bad = (pair.offer(request) for request in (p, full_p, bad_p))
        assert pair.words(full) == [full.generation] * prefill_ranks
        changes = {"tp_size": prefill_ranks}
        pair.fetch(d, [10, 11], pair.prefill.params(p, [[4, 5]], **changes), lease)
        for side in pair.decodes:
            side.fetch(full_d, (), pair.prefill.params(full_p, [[4]], **changes), parked=False)
        pair.run(
            lambda: (
                all(d in side.results.received for side in pair.decodes)
                and pair.sent(p) == pair.sent(full_p) == [1] * prefill_ranks
            )
        )
        assert pair.words(lease) == [0] * prefill_ranks
        heads = [
            cache[10, head]
            for side in pair.decodes
            for cache in side.worker.caches.values()
            for head in range(cache.shape[1])
        ]
        assert sorted({float(head.mean()) // 100 for head in heads}) == [0.0, 1.0]
        if decode_ranks == 1:
            assert all(bool((cache[10, 1] > 100).all()) for cache in pair.decode.worker.caches.values())
        # One rank has given its blocks away.
        pair.prefills[-1].worker.half._reqs_to_send[bad_p] = 0.0
        pair.prefills[-1].step()
        pair.fetch(bad_d, [10, 11], pair.prefill.params(bad_p, [[4, 5]], **changes), bad)
        pair.run(lambda: pair.ended(bad_d) and pair.sent(bad_p) == [1] * prefill_ranks)
        assert bad_d in pair.decodes[-1].results.failed
        if prefill_ranks == decode_ranks:
            assert bad_d in pair.decode.results.received
        assert pair.is_idle()
    finally:
        pair.close()


def test_a_release_is_reported_by_each_rank_once_whatever_it_heard_before() -> None:
    pair = Pair(
        tensor_parallel(KvdeltaPullWorker, KvdeltaConnectorMetadata, 2),
        tensor_parallel(KvdeltaPullWorker, KvdeltaConnectorMetadata, 2),
    )
    try:
        p, d = names()
        pair.offer(p)
        # Only the first rank of the decode worker has told.
        pair.decode.fetch(d, (), pair.prefill.params(p, [[4]], tp_size=2), parked=False)
        pair.run(lambda: pair.sent(p) == [1, 0])
        for side in pair.prefills:
            side.next.releases.add(p)
        pair.decodes[1].fetch(d, (), pair.prefill.params(p, [[4]], tp_size=2), parked=False)
        pair.run(lambda: pair.sent(p) == [1, 1])
        pair.steps()
        assert pair.sent(p) == [1, 1]
        assert pair.is_idle()
    finally:
        pair.close()


def test_only_what_is_listed_is_staged(pair: Pair, monkeypatch: Any) -> None:
    copies: list[tuple[list[int], str]] = []
    for side in (pair.prefill, pair.decode):
        half = side.worker.half
        monkeypatch.setattr(half, "use_host_buffer", True)
        monkeypatch.setattr(half, "copy_blocks", lambda _a, _b, blocks, _c, way: copies.append((blocks, way)))
    p, d = names()
    lease = pair.offer(p)
    pair.prefill.next.add_new_req_to_save(p, ([5, 6],), {})
    saved = pair.prefill.next
    pair.prefill.step()
    pair.prefill.worker.half.save_kv_to_host(saved)
    pair.fetch(d, [11, 12], pair.prefill.params(p, [[5, 6]]), lease)
    pair.run(lambda: d in pair.decode.results.received and pair.sent(p) == [1])
    assert copies == [([5, 6], "d2h"), ([11, 12], "h2d")]
