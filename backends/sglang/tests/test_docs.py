# SPDX-License-Identifier: Apache-2.0
"""Metrics as the pages of docs/ name them, and as the code has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvdelta_sglang.stats import COUNTERS, PREFIX

PAGES = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
OURS = {f"{PREFIX}{name}_total": counter for name, counter in COUNTERS.items()}


def test_every_metric_of_the_docs_exists() -> None:
    for page in PAGES:
        assert set(re.findall(rf"{PREFIX}[a-z_]*[a-z]", page.read_text())) <= set(OURS), page.name


def test_every_metric_is_in_the_docs_with_all_values_of_its_label() -> None:
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    for name, counter in OURS.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}`")]
        assert counter.label is None or f"by `{counter.label}`" in row
        assert all(f"`{value}`" in row for value in counter.values), row


def test_every_metric_is_on_the_board_and_grouped_by_its_label() -> None:
    board = json.loads((PAGES[0].parent / "grafana/kvdelta.json").read_text())
    shown = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", []) if PREFIX in target["expr"]
    ]
    assert {name for expression in shown for name in re.findall(rf"{PREFIX}[a-z_]*[a-z]", expression)} == set(OURS)
    for expression in shown:
        (name,) = re.findall(rf"{PREFIX}[a-z_]*[a-z]", expression)
        assert re.findall(r"by \((\w+)\)", expression) == [label for label in [OURS[name].label] if label]
