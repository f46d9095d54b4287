# SPDX-License-Identifier: Apache-2.0
"""Beside another connector, which relies on the blocks of a request after its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from factory import TABLES, Engine, claim, prefill, prompt
from nixl_pair import Worker
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from kvdelta_vllm.metadata import KvdeltaHandshakePayload
from kvdelta_vllm.worker import KvdeltaPullWorker, KvdeltaPushWorker

SAVES_LATE = {"kv_connector": "SavesLate", "kv_connector_module_path": "saves_late"}


def payload(*, alone: bool) -> KvdeltaHandshakePayload:
    """What a worker half says of itself."""
    return KvdeltaHandshakePayload("hash", b"metadata", lease_table=(4096, 0, 8), alone=alone)


@pytest.mark.parametrize(
    ("sibling", "payloads", "cuts"),
    [
        (False, [payload(alone=True)], True),
        (False, [payload(alone=True), payload(alone=True)], True),
        (True, [payload(alone=False)], False),
        # Every rank has to say so; MultiConnector hands on another connector's payload where that has one.
        (False, [payload(alone=True), payload(alone=False)], False),
        (True, [NixlHandshakePayload("hash", b"metadata")], False),
        # As Dynamo's PdConnector packs those of both of its connectors.
        (True, [SimpleNamespace(dynamo_metadata=None, nixl_metadata=payload(alone=True))], False),
    ],
)
def test_blocks_that_another_connector_saves_are_not_given_away(
    *,
    sibling: bool,
    payloads: list[Any],
    cuts: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Without the listener, which needs a port.
    monkeypatch.setattr(NixlBaseConnectorScheduler, "set_xfer_handshake_metadata", lambda *_: None)
    p = Engine(tables=TABLES, sibling=SAVES_LATE if sibling else None, blocks=12)
    p.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, rank): it for rank, it in enumerate(payloads)})
    tokens = prompt(30)
    answer = prefill(p, "p1", tokens, claim(p, tokens, 6))
    assert ("kvdelta" in answer) == cuts
    assert caplog.text.count("another connector stands beside this one") == (not cuts)
    if not sibling:
        assert p.count("claims", "skipped" if cuts else "refused_capability") == 1
    else:
        (saving,) = p.scheduler.connector.sub_connectors[1].saving["p1"]
        assert [p.pool.blocks[block].ref_cnt for block in saving] == [1] * 8


@pytest.mark.parametrize("half", [KvdeltaPullWorker, KvdeltaPushWorker])
def test_a_worker_tells_whether_it_is_alone(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    class Half(half):  # type: ignore[misc]
        def register_kv_caches(self, kv_caches: Any) -> None:
            """Register as the connector of this process, or beside another one."""
            group = SimpleNamespace(connector_worker=self) if not built else SimpleNamespace(sub_connectors=[self])
            built.append(self)
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)
            super().register_kv_caches(kv_caches)

    for alone in (True, False):
        worker = Worker(Half)
        try:
            assert worker.payload.alone is alone
        finally:
            worker.close()
