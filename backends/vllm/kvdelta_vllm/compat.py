# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that these connectors touch and that vLLM does not document for connectors.

One of them missing, or with other parameters: transfers are upstream's own, and one warning names it.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from vllm import envs

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION: Final = 1
"""What ``decode_cache_info_version`` says where nothing is missing."""


@dataclass(frozen=True)
class Touched:
    """Names of one class or module, ``name`` or ``name(parameters)`` in the order in which they are given."""

    module: str
    owner: str | None
    names: tuple[str, ...]
    seen: tuple[str, ...] = ("0.31", "0.32")
    """vLLM versions in which all of them were seen."""


_NIXL: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

SCHEDULER: Final = (
    Touched(
        f"{_NIXL}.base_scheduler",
        "NixlBaseConnectorScheduler",
        (
            "_get_remote_prefill_token_count(num_prompt_tokens)",
            "_kv_lease_duration",
            "_build_save_meta(meta, scheduler_output)",
            "_reqs_need_recv",
            "_reqs_need_save",
            "_reqs_need_send",
            "_stop_heartbeat(req_id)",
            "build_connector_meta(scheduler_output)",
            "get_exchange_clipped_blocks(block_ids)",
            "is_bidirectional_kv_xfer_enabled",
            "kv_cache_config",
            "on_new_request(request)",
            "set_xfer_handshake_metadata(metadata)",
            "update_connector_output(connector_output)",
            "use_host_buffer",
            "vllm_config",
        ),
    ),
    Touched(
        f"{_NIXL}.pull_scheduler",
        "NixlPullConnectorScheduler",
        (
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "request_finished(request, block_ids)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
        ),
    ),
    Touched(
        f"{_NIXL}.push_scheduler",
        "NixlPushConnectorScheduler",
        (
            "_finished_request_blocks",
            "_newly_finished_push_blocks",
            "_push_pending_registrations",
            "_push_registration_deadlines",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "request_finished(request, block_ids)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
        ),
    ),
    Touched(
        f"{_NIXL}.connector",
        "NixlBaseConnector",
        ("connector_scheduler", "connector_worker", "engine_id", "get_kv_connector_stats()"),
    ),
    Touched(
        f"{_NIXL}.metadata",
        "NixlConnectorMetadata",
        ("add_new_req_to_recv(request_id, local_block_ids, kv_transfer_params)", "reqs_to_recv", "reqs_to_save"),
    ),
    Touched(f"{_NIXL}.metadata", "NixlHandshakePayload", ("agent_metadata_bytes", "compatibility_hash")),
    Touched(f"{_NIXL}.stats", "NixlKVConnectorStats", ("aggregate(other)", "clone_and_reset()", "data", "is_empty()")),
    Touched(f"{_NIXL}.stats", "NixlPromMetrics", ("observe(transfer_stats_data, engine_idx)",)),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager", ("block_pool", "coordinator", "enable_caching")),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("blocks",)),
    Touched("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", ("single_type_managers",)),
    Touched("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", ("block_size", "req_to_blocks")),
    Touched("vllm.v1.core.block_pool", "BlockPool", ("free_blocks(ordered_blocks)", "hash_block_size", "null_block")),
    Touched("vllm.v1.core.kv_cache_utils", "KVCacheBlock", ("block_hash", "block_id", "is_null")),
    Touched("vllm.v1.core.kv_cache_utils", None, ("maybe_convert_block_hash(hash_bytes)",)),
    Touched(
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig",
        ("kv_cache_groups", "transfer_group_ids", "transfer_groups"),
    ),
    Touched("vllm.v1.kv_cache_interface", "KVCacheSpec", ("block_size", "page_size_bytes")),
    Touched(
        "vllm.v1.kv_cache_interface",
        None,
        (
            "FullAttentionSpec",
            "MLAAttentionSpec",
            "MambaSpec",
            "SlidingWindowMLASpec",
            "SlidingWindowSpec",
            "UniformTypeKVCacheSpecs",
        ),
    ),
    Touched("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", ("kv_cache_specs",)),
    Touched(
        "vllm.v1.request",
        "Request",
        (
            "block_hashes",
            "kv_transfer_params",
            "num_computed_tokens",
            "num_prompt_tokens",
            "prompt_token_ids",
            "resumable",
            "skip_reading_prefix_cache",
        ),
    ),
)
"""What the scheduler halves touch."""

