# SPDX-License-Identifier: Apache-2.0
"""Claims on their whole way: Dynamo's patched handlers, SGLang's engines, NIXL."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import engines
import inside
import numpy as np
import pytest
import workers
from engines import PAGE
from entry_points import KVDELTA, installed
from kvdelta import OFFER_KEY

from kvdelta_sglang.content import event_hash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT_PAGES = 10


@contextmanager
def started(folder: Path, **environment: str) -> Iterator[workers.Workers]:
    """Workers whose SGLang finds the plugin by the entry point of an installed package."""
    installed(folder / "installed", KVDELTA)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        patched.syspath_prepend(folder / "installed")
        patched.setattr(engines, "_run", workers.run)
        with workers.Workers(folder, {}, {}) as pair:
            yield pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    with started(tmp_path_factory.mktemp("workers")) as pair:
        yield pair


def tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(100, 4000, count)]


def claim(prompt: list[int], blocks: int, **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "claim_id": f"c-{blocks}",
        "decode_worker_id": 42,
        "decode_dp_rank": 0,
        "cached_prefix_blocks": blocks,
        "block_size": PAGE,
        "prefix_hash": event_hash(prompt, PAGE, blocks, None),
    } | fields


def counted(pair: workers.Workers, name: str, label: str = "") -> int:
    """What prefill has counted."""
    pair.prefill.call("count", name=name, label=label)
    number: int = pair.prefill.answer()
    return number


def said(prefill: list[dict[str, Any]]) -> Any:
    """What prefill told the router with its last output, beside its own cache's hit."""
    assert "bootstrap_room" in prefill[0]["disaggregated_params"]
    (last,) = prefill[1:]
    assert last["engine_data"].pop("kv_cache_hit")
    return last["engine_data"].get(OFFER_KEY)


def answer(decode: list[dict[str, Any]]) -> list[int]:
    assert decode[-1]["finish_reason"] == "length"
    return [token for output in decode for token in output["token_ids"]]


def moved(pair: workers.Workers) -> int:
    """Pages that decode asked for since the last call."""
    return sum(len(one.pages) for one in pair.decode.ask(inside.told))


@pytest.mark.parametrize(
    ("holds", "says", "outcome"),
    [(0, 4, "stale"), (4, 4, "held"), (4, 2, "held"), (4, 6, "stale"), (PROMPT_PAGES, PROMPT_PAGES, "held")],
)
def test_decodes_own_number_wins_and_the_claim_is_settled_by_it(
    pair: workers.Workers, holds: int, says: int, outcome: str
) -> None:
    prompt = tokens(100 * holds + says, PROMPT_PAGES * PAGE + 5)
    if holds:
        pair.ask(prompt[: holds * PAGE + 1])
    before = counted(pair, "claims", outcome), counted(pair, "skipped_tokens"), counted(pair, "sent_tokens")
    moved(pair)
    prefill, decode = pair.ask(prompt, claim(prompt, says))
    # Whatever the claim says, decode gets what it lacks and no page more.
    assert moved(pair) == PROMPT_PAGES + 1 - holds
    report = said(prefill)
    if outcome == "held":
        assert report == {"held_claim": f"c-{says}"}
    else:
        stale = report["stale_claim"]
        assert (stale["said_blocks"], stale["had_blocks"]) == (says, holds)
        assert (stale["reason"], stale["recovered"]) == ("stale", "sent")
    after = counted(pair, "claims", outcome), counted(pair, "skipped_tokens"), counted(pair, "sent_tokens")
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        1,
        holds * PAGE,
        len(prompt) - holds * PAGE,
    ]
    # The same tokens as without any claim, and with all of it held.
    again, the_same = pair.ask(prompt)
    assert said(again) is None
    assert answer(the_same) == answer(decode)


def test_a_claim_of_other_content_is_told_apart_and_changes_nothing(pair: workers.Workers) -> None:
    prompt = tokens(1, PROMPT_PAGES * PAGE + 5)
    pair.ask(prompt)
    moved(pair)
    prefill, _ = pair.ask(prompt, claim(prompt, 4, prefix_hash=7))
    assert said(prefill)["stale_claim"]["reason"] == "content"
    assert moved(pair) == 1


def test_what_cannot_be_read_costs_nothing(pair: workers.Workers) -> None:
    prompt = tokens(2, PROMPT_PAGES * PAGE + 5)
    prefill, decode = pair.ask(prompt, {"version": 9})
    assert said(prefill) is None
    assert len(answer(decode)) == 4


def free_at_rest(pair: workers.Workers) -> tuple[int, int]:
    """What D has free once it has given back what its requests had: SGLang answers first."""
    before = None
    while (free := pair.decode.ask(inside.free_tokens)) != before:
        before = free
        time.sleep(1)
    return free


def test_a_promise_that_decode_cannot_keep_is_asked_again_and_answered_right(pair: workers.Workers) -> None:
    prompt = tokens(3, PROMPT_PAGES * PAGE + 5)
    _, right = pair.ask(prompt)
    free = free_at_rest(pair)
    pair.decode.ask(lose_next_load)
    prefill, decode = pair.ask(prompt)
    assert said(prefill) is None
    (only,) = decode
    assert only["token_ids"] == []
    assert only["finish_reason"].startswith("error: Decode transfer failed")
    report = only["engine_data"][OFFER_KEY]["stale_claim"]
    assert (report["claim_id"], report["reason"], report["recovered"]) == ("", "load_failed", "ask_again")
    pair.decode.call("count", name="failed_loads")
    assert pair.decode.answer() == 1
    assert free_at_rest(pair) == free
    # As the router asks again: under a salt of its own, where decode finds nothing.
    moved(pair)
    _, decode = pair.ask(prompt, routing={"cache_salt": "of this attempt"})
    assert moved(pair) == PROMPT_PAGES + 1
    assert answer(decode) == answer(right)


def test_without_the_plugin_transfers_are_sglangs_own(tmp_path: Path) -> None:
    with started(tmp_path, SGLANG_PLUGINS="kvdelta_sglang_cpu") as pair:
        prompt = tokens(4, PROMPT_PAGES * PAGE + 5)
        pair.ask(prompt[: 4 * PAGE + 1])
        moved(pair)
        prefill, decode = pair.ask(prompt, claim(prompt, 4))
        assert moved(pair) == PROMPT_PAGES + 1 - 4
        assert said(prefill) is None
        assert len(answer(decode)) == 4
        for worker in (pair.prefill, pair.decode):
            worker.call("plain_reason")
            assert "SGLANG_PLUGINS leaves it out" in worker.answer()


def lose_next_load(scheduler: Any) -> None:
    """Have the next request lose what it was promised."""
    from loses_loads import lose  # noqa: PLC0415

    queue = scheduler.disagg_decode_transfer_queue
    pop = queue.pop_transferred

    def pop_transferred(*args: Any) -> Any:
        if lose(queue):
            queue.pop_transferred = pop
        return pop(*args)

    queue.pop_transferred = pop_transferred
