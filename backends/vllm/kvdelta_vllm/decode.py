# SPDX-License-Identifier: Apache-2.0
"""A decode worker's side: offers are checked, confirmed by its own lookup, and paired by position, or declined."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import kvdelta
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from . import params as wire
from .shared import blocks_of, now_ms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from .metadata import Lease
    from .shared import Shared

logger = init_logger(__name__)

Recovered = Literal["recompute", "ask_again"]

_FIXED: Final[dict[str, Recovered]] = {"recompute": "recompute", "ask_again": "ask_again"}
"""``kvdelta_recovery`` that leaves no choice."""
_REMEMBERED_OFFERS: Final = 8192
"""Offers that are known as used, since the blocks of one may be read once only."""


@dataclass
class Received:
    """An offer that came with a decode request."""

    head: kvdelta.Offer | None = None
    """None: it is whole."""
    lists: Sequence[list[int]] = ()
    tokens: int | None = None
    """Tokens that the prefill worker computed."""
    lease: Lease | None = None
    firsts: Sequence[int] | None = None
    """Index in the prompt of the first listed block of each group; None: not known."""
    declined: str | None = None
    """Why nothing of it is read."""
    choice: Recovered | None = None
    """How a stale claim is recovered from; chosen once."""
    report: dict[str, Any] | None = None
    """What is answered when the request ends."""
    held: int = 0
    """Tokens that this worker's last lookup found."""
    settled: bool = False
    """Whether its blocks were allocated, so that it was read or declined."""
    reading: bool = False
    blocks: int = 0
    """Blocks that are read."""
    bytes: int = 0
    since_ms: int = 0


