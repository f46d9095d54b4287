# SPDX-License-Identifier: Apache-2.0
"""docs/works-beside.md: what stands beside these connectors, as far as vLLM's and Dynamo's own classes are here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol
from factory import Engine, claim, decode, hold, prefill, prompt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as UpstreamConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput

from kvdelta_vllm.connector import NixlConnector, NixlPushConnector
from kvdelta_vllm.metadata import KvdeltaHandshakePayload

OURS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvdelta_vllm.connector", "kv_role": "kv_both"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, "block_size": 4},
}
TOKENS = prompt(30)
"""Seven whole blocks of four tokens and two tokens."""


def protocol(wrapper: str | None, *connectors: str | dict[str, Any]) -> str:
    """Name what Dynamo's worker hands a prefill request over by, or the error at its start."""
    children = [{"kv_connector": it, "kv_role": "kv_both"} if isinstance(it, str) else it for it in connectors]
    options: dict[str, Any] = children[0]
    if wrapper is not None:
        options = {"kv_connector": wrapper, "kv_role": "kv_both"}
        options["kv_connector_extra_config"] = {"connectors": children}
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**options))
    try:
        return type(make_kv_connector_protocol(config)).__name__
    except ValueError as error:
        return str(error)


def test_which_connector_hands_a_request_over() -> None:
    for wrapper in ("MultiConnector", "PdConnector"):
        for other in (
            "DynamoConnector",
            "LMCacheConnectorV1",
            "LMCacheMPConnector",
            "MooncakeStoreConnector",
            "OffloadingConnector",
        ):
            assert protocol(wrapper, other, OURS) == "NixlConnectorProtocol"
            assert protocol(wrapper, OURS, other) == "NixlConnectorProtocol"
    assert "multiple PD-capable" in protocol("MultiConnector", OURS, "MooncakeConnector")
    assert protocol(None, OURS) == "NixlConnectorProtocol"
    assert protocol(None, "LMCacheMPConnector") == "LMCacheMPConnectorProtocol"
    assert protocol(None, "MooncakeConnector") == "MooncakeConnectorProtocol"
    for alone in ("LMCacheConnectorV1", "MooncakeStoreConnector", "DynamoConnector"):
        assert "Unsupported kv_connector" in protocol(None, alone)


@pytest.mark.parametrize(
    "name",
    [
        "LMCacheConnectorV1",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    ],
)
def test_a_decode_worker_of_another_connector_gets_no_claims(name: str) -> None:
    connector = KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector=name, kv_role="kv_both"))
    assert not hasattr(connector, "decode_cache_info_version")
    assert hasattr(NixlConnector, "decode_cache_info_version")


def test_the_check_of_dynamos_wrapper_passes_in_pull_mode_only() -> None:
    assert issubclass(NixlConnector, UpstreamConnector)
    assert not issubclass(NixlPushConnector, UpstreamConnector)


def done(engine: Engine, place: int, jobs: Any) -> None:
    """Tell the engine that the offloading connector's worker half did its jobs."""
    metadata: list[Any] = [None, None]
    metadata[place] = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
    engine.scheduler.connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(tuple(metadata)))
    )


def jobs(engine: Engine, place: int, kind: str) -> dict[int, Any]:
    """Return the jobs that the offloading connector's worker half was given."""
    return {job: spec for meta in engine.metas for job, spec in getattr(meta.metadata[place], kind).items()}


@pytest.mark.parametrize("behind", [False, True])
def test_a_prefill_worker_keeps_what_is_offloaded(*, behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlBaseConnectorScheduler, "set_xfer_handshake_metadata", lambda *_: None)
    p = Engine(sibling=OFFLOADING, behind=behind, blocks=12)
    payload = KvdeltaHandshakePayload("hash", b"metadata", lease_table=(4096, 0, 8), alone=False)
    p.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): payload})
    answer = prefill(p, "p1", TOKENS, claim(p, TOKENS, 6))
    assert "kvdelta" not in answer
    stores = jobs(p, int(not behind), "store_jobs")
    saved = [block for job in stores.values() for block in job.src_spec.block_ids]
    assert saved == answer["remote_block_ids"][0][:7]
    assert all(p.pool.blocks[block].ref_cnt for block in saved)


@pytest.mark.parametrize("behind", [False, True])
def test_the_first_connector_that_has_blocks_loads_them(*, behind: bool) -> None:
    place = int(not behind)
    p, d = Engine(), Engine(sibling=OFFLOADING, behind=behind)
    hold(d, TOKENS, 6)
    done(d, place, jobs(d, place, "store_jobs"))
    d.evict(TOKENS, range(6))
    assert d.cached(TOKENS) == 0
    decode(d, "d1", TOKENS, prefill(p, "p1", TOKENS))
    for _ in range(3):
        d.step()
    told = {name: it for meta in d.metas for name, it in meta.metadata[1 - place].reqs_to_recv.items()}
    loads = jobs(d, place, "load_jobs")
    assert told["d1"].remote.request_id == "p1"
    if behind:
        # The prefill worker is told at once, and what the host has not is computed here.
        assert not any(told["d1"].local_block_ids)
        assert [job.req_id for job in loads.values()] == ["d1"]
    else:
        assert [len(ids) for ids in told["d1"].local_block_ids] == [8]
        assert not loads
    d.step(received={"d1"})
    done(d, place, loads)
    d.run("d1")


def test_counters_arrive_through_the_wrapper() -> None:
    p = Engine(sibling=OFFLOADING)
    prefill(p, "p1", TOKENS, claim(p, TOKENS, 6))
    p.step()
    registry = CollectorRegistry()

    def on(kind: Any) -> Any:
        return lambda *args, **options: kind(*args, registry=registry, **options)

    kinds = {Gauge: on(Gauge), Counter: on(Counter), Histogram: on(Histogram)}
    prom = MultiConnector.build_prom_metrics(p.config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    total = MultiConnector.build_kv_connector_stats()
    for data in p.stats:
        prom.observe(data, 0)
        # As vLLM's logger does, in the process of the API server.
        total = total.aggregate(MultiConnector.build_kv_connector_stats(data))
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:kvdelta_offered_blocks_total", labels) == 2
    # Built by the registered name, so its line is upstream's.
    assert "Offered blocks" not in total.reduce()["NixlConnector"]
