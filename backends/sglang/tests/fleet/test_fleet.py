# SPDX-License-Identifier: Apache-2.0
"""Claims in a whole fleet: the patched frontend, two workers of the patched ``dynamo.sglang``, SGLang, NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from engines import MODEL, ON_CPU, PAGE, free_port
from loses_loads import FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FRONTEND: Final = "KVDELTA_TEST_FRONTEND"
"""The frontend of the patched Dynamo."""
START_S: Final = 300
ANSWER_S: Final = 90
PROMPT: Final = " ".join(str(number * number) for number in range(150))
MODES: Final = ("prefill", "decode")


def installed(folder: Path, name: str, entry: str) -> None:
    """Write what an installed package with a plugin of SGLang has."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n")


def low_port() -> int:
    """A port that nobody has now, of those that Dynamo takes for its metrics: below 2^15."""
    for port in random.sample(range(20000, 2**15), 100):
        with socket.socket() as bound, contextlib.suppress(OSError):
            bound.bind(("0.0.0.0", port))  # noqa: S104 as Dynamo does
            return port
    raise RuntimeError("no free port")


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
    """A frontend, a prefill and a decode worker."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loses = folder, folder / "loses"
        self.http, bootstrap = free_port(), free_port()
        self.system = {mode: low_port() for mode in MODES}
        self.processes: list[subprocess.Popen[bytes]] = []
        installed(folder / "plugins", "kvdelta_sglang", "kvdelta = kvdelta_sglang.plugin:register")
        installed(folder / "lossy", "loses_loads", "loses_loads = loses_loads:install")
        self.start("frontend", [os.environ[FRONTEND], "--router-mode", "kv", *self.router()])
        for mode in MODES:
            self.start(mode, [sys.executable, "-m", "dynamo.sglang", *self.options(mode, bootstrap)])

    def router(self) -> list[str]:
        """Options of the frontend."""
        port, block = str(self.http), str(PAGE)
        return ["--router-decode-overlap-score-weight", "2", "--kv-cache-block-size", block, "--http-port", port]

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
            "max-total-tokens": 4096,
            "max-running-requests": 8,
            "random-seed": 1,
            "host": "0.0.0.0",  # noqa: S104 decode asks at the address that prefill advertises
            "port": free_port(),
            "disaggregation-mode": mode,
            "disaggregation-transfer-backend": "nixl",
            "disaggregation-bootstrap-port": bootstrap,
            "kv-events-config": json.dumps(events),
        }
        flags = ["--disable-overlap-schedule", "--skip-server-warmup"]
        if mode == "decode":
            flags.append("--disaggregation-decode-enable-radix-cache")
        return [*(text for name, value in options.items() for text in (f"--{name}", str(value))), *flags]

    def start(self, name: str, command: list[str]) -> None:
        """Start a process of its own group, whose output is kept."""
        folders = [self.folder / "plugins", Path(__file__).parents[1]]
        if name == "decode":
            folders.append(self.folder / "lossy")
        environment = os.environ | ON_CPU
        environment |= {
            "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]]),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "info,dynamo_llm::kv_router::prefill_router=debug",
            FILE: str(self.loses),
        }
        if name in self.system:
            environment["DYN_SYSTEM_PORT"] = str(self.system[name])
        log = (self.folder / f"{name}.log").open("wb")
        self.processes.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
        )

    def is_up(self) -> bool:
        """Whether the frontend can answer; an error if a process has ended."""
        for process in self.processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} has ended")
        try:
            # The model is listed a little before the router knows of all workers.
            return '"m"' in get(f"http://127.0.0.1:{self.http}/v1/models") and bool(self.ask("up"))
        except OSError:
            return False

    def ask(self, prompt: str) -> str:
        """The text of the answer."""
        asked = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        url, headers = f"http://127.0.0.1:{self.http}/v1/completions", {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            said: dict[str, Any] = json.load(answer)
            text: str = said["choices"][0]["text"]
            return text

    def metric(self, at: str, name: str, label: str = "") -> int:
        """The sum of a metric over its series that have the label."""
        port = self.http if at == "frontend" else self.system[at]
        lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", get(f"http://127.0.0.1:{port}/metrics"), re.MULTILINE)
        return round(sum(float(value) for labels, value in lines if label in labels))

    def stop(self) -> None:
        """End all, with what they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
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


def claims(fleet: Fleet) -> int:
    return fleet.metric("frontend", "dynamo_component_router_decode_claims_total")


def settled(fleet: Fleet, outcome: str) -> int:
    return fleet.metric("prefill", "sglang:kvdelta_claims_total", f'outcome="{outcome}"')


def test_the_router_claims_what_decode_holds_and_it_does(fleet: Fleet) -> None:
    answer = fleet.ask(PROMPT)
    assert fleet.metric("prefill", "sglang:kvdelta_skipped_tokens_total") == 0

    def is_claimed() -> bool:
        assert fleet.ask(PROMPT) == answer
        return claims(fleet) > 0

    until("decode's events arrive and a claim is made", is_claimed, ANSWER_S)
    assert fleet.ask(PROMPT) == answer
    until("prefill tells of all claims", lambda: settled(fleet, "held") == claims(fleet), ANSWER_S)
    assert all(settled(fleet, outcome) == 0 for outcome in ("stale", "content", "unsettled", "invalid"))
    assert fleet.metric("prefill", "sglang:kvdelta_skipped_tokens_total") > 0
    assert fleet.metric("frontend", "dynamo_component_router_decode_trust_lowered_total") == 0


def test_a_promise_that_decode_cannot_keep_ends_in_a_retry_and_the_right_answer(fleet: Fleet) -> None:
    answer = fleet.ask(PROMPT)
    sent = fleet.metric("prefill", "sglang:kvdelta_sent_tokens_total")
    fleet.loses.touch()
    assert fleet.ask(PROMPT) == answer
    assert not fleet.loses.exists()
    assert fleet.metric("decode", "sglang:kvdelta_failed_loads_total") == 1
    # Prefill sent all of the prompt, and no claim was at fault.
    until(
        "prefill is counted",
        lambda: fleet.metric("prefill", "sglang:kvdelta_sent_tokens_total") >= sent + 9 * PAGE,
        ANSWER_S,
    )
    assert fleet.metric("frontend", "dynamo_component_router_decode_trust_lowered_total") == 0
    # What was sent under a salt of its own is not what the next request finds.
    assert fleet.ask(PROMPT) == answer
