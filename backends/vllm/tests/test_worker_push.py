# SPDX-License-Identifier: Apache-2.0
"""Writes between real NIXL agents (push mode): what is written, who is told, and what a bad registration can do."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from nixl_pair import BLOCKS, Side, Worker, Workers, tensor_parallel
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from kvdelta_vllm.metadata import KvdeltaConnectorMetadata
from kvdelta_vllm.worker import KvdeltaPushWorker

NAMES = itertools.count()


def ours() -> Side:
    """Make one of our workers."""
    return Side(Worker(KvdeltaPushWorker), KvdeltaConnectorMetadata)


def stock() -> Side:
    """Make one of upstream's workers."""
    return Side(Worker(NixlPushConnectorWorker), NixlConnectorMetadata)


def names() -> tuple[str, str]:
    """Ids of a request on both workers: in push mode they are found by what they have in common."""
    number = next(NAMES)
    return f"r{number}-aaaaaaaa", f"r{number}-bbbbbbbb"


class Fleet(Workers):
    """The ranks of a prefill and of a decode worker."""

    def finish(self, request: str, blocks: list[int]) -> None:
        """End a prompt of the prefill worker."""
        for side in self.prefills:
            side.offer(request)
            side.next.push_finished_blocks[request] = (blocks,)

    def params(self, request: str) -> dict[str, Any]:
        """What the prefill worker answered."""
        return self.prefill.params(request, [[]], tp_size=len(self.prefills))

    def registration(self, request: str, own: list[int]) -> dict[str, Any]:
        """What a decode worker asks for."""
        return {
            "request_id": request,
            "decode_engine_id": self.decode.worker.engine_id,
            "decode_host": "127.0.0.1",
            "decode_port": self.decode.worker.port,
            "decode_tp_size": len(self.decodes),
            "local_block_ids": (own,),
            "remote_engine_id": self.prefill.worker.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.prefill.worker.port,
            "remote_tp_size": len(self.prefills),
            "remote_pp_size": 1,
        }

    def register(self, request: str, prefill_request: str, own: list[int]) -> None:
        """Have the decode worker ask for the blocks of a prompt."""
        for side in self.decodes:
            side.fetch(request, (own,), self.params(prefill_request), parked=False)
            side.next.push_registrations[request] = self.registration(request, own)

    def notice(self, request: str, prefill_request: str) -> None:
        """Have the decode worker say that it needs nothing."""
        for side in self.decodes:
            side.next.add_notice(request, self.params(prefill_request))

    def received(self, request: str) -> list[int]:
        """How often each rank of the decode worker reported a request as received."""
        return [side.results.received.count(request) for side in self.decodes]

    def kept(self, half: Any) -> list[Any]:
        """What a worker half keeps of requests."""
        return [
            *super().kept(half),
            half._sending_transfers,
            half._push_finished_blocks,
            half._pending_d_registrations,
        ]


@pytest.fixture(scope="module")
def shared() -> Iterator[Fleet]:
    """Two of our workers."""
    fleet = Fleet([ours()], [ours()])
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared: Fleet) -> Iterator[Fleet]:
    """Two of our workers that must have forgotten everything after a test."""
    shared.decode.worker.fill(list(range(BLOCKS)), -1.0)
    yield shared
    shared.run(shared.is_idle)


@pytest.mark.parametrize("registered_first", [False, True])
def test_only_the_registered_blocks_are_written(fleet: Fleet, *, registered_first: bool) -> None:
    p, d = names()
    fleet.prefill.worker.fill([3, 4, 5, 6], 7.0)
    if registered_first:
        fleet.register(d, p, [10, 11])
        fleet.steps()
    # Cut at the front: what is offered ends where the prompt ends.
    fleet.finish(p, [4, 5, 6])
    fleet.steps(3)
    if not registered_first:
        fleet.register(d, p, [10, 11])
    fleet.run(lambda: fleet.received(d) == [1] and fleet.sent(p) == [1])
    assert fleet.decode.worker.holds(10, 7.0, 5)
    assert fleet.decode.worker.holds(11, 7.0, 6)
    assert all(fleet.decode.worker.holds(block, -1.0, block) for block in range(BLOCKS) if block not in (10, 11))


@pytest.mark.parametrize("aborted", [False, True])
def test_requests_that_need_nothing_hold_nothing(fleet: Fleet, *, aborted: bool) -> None:
    requests = [names() for _ in range(100)]
    for p, d in requests:
        fleet.finish(p, [4, 5])
        if aborted:
            # Upstream's entry for what ends before it is scheduled.
            fleet.decode.fetch(d, (), fleet.params(p), parked=False)
        else:
            fleet.notice(d, p)
    fleet.decode.step()
    assert not fleet.decode.worker.half._recving_metadata
    fleet.run(lambda: all(fleet.sent(p) == [1] for p, _ in requests))
    fleet.steps()
    assert all(fleet.sent(p) == [1] and fleet.received(d) == [0] for p, d in requests)


