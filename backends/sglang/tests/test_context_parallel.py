# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: what SGLang's own plan of a transfer takes for a prefix."""

from __future__ import annotations

import numpy as np
import pytest
from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan

PAGE, RANKS, SENT = 4, 2, 16


def sources(prefix: int) -> list[list[int]]:
    """The tokens behind the prefix that each rank of D gets, by their place in P's pages."""
    plans = [
        build_dcp_token_transfer_plan(
            np.arange(SENT // PAGE),
            np.arange(SENT // PAGE // RANKS),
            physical_page_size=PAGE,
            dcp_size=RANKS,
            dcp_rank=rank,
            decode_prefix_len=prefix,
            num_kv_tokens=SENT,
        )
        for rank in range(RANKS)
    ]
    return [plan.target_src_token_indices.tolist() for plan in plans]


@pytest.mark.parametrize("prefix", [0, PAGE * RANKS, 3 * PAGE * RANKS])
def test_a_prefix_of_whole_pages_of_all_ranks_leaves_each_token_to_one_rank(prefix: int) -> None:
    assert sources(prefix) == [list(range(rank, SENT, RANKS)) for rank in range(RANKS)]


@pytest.mark.parametrize("prefix", [1, PAGE, 3 * PAGE])
def test_another_prefix_is_an_error(prefix: int) -> None:
    with pytest.raises(ValueError, match="to align to the virtual DCP page size"):
        sources(prefix)
