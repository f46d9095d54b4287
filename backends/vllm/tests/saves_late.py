# SPDX-License-Identifier: Apache-2.0
"""A connector that still saves the blocks of a request when it has ended, as LMCache or KVBM may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

if TYPE_CHECKING:
    from collections.abc import Sequence


class SavesLate(KVConnectorBase_V1, SupportsHMA):
    """Never done with its saves, so that vLLM holds the blocks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.saving: dict[str, list[list[int]]] = {}

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Save later."""

    def wait_for_save(self) -> None:
        """Save later."""

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:  # noqa: ARG002
        """Hold nothing."""
        return 0, False

    def update_state_after_alloc(self, *args: Any) -> None:
        """Load nothing."""

    def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:  # noqa: ARG002
        """Tell nothing."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Begin to save."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[list[int]]) -> tuple[bool, None]:
        """Begin to save."""
        self.saving[request.request_id] = [list(ids) for ids in block_ids]
        return True, None
