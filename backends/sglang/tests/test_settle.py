# SPDX-License-Identifier: Apache-2.0
"""What a claim comes to, by what decode told prefill, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from kvdelta import CLAIM_KEY, OFFER_KEY
from prometheus_client import CollectorRegistry, generate_latest

from kvdelta_sglang import compat
from kvdelta_sglang.content import event_hash
from kvdelta_sglang.plugin import FAILED_LOAD_KEY, PREFIX_KEY
from kvdelta_sglang.stats import COUNTERS, Stats
from kvdelta_sglang.worker import ClaimWorker

BLOCK = 16
PROMPT = list(range(100, 100 + 10 * BLOCK + 1))
SALT = "tenant"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ClaimWorker:
    monkeypatch.setattr(compat, "plain_reason", lambda: None)
    return ClaimWorker()


def claim(blocks: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "claim_id": "c-1",
        "decode_worker_id": 42,
        "decode_dp_rank": 0,
        "cached_prefix_blocks": blocks,
        "block_size": BLOCK,
        "prefix_hash": event_hash(PROMPT, BLOCK, blocks, None),
    } | fields


def meta(tokens: object, held_bytes: int = 0) -> dict[str, Any]:
    return {"prompt_tokens": len(PROMPT), PREFIX_KEY: [(tokens, held_bytes)]}


def settle(worker: ClaimWorker, said: object, told: dict[str, Any], **asked: Any) -> dict[str, Any] | None:
    asked = {"token_ids": PROMPT, "cache_salt": None} | asked
    return worker.settle(said, meta_info=told, **asked)


def claims(worker: ClaimWorker) -> dict[str, int]:
    """The outcomes that were counted."""
    counted = {outcome: worker.stats.value("claims", outcome) for outcome in COUNTERS["claims"].values}
    return {outcome: number for outcome, number in counted.items() if number}


@pytest.mark.parametrize("held", [4, 5, 10])
def test_a_claim_of_no_more_than_decode_says_holds(worker: ClaimWorker, held: int) -> None:
    assert settle(worker, claim(4), meta(held * BLOCK)) == {OFFER_KEY: {"held_claim": "c-1"}}
    assert claims(worker) == {"held": 1}
    assert worker.stats.value("claimed_blocks") == 4
    assert worker.stats.value("stale_blocks") == 0


@pytest.mark.parametrize(("tokens", "had"), [(0, 0), (15, 0), (16, 1), (3 * BLOCK, 3), (4 * BLOCK - 1, 3)])
def test_a_claim_of_more_than_decode_says_is_stale(worker: ClaimWorker, tokens: int, had: int) -> None:
    report = {
        "version": 1,
        "claim_id": "c-1",
        "said_blocks": 4,
        "had_blocks": had,
        "reason": "stale",
        "recovered": "sent",
    }
    assert settle(worker, claim(4), meta(tokens)) == {OFFER_KEY: {"stale_claim": report}}
    assert claims(worker) == {"stale": 1}
    assert worker.stats.value("stale_blocks") == 4 - had


def test_decode_with_other_blocks_is_compared_in_tokens(worker: ClaimWorker) -> None:
    two = claim(2, block_size=2 * BLOCK, prefix_hash=event_hash(PROMPT, 2 * BLOCK, 2, None))
    assert settle(worker, two, meta(4 * BLOCK)) == {OFFER_KEY: {"held_claim": "c-1"}}
    stale = settle(worker, two, meta(4 * BLOCK - 1))
    assert stale is not None
    assert stale[OFFER_KEY]["stale_claim"]["had_blocks"] == 1


@pytest.mark.parametrize(
    ("of", "asked"),
    [
        ({"prefix_hash": 7}, {}),
        ({}, {"cache_salt": SALT}),
        ({"prefix_hash": event_hash(PROMPT, BLOCK, 4, SALT)}, {}),
        ({"prefix_hash": event_hash(PROMPT, BLOCK, 3, None)}, {}),
        ({}, {"token_ids": [1, *PROMPT[1:]]}),
    ],
    ids=["another hash", "the request is salted", "the claim is salted", "another depth", "other tokens"],
)
def test_a_claim_of_other_content_is_told_apart(worker: ClaimWorker, of: dict[str, Any], asked: dict[str, Any]) -> None:
    said = settle(worker, claim(4, **of), meta(10 * BLOCK), **asked)
    assert said is not None
    report = said[OFFER_KEY]["stale_claim"]
    assert (report["reason"], report["said_blocks"], report["had_blocks"]) == ("content", 4, 4)
    assert claims(worker) == {"content": 1}


def test_content_is_not_compared_where_the_engine_hashes_other_tokens(worker: ClaimWorker) -> None:
    said = settle(worker, claim(4, prefix_hash=7), meta(4 * BLOCK), token_ids=None)
    assert said == {OFFER_KEY: {"held_claim": "c-1"}}


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_tokens": len(PROMPT)},
        # Other requests of its batch had a number.
        {"prompt_tokens": len(PROMPT), PREFIX_KEY: [None]},
        {"prompt_tokens": len(PROMPT), PREFIX_KEY: []},
        {PREFIX_KEY: [(64, 0)]},
        # The transfer failed after D had told it.
        meta(64) | {"finish_reason": {"type": "abort", "message": "failed"}},
    ],
)
def test_without_decodes_word_a_claim_stays_unsettled(worker: ClaimWorker, told: dict[str, Any]) -> None:
    assert settle(worker, claim(4), told) is None
    assert claims(worker) == {"unsettled": 1}
    assert worker.stats.value("sent_tokens") == 0


@pytest.mark.parametrize(
    "said",
    [
        "a claim",
        {},
        claim(4, version=2),
        claim(4, block_size=0),
        claim(4, cached_prefix_blocks=-1),
        # The last token of a prompt is always computed.
        claim(4, cached_prefix_blocks=11),
    ],
    ids=str,
)
def test_a_claim_that_cannot_be_read_is_counted_and_told_to_nobody(worker: ClaimWorker, said: object) -> None:
    assert settle(worker, said, meta(4 * BLOCK)) is None
    assert claims(worker) == {"invalid": 1}


def test_what_was_skipped_is_counted_with_a_claim_and_without(worker: ClaimWorker) -> None:
    assert settle(worker, None, meta(4 * BLOCK, 4096)) is None
    settle(worker, claim(4), meta(4 * BLOCK, 4096))
    settle(worker, None, meta(0))
    assert worker.stats.value("skipped_tokens") == 2 * 4 * BLOCK
    assert worker.stats.value("skipped_bytes") == 8192
    assert worker.stats.value("sent_tokens") == 3 * len(PROMPT) - 2 * 4 * BLOCK
    assert claims(worker) == {"held": 1}


def test_a_failed_load_is_to_be_asked_again_and_no_claims_fault(worker: ClaimWorker) -> None:
    assert worker.failed_load({}) is None
    said = worker.failed_load({FAILED_LOAD_KEY: []})
    assert said is not None
    report = said[OFFER_KEY]["stale_claim"]
    assert (report["claim_id"], report["reason"], report["recovered"]) == ("", "load_failed", "ask_again")
    assert worker.stats.value("failed_loads") == 1


def test_in_plain_mode_nothing_is_said_and_one_warning_tells_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "plain_reason", lambda: "this SGLang lacks x")
    worker = ClaimWorker()
    assert settle(worker, claim(4), meta(4 * BLOCK)) is None
    assert worker.failed_load({FAILED_LOAD_KEY: []}) is None
    assert worker.capability(None, None, block_size=BLOCK, events=True, indexer=True) is None
    (record,) = caplog.records
    assert record.getMessage() == "kvdelta: transfers are SGLang's own: this SGLang lacks x"
    assert claims(worker) == {}


def test_every_counter_is_there_from_the_start_under_its_name() -> None:
    stats, registry = Stats(), CollectorRegistry()
    registry.register(stats)
    stats.count("claims", label="stale")
    stats.count("sent_tokens", 7)
    text = generate_latest(registry).decode()
    assert 'sglang:kvdelta_claims_total{outcome="stale"} 1.0' in text
    assert 'sglang:kvdelta_claims_total{outcome="held"} 0.0' in text
    assert "sglang:kvdelta_sent_tokens_total 7.0" in text
    for name, counter in COUNTERS.items():
        assert text.count(f"\nsglang:kvdelta_{name}_total") == max(1, len(counter.values)), name
    with pytest.raises(KeyError):
        stats.count("claims", label="odd")
    assert CLAIM_KEY == "decode_cache_info"
