# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that want to be told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

_GIVEN: Final[set[int]] = set()
"""An engine listens on some of its ports seconds after its start: until then only this knows that they are taken."""


def free_port(count: int = 1) -> int:
    """The first of so many consecutive ports that nothing listens on, and that no call before returned.

    Below the range of the ports of connections, and below 2^15: Dynamo takes no other for its metrics.
    """
    for first in random.sample(range(20000, 2**15 - count), 1000):
        ports = range(first, first + count)
        if _GIVEN.isdisjoint(ports) and all(map(_is_free, ports)):
            _GIVEN.update(ports)
            return first
    raise RuntimeError("no free port between 20000 and 32767")


def _is_free(port: int) -> bool:
    with socket.socket() as bound, contextlib.suppress(OSError):
        bound.bind(("0.0.0.0", port))  # noqa: S104 as Dynamo does
        return True
    return False
