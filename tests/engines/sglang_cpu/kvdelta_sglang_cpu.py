# SPDX-License-Identifier: Apache-2.0
"""What a machine without a GPU needs in order to run SGLang, as one of its general plugins.

SGLang's NIXL back end registers the pools of keys and values as memory of a GPU. Here they are host
memory.
"""

from __future__ import annotations

import nixl._api
from nixl._api import nixl_agent


def _host(value: object) -> object:
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


class HostAgent(nixl_agent):  # type: ignore[misc]
    """A NIXL agent that takes memory of a GPU for host memory."""

    def register_memory(self, *args: object) -> object:
        """As NIXL's."""
        return super().register_memory(*map(_host, args))

    def get_xfer_descs(self, *args: object) -> object:
        """As NIXL's."""
        return super().get_xfer_descs(*map(_host, args))

    def prep_xfer_dlist(self, *args: object) -> object:
        """As NIXL's."""
        return super().prep_xfer_dlist(*map(_host, args))


def install() -> None:
    """Put the agent in the place of NIXL's, in this process."""
    nixl._api.nixl_agent = HostAgent  # noqa: SLF001