WORKER: Final = (
    Touched(
        f"{_NIXL}.base_worker",
        "NixlBaseConnectorWorker",
        (
            "_background_nixl_handshake(req_id, remote_engine_id, meta)",
            "_engines_with_inflight_transfers()",
            "_failed_recv_reqs",
            "_get_new_notifs()",
            "_handle_failed_transfer(req_id, handle, failed_req_ids, record_failed_transfer)",
            "_handshake_lock",
            "_log_failure(failure_type, req_id)",
            "_pop_done_transfers(transfers)",
            "_reap_expired_send_leases(done_sending)",
            "_recv_failures",
            "_recving_metadata",
            "_recving_transfers",
            "_registered_descs",
            "_remote_agents",
            "_reqs_to_process",
            "_reqs_to_send",
            "consumer_notification_counts_by_req",
            "dst_num_blocks",
            "dst_region_group_ids",
            "dst_region_num_blocks",
            "dst_uses_region_group_mapping",
            "expected_consumer_notifications_by_req",
            "get_block_ids_with_load_errors()",
            "get_transfer_results()",
            "nixl_wrapper",
            "register_kv_caches(kv_caches)",
            "shutdown()",
            "tp_mappings",
            "xfer_handshake_metadata",
            "xfer_stats",
        ),
    ),
    Touched(
        f"{_NIXL}.pull_worker",
        "NixlPullConnectorWorker",
        ("_read_blocks_for_req(req_id, meta)", "start_load_kv(metadata)"),
    ),
    Touched(
        f"{_NIXL}.push_worker",
        "NixlPushConnectorWorker",
        (
            "_do_send_reg_notif(req_id, reg_data)",
            "_do_start_push_kv(request_id, local_block_ids, registration_data)",
            "_handle_push_reg_notif(notif)",
            "_pending_d_registrations",
            "_push_writer_wake",
            "_reg_send_inbox",
            "_send_registration_to_p(req_id, reg_data)",
            "_sending_transfers",
            "_sending_transfers_lock",
            "_xfer_blocks_for_req(req_id, meta)",
            "start_load_kv(metadata)",
        ),
    ),
    Touched(f"{_NIXL}.metadata", None, ("PUSH_REG_NOTIF_PREFIX",)),
    Touched(
        "vllm.distributed.kv_transfer.kv_transfer_state", None, ("get_kv_transfer_group()", "has_kv_transfer_group()")
    ),
)
"""What the worker halves touch."""


def _own(owner: Any, name: str) -> Any | None:  # noqa: ANN401
    """Look ``name`` up in a class or module; an attribute that an ``__init__`` sets counts as ``True``."""
    try:
        return getattr(owner, name)
    except AttributeError:
        pass
    for base in getattr(owner, "__mro__", ()):
        if name in getattr(base, "__dataclass_fields__", ()):
            return True
        code = getattr(base.__dict__.get("__init__"), "__code__", None)
        if code is not None and name in code.co_names:
            return True
    return None


def _lacks(touched: Touched) -> Iterator[str]:
    where = f"{touched.module}.{touched.owner}" if touched.owner else touched.module
    try:
        owner: Any = importlib.import_module(touched.module)
        if touched.owner:
            owner = getattr(owner, touched.owner)
    except (ImportError, AttributeError) as error:
        yield f"{where} ({error})"
        return
    for entry in touched.names:
        name, _, parameters = entry.rstrip(")").partition("(")
        found = _own(owner, name)
        if found is None:
            yield f"{where}.{name}"
        elif "(" in entry:
            wanted = [parameter for parameter in parameters.split(", ") if parameter]
            has = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
            if has[: len(wanted)] != wanted:
                yield f"{where}.{name}({', '.join(has)}) instead of {entry}"


@cache
def missing(table: tuple[Touched, ...] = SCHEDULER) -> tuple[str, ...]:
    """Names of ``table`` that this vLLM lacks, or has with other parameters."""
    return tuple(lack for touched in table for lack in _lacks(touched))


def _unusable() -> str | None:
    """Say what keeps this process from settling claims, whatever its configuration."""
    try:
        importlib.import_module("kvdelta")
    except ImportError as error:
        return f"the Python package kvdelta is missing ({error})"
    lacks = missing(SCHEDULER) + missing(WORKER)
    if lacks:
        return f"this vLLM lacks {', '.join(lacks)}"
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is off, so there are no block hashes to compare"
    return None


_UNUSABLE: Final = _unusable()


def plain_reason(vllm_config: Any) -> str | None:  # noqa: ANN401
    """Say why transfers of this engine are upstream's own; None: they are not."""
    if _UNUSABLE:
        return _UNUSABLE
    parallel = vllm_config.parallel_config
    if vllm_config.kv_transfer_config.get_from_extra_config("bidirectional_kv_xfer", False):  # noqa: FBT003
        return "bidirectional_kv_xfer is on"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is on, and its blocks are spread over the ranks"
    return None
