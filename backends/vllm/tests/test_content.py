# SPDX-License-Identifier: Apache-2.0
"""A fleet of schedulers whose blocks have content: whatever happens, nobody attends to a wrong one.

Every slot of every block holds the chain of tokens that its key and value would come from. Computing checks what it
attends to and writes what it computes; a transfer copies whole blocks, as a READ does, at any later time.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from factory import TABLES, TOKEN, Engine, claim, full, window

PREFIXES, PREFIX, LONGEST = 5, 32, 56


class Memory:
    """What the blocks of one worker hold."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slots: dict[tuple[int, int, int], Any] = {}
        self.checked = 0
        engine.watchers.append(lambda _, output: self.compute(output))

    def compute(self, output: Any) -> None:
        """Check what the step attends to, and write what it computes."""
        for name, count in output.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[name]
            tables = self.engine.scheduler.kv_cache_manager.get_block_ids(name)
            end = request.num_computed_tokens
            chain: list[int] = []
            for token in [*request.all_token_ids[:end], *[TOKEN] * (end - request.num_tokens)]:
                chain.append(hash((chain[-1] if chain else request.cache_salt, token)))
            for group, (spec, table) in enumerate(zip(self.engine.specs, tables, strict=True)):
                size = spec.block_size
                # vLLM lays a window out for the token behind a loaded prompt and then recomputes its last token, whose
                # window may begin one slot before (stock workers as well): that slot is left out.
                low = max(0, end - count - spec.sliding_window + 2) if spec.sliding_window else 0
                for at in range(low, end - count):
                    found = self.slots.get((group, table[at // size], at % size))
                    assert found == chain[at], f"{name} attends at {at} of group {group} to what is not its own"
                    self.checked += 1
                for at in range(end - count, end):
                    self.slots[group, table[at // size], at % size] = chain[at]

    def copy_from(self, other: Memory, local: Any, remote: Any) -> None:
        """Read blocks of another worker."""
        for group, (own, ids) in enumerate(zip(local, remote, strict=True)):
            for to, source in zip(own, ids, strict=True):
                for offset in range(self.engine.specs[group].block_size):
                    self.slots[group, to, offset] = other.slots.get((group, source, offset))


class Fleet:
    """One prefill worker and two decode workers, driven at random."""

    def __init__(self, seed: int, specs: tuple[Any, ...], *, push: bool) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        self.push = push
        self.p = Engine(specs=specs, blocks=90, push=push, tables=TABLES)
        self.ds = [Engine(specs=specs, blocks=60, push=push) for _ in range(2)]
        self.starts = [engine.free for engine in (self.p, *self.ds)]
        self.memory = {id(engine): Memory(engine) for engine in (self.p, *self.ds)}
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.offers: list[tuple[str, list[int], int, Any]] = []
        self.loads: list[tuple[Engine, str, Any, Any]] = []
        self.told: list[set[str]] = [set(), set(), set()]
        self.failed: list[set[str]] = [set(), set()]
        self.received: list[set[str]] = [set(), set()]
        self.open: set[str] = set()
        self.prompts: dict[str, list[int]] = {}
        self.count = 0
        self.ends = 0
        self.again = 0
        for engine in self.ds:
            engine.watchers.append(self.notice)

    def ask(self, tokens: list[int], place: int, **more: object) -> None:
        """Send a prompt to prefill, with what its decode worker holds now, or with what it does not."""
        d = self.ds[place]
        blocks = d.cached(tokens) // d.specs[0].block_size
        if self.rng.random() < 0.2:
            blocks = self.rng.randint(0, (len(tokens) - 1) // d.specs[0].block_size)
        self.count += 1
        name = f"p{self.count}"
        params: dict[str, object] = {"do_remote_decode": True, **more}
        if blocks and not more:
            params["decode_cache_info"] = claim(d, tokens, blocks)
        self.p.add(name, list(tokens), params)
        self.asked[name] = (tokens, place)

    def notice(self, d: Engine, output: Any) -> None:
        """Take what a decode worker's scheduler tells its worker half."""
        place = self.ds.index(d)
        meta = output.kv_connector_metadata
        self.failed[place] |= meta.fail_now
        for name, entry in [*meta.notices.items(), *meta.reqs_to_recv.items()]:
            if not any(entry.local_block_ids):
                self.told[2].add(entry.remote.request_id)
            else:
                self.loads.append((d, name, entry, meta.leases.get(name)))

    def load(self, d: Engine, name: str, entry: Any, lease: Any) -> None:
        """Read, or write, the blocks of one request, whatever has become of them."""
        place, remote = self.ds.index(d), entry.remote.request_id
        blocks = entry.remote.block_ids
        if self.push:
            if remote not in self.open:
                # The prefill worker writes what it leases only; the decode worker's time-out ends the request.
                self.failed[place].add(name)
                return
            lists = self.p.half._finished_request_blocks[remote]
            blocks = [list(ids)[len(ids) - len(own) :] for ids, own in zip(lists, entry.local_block_ids, strict=True)]
        self.memory[id(d)].copy_from(self.memory[id(self.p)], entry.local_block_ids, blocks)
        if not self.push:
            sent = self.p.half.prefill._sent.get(remote)
            word = sent.word if sent and remote in self.open else None
            # A request beyond the words has none: its lease is not let end before it is read.
            if lease is not None and (word is None or word.generation != lease.generation):
                self.failed[place].add(name)
                return
        self.received[place].add(name)
        self.told[2].add(remote)

    def step(self) -> None:
        """Do things at random, then take a step of every worker."""
        self.ask_one()
        self.take_answers()
        self.send_one()
        self.break_something()
        if self.loads and self.rng.random() < 0.6:
            self.load(*self.loads.pop(self.rng.randrange(len(self.loads))))
        self.step_all()

    def ask_one(self) -> None:
        """Send a prompt of one of a few prefixes."""
        rng = self.rng
        if self.count < 60 and len(self.asked) < 4 and rng.random() < 0.6:
            prefix = rng.randrange(PREFIXES)
            head = [(prefix * 31 + index) % 400 for index in range(PREFIX)]
            tail = [rng.randrange(400) for _ in range(rng.randint(0, LONGEST - PREFIX))]
            self.ask(head + tail, rng.randrange(2))

    def take_answers(self) -> None:
        """Take what prefill offers."""
        for name, (tokens, place) in list(self.asked.items()):
            if name not in self.p.outputs:
                continue
            del self.asked[name]
            self.open.add(name)
            offer = json.loads(json.dumps(self.p.outputs.pop(name).kv_transfer_params))
            self.offers.append((name, tokens, place, offer))

    def send_one(self) -> None:
        """Send an offer to decode, now and then to another worker or with a longer prompt."""
        rng = self.rng
        if not self.offers or rng.random() < 0.5:
            return
        name, tokens, place, offer = self.offers.pop(rng.randrange(len(self.offers)))
        if rng.random() < 0.1:
            place = 1 - place
        if rng.random() < 0.1:
            tokens = [*tokens, rng.randrange(400)]
        self.prompts[f"d{name}"] = tokens
        self.ds[place].add(f"d{name}", list(tokens), offer, max_tokens=rng.randint(1, 4))

    def break_something(self) -> None:
        """Abort requests, and end leases, also of what is being read."""
        rng = self.rng
        for name in list(self.asked):
            if name not in self.p.outputs and rng.random() < 0.02:
                self.p.abort(name)
                del self.asked[name]
        for d in self.ds:
            if rng.random() < 0.02 and d.scheduler.requests:
                d.abort(rng.choice(sorted(d.scheduler.requests)))
        leased = sorted(self.open - self.told[2])
        if leased and rng.random() < 0.05:
            # Without a word nobody could tell.
            name = rng.choice(leased)
            sent = self.p.half.prefill._sent.get(name)
            if self.push or (sent is not None and sent.word is not None):
                self.told[2].add(name)

    def step_all(self) -> None:
        """Take a step of every worker, with what was told since the last one."""
        done = self.told[2] & self.open
        self.told[2] -= done
        self.open -= done
        self.told[2] &= self.open
        self.p.step(sent=done)
        released = self.p.meta.releases & self.open
        self.told[2] |= released
        for place, d in enumerate(self.ds):
            # Only what is parked, as the worker half reports it; aborted ones keep their blocks until then.
            failed = self.failed[place] & d.scheduler.requests.keys()
            received = self.received[place] & d.scheduler.requests.keys()
            self.failed[place] -= failed
            self.received[place] -= received
            d.step(received=received, failed=failed)
            for name in list(d.outputs):
                output = d.outputs.pop(name)
                self.ends += 1
                if str(output.finish_reason) == "error":
                    self.repeat(name, place)

    def repeat(self, name: str, place: int) -> None:
        """Do what the router does after an error before the first token."""
        tokens = self.prompts.pop(name, None)
        if tokens is not None:
            self.again += 1
            self.ask(tokens, place, kvdelta={"release": name.removeprefix("d")})


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(
    "specs", [(full(),), (full(), window(12)), (full(4), full(8))], ids=["full", "window", "sizes"]
)
@pytest.mark.parametrize("seed", range(4))
def test_nobody_attends_to_a_wrong_block(seed: int, specs: tuple[Any, ...], *, push: bool) -> None:
    fleet = Fleet(seed, specs, push=push)
    for _ in range(700):
        fleet.step()
        if fleet.count >= 60 and not (fleet.asked or fleet.offers or fleet.loads):
            break
    for _ in range(60):
        while fleet.loads:
            fleet.load(*fleet.loads.pop())
        fleet.step_all()
    # What nobody fetched ends with its lease.
    fleet.told[2] |= fleet.open
    fleet.step_all()
    fleet.step_all()
    assert [list(engine.scheduler.requests) for engine in (fleet.p, *fleet.ds)] == [[], [], []]
    assert [engine.free for engine in (fleet.p, *fleet.ds)] == fleet.starts
    assert fleet.p.count("claims", "skipped") > 0
    assert sum(d.count("offers", "confirmed") for d in fleet.ds) > 0
    assert all(memory.checked > 0 for memory in fleet.memory.values())
