# SPDX-License-Identifier: Apache-2.0
"""Claims in a whole fleet: patched frontends, three workers of the patched ``dynamo.sglang``, SGLang, NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from engines import MODEL, ON_CPU, PAGE
from entry_points import KVDELTA, LOSES_LOADS, installed
from loses_loads import FILE
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FRONTEND: Final = "KVDELTA_TEST_FRONTEND"
"""The frontend of the patched Dynamo."""
START_S: Final = 300
ANSWER_S: Final = 90
WORKERS: Final = {"prefill": "prefill", "decode-1": "decode", "decode-2": "decode"}
"""Names of the workers, and their modes."""
WEIGHTS: Final = {"frontend": "2", "plain": "0"}
"""Names of the frontends, and their weights."""
PREFIXES: Final = 4
"""Shared prefixes."""
PREFIX_PAGES: Final = 10
ASKED: Final = 6
"""Requests of each, after the first."""
AT_ONCE: Final = 2


def words(seed: int, tokens: int) -> str:
    """A text of so many tokens of the test model."""
    return " ".join(f"w{token:04}" for token in random.Random(seed).choices(range(4096), k=tokens))  # noqa: S311


PROMPT: Final = words(-1, PREFIX_PAGES * PAGE)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310
        text: str = answer.read().decode()
        return text


def until(what: str, holds: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.2)


class Fleet:
    """A frontend with a weight and one without, a prefill worker, two decode workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loses = folder, folder / "loses"
        bootstrap = free_port()
        self.http = {name: free_port() for name in WEIGHTS}
        self.system = {name: free_port() for name in WORKERS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        installed(folder / "plugins", KVDELTA)
        installed(folder / "lossy", LOSES_LOADS)
        for name, weight in WEIGHTS.items():
            port, block = str(self.http[name]), str(PAGE)
            router = ["--router-mode", "kv", "--router-decode-overlap-score-weight", weight]
            self.start(name, [os.environ[FRONTEND], *router, "--kv-cache-block-size", block, "--http-port", port])
        for name, mode in WORKERS.items():
            self.start(name, [sys.executable, "-m", "dynamo.sglang", *self.options(mode, bootstrap)])

    def options(self, mode: str, bootstrap: int) -> list[str]:
        """Options of a worker."""
        events = {"publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{free_port()}"}
        options = {
            "model-path": os.environ[MODEL],
            "served-model-name": "m",
            "device": "cpu",
            "dtype": "float32",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "page-size": PAGE,
            "max-total-tokens": 8192,
            "max-running-requests": 8,
            "random-seed": 1,
            "host": "0.0.0.0",  # noqa: S104 decode asks at the address that prefill advertises
            "port": free_port(),
            "nccl-port": free_port(),
            "disaggregation-mode": mode,
            "disaggregation-transfer-backend": "nixl",
            "disaggregation-bootstrap-port": bootstrap,
            "kv-events-config": json.dumps(events),
        }
        flags = ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"]
        if mode == "decode":
            flags.append("--disaggregation-decode-enable-radix-cache")
        return [*(text for name, value in options.items() for text in (f"--{name}", str(value))), *flags]

    def start(self, name: str, command: list[str]) -> None:
        """Start a process of its own group, whose output is kept."""
        folders = [self.folder / "plugins", Path(__file__).parents[1]]
        if name.startswith("decode"):
            folders.append(self.folder / "lossy")
        environment = os.environ | ON_CPU
        environment |= {
            "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]]),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_TCP_REQUEST_TIMEOUT": str(ANSWER_S),
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "info,dynamo_llm::kv_router::prefill_router=debug",
            FILE: str(self.loses),
        }
        if name in self.system:
            environment["DYN_SYSTEM_PORT"] = str(self.system[name])
        log = (self.folder / f"{name}.log").open("wb")
        self.processes[name] = subprocess.Popen(  # noqa: S603
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def is_up(self) -> bool:
        """Whether the frontend can answer; an error if a process has ended."""
        for process in self.processes.values():
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} has ended")
        try:
            # The model is listed a little before the router knows of all workers.
            return all(self.workers(at) == len(WORKERS) and self.ask("up", at) for at in self.http)
        except OSError:
            return False

    def workers(self, at: str) -> int:
        """How many workers a frontend knows."""
        health: dict[str, Any] = json.loads(get(f"http://127.0.0.1:{self.http[at]}/health"))
        return len({one["instance_id"] for one in health["instances"] if one["endpoint"] == "generate"})

    def ask(self, prompt: str, at: str = "frontend", salt: str | None = None) -> str:
        """The text of the answer."""
        text: str = self.answer(prompt, at, salt)["choices"][0]["text"]
        return text

    def answer(self, prompt: str, at: str, salt: str | None = None) -> dict[str, Any]:
        """The whole answer, with the ids of its workers."""
        asked = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        asked["nvext"] = {"extra_fields": ["worker_id"]}
        if salt is not None:
            asked["cache_salt"] = salt
        url, headers = f"http://127.0.0.1:{self.http[at]}/v1/completions", {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            said: dict[str, Any] = json.load(answer)
            return said

    def decode_of(self, prompt: str) -> str:
        """The name of the decode worker that now gets such a request."""
        worker = str(self.answer(prompt, "frontend")["nvext"]["worker_id"]["decode_worker_id"])
        logs = {name: (self.folder / f"{name}.log").read_text(errors="replace") for name in WORKERS}
        (name,) = [name for name, text in logs.items() if name.startswith("decode") and worker in text]
        return name

    def metric(self, at: str, name: str, label: str = "") -> int:
        """The sum of a metric, over the processes whose names begin so and its series that have the label."""
        ports = [port for of, port in (self.http | self.system).items() if of.startswith(at)]
        text = "\n".join(get(f"http://127.0.0.1:{port}/metrics") for port in ports)
        lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return round(sum(float(value) for labels, value in lines if label in labels))

    def stop(self) -> None:
        """End all, with what they started."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            # Schedulers may outlive their worker.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        until("the fleet is up", fleet.is_up, START_S)
        yield fleet
    finally:
        fleet.stop()
        for log in sorted(fleet.folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")  # noqa: T201


def sent(fleet: Fleet) -> int:
    """Tokens of prompts that prefill has sent."""
    return fleet.metric("prefill", "sglang:kvdelta_sent_tokens_total")


def skipped(fleet: Fleet) -> int:
    """Tokens of prompts that decode held."""
    return fleet.metric("prefill", "sglang:kvdelta_skipped_tokens_total")


def told(fleet: Fleet) -> int:
    """Tokens of prompts of which prefill has counted whether they were sent."""
    return sent(fleet) + skipped(fleet)


def until_counted(fleet: Fleet) -> None:
    """Wait until prefill has counted all that it was asked."""
    last = -1

    def is_still() -> bool:
        nonlocal last
        last, before = told(fleet), last
        return last == before

    until("prefill has counted all", is_still, ANSWER_S)


def claims(fleet: Fleet) -> int:
    return fleet.metric("frontend", "dynamo_component_router_decode_claims_total")


def settled(fleet: Fleet, outcome: str) -> int:
    return fleet.metric("prefill", "sglang:kvdelta_claims_total", f'outcome="{outcome}"')


def until_claimed(fleet: Fleet, prompt: str, **options: str) -> None:
    """Ask until decode's events have arrived, so that a claim is made."""
    before = claims(fleet)
    until("a claim is made", lambda: fleet.ask(prompt, **options) and claims(fleet) > before, ANSWER_S)


def test_the_router_claims_what_decode_holds_and_it_does(fleet: Fleet) -> None:
    answer = fleet.ask(PROMPT)
    assert skipped(fleet) == 0

    until_claimed(fleet, PROMPT)
    assert fleet.ask(PROMPT) == answer
    until("prefill tells of all claims", lambda: settled(fleet, "held") == claims(fleet), ANSWER_S)
    assert all(settled(fleet, outcome) == 0 for outcome in ("stale", "content", "unsettled", "invalid"))
    assert skipped(fleet) > 0
    assert fleet.metric("frontend", "dynamo_component_router_decode_trust_lowered_total") == 0


def test_a_promise_that_decode_cannot_keep_ends_in_a_retry_and_the_right_answer(fleet: Fleet) -> None:
    answer = fleet.ask(PROMPT)
    until_claimed(fleet, PROMPT)
    before = sent(fleet)
    fleet.loses.touch()
    assert fleet.ask(PROMPT) == answer
    assert not fleet.loses.exists()
    assert fleet.metric("decode", "sglang:kvdelta_failed_loads_total") == 1
    repeated = fleet.metric("frontend", "dynamo_component_router_decode_failed_loads_total", 'kind="ask_again"')
    assert repeated == 1
    # Prefill sent all of the prompt, and no claim was at fault.
    until("prefill is counted", lambda: sent(fleet) >= before + (PREFIX_PAGES - 1) * PAGE, ANSWER_S)
    assert fleet.metric("frontend", "dynamo_component_router_decode_trust_lowered_total") == 0
    # What was sent under a salt of its own is not what the next request finds.
    assert fleet.ask(PROMPT) == answer


def shared(number: int, asked: int) -> str:
    """A request that shares all but its end with those of the same number."""
    return f"{words(number, PREFIX_PAGES * PAGE)} {words(PREFIXES + number * (ASKED + 1) + asked, PAGE // 2)}"


def test_a_request_goes_to_the_decode_worker_that_holds_its_prefix(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    held, claimed = settled(fleet, "held"), claims(fleet)
    answers: dict[str, list[str]] = {}
    moved: dict[str, int] = {}
    whole: dict[str, int] = {}
    for at in WEIGHTS:
        # The same prompts, whose blocks are shared with nobody else.
        ask = partial(fleet.ask, at=at, salt=f"of {at}")
        answers[at] = [ask(shared(number, 0)) for number in range(PREFIXES)]
        if at == "frontend":
            for number in range(PREFIXES):
                until_claimed(fleet, shared(number, 0), salt=f"of {at}")
        until_counted(fleet)
        before_sent, before_told = sent(fleet), told(fleet)
        prompts = [shared(number, asked) for asked in range(1, ASKED + 1) for number in range(PREFIXES)]
        with ThreadPoolExecutor(AT_ONCE) as at_once:
            answers[at] += at_once.map(ask, prompts)
        until_counted(fleet)
        moved[at], whole[at] = sent(fleet) - before_sent, told(fleet) - before_told
    with capsys.disabled():
        for at, weight in WEIGHTS.items():
            said = f"{PREFIXES * ASKED} prompts of {whole[at]} tokens, weight {weight}: {moved[at]} tokens sent"
            print(said)  # noqa: T201
    assert answers["frontend"] == answers["plain"]
    assert whole["frontend"] == whole["plain"]
    # What differs at the end of a prompt, and the page that is not whole.
    assert moved["frontend"] <= PREFIXES * ASKED * 2 * PAGE
    # Of two at once, load alone sends one to each decode worker.
    assert moved["plain"] > moved["frontend"]
    assert claims(fleet) - claimed >= PREFIXES * ASKED
    until("all claims held", lambda: settled(fleet, "held") - held == claims(fleet) - claimed, ANSWER_S)


def test_when_a_decode_worker_dies_the_other_answers_and_gets_claims(fleet: Fleet) -> None:
    prompts = [shared(number, 0) for number in range(PREFIXES)]
    answers = [fleet.ask(prompt) for prompt in prompts]
    until_claimed(fleet, prompts[0])
    os.killpg(fleet.processes[fleet.decode_of(prompts[0])].pid, signal.SIGKILL)

    def is_answered() -> bool:
        try:
            got = {at: [fleet.ask(prompt, at=at) for prompt in prompts] for at in WEIGHTS}
        except OSError:
            # A request that was under way, or before a frontend knows.
            return False
        assert all(said == answers for said in got.values())
        return True

    until("the other decode worker answers all", is_answered, ANSWER_S)
    until_claimed(fleet, prompts[0])
