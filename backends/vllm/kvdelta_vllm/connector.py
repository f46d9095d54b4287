# SPDX-License-Identifier: Apache-2.0
"""The connectors that vLLM loads; they only build the halves and forward.

Workers load them by this module, under the names that vLLM and Dynamo know:

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvdelta_vllm.connector", ...}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as upstream
from vllm.logger import init_logger

from . import compat
from .stats import KvdeltaConnectorStats, KvdeltaPromMetrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

else:
    NixlBaseConnector = object

logger = init_logger(__name__)


class _Connector(NixlBaseConnector):
    """What both connectors add to upstream's."""

    @staticmethod
    def decode_cache_info_version(vllm_config: VllmConfig) -> int | None:
        """Return the version of claims that an engine of this configuration settles; None: transfers are vLLM's own.

        Read by Dynamo.
        """
        return None if compat.plain_reason(vllm_config) is not None else compat.VERSION

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Not the mode's own constructor: it would build upstream's halves first.
        upstream.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        reason = compat.plain_reason(vllm_config)
        if reason is not None and role == KVConnectorRole.SCHEDULER:
            logger.warning("kvdelta: transfers are vLLM's own: %s", reason)
        half = self._half(role, plain=reason is not None)(vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = half
        else:
            self.connector_worker = half
            # vLLM adds the scheduler half's counters to these.
            half.xfer_stats = KvdeltaConnectorStats()

    @staticmethod
    def _half(role: KVConnectorRole, *, plain: bool) -> Any:  # noqa: ANN401
        """Return the class of this process's half."""
        raise NotImplementedError

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Hand vLLM's block manager to the scheduler half."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if hasattr(self.connector_scheduler, "bind"):
            self.connector_scheduler.bind(kv_cache_manager)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted in this process since the last call."""
        if hasattr(self.connector_scheduler, "take_stats"):
            return self.connector_scheduler.take_stats()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Build the stats that :attr:`data` came from."""
        return KvdeltaConnectorStats() if data is None else KvdeltaConnectorStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdeltaPromMetrics:
        """Build the metrics for /metrics."""
        return KvdeltaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class NixlConnector(_Connector, upstream.NixlPullConnector):
    """The pull connector."""

    @staticmethod
    def _half(role: KVConnectorRole, *, plain: bool) -> Any:  # noqa: ANN401
        if plain:
            is_scheduler = role == KVConnectorRole.SCHEDULER
            return upstream.NixlPullConnectorScheduler if is_scheduler else upstream.NixlPullConnectorWorker
        if role == KVConnectorRole.SCHEDULER:
            from .scheduler import KvdeltaPullScheduler  # noqa: PLC0415

            return KvdeltaPullScheduler
        from .worker import KvdeltaPullWorker  # noqa: PLC0415

        return KvdeltaPullWorker


class NixlPushConnector(_Connector, upstream.NixlPushConnector):
    """The push connector."""

    @staticmethod
    def _half(role: KVConnectorRole, *, plain: bool) -> Any:  # noqa: ANN401
        if plain:
            is_scheduler = role == KVConnectorRole.SCHEDULER
            return upstream.NixlPushConnectorScheduler if is_scheduler else upstream.NixlPushConnectorWorker
        if role == KVConnectorRole.SCHEDULER:
            from .scheduler import KvdeltaPushScheduler  # noqa: PLC0415

            return KvdeltaPushScheduler
        from .worker import KvdeltaPushWorker  # noqa: PLC0415

        return KvdeltaPushWorker


__all__ = ["NixlConnector", "NixlPushConnector"]
