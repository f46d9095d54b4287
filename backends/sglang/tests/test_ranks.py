# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks at D: each has a radix tree, a publisher and a number of its own (CASES.md B14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import inside
import pytest
from engines import PAGE, Pair, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = tokens(60, 3 * PAGE + 1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("ranks"), decode={"dp_size": 2, "load_balance_method": "round_robin"}) as ranks:
        yield ranks


def prefixes(ranks: Pair) -> list[list[int]]:
    """What each rank told P since the last call."""
    return [[said.prefix_tokens for said in ranks.decode.ask(inside.told, rank=rank)] for rank in (0, 1)]


def test_b14_the_rank_that_was_asked_for_publishes_and_promises(ranks: Pair) -> None:
    ranks.generate(PROMPT, rank=1)
    publisher = ranks.publishers["decode"]
    batches = {rank: publisher.published(rank) for rank in (0, 1)}
    stored = {
        rank: sum(
            len(event["block_hashes"]) for _, events, _ in of for event in events if event["type"] == "BlockStored"
        )
        for rank, of in batches.items()
    }
    assert stored == {0: 0, 1: 3}
    assert {said for _, _, said in batches[1]} == {1}

    prefixes(ranks)
    ranks.generate(PROMPT, rank=1)
    assert prefixes(ranks) == [[], [3 * PAGE]]
    # The other rank has nothing of it.
    ranks.generate(PROMPT, rank=0)
    assert prefixes(ranks) == [[0], []]
