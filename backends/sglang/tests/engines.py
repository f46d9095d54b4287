# SPDX-License-Identifier: Apache-2.0
"""Real SGLang engines on the CPU, each in processes of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Client, wait
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import inside
import msgspec
import numpy as np
import zmq
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

T = TypeVar("T")
MODEL: Final = "KVDELTA_TEST_MODEL"
"""The folder of the test model."""
PAGE: Final = 16
TOKENS: Final = 1024
"""Tokens that one pool holds."""
WAIT_S: Final = 300.0
END: Final = (-1).to_bytes(8, "big", signed=True)

ON_CPU: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Some of SGLang's kernels are Triton's alone.
    "TRITON_INTERPRET": "1",
    "UCX_TLS": "tcp,sm,self",
    # All cores to each of two ranks; without this SGLang wants a NUMA node for each.
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * 2),
}
COMMON: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "page_size": PAGE,
    "max_total_tokens": TOKENS,
    "max_running_requests": 8,
    "random_seed": 1,
    "host": "127.0.0.1",
    "disaggregation_transfer_backend": "nixl",
}


def _run(pipe: Connection, options: dict[str, Any]) -> None:
    """Answer with what the engine says, until the other end is closed."""
    from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415

    class Watched(Engine):  # type: ignore[misc]
        """SGLang's engine, whose schedulers the tests look into."""

        run_scheduler_process_func = staticmethod(inside.run)

    engine = Watched(model_path=os.environ[MODEL], log_level="warning", **options)
    pipe.send(None)
    while True:
        try:
            method, request = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(getattr(engine, method)(**request))
        except Exception as error:  # noqa: BLE001 the test has to see it
            pipe.send(error)
    engine.shutdown()


@dataclass(frozen=True)
class Publisher:
    """Where an engine publishes its KV events; the second of two ranks one port higher."""

    events: int = field(default_factory=lambda: free_port(2))
    replay: int = field(default_factory=lambda: free_port(2))

    def config(self) -> str:
        """SGLang's option for it."""
        return json.dumps(
            {
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events}",
                "replay_endpoint": f"tcp://*:{self.replay}",
            }
        )

    def published(self, rank: int = 0) -> list[Any]:
        """All batches of a rank since the engine's start, by its replay socket."""
        batches: list[Any] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"tcp://127.0.0.1:{self.replay + rank}")
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while socket.poll(WAIT_S * 1000):
                _, number, payload = socket.recv_multipart()
                if not payload:
                    assert number == END
                    return batches
                batches.append(msgspec.msgpack.decode(payload))
        raise TimeoutError("no end of the replay")


class Engine:
    """One engine and its schedulers."""

    def __init__(self, folder: Path, mode: str, **options: Any) -> None:
        os.environ |= ON_CPU | {inside.SOCKETS: str(folder)}
        self.folder, self.mode = folder, mode
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        if options.get("dp_size", 1) == 1:
            # Otherwise each rank has one of its own.
            options = {"nccl_port": free_port()} | options
        options = COMMON | {"port": free_port(), "disaggregation_mode": mode} | options
        self.process = spawn.Process(target=_run, args=(theirs, options))
        self.process.start()
        theirs.close()
        self.asked: dict[int, Connection] = {}

    def answer(self) -> Any:
        """What the engine says to the request before; an error if it takes too long or has ended."""
        ready = wait([self.pipe, self.process.sentinel], WAIT_S)
        if self.pipe not in ready:
            raise RuntimeError(f"{self.mode}: {'ended' if ready else 'no answer'}")
        said = self.pipe.recv()
        if isinstance(said, Exception):
            raise said
        return said

    def call(self, method: str, **request: Any) -> None:
        """Begin a call; `answer` has its result."""
        self.pipe.send((method, request))

    def ask(self, function: Callable[..., T], *args: Any, rank: int = 0) -> T:
        """The result of a function of `inside`, called in the scheduler's process."""
        if rank not in self.asked:
            self.asked[rank] = Client(str(self.folder / f"{self.mode}-{rank}"))
        self.asked[rank].send((function, args))
        done, result = self.asked[rank].recv()
        if not done:
            raise RuntimeError(result)
        answer: T = result
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self.process.join(20)
        self.process.kill()


def tokens(seed: int, count: int) -> list[int]:
    """Return tokens of the test model that no other seed has."""
    return [int(token) for token in np.random.default_rng(seed).integers(100, 4000, count)]


class Pair:
    """A prefill and a decode engine, which tell what they cache, and requests through both."""

    def __init__(
        self, folder: Path, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
    ) -> None:
        self.bootstrap_port = free_port()
        self.publishers = {"prefill": Publisher(), "decode": Publisher()}
        shared = {"disaggregation_bootstrap_port": self.bootstrap_port}
        self.prefill, self.decode = (
            Engine(folder, mode, **shared | {"kv_events_config": self.publishers[mode].config()} | (options or {}))
            for mode, options in (
                ("prefill", prefill),
                ("decode", {"disaggregation_decode_enable_radix_cache": True} | (decode or {})),
            )
        )
        self.room = 0
        try:
            for engine in (self.prefill, self.decode):
                engine.answer()
        except BaseException:
            # Else the end of this process waits for theirs.
            self.__exit__()
            raise

    def request(self, tokens: list[int], new_tokens: int = 1, **request: Any) -> dict[str, Any]:
        """A request of its own, for both engines."""
        self.room += 1
        return request | {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": self.room,
        }

    def generate(self, tokens: list[int], new_tokens: int = 1, rank: int | None = None, **request: Any) -> list[int]:
        """The tokens that D answers with, or one of its ranks."""
        both = self.request(tokens, new_tokens, **request)
        self.prefill.call("generate", **both)
        self.decode.call("generate", **both, routed_dp_rank=rank)
        self.prefill.answer()
        said: list[int] = self.decode.answer()["output_ids"]
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.decode.__exit__(*reason)
        self.prefill.__exit__(*reason)
