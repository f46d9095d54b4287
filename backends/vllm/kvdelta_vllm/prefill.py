# SPDX-License-Identifier: Apache-2.0
"""A prefill worker's side: claims, cut offers, what is released at once, lease words."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvdelta
from vllm.logger import init_logger

from . import params as wire
from .metadata import LeaseWord
from .shared import blocks_of, now_ms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.request import Request

    from .metadata import KvdeltaConnectorMetadata
    from .shared import Shared

logger = init_logger(__name__)


@dataclass
class _Sent:
    """A request whose blocks this worker will offer, or offers."""

    claim: kvdelta.Claim | None = None
    word: LeaseWord | None = None
    leased: bool = False
    taken_back: bool = False
    unstaged: set[int] = field(default_factory=set)
    """Blocks that were not copied to the host buffer."""


@dataclass(frozen=True)
class Finished:
    """What becomes of a request that upstream finished."""

    answer: dict[str, Any] | None
    lists: Sequence[list[int]] | None = None
    """The lists of a cut offer; None: the offer is upstream's."""
    free_now: bool = False
    """Whether nothing may be offered after all."""


class Prefill:
    """The requests that a prefill worker has to offer."""

    def __init__(self, shared: Shared, *, cuts: bool, lease_ms: int) -> None:
        self._shared = shared
        self._cuts = cuts
        self._lease_ms = lease_ms
        self._sent: dict[str, _Sent] = {}
        self._ledger = kvdelta.Ledger(1)
        self._tables: dict[tuple[int, int], tuple[int, int]] = {}
        self._free_slots: list[int] = []
        # Generations of another process of this worker must not be met again.
        self._generation = secrets.randbits(62) | 1

    def __len__(self) -> int:
        return len(self._sent)

    def set_tables(self, tables: Mapping[tuple[int, int], tuple[int, int, int]]) -> None:
        """Take the lease tables of all ranks: address, device and number of words."""
        self._tables = {rank: (address, device) for rank, (address, device, _) in tables.items()}
        self._free_slots = list(range(min(words for _, _, words in tables.values())))

    def stop_cutting(self, why: str) -> None:
        """Offer everything from here on."""
        logger.warning("kvdelta: nothing is skipped for claims: %s", why)
        self._cuts = False

    def on_new(self, request: Request, params: dict[str, Any]) -> None:
        """Read what came with a prefill request."""
        # Upstream would load, or wait for blocks that only a decode worker of bidirectional transfer offers.
        params["remote_block_ids"] = None
        params["do_remote_prefill"] = False
        sent = self._sent[request.request_id] = _Sent()
        self._take_back(wire.release(params))
        value = wire.claim(params)
        if value is None:
            return
        try:
            # The router counted the whole prompt; upstream may cut its last tokens off.
            sent.claim = kvdelta.Claim(value, request.num_prompt_tokens)
        except kvdelta.BadClaim as error:
            logger.warning("kvdelta: request %s: %s", request.request_id, error)
            self._shared.stats.count("claims", label="refused_invalid")
            return
        self._shared.stats.count("claimed_blocks", sent.claim.cached_prefix_blocks)

    def _take_back(self, request_id: str | None) -> None:
        sent = self._sent.get(request_id) if request_id is not None else None
        if request_id is not None and sent is not None and sent.leased and not sent.taken_back:
            sent.taken_back = True
            self._shared.next.releases.add(request_id)

    def lend_word(self, request_id: str) -> None:
        """Give a request its lease word when it is first scheduled."""
        sent = self._sent.get(request_id)
        if sent is None or sent.word is not None or not self._free_slots:
            return
        self._generation += 1
        sent.word = LeaseWord(self._free_slots.pop(), self._generation)
        self._shared.next.lease_words[request_id] = sent.word

    def finish(self, request: Request, block_ids: Sequence[list[int]], answer: dict[str, Any] | None) -> Finished:
        """Cut the offer of ``answer`` if a claim allows it; None: upstream frees the blocks at once."""
        sent = self._sent.get(request.request_id)
        if sent is None:
            return Finished(answer)
        if answer is None:
            self.forget(request.request_id)
            return Finished(None)
        plan, lists = self._plan_by_claim(request, sent, block_ids, answer)
        if sent.unstaged and plan is None:
            # Cannot happen: the same was planned when they were left out.
            logger.error("kvdelta: request %s: blocks were not staged, nothing is offered", request.request_id)
            self.forget(request.request_id)
            return Finished(None, free_now=True)
        skipped = plan.skipped_blocks if plan else 0
        offered = sum(map(len, lists)) - skipped
        sent.leased = True
        self._ledger.open(request.request_id, skipped, offered, now_ms(), self._lease_ms)
        self._shared.stats.count("offered_blocks", offered)
        lease = wire.lease_on_wire(sent.word, self._tables) if sent.word else None
        if plan is None or sent.claim is None:
            return Finished({**answer, wire.LEASE_KEY: lease} if lease else answer)
        self._shared.stats.count("skipped_blocks", skipped)
        self._shared.stats.count("skipped_bytes", plan.skipped_bytes)
        if self._ledger.release_skipped(request.request_id):
            self._release(request.request_id, plan.skip)
        cut = [ids[skip:] for ids, skip in zip(lists, plan.skip, strict=True)]
        head = kvdelta.Offer.cut(sent.claim, plan, sent.claim.block_size).head()
        return Finished(wire.write_cut_offer(head, answer, cut, lease), cut)

    def _plan_by_claim(
        self, request: Request, sent: _Sent, block_ids: Sequence[list[int]], answer: dict[str, Any]
    ) -> tuple[kvdelta.OfferPlan | None, list[list[int]]]:
        lists: list[list[int]] = list(answer["remote_block_ids"])
        if sent.claim is None:
            return None, lists
        tokens: int = answer["remote_num_tokens"]
        computed = []
        for group, ids in zip(self._shared.groups, lists, strict=True):
            # Of some groups upstream lists blocks that were allocated behind the computed tokens.
            behind = len(block_ids[group.cache_group]) - blocks_of(tokens, group.block_size) if group.positional else 0
            computed.append(ids[: len(ids) - behind] if behind > 0 else ids)
        try:
            plan = self._plan(request, sent.claim, [len(ids) for ids in computed], tokens)
        except kvdelta.Refused as refused:
            logger.debug("kvdelta: request %s: %s", request.request_id, refused)
            self._shared.stats.count("claims", label=f"refused_{refused.reason}")
            return None, lists
        label = "skipped" if plan else "refused_capability"
        self._shared.stats.count("claims", label=label)
        return plan, computed if plan else lists

    def _plan(self, request: Request, claim: kvdelta.Claim, counts: list[int], tokens: int) -> kvdelta.OfferPlan | None:
        """Plan what is skipped of lists of so many blocks; None: this worker never skips of this request."""
        manager = self._shared.manager
        # The prompt of a resumable request grows behind the claim.
        if not self._cuts or manager is None or request.resumable:
            return None
        return kvdelta.plan_offer(
            claim,
            block_size=self._shared.hashed_block_size(claim.block_size) or claim.block_size,
            prefix_caching=manager.enable_caching,
            own_hash=self._shared.own_hash(request, claim.cached_prefix_blocks * claim.block_size),
            groups=[
                kvdelta.Group(
                    group.kind,
                    group.block_size,
                    max(blocks_of(tokens, group.block_size) - count, 0) if group.positional else 0,
                    count,
                    group.bytes_per_block,
                )
                for group, count in zip(self._shared.groups, counts, strict=True)
            ],
        )

    def _release(self, request_id: str, skip: list[int]) -> None:
        """Give skipped blocks back to the pool, where they stay in the prefix cache."""
        manager = self._shared.manager
        if manager is None:
            return
        pool = manager.block_pool
        for group, count in zip(self._shared.groups, skip, strict=True):
            if not count:
                continue
            blocks = manager.coordinator.single_type_managers[group.cache_group].req_to_blocks[request_id]
            skipped = blocks[:count]
            # As upstream does for blocks that left a sliding window.
            blocks[:count] = [pool.null_block] * count
            pool.free_blocks(reversed(skipped))

    def leave_unstaged(self, meta: KvdeltaConnectorMetadata, requests: Mapping[str, Request]) -> None:
        """Take what will be skipped out of the copies to the host buffer that upstream asks for."""
        manager = self._shared.manager
        for request_id, entry in meta.reqs_to_save.items():
            sent, request = self._sent.get(request_id), requests.get(request_id)
            if sent is None or sent.claim is None or request is None or manager is None:
                continue
            # What is offered in the end is no less, so that no less is skipped then.
            tokens = request.num_prompt_tokens
            counts = [blocks_of(tokens, group.block_size) for group in self._shared.groups]
            try:
                plan = self._plan(request, sent.claim, counts, tokens)
            except kvdelta.Refused:
                continue
            if plan is None:
                continue
            managers = manager.coordinator.single_type_managers
            kept = []
            for group, count, ids in zip(self._shared.groups, plan.skip, entry.local_block_ids, strict=True):
                table = managers[group.cache_group].req_to_blocks[request_id]
                skipped = {block.block_id for block in table[:count]}
                sent.unstaged |= skipped.intersection(ids)
                kept.append([block for block in ids if block not in skipped])
            entry.local_block_ids = entry.local_physical_block_ids = tuple(kept)

    def close(self, request_id: str) -> None:
        """Count an offer whose blocks vLLM is about to free."""
        sent = self._sent.get(request_id)
        taken_back = sent is not None and sent.taken_back
        closed = self._ledger.close(request_id, "release" if taken_back else "notice", now_ms())
        if closed is not None:
            self._shared.stats.count("pinned_block_seconds", closed.pinned_block_ms / 1000)
            if taken_back:
                self._shared.stats.count("released_offers")
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that is not offered, or not any more; its word is 0, or will be before a next one's."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        self._shared.next.releases.discard(request_id)
        self._shared.next.lease_words.pop(request_id, None)
        if sent.word is not None:
            self._free_slots.append(sent.word.slot)