class Decode:
    """The offers that a decode worker received."""

    def __init__(self, shared: Shared, *, recovery: str, policy: str, lease_check: bool) -> None:
        if recovery not in ("auto", "recompute", "ask_again"):
            raise ValueError(f"kvdelta_recovery is {recovery!r}, not auto, recompute or ask_again")
        self._shared = shared
        # A request that vLLM computes when it fails would be computed here anyway, and later.
        self._fixed = _FIXED.get("recompute" if policy == "recompute" else recovery)
        self._failed: Final = "recompute" if policy == "recompute" else "failed"
        self._lease_check = lease_check
        self._recovery = kvdelta.Recovery()
        self._received: dict[str, Received] = {}
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._recomputing: dict[str, tuple[Request, int, int]] = {}

    def __len__(self) -> int:
        return len(self._received)

    def get(self, request: Request) -> Received | None:
        """Return the offer of a request as long as upstream has not acted on it."""
        params = request.kv_transfer_params
        return self._received.get(request.request_id) if params and params.get("do_remote_prefill") else None

    def on_new(self, request: Request, params: dict[str, Any]) -> None:
        """Read the offer that came with a request; what cannot be used of it is dropped."""
        cut = wire.cut_offer(params)
        own: Any = params
        if cut is not None:
            own = cut.get("params") if isinstance(cut, dict) else None
            if not isinstance(own, dict):
                self.drop(request, f"{kvdelta.OFFER_KEY} is {cut!r:.80}, which has no params; computing all here")
                return
            own = dict(own)
        try:
            wire.check_address(own)
            wire.check_rest(own)
        except wire.BadParams as error:
            # Nobody can be told.
            self.drop(request, str(error))
            return
        key = (own["remote_engine_id"], own["remote_request_id"])
        if key in self._used:
            # One of several answers to a prompt (n > 1), or one sent twice. Not told to the prefill worker: the
            # first request may be reading.
            logger.debug("kvdelta: request %s: the offer %.80r was used before", request.request_id, key[1])
            self._shared.stats.count("offers", label="repeated")
            request.kv_transfer_params = None
            return
        self._used[key] = None
        if len(self._used) > _REMEMBERED_OFFERS:
            self._used.popitem(last=False)
        received = self._received[request.request_id] = Received()
        try:
            self._read_offer(received, cut, own)
        except (wire.BadParams, kvdelta.BadOffer) as error:
            received.declined = str(error)
            self._count_invalid(request, received.declined)
        # Upstream heartbeats, notices and aborts by these from here on.
        own["do_remote_prefill"] = True
        own["do_remote_decode"] = False
        own["remote_block_ids"] = list(received.lists) or [[] for _ in self._shared.groups]
        request.kv_transfer_params = own

    def drop(self, request: Request, why: str) -> None:
        """Compute a request here whose parameters cannot be used at all."""
        self._count_invalid(request, why)
        request.kv_transfer_params = None

    def _count_invalid(self, request: Request, why: str) -> None:
        logger.warning("kvdelta: request %s: %s", request.request_id, why)
        self._shared.stats.count("offers", label="invalid")

    def _read_offer(self, received: Received, cut: object, own: dict[str, Any]) -> None:
        received.tokens = wire.remote_num_tokens(own)
        received.lists = wire.block_ids(own.get("remote_block_ids"), len(self._shared.groups))
        received.lease = wire.read_lease(cut.get("lease") if isinstance(cut, dict) else own.pop(wire.LEASE_KEY, None))
        if cut is None:
            received.firsts = self._firsts_of_whole(received)
        else:
            received.head = kvdelta.Offer(cut)
            received.firsts = self._firsts_of_cut(received, received.head)

    def _firsts_of_whole(self, received: Received) -> list[int] | None:
        """Return where the lists of a whole offer begin.

        None: the prefill worker's blocks have another size, or it does not say where they end.
        """
        if received.tokens is None:
            return None
        firsts: list[int] = []
        for group, ids in zip(self._shared.groups, received.lists, strict=True):
            first = blocks_of(received.tokens, group.block_size) - len(ids) if group.positional and ids else 0
            if first < 0 or (group.whole_prefix and first > 0):
                return None
            firsts.append(first)
        return firsts

    def _firsts_of_cut(self, received: Received, head: kvdelta.Offer) -> list[int]:
        """Check where the lists of a cut offer begin; raises ``BadParams``."""
        groups, tokens = self._shared.groups, received.tokens
        firsts: list[int] = head.group_first_blocks
        if tokens is None or len(firsts) != len(groups) or not self._shared.hashed_block_size(0):
            raise wire.BadParams(
                f"the cut offer of claim {head.claim_id!r:.80} has {tokens} tokens and {len(firsts)} groups, here are "
                f"{len(groups)}; computing all here"
            )
        for index, (group, ids, first) in enumerate(zip(groups, received.lists, firsts, strict=True)):
            if group.positional and ids and first + len(ids) != blocks_of(tokens, group.block_size):
                raise wire.BadParams(
                    f"group {index} of the cut offer lists {len(ids)} blocks from block {first}, and {tokens} tokens "
                    f"end elsewhere; computing all here"
                )
        return firsts

    def look(self, request: Request, received: Received, held: int, prompt: int, count: int) -> int:
        """Return how many tokens behind the ``held`` ones are loaded, where upstream says ``count``.

        ``prompt`` is how many upstream would have loaded at most. Nothing changes but what is known of the offer.
        """
        received.held = held
        if received.declined is None:
            received.declined = self._unreadable(received, held, prompt)
            if received.declined is not None:
                self._count_invalid(request, received.declined)
        # vLLM ignores both what is cached and what is offered for a request that may not look.
        if received.declined is not None or request.skip_reading_prefix_cache:
            return 0
        if received.tokens is not None:
            count = min(count, received.tokens - held)
        if received.head is None:
            return max(count, 0)
        confirmation = self._confirm(request, received.head, held)
        if confirmation.kind == "covered":
            received.report = None
            return max(count, 0)
        if count <= 0:
            received.choice = "recompute"
        elif received.choice is None:
            received.choice = self._choose(request, received, received.head, held)
        received.report = self._report(
            received, confirmation.held_blocks, confirmation.kind, received.choice or "recompute"
        )
        return count if received.choice == "ask_again" else 0

    def _unreadable(self, received: Received, held: int, prompt: int) -> str | None:
        """Say why upstream must not load an offer: it would pair the wrong blocks, or stop the engine."""
        tokens = prompt if received.tokens is None else received.tokens
        groups = self._shared.groups
        if received.firsts is None and (
            held
            or any(
                blocks_of(min(prompt, tokens), group.block_size) > len(ids)
                for group, ids in zip(groups, received.lists, strict=True)
                if group.whole_prefix
            )
        ):
            return f"its blocks have another size, and {held} tokens are cached here; computing all here"
        if tokens > prompt and not all(group.whole_prefix for group in groups):
            return f"{tokens} tokens were prefilled of a prompt of {prompt}; computing all here"
        return None

    def _confirm(self, request: Request, head: kvdelta.Offer, held: int) -> kvdelta.Confirmation:
        return kvdelta.confirm(
            head,
            block_size=self._shared.hashed_block_size(head.block_size),
            held_tokens=held,
            own_hash=self._shared.own_hash(request, head.first_block * head.block_size),
        )

    def _choose(self, request: Request, received: Received, head: kvdelta.Offer, held: int) -> Recovered:
        if self._fixed is not None:
            return self._fixed
        skipped_tokens = head.first_block * head.block_size
        choice: Recovered = self._recovery.choose(
            missing_tokens=request.num_prompt_tokens - held,
            context_tokens=request.num_prompt_tokens,
            offered_bytes=self._shared.bytes_of(map(len, received.lists)),
            skipped_bytes=self._shared.bytes_of(
                (skipped_tokens // group.block_size for group in self._shared.groups), prefix_only=True
            ),
            now_ms=now_ms(),
        )
        return choice

    @staticmethod
    def _report(received: Received, had: int, reason: str, recovered: str) -> dict[str, Any]:
        head = received.head
        report: dict[str, Any] = {
            "version": kvdelta.PROTOCOL_VERSION,
            "claim_id": head.claim_id if head else "",
            "said_blocks": head.first_block if head else 0,
            "had_blocks": had,
            "reason": reason,
            "recovered": recovered,
        }
        if head is not None:
            report["decode_worker_id"] = head.decode_worker_id
        return report

    def unread(self, request: Request, received: Received) -> None:
        """Settle an offer of which nothing is loaded."""
        received.settled = True
        if received.declined is not None:
            return
        if received.report is None or received.head is None:
            if not request.skip_reading_prefix_cache:
                held_blocks = (received.held // group.block_size for group in self._shared.groups)
                self._count_used(received, self._shared.bytes_of(held_blocks, prefix_only=True))
                self._shared.stats.count("full_hits")
            return
        # vLLM may load nothing where it was answered that the request is to fail.
        received.report["recovered"] = "recompute"
        self._count_stale(received.report)
        held = received.report["had_blocks"] * received.head.block_size
        self._recomputing[request.request_id] = (request, held, now_ms())

    def fails(self, received: Received) -> bool:
        """Whether a request that is about to load has to fail instead, so that the router asks again."""
        return received.report is not None and received.choice == "ask_again"

    def fail(self, request: Request, received: Received, why: str | None = None) -> None:
        """Let the worker half report a parked request as failed."""
        received.settled = True
        if why is not None:
            logger.warning("kvdelta: request %s: %s; nothing is read and the request fails", request.request_id, why)
        if received.report is None:
            received.report = self._report(received, 0, "stale", self._failed)
        self._shared.next.fail_now.add(request.request_id)
        self._count_stale(received.report)

    def _count_used(self, received: Received, saved: int) -> None:
        self._shared.stats.count("offers", label="whole" if received.head is None else "confirmed")
        self._shared.stats.count("bytes_saved", saved)
        if received.head is not None:
            self._recovery.confirmed(now_ms())

    def _count_stale(self, report: Mapping[str, Any]) -> None:
        if report["reason"] != "expired":
            self._shared.stats.count("offers", label=report["reason"])
            self._shared.stats.count("stale_blocks", max(report["said_blocks"] - report["had_blocks"], 0))
        self._shared.stats.count("recoveries", label=report["recovered"])

    def pair(
        self, request: Request, received: Received, blocks: KVCacheBlocks, wanted: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return the prefill worker's blocks for the ``wanted`` ones, position by position.

        Raises ``BadParams`` where one is not offered, or where less is held than was skipped.
        """
        groups, firsts = self._shared.groups, received.firsts
        tables = [blocks.blocks[group.cache_group] for group in groups]
        starts = [len(table) - len(own) for table, own in zip(tables, wanted, strict=True)]
        held = min(
            (start * group.block_size for start, group in zip(starts, groups, strict=True) if group.whole_prefix),
            default=0,
        )
        if firsts is None:
            if held or any(len(own) > len(ids) for own, ids in zip(wanted, received.lists, strict=True)):
                raise wire.BadParams(f"its blocks have another size, and {held} tokens are cached here")
            return [ids if own else [] for own, ids in zip(wanted, received.lists, strict=True)]
        if received.head is not None and self._confirm(request, received.head, held).kind != "covered":
            raise wire.BadParams(f"{held} tokens are held of {received.head.first_block} blocks that were skipped")
        tokens = received.tokens or 0
        ends_meet = all(
            len(table) == blocks_of(tokens, group.block_size)
            for table, group in zip(tables, groups, strict=True)
            if group.positional
        )
        paired = []
        for group, table, start, own, ids, first in zip(
            groups, tables, starts, wanted, received.lists, firsts, strict=True
        ):
            if not group.positional:
                # Upstream pairs the last ones, which are the same only if both lists end at one token. A decode
                # worker may have one state more, for the token that it recomputes.
                if not ends_meet or len(own) > len(ids) + (group.kind == "mamba"):
                    raise wire.BadParams(f"{len(own)} blocks are wanted of {len(ids)} that have no positions")
                paired.append(ids[max(len(ids) - len(own), 0) :])
                continue
            if own and table[start].block_id != own[0]:
                raise wire.BadParams(f"what is missing in cache group {group.cache_group} has a hole")
            at, skipped, count = kvdelta.pair(first, len(ids), start, len(own))
            if own and (skipped or count != len(own)):
                raise wire.BadParams(
                    f"blocks {start} to {len(table)} of cache group {group.cache_group} are missing here, "
                    f"{first} to {first + len(ids)} are offered"
                )
            paired.append(ids[at : at + len(own)])
        return paired

    def reads(
        self, request: Request, received: Received, blocks: KVCacheBlocks, wanted: Sequence[Sequence[int]]
    ) -> None:
        """Settle an offer that is read into ``wanted``."""
        received.settled = received.reading = True
        received.since_ms = now_ms()
        received.blocks = sum(map(len, wanted))
        received.bytes = self._shared.bytes_of(map(len, wanted))
        if received.lease is not None and self._lease_check and received.blocks:
            self._shared.next.leases[request.request_id] = received.lease
        saved = self._shared.bytes_of(
            (
                max(len(blocks.blocks[group.cache_group]) - len(own), 0)
                for group, own in zip(self._shared.groups, wanted, strict=True)
            ),
            prefix_only=True,
        )
        self._count_used(received, saved)

    def done(self, request_id: str, *, failed: bool) -> None:
        """Count a load that ended."""
        received = self._received.get(request_id)
        if received is None or not received.reading:
            return
        received.reading = False
        if failed:
            received.report = self._report(
                received, received.head.first_block if received.head else 0, "expired", self._failed
            )
            self._count_stale(received.report)
            return
        self._shared.stats.count("blocks_read", received.blocks)
        self._shared.stats.count("bytes_read", received.bytes)
        if received.bytes:
            self._recovery.observe_transfer(received.bytes, float(now_ms() - received.since_ms))

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Forget a request that ended, and return what is answered of its offer."""
        if request.status == RequestStatus.FINISHED_ERROR:
            # vLLM ends a request whose load failed before it tells so.
            self.done(request.request_id, failed=True)
        received = self._received.pop(request.request_id, None)
        self._recomputing.pop(request.request_id, None)
        if received is None or received.report is None or not received.settled:
            return None
        return wire.write_stale_claim(received.report)

    def observe(self) -> None:
        """Learn from recomputed prompts how fast this worker computes."""
        for request_id, (request, held, since) in list(self._recomputing.items()):
            if request.num_computed_tokens >= request.num_prompt_tokens:
                del self._recomputing[request_id]
                self._recovery.observe_decode_prefill(request.num_prompt_tokens - held, float(now_ms() - since))
