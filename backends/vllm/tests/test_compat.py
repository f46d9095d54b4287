# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM that are touched: in the installed one, and in sources that are given.

    KVDELTA_VLLM_SOURCES=folder pytest tests/test_compat.py

``folder`` has the ``vllm`` package of another version, which need not be complete or importable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import vllm
from factory import Engine, prompt
from sources import lacks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPushConnector as UpstreamPush

from kvdelta_vllm import compat
from kvdelta_vllm.compat import SCHEDULER, WORKER, Touched
from kvdelta_vllm.connector import NixlConnector, NixlPushConnector

INSTALLED = Path(vllm.__file__).parent.parent
GIVEN = os.environ.get("KVDELTA_VLLM_SOURCES")


def test_nothing_is_missing_here() -> None:
    assert compat.missing(SCHEDULER) == ()
    assert compat.missing(WORKER) == ()
    assert compat._UNUSABLE is None


@pytest.mark.parametrize("root", [INSTALLED, *([Path(GIVEN)] if GIVEN else [])], ids=str)
@pytest.mark.parametrize("touched", [*SCHEDULER, *WORKER], ids=lambda touched: touched.owner or touched.module)
def test_sources_have_what_is_touched(root: Path, touched: Touched) -> None:
    assert list(lacks(root, touched)) == []


@pytest.mark.parametrize(
    ("touched", "said"),
    [
        (Touched("vllm.nowhere", "X", ()), "vllm.nowhere.X (No module named 'vllm.nowhere')"),
        (Touched("vllm.v1.request", "Nobody", ()), "vllm.v1.request.Nobody (module 'vllm.v1.request' has no"),
        (Touched("vllm.v1.request", "Request", ("gone",)), "vllm.v1.request.Request.gone"),
        (
            Touched("vllm.v1.core.block_pool", "BlockPool", ("free_blocks(blocks)",)),
            "vllm.v1.core.block_pool.BlockPool.free_blocks(ordered_blocks) instead of free_blocks(blocks)",
        ),
    ],
)
def test_what_is_missing_is_named(touched: Touched, said: str) -> None:
    assert compat.missing((touched,))[0].startswith(said)
    assert list(lacks(INSTALLED, touched))


def test_the_pull_connector_passes_every_name_check() -> None:
    assert NixlConnector.__name__ == "NixlConnector"
    assert issubclass(NixlConnector, NixlPullConnector)
    assert issubclass(NixlPushConnector, UpstreamPush)


@pytest.mark.parametrize("connector", [NixlConnector, NixlPushConnector])
@pytest.mark.parametrize(("bidirectional", "version"), [(False, 1), (True, None)])
def test_an_engine_that_is_plain_settles_no_claims(connector: Any, bidirectional: bool, version: int | None) -> None:  # noqa: FBT001
    config = Engine(extra={"bidirectional_kv_xfer": bidirectional}).config
    assert connector.decode_cache_info_version(config) == version


def test_bidirectional_transfer_is_plain(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(extra={"bidirectional_kv_xfer": True})
    assert type(engine.half) is NixlPullConnectorScheduler
    engine.add("r1", prompt(9), {"do_remote_prefill": False})
    engine.run("r1")
    warnings = [record.getMessage() for record in caplog.records if "kvdelta" in record.getMessage()]
    assert warnings == ["kvdelta: transfers are vLLM's own: bidirectional_kv_xfer is on"]


def test_a_missing_name_is_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compat, "_UNUSABLE", "this vLLM lacks Scheduler.gone")
    engine = Engine()
    assert type(engine.half) is NixlPullConnectorScheduler
    warnings = [record.getMessage() for record in caplog.records if "kvdelta" in record.getMessage()]
    assert warnings == ["kvdelta: transfers are vLLM's own: this vLLM lacks Scheduler.gone"]
    assert engine.scheduler.connector.get_kv_connector_stats() is None


def test_a_recovery_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="kvdelta_recovery is 'perhaps', not auto, recompute or ask_again"):
        Engine(extra={"kvdelta_recovery": "perhaps"})
