# SPDX-License-Identifier: Apache-2.0
"""Metrics as the pages of docs/ and the Grafana board name them, and as the code has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import vllm

from kvdelta_vllm.stats import COUNTERS

ROOT = Path(__file__).parents[3]
BOARD = ROOT / "docs/grafana/kvdelta.json"
TRANSFER, ROUTING = ROOT / "docs/transfer.md", ROOT / "docs/routing.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FRONTEND = "dynamo_component_router_decode_"
NAME = re.compile(rf"\b(?:vllm:|{FRONTEND})[a-z_]*[a-z]")
OURS = {f"vllm:kvdelta_{name}_total": counter for name, counter in COUNTERS.items()}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def frontends() -> dict[str, str | None]:
    """Names of the router's metrics, with the label of those that have one."""
    series = ROOT / "patches/dynamo-1.6.1"
    patches = (series / "series").read_text().split()
    added = re.findall(
        r"^\+(.*)", "\n".join((series / name).read_text() for name in patches if name.endswith(".patch")), re.MULTILINE
    )
    names: dict[str, str | None] = {}
    for kind, name, label in re.findall(
        r"(\w+)\(\s*\"router_decode_(\w+)\",\s*\"[^\"]*\",\s*(?:\"(\w+)\")?", "\n".join(added)
    ):
        names[f"{FRONTEND}{name}"] = "reason" if kind == "reasons" else label or None
    for name in re.findall(r"\"router_decode_(\w+_seconds)\"", "\n".join(added)):
        names.update({f"{FRONTEND}{name}{suffix}": None for suffix in SUFFIXES["histogram"]})
    return names


def upstream() -> set[str]:
    """Names of vLLM's own metrics."""
    package = Path(vllm.__file__).parent
    files = ["v1/metrics/loggers.py", "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"]
    text = "\n".join((package / file).read_text() for file in files)
    found = re.findall(r"_(counter|gauge|histogram)_cls\(\s*name=\"(vllm:\w+)\"", text)
    return {name + suffix for kind, name in found for suffix in SUFFIXES[kind]}


def panels() -> list[dict[str, Any]]:
    """The board's panels that show something."""
    return [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """Every expression of the board, with its legend."""
    return [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel["targets"]]


def test_every_metric_of_the_docs_exists() -> None:
    """A page or a panel with a name that nobody counts shows nothing."""
    histograms = {name.removesuffix("_sum") for name in {*frontends(), *upstream()} if name.endswith("_sum")}
    known = {*OURS, *frontends(), *upstream(), *histograms}
    for page in PAGES:
        assert set(NAME.findall(page.read_text())) <= known, page.name
    shown = {name for expression, _ in expressions() for name in NAME.findall(expression)}
    assert shown <= known - histograms


def test_every_metric_of_ours_is_in_the_docs_and_on_the_board() -> None:
    """With all values of its label."""
    shown = {name for expression, _ in expressions() for name in NAME.findall(expression)}
    board = shown | {re.sub("_(bucket|count|sum)$", "", name) for name in shown}
    rows = [line for line in TRANSFER.read_text().splitlines() if line.startswith("| `vllm:kvdelta_")]
    for name, counter in OURS.items():
        (row,) = [row for row in rows if f"`{name}`" in row]
        assert name in board
        if counter.label is not None:
            values = ", ".join(f"`{value}`" for value in counter.values)
            assert f"`{name}` by `{counter.label}`: {values} |" in row
    rows = [line for line in ROUTING.read_text().splitlines() if line.startswith(f"| `{FRONTEND}")]
    assert len(frontends()) > len(SUFFIXES["histogram"])
    for name, label in frontends().items():
        if name.endswith(SUFFIXES["histogram"]):
            continue
        (row,) = [row for row in rows if f"`{name}`" in row]
        assert name in board
        assert label is None or f"`{name}` by `{label}`" in row


def test_the_board_can_be_imported_and_groups_by_labels_that_exist() -> None:
    """Every panel asks the data source that the user chooses."""
    board = json.loads(BOARD.read_text())
    (variable,) = board["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    wanted = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    for panel in panels():
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [wanted] * (
            1 + len(panel["targets"])
        )
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    labels = {name: counter.label for name, counter in OURS.items()} | frontends()
    for expression, legend in expressions():
        assert expression.count("(") == expression.count(")")
        grouped = set(re.findall(r"(?:sum|max) by \((\w+)\)", expression)) - {"le"}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == grouped
        # Those of the package for SGLang are held by its own tests.
        for label in set() if "sglang:" in expression else grouped - {"instance"}:
            assert [labels[name] for name in NAME.findall(expression)] == [label]


def test_the_tests_of_the_cases_exist() -> None:
    """A case whose test was renamed or removed is no longer covered by what the page says."""
    sources = [
        ROOT / "crates/kvdelta-transfer/tests/cases.rs",
        ROOT / "crates/xtask/src/faults/plan.rs",
        *(ROOT / "backends/vllm/tests").glob("test_*.py"),
    ]
    text = "\n".join(source.read_text() for source in sources)
    there = {name for names in re.findall(r"(?:def|fn) (\w+)\(|^    (\w+),$", text, re.MULTILINE) for name in names}
    rows = [line for line in TRANSFER.read_text().splitlines() if re.match(r"\| B\d\d ", line)]
    assert [row[2:5] for row in rows] == ["B19", "B20", "B22", "B23", "B25", "B28", "B29"]
    for row in rows:
        named = re.findall(r"`(\w+)`", row)
        assert named
        assert set(named) <= there
