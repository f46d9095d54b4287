# SPDX-License-Identifier: Apache-2.0
"""The connector under test, and hooks by which the fault bench does what no router would.

Engines load it by its module:

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "fault_connector", ...}

* A request with kv_transfer_params {"fault_evict": [hash, ...]} takes the blocks with these hashes
  out of the prefix cache before it runs; a hash is the number that KV events have.
* A notice that names a request whose id contains "lost-notice" is lost on its way to prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvdelta_vllm import connector
from vllm.v1.core.kv_cache_utils import get_block_hash

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

EVICT: Final = "fault_evict"
LOST: Final = b"lost-notice"
HEARTBEAT: Final = b"HB:"


class Lossy:
    """A NIXL agent that loses some of the notices that reach it."""

    def __init__(self, agent: Any) -> None:  # noqa: ANN401
        """Stand before `agent`."""
        self._agent = agent

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Everything else is the agent's own."""
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return the new notices by sender, without those that are lost; heartbeats are not."""
        notices: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return {
            sender: [text for text in texts if LOST not in text or text.startswith(HEARTBEAT)]
            for sender, texts in notices.items()
        }


class NixlConnector(connector.NixlConnector):  # type: ignore[misc]
    """The connector under test with the hooks."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Take the connector's arguments."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager: KVCacheManager | None = None
        if self.connector_worker is not None:
            self.connector_worker.nixl_wrapper = Lossy(self.connector_worker.nixl_wrapper)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep the manager, whose blocks are evicted."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        """Evict what the request names."""
        # The connector drops parameters that it does not know.
        hashes = (request.kv_transfer_params or {}).get(EVICT)
        super().on_new_request(request)
        if hashes and self._manager is not None:
            pool = self._manager.block_pool
            wanted = {int(number) for number in hashes}
            pool.evict_blocks(
                {
                    block.block_id
                    for block in pool.blocks
                    if block.block_hash is not None
                    and int.from_bytes(get_block_hash(block.block_hash)[-8:], "big") in wanted
                }
            )
