# SPDX-License-Identifier: Apache-2.0
"""The worker halves: lease words, early release, and reads and registrations whose failure stays with their request.

What upstream's workers do is left to them; see :mod:`kvdelta_vllm.lease` for the check that is added to a read.
"""

import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX, ReqId, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from kvdelta_vllm.lease import (
    LANDING_WORDS,
    LEASE_WORDS,
    WORD_BYTES,
    Landing,
    LeaseCheck,
    LeaseWords,
    WordRead,
    WordTable,
)
from kvdelta_vllm.metadata import KvdeltaConnectorMetadata, KvdeltaHandshakePayload, Lease
from kvdelta_vllm.notices import MAX_RANKS, CheckedAgent, bad_registration, bad_remote
from kvdelta_vllm.stats import KvdeltaConnectorStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

LEASE_CHECK_SECONDS = 20.0
"""How long the read of a lease word may take; then the request fails. A read of 8 bytes takes milliseconds."""
MAX_WAITING_REGISTRATIONS = 4_096
"""Registrations of decode workers that wait for their prompt (push mode); beyond these the oldest is dropped."""
_ALL_GROUPS = -1


class BadBlocksError(ValueError):
    """Block ids from another process that cannot be what they say."""


class _KvdeltaWorker(NixlBaseConnectorWorker):
    """What both directions share: lease words, early release, checked notices."""

    nixl_wrapper: Any
    xfer_handshake_metadata: Any

    def __init__(self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = KvdeltaConnectorStats()
        self.nixl_wrapper = CheckedAgent(self.nixl_wrapper, self._can_be_count)
        self._lease_words: LeaseWords | None = None
        if self.kv_transfer_config.get_from_extra_config("kvdelta_lease_check", True):  # noqa: FBT003
            self._lease_words = LeaseWords(WordTable(LEASE_WORDS))
        self._released: set[ReqId] = set()

    # Upstream's hooks.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Register the lease words, then the caches: what upstream publishes covers both."""
        if self._lease_words is not None:
            self._register_words(self._lease_words.table)
        super().register_kv_caches(kv_caches)
        payload = self.xfer_handshake_metadata
        table = None if self._lease_words is None else self._lease_words.table
        self.xfer_handshake_metadata = KvdeltaHandshakePayload(
            compatibility_hash=payload.compatibility_hash,
            agent_metadata_bytes=payload.agent_metadata_bytes,
            lease_table=None if table is None else (table.address, 0, len(table)),
            alone=not has_kv_transfer_group() or getattr(get_kv_transfer_group(), "connector_worker", None) is self,
        )

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """As upstream; the words of what is reported as sent are cleared before anyone may free its blocks."""
        results = super().get_transfer_results()
        if self._lease_words is not None:
            for req_id in results.finished_sending:
                self._lease_words.let_go(req_id)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As upstream; with several cache groups ids alone say nothing, and vLLM ends the engine over them."""
        blocks: set[int] = super().get_block_ids_with_load_errors()
        return blocks if len(self.kv_cache_config.kv_cache_groups) == 1 else set()

    def shutdown(self) -> None:
        """Clear the words, then as upstream."""
        # Nothing is there yet where the constructor failed.
        if (words := getattr(self, "_lease_words", None)) is not None:
            words.let_go_of_all()
        super().shutdown()

    def _get_new_notifs(self) -> set[str]:
        done: set[str] = super()._get_new_notifs()
        done |= self._released
        self._released.clear()
        return done

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = len(done_sending)
        super()._reap_expired_send_leases(done_sending)
        if expired := len(done_sending) - before:
            self.xfer_stats.count("leases_expired", expired)

    # Ours.

    def _register_words(self, table: WordTable) -> None:
        self._registered_descs.append(table.register(self.nixl_wrapper, self.nixl_backends))

    def _can_be_count(self, count: int) -> bool:
        """Whether a completion notice may carry this number of readers (pull) or ranks (push)."""
        return 1 <= count <= MAX_RANKS

    def _begin_step(self, metadata: KvdeltaConnectorMetadata) -> None:
        if self._lease_words is None:
            return
        for req_id in metadata.reqs_not_processed:
            self._lease_words.let_go(req_id)
        for req_id, word in metadata.lease_words.items():
            self._lease_words.hold(req_id, word)

    def _end_step(self, metadata: KvdeltaConnectorMetadata) -> None:
        for req_id in metadata.releases:
            # Only what is finished, still leased and not being written: each rank reports it once, however it ends.
            if req_id not in self._reqs_to_send or self._is_being_sent(req_id):
                continue
            del self._reqs_to_send[req_id]
            self._reqs_to_process.discard(req_id)
            self.consumer_notification_counts_by_req.pop(req_id, None)
            self.expected_consumer_notifications_by_req.pop(req_id, None)
            self._released.add(req_id)

    def _is_being_sent(self, req_id: ReqId) -> bool:  # noqa: ARG002
        return False

    def _fail_recv(self, req_id: ReqId, meta: ReqMeta | None = None) -> None:
        """Report a parked request as failed with this step's results, or once its transfers are over."""
        if req_id not in self._recving_metadata:
            blocks: BlockIds = meta.local_block_ids if meta is not None and meta.local_block_ids else ([],)
            self._recving_metadata[req_id] = ReqMeta(local_block_ids=blocks, local_physical_block_ids=blocks, tp_size=1)
        elif not self._recving_metadata[req_id].local_block_ids:
            # Upstream looks at the first group of what failed.
            self._recving_metadata[req_id].local_block_ids = ([],)
        self._recv_failures.add(req_id)

    def _notify(self, agent: str, notice: bytes, req_id: ReqId) -> None:
        try:
            self.nixl_wrapper.send_notif(agent, notif_msg=notice)
        except Exception as error:  # noqa: BLE001
            self._log_failure(
                failure_type="notification_failed",
                msg="P worker blocks will be freed after timeout.",
                req_id=req_id,
                error=error,
                remote_agent_name=agent,
            )
            self.xfer_stats.record_failed_notification()

    def _check_block_ids(self, engine_id: str, block_ids: BlockIds) -> None:
        """Refuse block ids that the other engine does not have: behind its pool begin other layers' blocks."""
        assert self.transfer_topo is not None  # noqa: S101
        ratio = self.transfer_topo.get_engine_info(engine_id).remote_physical_blocks_per_logical
        counts = self.dst_region_num_blocks.get(engine_id) or [self.dst_num_blocks[engine_id]]
        groups_of_regions = self.dst_region_group_ids.get(engine_id) or []
        by_group = self.dst_uses_region_group_mapping.get(engine_id, False)
        for group, ids in enumerate(block_ids):
            if len(ids) == 0:
                continue
            array = np.asarray(ids)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise BadBlocksError(f"block ids of group {group} are not numbers")
            blocks = min(
                count
                for region, count in enumerate(counts)
                if not by_group or groups_of_regions[region] in (group, _ALL_GROUPS)
            )
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= blocks // ratio:
                known = f"the {blocks // ratio} blocks of {engine_id}"
                raise BadBlocksError(f"block ids {low} to {high} of group {group} are not among {known}")


class KvdeltaPullWorker(_KvdeltaWorker, NixlPullConnectorWorker):
    """Upstream's pull worker (READ); as decode worker it checks the lease of what it has read."""

    def __init__(self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.clock = time.perf_counter
        self.lease_check_seconds = float(
            self.kv_transfer_config.get_from_extra_config("kvdelta_lease_check_seconds", LEASE_CHECK_SECONDS)
        )
        self._landing = Landing(WordTable(LANDING_WORDS))
        self._leases: dict[ReqId, Lease] = {}
        self._checks: dict[ReqId, LeaseCheck] = {}
        # Reads given up; their words may still be written.
        self._abandoned: list[WordRead] = []

    # Upstream's hooks.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Register also the words into which lease words are read."""
        self._register_words(self._landing.table)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, metadata: KvdeltaConnectorMetadata) -> None:
        """Start reads as upstream, with what cannot be read taken out."""
        self._begin_step(metadata)
        self._leases.update(metadata.leases)
        for req_id, meta in list(metadata.reqs_to_recv.items()):
            if req_id in metadata.fail_now:
                # Tells the prefill worker; what happens to the request is decided below.
                meta.local_block_ids, meta.awaiting_kvs = (), False
            if (reason := bad_remote(meta)) is not None:
                del metadata.reqs_to_recv[req_id]
                self._contain(req_id, meta, BadBlocksError(reason))
        super().start_load_kv(metadata)
        for req_id in metadata.fail_now:
            self._fail_recv(req_id)
        self._end_step(metadata)

    def shutdown(self) -> None:
        """Release the reads of lease words, then as upstream."""
        # Nothing is there yet where the constructor failed.
        reads = [read for check in getattr(self, "_checks", {}).values() for read in check.reads.values()]
        for read in [*reads, *getattr(self, "_abandoned", [])]:
            with contextlib.suppress(Exception):
                self.nixl_wrapper.release_xfer_handle(read.handle)
        self._checks, self._abandoned = {}, []
        super().shutdown()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """As upstream."""
        results = super().get_transfer_results()
        for req_id in results.failed_recving:
            self._leases.pop(req_id, None)
        return results

    def _background_nixl_handshake(self, req_id: str, remote_engine_id: str, meta: ReqMeta) -> None:
        try:
            super()._background_nixl_handshake(req_id, remote_engine_id, meta)
        except Exception as error:  # noqa: BLE001
            self._contain(req_id, meta, error)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if meta.remote.engine_id not in self._remote_agents:
            # vLLM 0.32 shakes hands from here, and comes back.
            super()._read_blocks_for_req(req_id, meta)
            return
        lease = self._leases.pop(req_id, None)
        reads = any(len(group) > 0 for group in meta.local_block_ids)
        remote = meta.remote
        name = remote.request_id
        try:
            if reads:
                self._check_read(meta)
            if reads and lease is not None:
                self._checks[req_id] = self._new_check(lease, meta)
                # A notice that upstream's prefill worker takes for a heartbeat: the blocks are not free yet.
                remote.request_id = f"HB:{name},"
            super()._read_blocks_for_req(req_id, meta)
            if req_id not in self._checks and req_id not in self._recv_failures and not self.use_mla:
                self._notify_unread(remote.engine_id, self._notice(name, remote.engine_id), req_id)
        except Exception as error:  # noqa: BLE001
            if reads and req_id not in self._checks and not self._recving_transfers.get(req_id):
                self._tell(remote.engine_id, name, req_id)
            self._contain(req_id, meta, error)
        finally:
            remote.request_id = name

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is self._recving_transfers:
            self._advance_checks(done, failed)
        return done, failed

    def _engines_with_inflight_transfers(self) -> set[str]:
        busy: set[str] = super()._engines_with_inflight_transfers()
        return busy | {check.engine_id for check in self._checks.values()}

    # One request's failure.

    def _contain(self, req_id: ReqId, meta: ReqMeta, error: Exception) -> None:
        """Let an error end its request and nothing else."""
        self._leases.pop(req_id, None)
        self._log_failure(failure_type="read_refused", req_id=req_id, error=error)
        self.xfer_stats.record_failed_transfer()
        if meta.awaiting_kvs or any(len(group) > 0 for group in meta.local_block_ids):
            self._fail_recv(req_id, meta)
        else:
            # Nobody waits for it, so it must not be reported.
            self._recving_transfers.pop(req_id, None)

    def _check_read(self, meta: ReqMeta) -> None:
        """Refuse what upstream would assert on, or read from a wrong place."""
        remote = meta.remote
        local_groups = self.region_group_ids or self.dst_region_group_ids[remote.engine_id]
        if local_groups == self.dst_region_group_ids[remote.engine_id]:
            groups = len(self.kv_cache_config.transfer_groups)
            if len(remote.block_ids) != groups or len(meta.local_block_ids) != groups:
                raise BadBlocksError(f"block ids of {len(remote.block_ids)} cache groups instead of {groups}")
            # Upstream's slice of the last 0 blocks is the whole list.
            remote.block_ids = [
                list(blocks) if len(own) > 0 else []
                for own, blocks in zip(meta.local_block_ids, remote.block_ids, strict=True)
            ]
        self._check_block_ids(remote.engine_id, remote.block_ids)

    def _notice(self, remote_request_id: str, engine_id: str) -> bytes:
        return f"{remote_request_id}:{self.tp_mappings[engine_id].local_consumers}".encode()

    def _notify_unread(self, engine_id: str, notice: bytes, req_id: ReqId) -> None:
        """Tell ranks that hold the same heads as one that is read: they wait for a notice as well."""
        read = {(0, rank) for rank in self.tp_mappings[engine_id].all_source_ranks}
        for rank, agent in self._remote_agents[engine_id].items():
            if rank not in read:
                self._notify(agent, notice, req_id)

    def _tell(self, engine_id: str, remote_request_id: str, req_id: ReqId) -> None:
        """Tell every rank of the prefill worker that nothing will be read."""
        if engine_id in self._remote_agents and engine_id in self.tp_mappings:
            notice = self._notice(remote_request_id, engine_id)
            for agent in self._remote_agents[engine_id].values():
                self._notify(agent, notice, req_id)

    # The lease check.

    def _new_check(self, lease: Lease, meta: ReqMeta) -> LeaseCheck:
        engine_id = meta.remote.engine_id
        ranks = self.tp_mappings[engine_id].all_source_ranks
        for rank in ranks:
            if (0, rank) not in lease.tables:
                raise BadBlocksError(f"no lease table of rank {rank}")
        return LeaseCheck(lease, engine_id, ranks, self._notice(meta.remote.request_id, engine_id))

    def _advance_checks(self, done: set[str], failed: set[str]) -> None:
        """Hold back what is read but not checked; ``done`` and ``failed`` are changed in place."""
        self._sweep_abandoned()
        for req_id, check in list(self._checks.items()):
            if check.deadline is None:
                if req_id not in done:
                    continue
                if req_id in failed or req_id in self._recv_failures:
                    del self._checks[req_id]
                    # Its reads are over and told nothing to the prefill worker.
                    for agent in self._remote_agents[check.engine_id].values():
                        self._notify(agent, check.notice, req_id)
                    continue
                done.discard(req_id)
                check.deadline = self.clock() + self.lease_check_seconds
                check.to_post = list(check.ranks)
            self._post_word_reads(req_id, check)
            self._poll_word_reads(req_id, check)
            if not check.finished:
                continue
            del self._checks[req_id]
            self._notify_unread(check.engine_id, check.notice, req_id)
            if check.held:
                done.add(req_id)
            else:
                failed.add(req_id)

    def _post_word_reads(self, req_id: ReqId, check: LeaseCheck) -> None:
        while check.to_post and (landing := self._landing.take()) is not None:
            rank = check.to_post.pop()
            agent = self._remote_agents[check.engine_id].get((0, rank))
            handle = None
            try:
                address, device = check.lease.tables[0, rank]
                local = self.nixl_wrapper.get_xfer_descs(
                    [(self._landing.table.address_of(landing), WORD_BYTES, 0)], "DRAM"
                )
                remote = self.nixl_wrapper.get_xfer_descs(
                    [(address + WORD_BYTES * check.lease.slot, WORD_BYTES, device)], "DRAM"
                )
                handle = self.nixl_wrapper.initialize_xfer("READ", local, remote, agent, check.notice)
                self.nixl_wrapper.transfer(handle)
            except Exception as error:  # noqa: BLE001
                self._log_failure(failure_type="lease_check_setup_failed", req_id=req_id, error=error, remote_rank=rank)
                self._word_failed(check)
                if handle is None:
                    self._landing.give(landing)
                    if agent is not None:
                        self._notify(agent, check.notice, req_id)
                else:
                    self._abandoned.append(WordRead(handle, landing))
                continue
            check.reads[rank] = WordRead(handle, landing)

    def _poll_word_reads(self, req_id: ReqId, check: LeaseCheck) -> None:
        late = check.deadline is not None and self.clock() >= check.deadline
        for rank, read in list(check.reads.items()):
            try:
                state = self.nixl_wrapper.check_xfer_state(read.handle)
            except Exception as error:  # noqa: BLE001
                state = repr(error)
            if state == "PROC" and not late:
                continue
            del check.reads[rank]
            self._abandoned.append(read)
            if state != "DONE":
                self._log_failure(failure_type="lease_check_failed", req_id=req_id, xfer_state=state, remote_rank=rank)
                self._word_failed(check)
                agent = self._remote_agents[check.engine_id].get((0, rank))
                if state != "PROC" and agent is not None:
                    # A notice goes out with a read that succeeds, so this one did not.
                    self._notify(agent, check.notice, req_id)
            elif self._landing.table[read.landing] == check.lease.generation:
                self.xfer_stats.count("lease_checks", label="held")
            else:
                self._log_failure(
                    failure_type="lease_ended",
                    msg="The blocks may hold another prompt by now; they are not used.",
                    req_id=req_id,
                    remote_rank=rank,
                )
                self.xfer_stats.count("lease_checks", label="gone")
                check.held = False
        if late and check.to_post:
            check.to_post.clear()
            self._word_failed(check)
        self._sweep_abandoned()

    def _word_failed(self, check: LeaseCheck) -> None:
        self.xfer_stats.count("lease_checks", label="failed")
        check.held = False

    def _sweep_abandoned(self) -> None:
        """Release reads that are over; a word is free again once nothing can write it."""
        kept = []
        for read in self._abandoned:
            try:
                if self.nixl_wrapper.check_xfer_state(read.handle) == "PROC":
                    kept.append(read)
                    continue
            except Exception:
                logger.debug("The read of a lease word is over with an error.", exc_info=True)
            try:
                self.nixl_wrapper.release_xfer_handle(read.handle)
            except Exception:  # noqa: BLE001
                kept.append(read)
            else:
                self._landing.give(read.landing)
        self._abandoned = kept


class _Notice(dict[str, Any]):
    """Goes the way of a registration (handshake, then a notice from the writer thread) and is none."""


class KvdeltaPushWorker(_KvdeltaWorker, NixlPushConnectorWorker):
    """Upstream's push worker (WRITE); a decode worker that needs nothing says so, which upstream's does not."""

    # Upstream's hooks, engine thread.

    def start_load_kv(self, metadata: KvdeltaConnectorMetadata) -> None:
        """As upstream; requests that need nothing are told to the prefill worker and are not waited for."""
        self._begin_step(metadata)
        for req_id, meta in list(metadata.reqs_to_recv.items()):
            if not any(len(group) > 0 for group in meta.local_block_ids):
                # Upstream's entry for a request that was aborted before it was scheduled.
                metadata.notices.setdefault(req_id, meta)
                del metadata.reqs_to_recv[req_id]
            elif (reason := bad_remote(meta)) is not None:
                self._log_failure(failure_type="registration_refused", msg=reason, req_id=req_id)
                del metadata.reqs_to_recv[req_id]
                metadata.push_registrations.pop(req_id, None)
                self._fail_recv(req_id, meta)
        for req_id, meta in metadata.notices.items():
            self._queue_notice(req_id, meta)
        known = self._reqs_to_process | metadata.reqs_in_batch
        # A notice that came before the blocks has ended the request; the writer would wait for ever.
        metadata.push_finished_blocks = {
            req_id: blocks for req_id, blocks in metadata.push_finished_blocks.items() if req_id in known
        }
        super().start_load_kv(metadata)
        for req_id in metadata.fail_now:
            self._fail_recv(req_id)
        self._end_step(metadata)

    def _can_be_count(self, count: int) -> bool:
        # Upstream divides one number of ranks by the other and asserts that nothing remains.
        return super()._can_be_count(count) and (count % self.world_size == 0 or self.world_size % count == 0)

    def _is_being_sent(self, req_id: ReqId) -> bool:
        with self._sending_transfers_lock:
            return req_id in self._sending_transfers

    def _queue_notice(self, req_id: ReqId, meta: ReqMeta) -> None:
        if (reason := bad_remote(meta)) is not None:
            self._log_failure(failure_type="notification_failed", msg=reason, req_id=req_id)
            return
        remote = meta.remote
        notice = _Notice(
            # Upstream's prefill worker derives from it how many notices each of its ranks gets.
            notice=f"{remote.request_id}:{self.world_size}".encode(),
            remote_engine_id=remote.engine_id,
            remote_host=remote.host,
            remote_port=remote.port,
            remote_tp_size=meta.tp_size,
            remote_pp_size=meta.pp_size,
        )
        self._reg_send_inbox.put((req_id, notice))
        self._push_writer_wake.set()

    # Upstream's hooks, writer thread: what they raise would lose the notices of other requests.

    def _send_registration_to_p(self, req_id: str, reg_data: dict[str, Any]) -> None:
        try:
            super()._send_registration_to_p(req_id, reg_data)
        except Exception as error:  # noqa: BLE001
            self._log_failure(failure_type="push_reg_failed", req_id=req_id, error=error)
            if not isinstance(reg_data, _Notice):
                self._failed_recv_reqs.put(req_id)

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        if not isinstance(reg_data, _Notice):
            super()._do_send_reg_notif(req_id, reg_data)
            return
        with self._handshake_lock:
            agents = dict(self._remote_agents.get(reg_data["remote_engine_id"]) or {})
        for agent in agents.values():
            self._notify(agent, reg_data["notice"], req_id)

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        try:
            registration = msgspec.msgpack.decode(notif[len(PUSH_REG_NOTIF_PREFIX) :])
            # Before upstream looks up, and takes, the blocks of the request.
            if (reason := bad_registration(registration)) is not None:
                logger.warning("Ignoring a push registration: %s.", reason)
                return
            super()._handle_push_reg_notif(notif)
        except Exception:
            logger.exception("Ignoring a push registration.")
        while len(self._pending_d_registrations) > MAX_WAITING_REGISTRATIONS:
            self._pending_d_registrations.pop(next(iter(self._pending_d_registrations)))

    def _do_start_push_kv(self, request_id: str, local_block_ids: BlockIds, registration_data: dict[str, Any]) -> None:
        try:
            super()._do_start_push_kv(request_id, local_block_ids, registration_data)
        except Exception as error:  # noqa: BLE001
            # Its lease frees the blocks.
            self._log_failure(failure_type="push_refused", req_id=request_id, error=error)
            self.xfer_stats.record_failed_transfer()

    def _xfer_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        remote = meta.remote
        groups = len(meta.local_physical_block_ids)
        if len(remote.block_ids) != groups:
            raise BadBlocksError(f"block ids of {len(remote.block_ids)} cache groups instead of {groups}")
        self._check_block_ids(remote.engine_id, remote.block_ids)
        # Upstream's slice of the last 0 blocks is the whole list.
        meta.local_physical_block_ids = [
            list(own) if len(blocks) > 0 else []
            for own, blocks in zip(meta.local_physical_block_ids, remote.block_ids, strict=True)
        ]
        super()._xfer_blocks_for_req(req_id, meta)
