# SPDX-License-Identifier: Apache-2.0
"""The scheduler halves: a prefill worker cuts and releases, a decode worker confirms, pairs or declines.

Upstream's half does the work; these look at its question or answer first or after.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

import kvdelta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from . import params as wire
from .metadata import KvdeltaConnectorMetadata, Lease, LeaseWord
from .stats import KvdeltaConnectorStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_REMEMBERED_OFFERS: Final = 8192
"""Offers that are known as used, since the blocks of one may be read once only."""

# Subclasses of these may keep other blocks than their base, so only the classes themselves are known.
_KINDS: Final[dict[type, kvdelta.GroupKind]] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    SlidingWindowMLASpec: "sliding_window",
    MambaSpec: "mamba",
}


def _kind(spec: KVCacheSpec) -> kvdelta.GroupKind:
    if type(spec) is UniformTypeKVCacheSpecs:
        kinds = {_kind(inner) for inner in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else "unknown"
    return _KINDS.get(type(spec), "unknown")


@dataclass(frozen=True)
class _Group:
    """A cache group that is transferred."""

    cache_group: int
    """Its index among all cache groups."""
    kind: kvdelta.GroupKind
    block_size: int
    bytes_per_block: int
    """Over all its layers and ranks."""

    @property
    def whole_prefix(self) -> bool:
        """Whether it keeps every block of the prompt."""
        return self.kind in ("full_attention", "mla")

    @property
    def positional(self) -> bool:
        """Whether its list of blocks ends where the computed tokens end."""
        return self.whole_prefix or self.kind == "sliding_window"


@dataclass
class _Received:
    """An offer that came with a decode request."""

    head: kvdelta.Offer | None
    """None: it is whole."""
    lists: list[list[int]]
    tokens: int | None
    """Tokens that the prefill worker computed."""
    lease: Lease | None
    firsts: list[int] | None
    """Index in the prompt of the first listed block of each group; None: not known."""
    declined: str | None = None
    """Why nothing of it is read."""
    answer: Literal["covered", "recompute", "ask_again"] | None = None
    """What was last said of it; a choice of how to recover is made once."""
    report: dict[str, Any] | None = None
    """What is answered when the request ends."""
    read_blocks: int = 0
    read_bytes: int = 0
    since_ms: int = 0
    settled: bool = False
    """Whether its blocks were allocated, so that this worker has relied on the offer or declined it."""
    pending: bool = False
    """Whether it is being read."""


@dataclass
class _Sent:
    """A request of which this prefill worker has to offer the blocks."""

    claim: kvdelta.Claim | None = None
    word: LeaseWord | None = None
    unstaged: bool = False
    """Whether skipped blocks were left out of the host buffer."""


@dataclass
class _Slots:
    """Lease words of this prefill worker."""

    tables: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    generation: int = field(default_factory=lambda: secrets.randbits(62) | 1)

    def take(self) -> LeaseWord | None:
        if not self.free:
            return None
        self.generation += 1
        return LeaseWord(self.free.pop(), self.generation)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class _Half:
    """What both modes share; stands before upstream's half in the classes below."""

    _lends: bool
    """Whether a decode worker reads, so that it has to learn whether the blocks were still leased."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        parallel = vllm_config.parallel_config
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._groups = [
            _Group(
                index,
                _kind(spec),
                spec.block_size,
                spec.page_size_bytes * ranks * (1 if type(spec) is UniformTypeKVCacheSpecs else len(group.layer_names)),
            )
            for index, group in zip(kv_cache_config.transfer_group_ids, kv_cache_config.transfer_groups, strict=True)
            for spec in [group.kv_cache_spec]
        ]
        self._main = next((group for group in self._groups if group.whole_prefix), None)
        # Each rank of a pipeline has other groups, and only the first would be planned for.
        self._cuts = parallel.pipeline_parallel_size == 1
        self._lease_check = self._lends and bool(extra("kvdelta_lease_check", True))  # noqa: FBT003
        self._recovery_kind = extra("kvdelta_recovery", "auto")
        if self._recovery_kind not in ("auto", "recompute", "ask_again"):
            raise ValueError(f"kvdelta_recovery is {self._recovery_kind!r}, not auto, recompute or ask_again")
        if vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute":
            # A request that fails would be computed here anyway, and later.
            self._recovery_kind = "recompute"
        self._recovery = kvdelta.Recovery()
        self._ledger = kvdelta.Ledger(1)
        self._manager: KVCacheManager | None = None
        self._stats = KvdeltaConnectorStats()
        self._sent: dict[str, _Sent] = {}
        self._leased: set[str] = set()
        self._released: set[str] = set()
        self._slots = _Slots()
        self._received: dict[str, _Received] = {}
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._recomputing: dict[str, tuple[Request, int, int]] = {}
        self._next = KvdeltaConnectorMetadata()

    # What the connector binds and asks.

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's block manager, of which a prefill worker releases blocks."""
        self._manager = manager

    def take_stats(self) -> KvdeltaConnectorStats | None:
        """Hand out what was counted since the last call."""
        return None if self._stats.is_empty() else self._stats.clone_and_reset()

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take the ranks' lease tables out of the payloads; what is served is upstream's."""
        tables = {rank: getattr(payload, "lease_table", None) for rank, payload in metadata.items()}
        if self._lease_check and tables and all(tables.values()):
            self._slots.tables = {rank: (table[0], table[1]) for rank, table in tables.items() if table}
            self._slots.free = list(range(min(table[2] for table in tables.values() if table)))
        names = [entry.name for entry in fields(NixlHandshakePayload)]
        super().set_xfer_handshake_metadata(
            {
                rank: NixlHandshakePayload(**{name: getattr(payload, name) for name in names})
                if isinstance(payload, NixlHandshakePayload)
                else payload
                for rank, payload in metadata.items()
            }
        )

    def on_new_request(self, request: Request) -> None:
        """Read and check what came with the request; what cannot be used is dropped."""
        params = request.kv_transfer_params
        if params is None:
            pass
        elif not isinstance(params, dict):
            self._drop(request, f"kv_transfer_params is {params!r:.80}, not a dict; computing all here")
        elif params.get("do_remote_decode"):
            self._on_new_prefill(request, params)
        elif wire.cut_offer(params) is not None or params.get("do_remote_prefill"):
            self._on_new_decode(request, params)
        super().on_new_request(request)

    def _drop(self, request: Request, why: str) -> None:
        logger.warning("kvdelta: request %s: %s", request.request_id, why)
        self._stats.count("offers", label="invalid")
        request.kv_transfer_params = None

    # Prefill worker.

    def _on_new_prefill(self, request: Request, params: dict[str, Any]) -> None:
        # Upstream would wait for blocks that only a decode worker of bidirectional transfer offers.
        params["remote_block_ids"] = None
        params["do_remote_prefill"] = False
        sent = self._sent[request.request_id] = _Sent()
        release = wire.release(params)
        if release in self._leased and release not in self._released:
            self._released.add(release)
            self._next.releases.add(release)
        value = wire.claim(params)
        if value is None:
            return
        try:
            # The router counted the whole prompt; upstream may cut its last tokens off.
            sent.claim = kvdelta.Claim(value, request.num_prompt_tokens)
        except kvdelta.BadClaim as error:
            logger.warning("kvdelta: request %s: %s", request.request_id, error)
            self._stats.count("claims", label="refused_invalid")
            return
        self._stats.count("claimed_blocks", sent.claim.cached_prefix_blocks)

    def _lend_word(self, request: Request) -> None:
        """Give a prefill request its lease word when it is first scheduled."""
        sent = self._sent.get(request.request_id)
        if sent is None or sent.word is not None:
            return
        sent.word = self._slots.take()
        if sent.word is not None:
            self._next.lease_words[request.request_id] = sent.word

    def _own_hash(self, request: Request, tokens: int) -> int | None:
        """Return this worker's hash of the first ``tokens`` tokens, as its KV events have it."""
        if self._manager is None:
            return None
        step = self._manager.block_pool.hash_block_size
        if tokens <= 0 or tokens % step or tokens // step > len(request.block_hashes):
            return None
        # Each hash is chained over its whole prefix, so it is the same for groups of larger blocks.
        own = maybe_convert_block_hash(request.block_hashes[tokens // step - 1])
        return own if isinstance(own, int) else None

    def _may_cut(self, request: Request) -> bool:
        # The prompt of a resumable request grows behind the claim.
        return self._cuts and not request.resumable and self._manager is not None

    def _computed(self, lists: list[list[int]], totals: list[int], tokens: int) -> list[list[int]]:
        """Leave out blocks that were allocated behind the computed tokens, which upstream lists of some groups."""
        behind = [
            total + tokens // -group.block_size if group.positional else 0
            for group, total in zip(self._groups, totals, strict=True)
        ]
        return [ids[: len(ids) - excess] if excess > 0 else ids for ids, excess in zip(lists, behind, strict=True)]

    def _plan(self, request: Request, claim: kvdelta.Claim, lists: list[list[int]], tokens: int) -> kvdelta.OfferPlan:
        assert self._manager is not None  # noqa: S101
        sizes = {group.block_size for group in self._groups if group.whole_prefix}
        own = claim.block_size if claim.block_size in sizes else (self._main.block_size if self._main else 1)
        return kvdelta.plan_offer(
            claim,
            block_size=own,
            prefix_caching=self._manager.enable_caching,
            own_hash=self._own_hash(request, claim.cached_prefix_blocks * claim.block_size),
            groups=[
                kvdelta.Group(
                    group.kind,
                    group.block_size,
                    max(-(tokens // -group.block_size) - len(ids), 0) if group.positional else 0,
                    len(ids),
                    group.bytes_per_block,
                )
                for group, ids in zip(self._groups, lists, strict=True)
            ],
        )

    def _cut(self, request: Request, sent: _Sent, block_ids: Any, answer: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
        """Cut the offer that upstream decided to lease, and release what is skipped."""
        request_id = request.request_id
        tokens = answer["remote_num_tokens"]
        lists = list(answer["remote_block_ids"])
        offered = sum(map(len, lists))
        lease = wire.lease_on_wire(sent.word, self._slots.tables) if sent.word else None
        plan = None
        if sent.claim is not None:
            totals = [len(block_ids[group.cache_group]) for group in self._groups]
            try:
                if self._may_cut(request):
                    lists = self._computed(lists, totals, tokens)
                    plan = self._plan(request, sent.claim, lists, tokens)
                    label = "skipped"
                else:
                    label = "refused_capability"
            except kvdelta.Refused as refused:
                logger.debug("kvdelta: request %s: %s", request_id, refused)
                label = f"refused_{refused.reason}"
            self._stats.count("claims", label=label)
        now = _now_ms()
        skipped = plan.skipped_blocks if plan else 0
        self._leased.add(request_id)
        self._ledger.open(request_id, skipped, offered - skipped, now, self._kv_lease_duration * 1000)
        self._stats.count("offered_blocks", offered - skipped)
        if plan is None:
            return {**answer, wire.LEASE_KEY: lease} if lease else answer
        self._stats.count("skipped_blocks", skipped)
        self._stats.count("skipped_bytes", plan.skipped_bytes)
        if self._ledger.release_skipped(request_id):
            self._release(request_id, plan.skip)
        cut = [ids[skip:] for ids, skip in zip(lists, plan.skip, strict=True)]
        self._on_cut(request_id, cut)
        head = kvdelta.Offer.cut(sent.claim, plan, sent.claim.block_size).head()
        return wire.write_cut_offer(head, answer, cut, lease)

    def _release(self, request_id: str, skip: list[int]) -> None:
        """Give skipped blocks back to the pool, where they stay in the prefix cache."""
        assert self._manager is not None  # noqa: S101
        pool = self._manager.block_pool
        for group, count in zip(self._groups, skip, strict=True):
            if not count:
                continue
            blocks = self._manager.coordinator.single_type_managers[group.cache_group].req_to_blocks[request_id]
            skipped = blocks[:count]
            # As upstream does for blocks that left a sliding window.
            blocks[:count] = [pool.null_block] * count
            pool.free_blocks(block for block in reversed(skipped) if not block.is_null)

    def _on_cut(self, request_id: str, cut: list[list[int]]) -> None:
        """Tell upstream's half of the shorter lists."""

    def _finish_prefill(self, request: Request, block_ids: Any, delay: bool, answer: Any) -> Any:  # noqa: ANN401, FBT001
        sent = self._sent.get(request.request_id)
        if sent is None:
            return answer
        if not delay or answer is None:
            self._forget_sent(request.request_id)
            # An abort is among these already; the worker half sets the word to 0.
            self._reqs_not_processed.add(request.request_id)
            return answer
        return self._cut(request, sent, block_ids, answer)

    def _forget_sent(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        self._leased.discard(request_id)
        self._released.discard(request_id)
        self._next.releases.discard(request_id)
        self._next.lease_words.pop(request_id, None)
        if sent is not None and sent.word is not None:
            self._slots.free.append(sent.word.slot)

    def _close(self, request_id: str) -> None:
        """Count an offer whose blocks vLLM is about to free."""
        ending: kvdelta.Ending = "release" if request_id in self._released else "notice"
        closed = self._ledger.close(request_id, ending, _now_ms())
        if closed is not None:
            self._stats.count("pinned_block_seconds", closed.pinned_block_ms / 1000)
            if ending == "release":
                self._stats.count("released_offers")
        self._forget_sent(request_id)

    # Decode worker.

    def _on_new_decode(self, request: Request, params: dict[str, Any]) -> None:
        cut = wire.cut_offer(params)
        own: Any = params
        if cut is not None:
            own = cut.get("params") if isinstance(cut, dict) else None
            if not isinstance(own, dict):
                self._drop(request, f"{kvdelta.OFFER_KEY} is {cut!r:.80}, which has no params; computing all here")
                return
            own = dict(own)
        try:
            wire.check_address(own)
            wire.check_rest(own)
        except wire.BadParams as error:
            # Nobody can be told.
            self._drop(request, str(error))
            return
        # Upstream heartbeats, notices and aborts by these from here on.
        own["do_remote_prefill"] = True
        own["do_remote_decode"] = False
        request.kv_transfer_params = own
        received = _Received(None, [], None, None, None)
        self._received[request.request_id] = received
        try:
            received.tokens = wire.remote_num_tokens(own)
            received.lists = wire.block_ids(own.get("remote_block_ids"), len(self._groups))
            received.lease = wire.read_lease(cut.get("lease") if cut is not None else own.pop(wire.LEASE_KEY, None))
            if cut is not None:
                received.head = kvdelta.Offer(cut)
                if self._main is None:
                    raise wire.BadParams(
                        "no cache group here keeps a prefix, and the offer was cut; computing all here"
                    )
            received.firsts = self._firsts(received)
            self._use(own)
        except (wire.BadParams, kvdelta.BadOffer) as error:
            received.declined = str(error)
            logger.warning("kvdelta: request %s: %s", request.request_id, error)
            self._stats.count("offers", label="invalid")
        # Lists that stay readable for upstream whatever came: they are set when the offer is settled.
        own["remote_block_ids"] = received.lists or [[] for _ in self._groups]

    def _use(self, own: Mapping[str, Any]) -> None:
        """Remember the offer; its blocks are gone after the first request that read them."""
        key = (own["remote_engine_id"], own["remote_request_id"])
        if key in self._used:
            raise wire.BadParams(f"the offer {key[1]!r:.80} was used before; computing all here")
        self._used[key] = None
        if len(self._used) > _REMEMBERED_OFFERS:
            self._used.popitem(last=False)

    def _firsts(self, received: _Received) -> list[int] | None:
        """Index in the prompt of each list's first block.

        None: the prefill worker's blocks have another size, or it does not say where they end.
        """
        tokens = received.tokens
        if received.head is not None:
            firsts = received.head.group_first_blocks
            if tokens is None or len(firsts) != len(self._groups):
                raise wire.BadParams(
                    f"the cut offer of claim {received.head.claim_id!r:.80} has {len(firsts)} groups and "
                    f"{tokens} tokens, here are {len(self._groups)} groups; computing all here"
                )
        else:
            firsts = None
            if tokens is None:
                return None
        found: list[int] = []
        for index, (group, ids) in enumerate(zip(self._groups, received.lists, strict=True)):
            if not group.positional or not ids:
                found.append(0)
                continue
            end = -(tokens // -group.block_size)
            if firsts is None:
                first = end - len(ids)
                if first < 0 or (group.whole_prefix and first > 0):
                    return None
            else:
                first = firsts[index]
                if first + len(ids) != end:
                    raise wire.BadParams(
                        f"group {index} of the cut offer lists {len(ids)} blocks from block {first}, and {tokens} "
                        f"tokens end at block {end}; computing all here"
                    )
            found.append(first)
        return found

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Look at the offer: upstream's answer, bounded by what the prefill worker computed, or nothing."""
        params = request.kv_transfer_params
        received = self._received.get(request.request_id)
        if received is None or not params or not params.get("do_remote_prefill"):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        count, load = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if received.declined is None:
            received.declined = self._unreadable(request, received, num_computed_tokens)
            if received.declined is not None:
                logger.warning("kvdelta: request %s: %s", request.request_id, received.declined)
                self._stats.count("offers", label="invalid")
        if received.declined is not None:
            return 0, False
        if request.skip_reading_prefix_cache:
            # vLLM ignores both what is cached and what is offered.
            return 0, False
        if received.tokens is not None:
            count = min(count, received.tokens - num_computed_tokens)
        if received.head is None:
            return (count, load) if count > 0 else (0, False)
        confirmation = self._confirm(request, received.head, num_computed_tokens)
        if confirmation.kind == "covered":
            received.answer, received.report = "covered", None
            return (count, load) if count > 0 else (0, False)
        if received.answer not in ("recompute", "ask_again"):
            received.answer = self._choose(request, received, num_computed_tokens) if count > 0 else "recompute"
        received.report = {
            "version": kvdelta.PROTOCOL_VERSION,
            "claim_id": received.head.claim_id,
            "decode_worker_id": received.head.decode_worker_id,
            "said_blocks": received.head.first_block,
            "had_blocks": confirmation.held_blocks,
            "reason": confirmation.kind,
            "recovered": received.answer,
        }
        return (count, True) if received.answer == "ask_again" else (0, False)

    def _unreadable(self, request: Request, received: _Received, held: int) -> str | None:
        """Say why upstream must not load a whole offer, where it would pair the wrong blocks or stop the engine."""
        prompt = self._get_remote_prefill_token_count(len(request.prompt_token_ids or []))
        if received.firsts is None:
            if held or any(
                -(min(prompt, received.tokens or prompt) // -group.block_size) > len(ids)
                for group, ids in zip(self._groups, received.lists, strict=True)
                if group.whole_prefix
            ):
                return f"blocks of another size, and {held} tokens are cached here; computing all here"
            return None
        longer = received.tokens is not None and received.tokens > prompt
        if longer and not all(group.whole_prefix for group in self._groups):
            return f"{received.tokens} tokens were prefilled of a prompt of {prompt}; computing all here"
        return None

    def _confirm(self, request: Request, head: kvdelta.Offer, held_tokens: int) -> kvdelta.Confirmation:
        sizes = {group.block_size for group in self._groups if group.whole_prefix}
        size = head.block_size if head.block_size in sizes else (self._main.block_size if self._main else 1)
        own = self._own_hash(request, head.first_block * head.block_size)
        return kvdelta.confirm(head, block_size=size, held_tokens=held_tokens, own_hash=own)

    def _choose(self, request: Request, received: _Received, held: int) -> Literal["recompute", "ask_again"]:
        if self._recovery_kind != "auto":
            return self._recovery_kind  # type: ignore[no-any-return]
        assert received.head is not None  # noqa: S101
        prompt = len(request.prompt_token_ids or [])
        return self._recovery.choose(
            missing_tokens=prompt - held,
            context_tokens=prompt,
            offered_bytes=sum(
                len(ids) * group.bytes_per_block for ids, group in zip(received.lists, self._groups, strict=True)
            ),
            skipped_bytes=sum(
                received.head.first_block * received.head.block_size // group.block_size * group.bytes_per_block
                for group in self._groups
                if group.whole_prefix
            ),
            now_ms=_now_ms(),
        )

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Settle the offer by what is held now: read it paired by position, or tell the prefill worker."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            self._lend_word(request)
        received = self._received.get(request.request_id)
        if received is None or not params or not params.get("do_remote_prefill"):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        received.settled = True
        received.since_ms = _now_ms()
        if num_external_tokens <= 0:
            self._tell(request, blocks)
            self._count_unread(request, received)
            return
        if received.answer == "ask_again":
            self._tell(request, blocks)
            self._fail(request, received)
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params["do_remote_prefill"] = False
        local = self._wanted(request.request_id)
        try:
            self._read(request, received, self._paired(request, received, blocks, local))
        except wire.BadParams as error:
            logger.warning("kvdelta: request %s: %s; the request fails", request.request_id, error)
            self._unwant(request)
            self._tell(request, blocks)
            received.report = received.report or self._expired(received)
            self._fail(request, received)
            return
        if received.lease is not None and self._lease_check and any(local):
            self._next.leases[request.request_id] = received.lease
        received.pending = True
        received.read_blocks = sum(map(len, local))
        received.read_bytes = sum(
            len(ids) * group.bytes_per_block for ids, group in zip(local, self._groups, strict=True)
        )
        held = sum(
            (len(blocks.blocks[group.cache_group]) - len(ids)) * group.bytes_per_block
            for ids, group in zip(local, self._groups, strict=True)
            if group.whole_prefix
        )
        self._stats.count("offers", label="confirmed")
        self._stats.count("bytes_saved", held)
        if received.head is not None:
            self._recovery.confirmed(received.since_ms)

    def _count_unread(self, request: Request, received: _Received) -> None:
        """Count an offer of which nothing is read."""
        if received.declined is not None:
            return
        if received.report is None:
            if request.skip_reading_prefix_cache:
                return
            self._stats.count("offers", label="confirmed")
            self._stats.count("full_hits")
            return
        received.report["recovered"] = "recompute"
        self._count_stale(received)
        assert received.head is not None  # noqa: S101
        held = received.report["had_blocks"] * received.head.block_size
        self._recomputing[request.request_id] = (request, held, received.since_ms)

    def _count_stale(self, received: _Received) -> None:
        report = received.report
        assert report is not None  # noqa: S101
        if report["reason"] in ("stale", "content"):
            self._stats.count("offers", label=report["reason"])
            self._stats.count("stale_blocks", report["said_blocks"] - report["had_blocks"])
        self._stats.count("recoveries", label=report["recovered"])

    def _fail(self, request: Request, received: _Received) -> None:
        """Let the worker half report the parked request as failed."""
        self._next.fail_now.add(request.request_id)
        self._count_stale(received)

    def _expired(self, received: _Received) -> dict[str, Any]:
        policy = self.vllm_config.kv_transfer_config.kv_load_failure_policy
        head = received.head
        return {
            "version": kvdelta.PROTOCOL_VERSION,
            "claim_id": head.claim_id if head else "",
            "said_blocks": head.first_block if head else 0,
            "had_blocks": head.first_block if head else 0,
            "reason": "expired",
            "recovered": "recompute" if policy == "recompute" else "failed",
        }

    def _paired(
        self, request: Request, received: _Received, blocks: KVCacheBlocks, local: list[list[int]]
    ) -> list[list[int]]:
        """Return the prefill worker's blocks for ``local``, position by position; raises where one is not offered."""
        firsts = received.firsts
        if firsts is None:
            if any(
                len(ids) < len(blocks.blocks[group.cache_group])
                for ids, group in zip(local, self._groups, strict=True)
                if group.whole_prefix
            ):
                raise wire.BadParams("blocks of another size, and some are cached here")
            return received.lists
        if not all(group.positional for group in self._groups):
            self._check_ends(received, blocks)
        paired: list[list[int]] = []
        held_tokens: int | None = None
        for group, own, ids, first in zip(self._groups, local, received.lists, firsts, strict=True):
            if not group.positional:
                # States: upstream pairs them by their place, and the last ones where they are fewer.
                if len(own) > len(ids) + (group.kind == "mamba"):
                    raise wire.BadParams(f"{len(own)} states are wanted and {len(ids)} offered")
                paired.append(ids[len(ids) - len(own) :] if 0 <= len(own) < len(ids) else ids)
                continue
            table = blocks.blocks[group.cache_group]
            start = len(table) - len(own)
            if own and table[start].block_id != own[0]:
                raise wire.BadParams(f"the blocks to load in cache group {group.cache_group} have a hole")
            if group.whole_prefix:
                held = start * group.block_size
                held_tokens = held if held_tokens is None else min(held, held_tokens)
            at, skipped, count = kvdelta.pair(first, len(ids), start, len(own))
            if own and (skipped or count != len(own)):
                raise wire.BadParams(
                    f"blocks [{start}, {len(table)}) are missing here and [{first}, {first + len(ids)}) are offered"
                )
            paired.append(ids[at : at + len(own)])
        if received.head is not None and held_tokens is not None:
            confirmation = self._confirm(request, received.head, held_tokens)
            if confirmation.kind != "covered":
                raise wire.BadParams(f"{held_tokens} tokens are held of a claim of {received.head.first_block} blocks")
        return paired

    def _check_ends(self, received: _Received, blocks: KVCacheBlocks) -> None:
        """Groups without positions can only be paired where both workers end at the same block."""
        tokens = received.tokens or 0
        if any(
            len(blocks.blocks[group.cache_group]) != -(tokens // -group.block_size)
            for group in self._groups
            if group.positional
        ):
            raise wire.BadParams(f"{tokens} tokens are offered, another number is loaded")

    def _finish_decode(self, request: Request, received: _Received, answer: Any) -> Any:  # noqa: ANN401
        if received.pending and request.status == RequestStatus.FINISHED_ERROR:
            # vLLM ends a request whose read failed before it tells us so.
            self._count_failed(received)
        if received.report is not None and received.settled:
            return wire.write_stale_claim(received.report)
        return answer

    def _count_failed(self, received: _Received) -> None:
        received.pending = False
        if received.report is None:
            received.report = self._expired(received)
            self._count_stale(received)

    # Both.

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """Let upstream decide, then cut its offer or add what happened to ours."""
        request_id = request.request_id
        received = self._received.pop(request_id, None)
        self._recomputing.pop(request_id, None)
        delay, answer = super().request_finished(request, block_ids)
        if received is not None:
            return delay, self._finish_decode(request, received, answer)
        return delay, self._finish_prefill(request, block_ids, delay, answer)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Close what was sent, and count what was read."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self._close(request_id)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            received = self._received.get(request_id)
            if received is None or not received.pending:
                continue
            if request_id in failed:
                self._count_failed(received)
                continue
            received.pending = False
            self._stats.count("blocks_read", received.read_blocks)
            self._stats.count("bytes_read", received.read_bytes)
            if received.read_bytes:
                self._recovery.observe_transfer(received.read_bytes, float(_now_ms() - received.since_ms))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvdeltaConnectorMetadata:
        """Add to upstream's metadata what only our worker half reads."""
        for request_id, (request, held, since) in list(self._recomputing.items()):
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self._recovery.observe_decode_prefill(request.num_prompt_tokens - held, float(_now_ms() - since))
                del self._recomputing[request_id]
        meta, self._next = self._next, KvdeltaConnectorMetadata()
        vars(meta).update(vars(super().build_connector_meta(scheduler_output)))
        return meta


class KvdeltaPullScheduler(_Half, NixlPullConnectorScheduler):
    """The scheduler half of the pull connector."""

    _lends = True

    def _tell(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Let the worker half tell the prefill worker that nothing is read."""
        request.kv_transfer_params["remote_block_ids"] = [[] for _ in self._groups]
        NixlPullConnectorScheduler.update_state_after_alloc(self, request, blocks, 0)
        self._stop_heartbeat(request.request_id)

    def _wanted(self, request_id: str) -> list[list[int]]:
        """Blocks that upstream wants to load, by group."""
        return list(self._reqs_need_recv[request_id][1])

    def _unwant(self, request: Request) -> None:
        """Take back that they are loaded."""
        del self._reqs_need_recv[request.request_id]
        request.kv_transfer_params["do_remote_prefill"] = True

    def _read(self, request: Request, received: _Received, paired: list[list[int]]) -> None:
        """Let the worker half load them from ``paired``."""
        request.kv_transfer_params["remote_block_ids"] = paired
        if received.firsts is not None:
            # Upstream would count positions in the whole list by it.
            request.kv_transfer_params["remote_num_tokens"] = None


class KvdeltaPushScheduler(_Half, NixlPushConnectorScheduler):
    """The scheduler half of the push connector."""

    _lends = False

    def _on_cut(self, request_id: str, cut: list[list[int]]) -> None:
        blocks = tuple(cut)
        self._finished_request_blocks[request_id] = blocks
        self._newly_finished_push_blocks[request_id] = blocks

    def _tell(self, request: Request, blocks: KVCacheBlocks) -> None:  # noqa: ARG002
        """Let the worker half tell the prefill worker that nothing is needed; upstream's would not."""
        params = request.kv_transfer_params
        self._next.add_notice(request.request_id, params)
        params["do_remote_prefill"] = False
        self._stop_heartbeat(request.request_id)

    def _wanted(self, request_id: str) -> list[list[int]]:
        """Blocks that upstream registers to be written, by group."""
        return list(self._push_pending_registrations[request_id]["local_block_ids"])

    def _unwant(self, request: Request) -> None:
        """Take back that they are registered."""
        request_id = request.request_id
        del self._push_pending_registrations[request_id]
        self._push_registration_deadlines.pop(request_id, None)
        self._reqs_need_recv.pop(request_id, None)
        request.kv_transfer_params["do_remote_prefill"] = True

    def _read(self, request: Request, received: _Received, paired: list[list[int]]) -> None:  # noqa: ARG002
        """Check that the prefill worker, which pairs from the end, writes what was paired."""
        for ids, blocks in zip(received.lists, paired, strict=True):
            if received.firsts is not None and blocks and ids[-1] != blocks[-1]:
                raise wire.BadParams("the prefill worker has more blocks than are wanted here")

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """As the pull half, and tell the prefill worker of a request that ends before it is scheduled."""
        params = request.kv_transfer_params
        unscheduled = request.request_id in self._received and params and params.get("do_remote_prefill")
        answer = super().request_finished(request, block_ids)
        if unscheduled and self._reqs_need_recv.pop(request.request_id, None) is not None:
            # Upstream's worker half would wait for it.
            self._next.add_notice(request.request_id, params)
        return answer
