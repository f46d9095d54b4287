# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the worker half every step, beside what upstream's connector tells it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakePayload,
    ReqId,
    ReqMeta,
)


@dataclass
class KvdeltaHandshakePayload(NixlHandshakePayload):
    """Upstream's payload with the address of this rank's table of lease words.

    The scheduler half takes the table out of it: what the side channel serves is upstream's payload.
    """

    lease_table: tuple[int, int, int] | None = None
    """Address, NIXL device id and count of the u64 words; None: this rank has no table."""
    alone: bool = False
    """Whether no other connector stands beside this one, as in vLLM's MultiConnector."""


class LeaseWord(NamedTuple):
    """The word of one request in every rank's table of this prefill worker."""

    slot: int
    """Index of the word."""
    generation: int
    """Its value while the blocks are leased: never 0, and never used before by this process."""


class Lease(NamedTuple):
    """Where a decode worker finds the word of an offer, and the value that it must have after the read."""

    slot: int
    generation: int
    tables: dict[tuple[int, int], tuple[int, int]]
    """(pp rank, tp rank) of the prefill worker to (address, device id) of its table."""


class KvdeltaConnectorMetadata(NixlConnectorMetadata):
    """Upstream's metadata and ours.

    Order for the worker half: words of ``reqs_not_processed`` to 0, then ``lease_words``, then upstream's own, then
    ``releases``. A word is set to 0 only while it still has the generation of its request, since a slot is used again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lease_words: dict[ReqId, LeaseWord] = {}
        """Prefill worker: words to write, for requests that are scheduled for the first time."""
        self.releases: set[ReqId] = set()
        """Prefill worker: its own request ids whose blocks are to be freed now (reported as finished sending, once)."""
        self.leases: dict[ReqId, Lease] = {}
        """Decode worker: the lease of requests in ``reqs_to_recv`` that read; absent: they read as upstream's do."""
        self.fail_now: set[ReqId] = set()
        """Decode worker: parked requests to report as failed; nothing is read for them.

        It may also stand in ``reqs_to_recv`` or ``notices``, without blocks, so that its prefill worker is told.
        """
        self.notices: dict[ReqId, ReqMeta] = {}
        """Decode worker, push mode only: ``remote`` is told that nothing is needed (in pull mode that is upstream's
        entry in ``reqs_to_recv`` without blocks)."""

    def add_notice(self, request_id: ReqId, kv_transfer_params: dict[str, Any]) -> None:
        """Add an entry to :attr:`notices`; the params are checked ones."""
        notice = NixlConnectorMetadata()
        notice.add_new_req_to_recv(request_id, (), {**kv_transfer_params, "remote_block_ids": ()})
        self.notices[request_id] = notice.reqs_to_recv[request_id]