def test_a_notice_that_is_faster_than_the_blocks_leaves_no_work(fleet: Fleet) -> None:
    p, d = names()
    fleet.prefill.next.reqs_in_batch.add(p)
    fleet.prefill.step()
    fleet.notice(d, p)
    fleet.run(lambda: fleet.sent(p) == [1])
    # Known a step late where steps are scheduled ahead.
    fleet.prefill.next.push_finished_blocks[p] = ([4, 5],)
    fleet.steps()
    assert not fleet.prefill.worker.half._push_finished_blocks


def test_an_offer_is_released_once(fleet: Fleet) -> None:
    p, d = names()
    fleet.finish(p, [4, 5])
    fleet.steps(3)
    fleet.prefill.next.releases.add(p)
    fleet.run(lambda: fleet.sent(p) == [1])
    fleet.prefill.next.releases.add(p)
    fleet.notice(d, p)
    fleet.steps()
    assert fleet.sent(p) == [1]


def test_what_is_to_fail_fails_at_once(fleet: Fleet) -> None:
    (p, told), (unanswered_p, unanswered), (_, unknown) = names(), names(), names()
    fleet.finish(p, [4])
    fleet.register(unanswered, unanswered_p, [10])
    fleet.steps(3)
    fleet.notice(told, p)
    fleet.decode.next.fail_now |= {told, unanswered, unknown}
    fleet.decode.step()
    assert {told, unanswered, unknown} <= set(fleet.decode.results.failed)
    fleet.run(lambda: fleet.sent(p) == [1])
    # The prompt that it registered for ends some day, or never.
    fleet.prefill.worker.half._evict_finished_inbox.put(unanswered)
    fleet.prefill.worker.half._push_writer_wake.set()


def test_what_cannot_be_registered_fails_alone(fleet: Fleet) -> None:
    (_, bad), (good_p, good) = names(), names()
    fleet.prefill.worker.fill([4], 7.0)
    fleet.finish(good_p, [4])
    fleet.register(bad, "p", [11])
    fleet.decode.next.reqs_to_recv[bad].tp_size = 0
    fleet.register(good, good_p, [10])
    fleet.run(lambda: fleet.received(good) == [1] and fleet.sent(good_p) == [1])
    assert bad in fleet.decode.results.failed
    assert fleet.decode.worker.holds(10, 7.0, 4)


BAD_REGISTRATIONS: dict[str, dict[str, Any]] = {
    "no engine": {"decode_engine_id": None},
    "a list for an engine": {"decode_engine_id": ["e"]},
    "the prefill worker itself": {"decode_engine_id": "SELF"},
    "another engine": {"decode_engine_id": "somebody"},
    "no host": {"decode_host": 7},
    "no port": {"decode_port": "x"},
    "no ranks": {"decode_tp_size": 0},
    "ranks without end": {"decode_tp_size": 1 << 40},
    "no blocks": {"local_block_ids": None},
    "text": {"local_block_ids": "abc"},
    "behind the pool": {"local_block_ids": [[BLOCKS]]},
    "negative": {"local_block_ids": [[-1]]},
    "not a number": {"local_block_ids": [["a"]]},
    "more than there are": {"local_block_ids": [[11, 12, 13]]},
    "two groups": {"local_block_ids": [[11], [12]]},
    "no group": {"local_block_ids": []},
}


def wake(fleet: Fleet, notices: list[bytes]) -> None:
    """Send the prefill worker notices as its decode worker could."""
    half = fleet.decode.worker.half
    for notice in notices:
        half.nixl_wrapper.send_notif(half._remote_agents[fleet.prefill.worker.engine_id][0, 0], notif_msg=notice)


@pytest.fixture
def connected(fleet: Fleet) -> Fleet:
    """Two workers that know each other."""
    p, d = names()
    fleet.finish(p, [4])
    fleet.register(d, p, [10])
    fleet.run(lambda: fleet.received(d) == [1] and fleet.sent(p) == [1])
    return fleet


@pytest.mark.parametrize("finished_first", [False, True])
@pytest.mark.parametrize("case", BAD_REGISTRATIONS)
def test_a_bad_registration_costs_its_own_request_only(connected: Fleet, case: str, *, finished_first: bool) -> None:
    fleet = connected
    changes = dict(BAD_REGISTRATIONS[case])
    if changes.get("decode_engine_id") == "SELF":
        changes["decode_engine_id"] = fleet.prefill.worker.engine_id
    (p, d), (good_p, good) = names(), names()
    fleet.prefill.worker.fill([4, 5], 7.0)
    if finished_first:
        fleet.finish(p, [4, 5])
        fleet.finish(good_p, [5])
        fleet.steps(3)
    bad = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode({**fleet.registration(d, [11]), **changes})
    fleet.decode.fetch(good, ([12],), fleet.params(good_p), parked=False)
    fleet.decode.step()
    # One after the other, so that one poll of the writer finds both.
    wake(fleet, [bad, PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(fleet.registration(good, [12]))])
    if not finished_first:
        fleet.steps(3)
        fleet.finish(p, [4, 5])
        fleet.finish(good_p, [5])
    fleet.run(lambda: fleet.received(good) == [1] and fleet.sent(good_p) == [1])
    assert fleet.decode.worker.holds(12, 7.0, 5)
    assert fleet.decode.worker.holds(11, -1.0, 11)
    assert fleet.prefill.worker.half._push_writer_thread.is_alive()
    fleet.steps(3)
    if fleet.sent(p) == [0]:
        fleet.prefill.next.releases.add(p)
    fleet.run(lambda: fleet.sent(p) == [1])


