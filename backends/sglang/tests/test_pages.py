# SPDX-License-Identifier: Apache-2.0
"""Which pages SGLang's own sender and receiver move over NIXL, when D has a part of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import inside
import numpy as np
import pytest
from engines import PAGE, tokens

if TYPE_CHECKING:
    from engines import Pair

PROMPT_PAGES = 10


def moved(pair: Pair, prompt: list[int], *, has_pages: int) -> list[int]:
    """Send the prompt; returns the pages of D's pool that NIXL was told to write, and checks every byte of the pool."""
    pair.prefill.ask(inside.writes)
    pair.decode.ask(inside.told)
    before = pair.decode.ask(inside.pool)
    pair.generate(prompt)
    (said,) = pair.decode.ask(inside.told)
    assert said.prefix_tokens == has_pages * PAGE
    theirs, ours = pair.prefill.ask(inside.layout), pair.decode.ask(inside.layout)
    source, after = pair.prefill.ask(inside.pool), pair.decode.ask(inside.pool)

    written = []
    expected = [buffer.copy() for buffer in before]
    for write in pair.prefill.ask(inside.writes):
        if "_kv_" not in write.notice:
            continue
        for (at, length), (to, same) in zip(write.sources, write.targets, strict=True):
            (from_buffer, from_page), (buffer, page) = theirs.page(at), ours.page(to)
            assert length == same == ours.page_bytes[buffer]
            assert from_buffer == buffer
            expected[buffer][page] = source[buffer][from_page]
            written.append((buffer, page))
    for buffer, (right, found) in enumerate(zip(expected, after, strict=True)):
        np.testing.assert_array_equal(found, right, err_msg=f"buffer {buffer}")
    # Every layer's keys and values, each page once.
    pages = [page for buffer, page in written if buffer == 0]
    assert sorted(written) == sorted((buffer, page) for buffer in range(len(before)) for page in pages)
    assert pages == said.pages

    # What D now has of the prompt is what P has, page by page.
    ours_by_position, theirs_by_position = (
        engine.ask(inside.cached_pages, prompt) for engine in (pair.decode, pair.prefill)
    )
    assert len(ours_by_position) == len(theirs_by_position) == len(prompt) // PAGE
    for right, found in zip(source, after, strict=True):
        np.testing.assert_array_equal(found[ours_by_position], right[theirs_by_position])
    return pages


@pytest.mark.parametrize(
    ("seed", "has", "whole", "tail", "moves"),
    [
        pytest.param(1, 0, PROMPT_PAGES, 5, PROMPT_PAGES + 1, id="nothing"),
        pytest.param(2, 4, PROMPT_PAGES, 5, PROMPT_PAGES - 4 + 1, id="a part"),
        pytest.param(3, PROMPT_PAGES, PROMPT_PAGES, 5, 1, id="all but one page"),
        pytest.param(4, PROMPT_PAGES - 1, PROMPT_PAGES, 0, 1, id="all but the last whole page"),
        pytest.param(5, PROMPT_PAGES, PROMPT_PAGES, 0, 0, id="all"),
    ],
)
def test_the_pages_that_d_lacks_move_and_no_others(  # noqa: PLR0917 a row of the table
    pair: Pair, seed: int, has: int, whole: int, tail: int, moves: int
) -> None:
    prompt = tokens(seed, whole * PAGE + tail)
    if has:
        other = tokens(100 + seed, PAGE)
        moved(pair, prompt[: has * PAGE] + other, has_pages=0)
    assert len(moved(pair, prompt, has_pages=has)) == moves
