# SPDX-License-Identifier: Apache-2.0
"""Our counters, for a registry of their own: SGLang's live in files of several processes."""

from __future__ import annotations

from collections import Counter as Numbers
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Counter(NamedTuple):
    """A counter ``sglang:kvdelta_<name>``."""

    documentation: str
    label: str | None = None
    values: tuple[str, ...] = ()
    """All values of the label, so that every series is there from the start."""


PREFIX = "sglang:kvdelta_"

COUNTERS: dict[str, Counter] = {
    # Prefill worker.
    "claims": Counter(
        "Claims that came with a request, by what the decode worker itself said.",
        "outcome",
        ("held", "stale", "content", "unsettled", "invalid"),
    ),
    "claimed_blocks": Counter("Blocks that claims said the decode worker holds."),
    "stale_blocks": Counter("Blocks that stale claims said it holds and that it lacks."),
    "skipped_tokens": Counter("Tokens of prompts that the decode worker said it holds, and that were not sent."),
    "sent_tokens": Counter("Tokens of prompts that were sent."),
    "skipped_bytes": Counter("Bytes of the skipped tokens on the rank of this worker that answers."),
    # Decode worker.
    "failed_loads": Counter("Requests whose prefix this worker had promised and could not load."),
}
"""Every counter; ``sglang:kvdelta_`` before and ``_total`` after its name at /metrics."""


class Stats:
    """The counts of this process, and a collector for ``prometheus_client``."""

    def __init__(self) -> None:
        self._numbers: Numbers[tuple[str, str]] = Numbers()

    def count(self, name: str, value: int = 1, label: str = "") -> None:
        """Add ``value`` to the counter ``name`` of :data:`COUNTERS`."""
        counter = COUNTERS[name]
        if label not in (counter.values or ("",)):
            raise KeyError(f"{name} has no {counter.label} {label!r}")
        self._numbers[name, label] += value

    def value(self, name: str, label: str = "") -> int:
        """Return what was counted."""
        return self._numbers[name, label]

    def collect(self) -> Iterator[Any]:
        """Yield every counter, for ``CollectorRegistry.register``."""
        # Not before SGLang has said where metrics of several processes are kept.
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

        for name, counter in COUNTERS.items():
            labels = [counter.label] if counter.label else []
            family = CounterMetricFamily(PREFIX + name, counter.documentation, labels=labels)
            for label in counter.values or ("",):
                family.add_metric([label] if counter.label else [], self._numbers[name, label])
            yield family