@pytest.mark.parametrize(
    "notice",
    [
        b"",
        b":",
        b"p:",
        b"p:x",
        b"p:0",
        b"p:-1",
        b"p:3x",
        b"\xff:1",
        b"PUSH_REG:",
        b"PUSH_REG:\xc1",
        b"PUSH_REG:\x01",
        b"HB:",
    ],
)
def test_no_notice_ends_the_engine(connected: Fleet, notice: bytes) -> None:
    fleet = connected
    p, d = names()
    fleet.finish(p, [4])
    fleet.steps(3)
    wake(fleet, [notice.replace(b"p:", f"{p}:".encode())])
    fleet.steps()
    if fleet.sent(p) == [0]:
        fleet.notice(d, p)
    fleet.run(lambda: fleet.sent(p) == [1])


@pytest.mark.parametrize(
    ("ranks", "count", "can_be"), [(1, 3, True), (2, 3, False), (2, 4, True), (4, 2, True), (1, 0, False)]
)
def test_a_number_of_ranks_that_upstream_asserts_on_is_refused(
    connected: Fleet, monkeypatch: Any, ranks: int, count: int, *, can_be: bool
) -> None:
    half = connected.prefill.worker.half
    monkeypatch.setattr(half, "world_size", ranks)
    assert half._can_be_count(count) is can_be


def test_registrations_that_nobody_answers_are_bounded(connected: Fleet, monkeypatch: Any) -> None:
    fleet = connected
    monkeypatch.setattr("kvdelta_vllm.worker.MAX_WAITING_REGISTRATIONS", 4)
    made = [PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(fleet.registration(f"nobody-{i}", [11])) for i in range(10)]
    wake(fleet, made)
    waiting = fleet.prefill.worker.half._pending_d_registrations
    fleet.run(lambda: list(waiting) == [f"nobody-{i}" for i in range(6, 10)])
    for request in list(waiting):
        fleet.prefill.worker.half._evict_finished_inbox.put(request)


@pytest.mark.parametrize(("prefill", "decode"), [(ours, stock), (stock, ours)])
def test_with_one_of_upstreams_workers_it_is_as_upstream(
    prefill: Callable[[], Side], decode: Callable[[], Side]
) -> None:
    fleet = Fleet([prefill()], [decode()])
    try:
        (p, d), (full_p, full) = names(), names()
        fleet.prefill.worker.fill([4, 5, 6], 7.0)
        fleet.finish(p, [4, 5, 6])
        fleet.register(d, p, [10, 11])
        fleet.run(lambda: fleet.received(d) == [1] and fleet.sent(p) == [1])
        assert fleet.decode.worker.holds(10, 7.0, 5)
        if decode is ours:
            fleet.finish(full_p, [4])
            fleet.notice(full, full_p)
            fleet.run(lambda: fleet.sent(full_p) == [1])
        fleet.run(fleet.is_idle)
    finally:
        fleet.close()


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_of_prefill_hears_from_all_that_it_waits_for(prefill_ranks: int, decode_ranks: int) -> None:
    fleet = Fleet(
        tensor_parallel(KvdeltaPushWorker, KvdeltaConnectorMetadata, prefill_ranks),
        tensor_parallel(KvdeltaPushWorker, KvdeltaConnectorMetadata, decode_ranks),
    )
    try:
        (p, d), (full_p, full), (half_p, half) = names(), names(), names()
        for rank, side in enumerate(fleet.prefills):
            side.worker.fill([4, 5], 7.0 + 100 * rank)
        for request in (p, full_p, half_p):
            fleet.finish(request, [4, 5])
        fleet.register(d, p, [10, 11])
        fleet.notice(full, full_p)
        # Only one rank of the decode worker has told.
        fleet.decodes[-1].next.add_notice(half, fleet.params(half_p))
        fleet.run(
            lambda: (
                fleet.received(d) == [1] * decode_ranks and fleet.sent(p) == fleet.sent(full_p) == [1] * prefill_ranks
            )
        )
        fleet.steps()
        assert fleet.sent(full_p) == [1] * prefill_ranks
        assert sum(fleet.sent(half_p)) == {(2, 1): 2, (1, 2): 0, (2, 2): 1}[prefill_ranks, decode_ranks]
        if decode_ranks == 1:
            assert all(
                bool((cache[10, 0] < 100).all() and (cache[10, 1] > 100).all())
                for cache in fleet.decode.worker.caches.values()
            )
        if decode_ranks > 1:
            fleet.decodes[0].next.add_notice(half, fleet.params(half_p))
        fleet.run(lambda: fleet.sent(half_p) == [1] * prefill_ranks)
        # Upstream keeps the registration of the second rank, which found its blocks being sent.
        fleet.prefill.worker.half._evict_finished_inbox.put(d)
        fleet.run(fleet.is_idle)
    finally:
        fleet.close()
