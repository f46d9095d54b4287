# SPDX-License-Identifier: Apache-2.0
"""What D's radix tree publishes after transferred pages were put into it, and what kvdelta's index makes of it."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import inside
from engines import PAGE, TOKENS, tokens

if TYPE_CHECKING:
    from pathlib import Path

    from engines import Pair, Publisher

OBSERVE = "KVDELTA_TEST_COMMAND"
"""The command line `kvdelta`."""


def stored(publisher: Publisher, prompt: list[int], salt: str | None = None) -> list[tuple[int, dict[str, Any]]]:
    """The hash of each of the prompt's pages that was stored last, with what else its event says."""
    found: dict[tuple[int, ...], tuple[int, dict[str, Any]]] = {}
    for _, events, _ in publisher.published():
        for event in events:
            if event["type"] != "BlockStored" or event.get("cache_salt") != salt:
                continue
            names = event.pop("block_hashes")
            content = event.pop("token_ids")
            for at, name in enumerate(names):
                found[tuple(content[at * PAGE : (at + 1) * PAGE])] = (name, event)
    pages = [tuple(prompt[at : at + PAGE]) for at in range(0, len(prompt) // PAGE * PAGE, PAGE)]
    return [found[page] for page in pages if page in found]


def overlap(folder: Path, publisher: Publisher, prompt: list[int], *more: str) -> tuple[int, str]:
    """Blocks of the prompt that `kvdelta observe` finds, from the engine's sockets alone, and its trust."""
    file = folder / "prompt.json"
    file.write_text(json.dumps(prompt))
    worker = f"d=tcp://127.0.0.1:{publisher.events},replay=tcp://127.0.0.1:{publisher.replay},engine=sglang"
    said = subprocess.run(  # noqa: S603 our own
        [
            os.environ[OBSERVE], "observe", "--block-size", str(PAGE), "--worker", worker,
            "--prompt-tokens", str(file), "--once", "--json", *more,
        ],
        check=True,
        capture_output=True,
        text=True,
    )  # fmt: skip
    snapshot = json.loads(said.stdout)
    return snapshot["prompts"][0]["overlaps"][0]["device_blocks"], snapshot["ranks"][0]["trust"]


def test_transferred_pages_are_published_as_if_d_had_computed_them(pair: Pair) -> None:
    prompt = tokens(40, 5 * PAGE + 3)
    pair.generate(prompt)
    by_p, by_d = (stored(pair.publishers[mode], prompt) for mode in ("prefill", "decode"))
    # Same hashes on both sides, five whole pages; the last page, which is not whole, is not published.
    assert [name for name, _ in by_d] == [name for name, _ in by_p]
    assert len(by_d) == 5
    for _, event in by_d:
        assert event == {
            "type": "BlockStored",
            "parent_block_hash": None,
            "block_size": PAGE,
            "lora_id": None,
            "medium": "GPU",
        }


def test_they_are_published_while_the_request_still_runs(pair: Pair) -> None:
    prompt = tokens(47, 2 * PAGE)
    request = pair.request(prompt, new_tokens=200)
    for engine in (pair.prefill, pair.decode):
        engine.call("generate", **request)
    pair.prefill.answer()
    while len(stored(pair.publishers["decode"], prompt)) < 2:
        assert not pair.decode.pipe.poll(), "D answered before it published"
    assert not pair.decode.pipe.poll()
    assert len(pair.decode.answer()["output_ids"]) == 200


def test_a_page_that_was_generated_is_published_too(pair: Pair) -> None:
    prompt = tokens(41, 2 * PAGE)
    answer = pair.generate(prompt, new_tokens=PAGE + 2)
    assert len(stored(pair.publishers["decode"], prompt + answer)) == 3


def test_hashes_are_of_the_salt_too_and_events_tell_it(pair: Pair) -> None:
    prompt = tokens(42, 3 * PAGE)
    for salt in (None, "A", "B"):
        pair.generate(prompt, cache_salt=salt)
    names = [[name for name, _ in stored(pair.publishers["decode"], prompt, salt)] for salt in (None, "A", "B")]
    assert [len(set(each)) for each in names] == [3, 3, 3]
    assert len(set().union(*names)) == 9


def test_another_salt_is_another_prefix_to_d(pair: Pair) -> None:
    prompt = tokens(43, 3 * PAGE)
    for salt, has in (("A", 0), ("A", 3), ("B", 0)):
        pair.decode.ask(inside.told)
        pair.generate([*prompt, 7], cache_salt=salt)
        (said,) = pair.decode.ask(inside.told)
        assert said.prefix_tokens == has * PAGE


def test_the_index_has_what_d_has(pair: Pair, tmp_path: Path) -> None:
    publisher = pair.publishers["decode"]
    prompt = tokens(44, 6 * PAGE + 1)
    # A node, its split, and a salt of which only the first pages are there.
    pair.generate(prompt)
    other_end = prompt[: 4 * PAGE] + tokens(45, 2 * PAGE)
    pair.generate(other_end)
    pair.generate(prompt[: 2 * PAGE], cache_salt="A")
    for asked, salt, blocks in ((prompt, None, 6), (other_end, None, 6), (prompt, "A", 2), (prompt, "B", 0)):
        more = ["--salt", salt] if salt else []
        assert overlap(tmp_path, publisher, asked, *more) == (blocks, "complete"), salt
        assert len(pair.decode.ask(inside.cached_pages, asked, salt)) == blocks

    # Eviction, of which the tree decides: whatever is left, the index has the same.
    for seed in range(50, 50 + TOKENS // (6 * PAGE)):
        pair.generate(tokens(seed, 6 * PAGE))
    left = [(asked, salt) for asked in (prompt, other_end) for salt in (None, "A")]
    found = [len(pair.decode.ask(inside.cached_pages, asked, salt)) for asked, salt in left]
    assert sum(found) < 6 + 6 + 2 + 2
    for (asked, salt), blocks in zip(left, found, strict=True):
        more = ["--salt", salt] if salt else []
        assert overlap(tmp_path, publisher, asked, *more) == (blocks, "complete"), salt


def test_after_a_flush_nothing_is_left(pair: Pair, tmp_path: Path) -> None:
    prompt = tokens(46, 2 * PAGE)
    pair.generate(prompt)
    publisher = pair.publishers["decode"]
    assert overlap(tmp_path, publisher, prompt)[0] == 2
    pair.decode.call("flush_cache")
    assert pair.decode.answer().success
    assert overlap(tmp_path, publisher, prompt)[0] == 0
