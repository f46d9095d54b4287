# SPDX-License-Identifier: Apache-2.0
"""Metrics as the pages of docs/ name them, and as the code has them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import dynamo.sglang
from sglang.srt.server_args import ServerArgs

from kvdelta_sglang.stats import COUNTERS, PREFIX

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
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


def test_every_option_of_the_page_exists() -> None:
    page = re.sub(r"cargo xtask [^`]*|--only", "", (ROOT / "docs/sglang.md").read_text())
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    # Of Dynamo's workers and of the frontend, where they may be written as a field.
    others = [Path(dynamo.sglang.__path__[0]) / "backend_args.py", *(ROOT / "tests/dynamo-frontend/src").glob("*.rs")]
    text = parser.format_help() + "".join(other.read_text().replace("_", "-") for other in others)
    assert {option for option in options if option.removeprefix("--") not in text} == set()
    assert "--disaggregation-decode-enable-radix-cache" in options


def test_every_metric_is_on_the_board_and_grouped_by_its_label() -> None:
    board = json.loads((PAGES[0].parent / "grafana/kvdelta.json").read_text())
    shown = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", []) if PREFIX in target["expr"]
    ]
    assert {name for expression in shown for name in re.findall(rf"{PREFIX}[a-z_]*[a-z]", expression)} == set(OURS)
    for expression in shown:
        (name,) = re.findall(rf"{PREFIX}[a-z_]*[a-z]", expression)
        assert re.findall(r"by \((\w+)\)", expression) == [label for label in [OURS[name].label] if label]
