# SPDX-License-Identifier: Apache-2.0
"""Whatever another process sends: nothing is raised, and no other request is lost."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import pytest
from factory import TABLES, Engine, claim, hold, prefill, prompt

from kvdelta_vllm import params as wire
from kvdelta_vllm.metadata import Lease, LeaseWord

if TYPE_CHECKING:
    from collections.abc import Iterator

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 2**31, 2**32, 2**63, 2**64, 2**70, 0.5, float("inf"), "", "x", "0,0", "a" * 5000,
    [], [[]], [None], [[None]], [[1]], [[-1]], [[True]], [[1.5]], [["1"]], [[2**40]], [[1], [2]], [1, 2], {}, {"a": 1},
    {"0,0": [1, 0]}, {"params": {}}, {"version": 1}, {"tables": {}}, ["x"] * 50,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of everything in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield from places(entry, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any, *, drop: bool = False) -> Any:
    """Return ``value`` with another value at a path, or without what is there."""
    if not path:
        return copy.deepcopy(new)
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = copy.deepcopy(new)
    return value


def survives(d: Engine, tokens: list[int], offer: Any) -> None:
    """Run a decode leg whatever its offer, and a sound request beside it."""
    d.outputs.clear()
    d.half.decode._used.clear()
    d.add("odd", list(tokens), copy.deepcopy(offer))
    d.add("sound", prompt(9, 50))
    for _ in range(20):
        d.step()
        if "odd" in d.outputs:
            break
        waiting = {
            name for name, entry in d.meta.reqs_to_recv.items() if entry.awaiting_kvs or any(entry.local_block_ids)
        }
        for name in waiting:
            local, remote = d.meta.reqs_to_recv[name].local_block_ids, d.meta.reqs_to_recv[name].remote.block_ids
            # What upstream's worker half would stop the engine for.
            assert d.push or [len(ids) for ids in local] == [len(ids) for ids in remote]
        if waiting or d.meta.fail_now:
            d.step(received=waiting - d.meta.fail_now, failed=d.meta.fail_now)
    assert set(d.outputs) == {"odd", "sound"}
    # A decode leg that says that it is a prefill leg is one, and offers.
    offers = isinstance(offer, dict) and offer.get("do_remote_decode")
    d.step(sent={"odd"} & d.scheduler.requests.keys() if offers else set())
    assert not d.scheduler.requests
    assert not len(d.half.decode)


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_every_value_of_an_offer_replaced_or_missing(*, whole: bool, push: bool) -> None:
    tokens = prompt(30)
    p, d = Engine(tables=TABLES, push=push), Engine(push=push)
    offer = prefill(p, "p1", tokens, None if whole else claim(p, tokens, 6))
    hold(d, tokens, 6)
    free = d.free
    for path in places(offer):
        for new in ODD:
            survives(d, tokens, changed(offer, path, new))
        if path:
            survives(d, tokens, changed(offer, path, None, drop=True))
    assert d.free == free


def test_offers_with_several_values_changed() -> None:
    tokens = prompt(30)
    p, d = Engine(tables=TABLES), Engine()
    sound = [prefill(p, "p1", tokens, claim(p, tokens, 6)), prefill(p, "p2", tokens)]
    hold(d, tokens, 4)
    free = d.free
    rng = random.Random(6)  # noqa: S311
    for _ in range(600):
        offer = rng.choice(sound)
        for _ in range(rng.randint(2, 5)):
            offer = (
                changed(offer, rng.choice(list(places(offer))), rng.choice(ODD)) if isinstance(offer, dict) else offer
            )
        survives(d, tokens, offer)
    assert d.free == free


def test_every_value_of_a_claim_replaced_or_missing() -> None:
    tokens = prompt(30)
    p = Engine(tables=TABLES)
    start = p.free
    params = {"do_remote_decode": True, "decode_cache_info": claim(p, tokens, 6), "kvdelta": {"release": "p0"}}
    for path in places(params):
        if path == ("do_remote_decode",):
            continue
        for new in ODD:
            value = changed(params, path, new)
            p.add("p1", list(tokens), value)
            p.add("sound", prompt(9, 50))
            p.run("p1")
            p.run("sound")
            leased = {"p1"} & p.scheduler.requests.keys()
            p.outputs.clear()
            p.step(sent=leased)
    assert p.free == start
    assert not p.half.prefill._sent


def test_a_prefill_request_never_waits_for_remote_blocks() -> None:
    """Upstream would park it, for blocks that nobody was asked for."""
    p = Engine()
    answer = prefill(
        p, "p1", prompt(100), remote_block_ids=[[1]], remote_engine_id="e", remote_request_id="r", remote_host="h",
        remote_port=1, remote_num_tokens=100,
    )  # fmt: skip
    assert answer["remote_block_ids"]


def test_a_lease_on_the_wire_and_back() -> None:
    word = LeaseWord(3, 2**64 - 1)
    tables = {(0, 0): (2**48, 0), (1, 2): (4096, 7)}
    assert wire.read_lease(wire.lease_on_wire(word, tables)) == Lease(3, 2**64 - 1, tables)


def test_messages_name_the_value() -> None:
    with pytest.raises(wire.BadParams, match="remote_port is 0, not a number from 1 to 65535; computing all here"):
        wire.check_address(
            {"remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 0, "tp_size": 1}
        )
