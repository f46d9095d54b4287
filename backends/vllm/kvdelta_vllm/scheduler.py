# SPDX-License-Identifier: Apache-2.0
"""The scheduler halves: upstream's, whose questions and answers go through a prefill and a decode side of ours."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler

from . import params as wire
from .decode import Decode
from .metadata import KvdeltaConnectorMetadata
from .prefill import Prefill
from .shared import Shared, groups_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .decode import Received
    from .stats import KvdeltaConnectorStats

else:
    NixlBaseConnectorScheduler = object


class _Half(NixlBaseConnectorScheduler):
    """What both modes share; stands before upstream's half in the classes below."""

    lends: bool
    """Whether a decode worker reads, so that it has to learn whether the blocks were still leased."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._lease_check = self.lends and bool(transfer.get_from_extra_config("kvdelta_lease_check", True))  # noqa: FBT003
        self.shared = Shared(groups_of(kv_cache_config, ranks))
        # Each stage of a pipeline has other groups, and only those of the first would be planned for.
        self.prefill = Prefill(
            self.shared, cuts=parallel.pipeline_parallel_size == 1, lease_ms=self._kv_lease_duration * 1000
        )
        self.decode = Decode(
            self.shared,
            recovery=transfer.get_from_extra_config("kvdelta_recovery", "auto"),
            policy=transfer.kv_load_failure_policy,
            lease_check=self._lease_check,
        )

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's block manager."""
        self.shared.manager = manager

    def take_stats(self) -> KvdeltaConnectorStats | None:
        """Hand out what was counted since the last call."""
        stats = self.shared.stats
        return None if stats.is_empty() else stats.clone_and_reset()

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take the lease tables out of the ranks' payloads; what is served is upstream's."""
        tables = {rank: getattr(payload, "lease_table", None) for rank, payload in metadata.items()}
        known = {rank: table for rank, table in tables.items() if table is not None}
        if self._lease_check and known and len(known) == len(tables):
            self.prefill.set_tables(known)
        # MultiConnector hands on the first payload that one of its connectors has, which need not be ours.
        if not all(getattr(payload, "alone", False) for payload in metadata.values()):
            self.prefill.stop_cutting("another connector stands beside this one, and may still save the blocks")
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
        """Read and check what came with the request before upstream does."""
        params = request.kv_transfer_params
        if params is not None and not isinstance(params, dict):
            self.decode.drop(request, f"kv_transfer_params is {params!r:.80}, not a dict; computing all here")
        elif params and params.get("do_remote_decode"):
            self.prefill.on_new(request, params)
        elif params and (params.get("do_remote_prefill") or wire.cut_offer(params) is not None):
            self.decode.on_new(request, params)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Answer as upstream, as far as the offer bears it."""
        count, load = super().get_num_new_matched_tokens(request, num_computed_tokens)
        received = self.decode.get(request)
        if received is None:
            return count, load
        prompt = self._get_remote_prefill_token_count(len(request.prompt_token_ids or []))
        count = self.decode.look(request, received, num_computed_tokens, prompt, count)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Settle the offer by what is held now: load it paired by position, or tell the prefill worker."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            self.prefill.lend_word(request.request_id)
        received = self.decode.get(request)
        if received is None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens <= 0:
            self._tell(request, blocks)
            self.decode.unread(request, received)
        elif self.decode.fails(received):
            self._tell(request, blocks)
            self.decode.fail(request, received)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            wanted = self._wanted(request.request_id)
            try:
                self._read(request, received, self.decode.pair(request, received, blocks, wanted))
            except wire.BadParams as error:
                self._unwant(request)
                self._tell(request, blocks)
                self.decode.fail(request, received, str(error))
            else:
                self.decode.reads(request, received, blocks, wanted)

    def _tell(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Let the worker half tell the prefill worker that nothing is loaded."""
        raise NotImplementedError

    def _wanted(self, request_id: str) -> list[list[int]]:
        """Return the blocks that upstream wants to load, by group."""
        raise NotImplementedError

    def _unwant(self, request: Request) -> None:
        """Take back that they are loaded."""
        raise NotImplementedError

    def _read(self, request: Request, received: Received, paired: list[list[int]]) -> None:
        """Let the worker half load them from the prefill worker's ``paired`` ones."""
        raise NotImplementedError

    def request_finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Let upstream decide, then cut its offer, or answer what became of the one that was received."""
        delay, answer = super().request_finished(request, block_ids)
        stale = self.decode.finish(request)
        if stale is not None:
            return delay, stale
        finished = self.prefill.finish(request, block_ids, answer if delay else None)
        if finished.free_now:
            self._reqs_need_send.pop(request.request_id, None)
            return False, None
        if finished.lists is not None:
            self._offer(request.request_id, finished.lists)
        return delay, finished.answer if delay else answer

    def _offer(self, request_id: str, lists: Sequence[list[int]]) -> None:
        """Tell upstream's half of the lists of a cut offer."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Close what was sent, and count what was loaded."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self.prefill.close(request_id)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            self.decode.done(request_id, failed=request_id in failed)

    def _build_save_meta(self, meta: KvdeltaConnectorMetadata, scheduler_output: SchedulerOutput) -> None:
        requests = dict(self._reqs_need_save)
        super()._build_save_meta(meta, scheduler_output)
        self.prefill.leave_unstaged(meta, requests)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvdeltaConnectorMetadata:
        """Add to upstream's metadata what only our worker half reads."""
        self.decode.observe()
        upstream = super().build_connector_meta(scheduler_output)
        meta, self.shared.next = self.shared.next, KvdeltaConnectorMetadata()
        meta.__dict__.update(upstream.__dict__)
        return meta


class KvdeltaPullScheduler(_Half, NixlPullConnectorScheduler):
    """The scheduler half of the pull connector."""

    lends = True

    def _tell(self, request: Request, blocks: KVCacheBlocks) -> None:
        # To upstream that is a full hit.
        request.kv_transfer_params["remote_block_ids"] = [[] for _ in self.shared.groups]
        NixlPullConnectorScheduler.update_state_after_alloc(self, request, blocks, 0)
        self._stop_heartbeat(request.request_id)

    def _wanted(self, request_id: str) -> list[list[int]]:
        return list(self._reqs_need_recv[request_id][1])

    def _unwant(self, request: Request) -> None:
        del self._reqs_need_recv[request.request_id]
        request.kv_transfer_params["do_remote_prefill"] = True

    def _read(self, request: Request, received: Received, paired: list[list[int]]) -> None:
        request.kv_transfer_params["remote_block_ids"] = paired
        if received.firsts is not None:
            # Upstream would count positions in the whole list by it.
            request.kv_transfer_params["remote_num_tokens"] = None


class KvdeltaPushScheduler(_Half, NixlPushConnectorScheduler):
    """The scheduler half of the push connector."""

    lends = False

    def _tell(self, request: Request, blocks: KVCacheBlocks) -> None:  # noqa: ARG002
        # Upstream tells nobody.
        params = request.kv_transfer_params
        self.shared.next.add_notice(request.request_id, params)
        params["do_remote_prefill"] = False
        self._stop_heartbeat(request.request_id)

    def _wanted(self, request_id: str) -> list[list[int]]:
        return list(self._push_pending_registrations[request_id]["local_block_ids"])

    def _unwant(self, request: Request) -> None:
        del self._push_pending_registrations[request.request_id]
        self._push_registration_deadlines.pop(request.request_id, None)
        self._reqs_need_recv.pop(request.request_id, None)
        request.kv_transfer_params["do_remote_prefill"] = True

    def _read(self, request: Request, received: Received, paired: list[list[int]]) -> None:  # noqa: ARG002
        # The prefill worker pairs from the ends of both lists.
        for ids, blocks in zip(received.lists, paired, strict=True):
            if received.firsts is not None and blocks and ids[-1] != blocks[-1]:
                raise wire.BadParams("the prefill worker would write the blocks behind the wanted ones")

    def _offer(self, request_id: str, lists: Sequence[list[int]]) -> None:
        self._finished_request_blocks[request_id] = tuple(lists)
        self._newly_finished_push_blocks[request_id] = tuple(lists)

    def request_finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """As in pull mode, and tell the prefill worker of a request that ends before it is scheduled."""
        unscheduled = self.decode.get(request) is not None
        answer = super().request_finished(request, block_ids)
        if unscheduled and self._reqs_need_recv.pop(request.request_id, None) is not None:
            # Upstream's worker half would wait for blocks that nobody writes.
            self.shared.next.add_notice(request.request_id, request.kv_transfer_params)
        return answer
