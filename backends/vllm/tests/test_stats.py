# SPDX-License-Identifier: Apache-2.0
"""Our counters beside upstream's, from both halves to /metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from factory import Engine, claim, decode, hold, prefill, prompt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from kvdelta_vllm.connector import NixlConnector
from kvdelta_vllm.stats import COUNTERS, KvdeltaConnectorStats, KvdeltaPromMetrics


def test_halves_are_added_up() -> None:
    worker, scheduler = KvdeltaConnectorStats(), KvdeltaConnectorStats()
    worker.data["bytes_transferred"].append(7)
    worker.count("lease_checks", label="held")
    worker.count("lease_checks", label="held")
    scheduler.count("lease_checks", label="held")
    scheduler.count("pinned_block_seconds", 0.5)
    rebuilt = NixlConnector.build_kv_connector_stats(dict(worker.data))
    assert rebuilt is not None
    merged = rebuilt.aggregate(scheduler)
    assert merged.data["bytes_transferred"] == [7]
    assert sum(merged.data["kvdelta_lease_checks/held"]) == 3
    assert merged.data["kvdelta_pinned_block_seconds"] == [0.5]


def test_upstreams_own_can_be_added() -> None:
    ours, upstream = KvdeltaConnectorStats(), NixlKVConnectorStats()
    upstream.record_failed_handshake()
    assert ours.aggregate(upstream).data["num_failed_handshakes"] == [1]


def test_only_what_was_counted_is_handed_out() -> None:
    stats = KvdeltaConnectorStats()
    assert stats.is_empty()
    stats.count("full_hits")
    assert not stats.is_empty()
    old = stats.clone_and_reset()
    assert old.data["kvdelta_full_hits"] == [1]
    assert stats.is_empty()
    assert old.reduce()["Full hits"] == 1


def metrics(data: dict[str, Any]) -> CollectorRegistry:
    registry = CollectorRegistry()

    def on(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    prom = KvdeltaPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: on(Gauge), Counter: on(Counter), Histogram: on(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    prom.observe(data, 0)
    return registry


def test_every_series_is_there_from_the_start() -> None:
    registry = metrics(KvdeltaConnectorStats().data)
    for name, counter in COUNTERS.items():
        for value in counter.values or (None,):
            labels = {"model_name": "m", "engine": "0"} | ({} if value is None else {counter.label: value})
            assert registry.get_sample_value(f"vllm:kvdelta_{name}_total", labels) == 0


def test_counts_arrive_at_metrics_and_upstreams_with_them() -> None:
    d = Engine()
    tokens = prompt(30)
    hold(d, tokens, 6)
    p = Engine()
    decode(d, "d1", tokens, prefill(p, "p1", tokens, claim(p, tokens, 6)))
    d.step()
    d.step(received={"d1"})
    total = KvdeltaConnectorStats()
    for data in d.stats:
        total.aggregate(KvdeltaConnectorStats(data=data))
    total.data["bytes_transferred"].append(64)
    registry = metrics(total.data)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:kvdelta_offers_total", labels | {"outcome": "confirmed"}) == 1
    assert registry.get_sample_value("vllm:kvdelta_blocks_read_total", labels) == 2
    assert registry.get_sample_value("vllm:nixl_bytes_transferred_sum", labels) == 64


def test_stats_of_an_older_worker_are_observed() -> None:
    registry = metrics(NixlKVConnectorStats().data)
    assert registry.get_sample_value("vllm:kvdelta_full_hits_total", {"model_name": "m", "engine": "0"}) == 0
