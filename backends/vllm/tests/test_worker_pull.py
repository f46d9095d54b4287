# SPDX-License-Identifier: Apache-2.0
"""Reads between real NIXL agents: what is read, what is told, and what a lease word proves (CASES B22, B23, B25)."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from kvdelta_vllm.metadata import KvdeltaConnectorMetadata, Lease, LeaseWord
from kvdelta_vllm.worker import KvdeltaPullWorker
from nixl_pair import BLOCKS, Side, Worker, run
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

NAMES = itertools.count()


class Pair:
    """A prefill worker and a decode worker."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill = prefill
        self.decode = decode
        self._slots = itertools.count(1)

    def lease(self, request: str) -> Lease:
        """Write the word of a request, with the prefill worker's next step."""
        slot = next(self._slots)
        word = LeaseWord(slot, 1 << 60 | slot)
        self.prefill.next.lease_words[request] = word
        address, device, _ = self.prefill.worker.payload.lease_table
        return Lease(word.slot, word.generation, {(0, 0): (address, device)})

    def names(self) -> tuple[str, str]:
        """Ids of a request, on the prefill and on the decode worker."""
        number = next(NAMES)
        return f"p-{number}", f"d-{number}"

    def run(self, until: Any) -> None:  # noqa: ANN401
        """Step both until something is so."""
        run([self.prefill, self.decode], until)

    def steps(self, count: int) -> None:
        """Step both."""
        for _ in range(count):
            self.prefill.step()
            self.decode.step()


def ours(**options: Any) -> Side:  # noqa: ANN401
    """Make one of our workers."""
    return Side(Worker(KvdeltaPullWorker, **options), KvdeltaConnectorMetadata)


def stock(**options: Any) -> Side:  # noqa: ANN401
    """Make one of upstream's workers."""
    return Side(Worker(NixlPullConnectorWorker, **options), NixlConnectorMetadata)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two of our workers."""
    made = Pair(ours(), ours())
    yield made
    made.decode.worker.close()
    made.prefill.worker.close()


def test_only_the_paired_blocks_are_read_and_the_word_is_cleared_after(pair: Pair) -> None:
    p, d = pair.names()
    table = pair.prefill.worker.half._lease_words.table
    pair.prefill.worker.fill([3, 4, 5, 6], 7.0)
    pair.decode.worker.fill(list(range(BLOCKS)), -1.0)
    lease = pair.lease(p)
    pair.prefill.offer(p)
    pair.prefill.step()
    assert table[lease.slot] == lease.generation
    pair.decode.fetch(d, ([10, 11],), pair.prefill.params(p, [[4, 5]]))
    pair.decode.next.leases[d] = lease
    before = pair.decode.worker.half.xfer_stats.data["bytes_transferred"][:]
    pair.run(lambda: d in pair.decode.results.received and p in pair.prefill.results.sent)
    assert pair.decode.worker.holds(10, 7.0, 4)
    assert pair.decode.worker.holds(11, 7.0, 5)
    assert all(pair.decode.worker.holds(block, -1.0, block) for block in range(BLOCKS) if block not in (10, 11))
    stats = pair.decode.worker.half.xfer_stats.data
    assert stats["bytes_transferred"][len(before) :] == [2 * pair.decode.worker.block_bytes]
    assert sum(stats["kvdelta_lease_checks/held"]) >= 1
    assert table[lease.slot] == 0
