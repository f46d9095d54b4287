# SPDX-License-Identifier: Apache-2.0
"""What a machine without a GPU needs in order to run SGLang, as one of its general plugins.

SGLang's NIXL back end registers the pools of keys and values as memory of a GPU. Here they are host memory.
"""

from __future__ import annotations

from typing import Any

import nixl._api
from nixl._api import nixl_agent


def _host(kind: str | None) -> str | None:
    return "DRAM" if kind == "VRAM" else kind


class HostAgent(nixl_agent):  # type: ignore[misc]
    """A NIXL agent that takes memory of a GPU for host memory."""

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, *args: Any, **options: Any
    ) -> Any:
        """As NIXL's."""
        return super().register_memory(reg_list, _host(mem_type), *args, **options)

    def get_xfer_descs(
        self, descs: Any, mem_type: str | None = None, *args: Any, **options: Any
    ) -> Any:
        """As NIXL's."""
        return super().get_xfer_descs(descs, _host(mem_type), *args, **options)

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, *args: Any, **options: Any
    ) -> Any:
        """As NIXL's."""
        return super().prep_xfer_dlist(agent_name, xfer_list, _host(mem_type), *args, **options)


def install() -> None:
    """Put the agent in the place of NIXL's, in this process."""
    nixl._api.nixl_agent = HostAgent  # noqa: SLF001
