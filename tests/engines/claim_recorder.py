# SPDX-License-Identifier: Apache-2.0
"""A stock NIXL connector that says that it settles claims, and writes down those that reach it.

Workers load it by its module:

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "claim_recorder",
     "kv_connector_extra_config": {"claim_recorder_path": "claims.jsonl"}, ...}

It settles none: every transfer stays what it is. Its name is that of the stock connector, which
Dynamo and vLLM know. Each request with kv_transfer_params is one line:

    {"request_id": "...", "is_prefill": true, "prompt_tokens": 2148, "claim": as it came,
     "own_hashes": [the engine's own of the prompt's whole blocks]}

without "claim" where none came.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

CLAIM: Final = "decode_cache_info"


def event_hash(block_hash: bytes) -> int:
    """Return the number that a claim and vLLM's KV events have for a block.

    vLLM's maybe_convert_block_hash does the same unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0.
    """
    return int.from_bytes(block_hash[-8:], "big")


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """The stock connector, and a line for each request."""

    decode_cache_info_version: ClassVar = 1

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Take the stock connector's arguments."""
        super().__init__(vllm_config, role, kv_cache_config)
        path = self.kv_transfer_config.get_from_extra_config("claim_recorder_path", None)
        self._records: Path | None = None if path is None else Path(path)

    def on_new_request(self, request: Request) -> None:
        """Write the line: vLLM calls this once a request, when its hashes are there."""
        super().on_new_request(request)
        params = request.kv_transfer_params
        if self._records is None or params is None:
            return
        # With one cache group, as the test model has, each hash is that of one block.
        line = json.dumps(
            {
                "request_id": request.request_id,
                "is_prefill": bool(params.get("do_remote_decode")),
                "prompt_tokens": request.num_prompt_tokens,
                **({"claim": params[CLAIM]} if CLAIM in params else {}),
                "own_hashes": [event_hash(own) for own in request.block_hashes],
            }
        )
        with self._records.open("a") as records:
            records.write(line + "\n")
