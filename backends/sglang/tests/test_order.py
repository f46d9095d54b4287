# SPDX-License-Identifier: Apache-2.0
"""When P learns how much of the prompt D has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import inside
import pytest
from engines import PAGE, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engines import Pair

HAS = 4
PROMPT = 10


@pytest.fixture
def computes_early(pair: Pair) -> Iterator[None]:
    pair.prefill.ask(inside.computes_early, 1)
    yield
    pair.prefill.ask(inside.computes_early, 0)


def steps(pair: Pair, seed: int, *, p_first: bool) -> list[inside.Step]:
    """What P does for a prompt of which D has the first pages, and P none any more."""
    prompt = tokens(seed, PROMPT * PAGE)
    pair.generate(prompt[: HAS * PAGE] + tokens(seed + 1000, PAGE))
    pair.prefill.call("flush_cache")
    assert pair.prefill.answer().success
    pair.prefill.ask(inside.steps)
    request = pair.request(prompt)
    pair.prefill.call("generate", **request)
    if p_first:
        # Long enough for P to begin if it did not wait for D.
        time.sleep(2)
    pair.decode.call("generate", **request)
    said = pair.prefill.answer()
    assert said["meta_info"]["cached_tokens"] == 0
    pair.decode.answer()
    return [step for step in pair.prefill.ask(inside.steps) if step.room == request["bootstrap_room"]]


def test_p_waits_for_d_and_then_computes_all_and_sends_the_rest(pair: Pair) -> None:
    assert [(step.what, step.tokens) for step in steps(pair, 20, p_first=True)] == [
        ("known", HAS * PAGE),
        ("computes", PROMPT * PAGE),
        ("sends", HAS * PAGE),
    ]


@pytest.mark.usefixtures("computes_early")
def test_with_optimistic_prefill_p_computes_first_and_still_sends_the_rest_alone(pair: Pair) -> None:
    assert [(step.what, step.tokens) for step in steps(pair, 21, p_first=True)] == [
        ("computes", PROMPT * PAGE),
        ("known", HAS * PAGE),
        ("sends", HAS * PAGE),
    ]
