# SPDX-License-Identifier: Apache-2.0
"""The handlers of ``dynamo.sglang`` in front of real SGLang engines, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import inside
from engines import MODEL, Pair

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Context:
    """A request's context whose client stays."""

    def __init__(self, name: str) -> None:
        self.name = name

    def id(self) -> str:
        """The request's id."""
        return self.name

    def trace_headers(self) -> dict[str, str]:
        """Nothing is traced."""
        return {}

    def is_stopped(self) -> bool:
        """Nobody leaves."""
        return False

    def notify_first_token(self) -> None:
        """Nobody waits for it."""

    def async_killed_or_stopped(self) -> asyncio.Future[None]:
        """Return what never ends."""
        return asyncio.get_running_loop().create_future()


def _handler(mode: str, engine: Any) -> Any:
    """Dynamo's handler as its worker makes it, without what needs Dynamo's runtime."""
    from dynamo.sglang.request_handlers.handler_base import BaseWorkerHandler  # noqa: PLC0415
    from dynamo.sglang.request_handlers.llm.decode_handler import DecodeWorkerHandler  # noqa: PLC0415
    from dynamo.sglang.request_handlers.llm.prefill_handler import PrefillWorkerHandler  # noqa: PLC0415

    config = SimpleNamespace(
        server_args=engine.server_args,
        serving_mode=None,
        dynamo_args=SimpleNamespace(enable_rl=False, use_sglang_tokenizer=False),
    )
    kind = PrefillWorkerHandler if mode == "prefill" else DecodeWorkerHandler
    handler = kind.__new__(kind)
    handler.engine, handler.config, handler.shutdown_event = engine, config, None
    handler.enable_trace = False
    handler.use_sglang_tokenizer = False
    handler._abort_tasks, handler._consume_tasks = set(), set()
    handler._first_token_source, handler._routed_experts_kwargs = None, {}
    handler._max_input_token_id = None
    handler._get_input_param = lambda request: {"input_ids": request["token_ids"]}
    handler._resolve_lora = lambda _: None
    handler._priority_kwargs = lambda _: {}
    if mode == "prefill":
        handler.bootstrap_host, handler.bootstrap_port = BaseWorkerHandler._get_bootstrap_info(engine)
    else:
        from dynamo.common.constants import DisaggregationMode  # noqa: PLC0415

        handler.serving_mode = DisaggregationMode.DECODE
    return handler


async def _outputs(handler: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [output async for output in handler.generate(request, Context(request["id"]))]


def run(pipe: Connection, options: dict[str, Any]) -> None:
    """Answer requests with all that the handler yields, until the other end is closed."""
    from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415

    class Watched(Engine):  # type: ignore[misc]
        """SGLang's engine, whose schedulers the tests look into."""

        run_scheduler_process_func = staticmethod(inside.run)

    # Dynamo asks SGLang for disjoint chunks.
    engine = Watched(
        model_path=os.environ[MODEL],
        log_level="warning",
        incremental_streaming_output=True,
        skip_tokenizer_init=True,
        **options,
    )
    handler = _handler(options["disaggregation_mode"], engine)
    from dynamo.sglang import decode_cache_info  # noqa: PLC0415

    pipe.send(None)
    while True:
        try:
            method, request = pipe.recv()
        except EOFError:
            break
        try:
            if method == "serve":
                pipe.send(engine.loop.run_until_complete(_outputs(handler, request)))
            elif method == "count":
                pipe.send(decode_cache_info.claim_worker().stats.value(**request))
            else:
                pipe.send(decode_cache_info.claim_worker().plain_reason)
        except Exception as error:  # noqa: BLE001 the test has to see it
            pipe.send(error)
    engine.shutdown()


class Workers(Pair):
    """A prefill and a decode worker, with requests as Dynamo's router sends them."""

    def ask(self, tokens: list[int], claim: dict[str, Any] | None = None, **decode: Any) -> tuple[Any, Any]:
        """All outputs of prefill and of decode."""
        self.room += 1
        request = {
            "id": f"request-{self.room}",
            "token_ids": tokens,
            "sampling_options": {"temperature": 0},
            "stop_conditions": {"max_tokens": 4, "ignore_eos": True},
            "bootstrap_info": {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": self.bootstrap_port,
                "bootstrap_room": self.room,
            },
        }
        told = {} if claim is None else {"decode_cache_info": claim}
        self.prefill.call("serve", **request, **told)
        self.decode.call("serve", **request, **decode)
        return self.prefill.answer(), self.decode.answer()
