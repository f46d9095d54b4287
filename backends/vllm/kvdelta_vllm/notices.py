# SPDX-License-Identifier: Apache-2.0
"""What other processes send over NIXL, checked before upstream's code reads it.

Upstream decodes notices on the engine's thread without a check, so that one bad notice would end the engine.
"""

import re
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX, RemoteMeta, ReqMeta
from vllm.logger import init_logger

logger = init_logger(__name__)

MAX_RANKS = 1_024
"""More ranks than this in what another process sent are taken for an error."""

_COMPLETION = re.compile(r".+:([0-9]{1,6})", re.DOTALL)


def readable_notice(notice: bytes, counts: Callable[[int], bool]) -> bool:
    """Whether upstream can read a notice: a heartbeat, a push registration, or ``<request id>:<count>``.

    ``counts`` tells whether this worker can have been sent such a count.
    """
    if notice.startswith(PUSH_REG_NOTIF_PREFIX):
        return True
    try:
        text = notice.decode()
    except UnicodeDecodeError:
        return False
    if text.startswith("HB:"):
        return True
    match = _COMPLETION.fullmatch(text)
    return match is not None and counts(int(match[1]))


class CheckedAgent:
    """A NIXL agent that hands out readable notices only."""

    def __init__(self, agent: Any, counts: Callable[[int], bool]) -> None:  # noqa: ANN401
        self._agent = agent
        self._counts = counts

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Take the new notices, by sender."""
        readable: dict[str, list[bytes]] = {}
        for sender, notices in self._agent.get_new_notifs().items():
            readable[sender] = []
            for notice in notices:
                if readable_notice(notice, self._counts):
                    readable[sender].append(notice)
                else:
                    logger.warning("Ignoring a notice of %d bytes from %s that cannot be read.", len(notice), sender)
        return readable


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANKS


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 16


def _are_groups(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in value)


def bad_remote(meta: ReqMeta) -> str | None:
    """What is wrong with where a request says its blocks are; None: it can be handed to upstream."""
    remote: RemoteMeta | None = meta.remote
    if remote is None:
        return "no prefill worker"
    for name in ("engine_id", "request_id", "host"):
        value = getattr(remote, name)
        if not isinstance(value, str) or not value:
            return f"{name} {value!r} is not a name"
    if not _is_port(remote.port):
        return f"port {remote.port!r} is not a port"
    for name in ("tp_size", "dcp_size", "pp_size"):
        if not _is_count(getattr(meta, name)):
            return f"{name} {getattr(meta, name)!r} is not a number of ranks"
    if not _are_groups(remote.block_ids):
        return "its block ids are not lists by cache group"
    return None


def bad_registration(registration: object) -> str | None:
    """What is wrong with a decode worker's registration (push mode); None: it can be handed to upstream."""
    if not isinstance(registration, dict):
        return "it is no map"
    for name in ("request_id", "decode_engine_id", "decode_host"):
        value = registration.get(name)
        if not isinstance(value, str) or not value:
            return f"{name} {value!r} is not a name"
    if not _is_port(registration.get("decode_port")):
        return f"decode_port {registration.get('decode_port')!r} is not a port"
    if not _is_count(registration.get("decode_tp_size")):
        return f"decode_tp_size {registration.get('decode_tp_size')!r} is not a number of ranks"
    blocks = registration.get("local_block_ids")
    # Upstream also takes the flat list of a single group.
    if not _are_groups(blocks) and not _are_groups([blocks]):
        return "its block ids are not lists by cache group"
    return None
