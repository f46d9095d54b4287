# SPDX-License-Identifier: Apache-2.0
"""Our counters in vLLM's connector stats; upstream's own stay as they are.

Both halves count into a :class:`KvdeltaConnectorStats`; vLLM adds up what the workers and the scheduler hand out.
"""

from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine


class Counter(NamedTuple):
    """A counter ``vllm:kvdelta_<name>``."""

    documentation: str
    label: str | None = None
    values: tuple[str, ...] = ()
    """All values of the label, so that every series is there from the start."""


COUNTERS: dict[str, Counter] = {
    # Prefill worker.
    "claims": Counter(
        "Claims that came with a request, by what was done: blocks skipped, or everything sent and why.",
        "outcome",
        ("skipped", "refused_content", "refused_capability", "refused_invalid"),
    ),
    "claimed_blocks": Counter("Blocks that claims said the decode worker holds."),
    "skipped_blocks": Counter("Blocks of finished prompts that were not offered and were released at once."),
    "skipped_bytes": Counter("Bytes of the skipped blocks on all ranks of this worker."),
    "offered_blocks": Counter("Blocks of finished prompts that were offered to a decode worker."),
    "pinned_block_seconds": Counter("Offered blocks times the seconds that they stayed leased."),
    "leases_expired": Counter("Leases that ended without a notice, by rank."),
    "released_offers": Counter("Offers freed because the router asked for the prompt again."),
    # Decode worker.
    "offers": Counter(
        "Offers that came with a request: cut by a claim, and what this worker's own lookup said of it, or whole.",
        "outcome",
        ("confirmed", "stale", "content", "whole", "repeated", "invalid"),
    ),
    "stale_blocks": Counter("Blocks that stale claims said this worker holds and that it lacks."),
    "recoveries": Counter(
        "What was done about claims that did not hold.",
        "kind",
        ("recompute", "ask_again", "failed"),
    ),
    "full_hits": Counter("Requests with an offer of which nothing had to be read."),
    "blocks_read": Counter("Blocks that were asked of prefill workers."),
    "bytes_read": Counter("Bytes of these blocks on all ranks of this worker."),
    "bytes_saved": Counter("Bytes of prompts that this worker held itself, on all its ranks."),
    "lease_checks": Counter(
        "Lease words read after a transfer: held, gone (its blocks may be another prompt's), or not readable.",
        "outcome",
        ("held", "gone", "failed"),
    ),
}
"""Every counter; ``vllm:kvdelta_`` before and ``_total`` after its name at /metrics."""


def _keys(name: str) -> dict[str, str | None]:
    """Keys of a counter in the stats' data, with the label's value."""
    counter = COUNTERS[name]
    if counter.label is None:
        return {f"kvdelta_{name}": None}
    return {f"kvdelta_{name}/{value}": value for value in counter.values}


_KEYS = frozenset(key for name in COUNTERS for key in _keys(name))


class KvdeltaConnectorStats(NixlKVConnectorStats):
    """Upstream's stats and our counters, which stand in ``data`` as lists of at most one number until merged."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.data.update({key: [] for key in _KEYS})

    def count(self, name: str, value: float = 1, label: str | None = None) -> None:
        """Add ``value`` to the counter ``name`` of :data:`COUNTERS`."""
        numbers = self.data[f"kvdelta_{name}" if label is None else f"kvdelta_{name}/{label}"]
        numbers[:] = [sum(numbers) + value]

    def is_empty(self) -> bool:
        """Whether there is nothing to report, of upstream's or ours."""
        return super().is_empty() and not any(self.data.get(key) for key in _KEYS)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what ``other`` counted, which may be upstream's own."""
        for key, numbers in other.data.items():
            self.data.setdefault(key, []).extend(numbers)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Upstream's line for the log, and those of our counters that moved."""
        line: dict[str, int | float] = super().reduce()
        for key in sorted(_KEYS):
            if numbers := self.data.get(key):
                line[key.removeprefix("kvdelta_").replace("_", " ").capitalize()] = round(sum(numbers), 3)
        return line


class KvdeltaPromMetrics(NixlPromMetrics):
    """Upstream's Prometheus metrics and our counters."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, dict[int, Any]] = {}
        for name, counter in COUNTERS.items():
            labels = labelnames if counter.label is None else [*labelnames, counter.label]
            family = self._counter_cls(
                name=f"vllm:kvdelta_{name}", documentation=counter.documentation, labelnames=labels
            )
            for key, value in _keys(name).items():
                per_engine = {
                    engine: values if value is None else [*values, value]
                    for engine, values in per_engine_labelvalues.items()
                }
                self._series[key] = create_metric_per_engine(family, per_engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what was counted since the last call."""
        super().observe(transfer_stats_data, engine_idx)
        for key, per_engine in self._series.items():
            for number in transfer_stats_data.get(key, ()):
                per_engine[engine_idx].inc(number)
