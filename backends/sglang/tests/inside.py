# SPDX-License-Identifier: Apache-2.0
"""What the tests do inside of SGLang's scheduler process: watch NIXL, and look at the pools of keys and values."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from dataclasses import dataclass
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

SOCKETS: Final = "KVDELTA_TEST_SOCKETS"
"""The folder where each scheduler listens, by mode and rank."""


@dataclass(frozen=True)
class Write:
    """One transfer that SGLang gave to NIXL: ranges of addresses, in pairs."""

    notice: str
    sources: list[tuple[int, int]]
    targets: list[tuple[int, int]]


@dataclass(frozen=True)
class Metadata:
    """What D told P about one request."""

    room: int
    pages: list[int]
    prefix_tokens: int


@dataclass(frozen=True)
class Layout:
    """Where the pool of one rank lies: for each buffer its address, its bytes and the bytes of a page."""

    addresses: list[int]
    lengths: list[int]
    page_bytes: list[int]

    def page(self, address: int) -> tuple[int, int]:
        """The buffer and the page that begins at an address.

        Raises:
            ValueError: if no page of this pool does.
        """
        for buffer, (start, length, page) in enumerate(zip(self.addresses, self.lengths, self.page_bytes, strict=True)):
            if start <= address < start + length and (address - start) % page == 0:
                return buffer, (address - start) // page
        raise ValueError(address)


@dataclass(frozen=True)
class Step:
    """What P did for a request: `known` when it learnt what D has, `computes`, `sends`."""

    what: str
    room: int
    tokens: int


WRITES: list[Write] = []
STEPS: list[Step] = []
TOLD: list[Metadata] = []


def writes(_: Any) -> list[Write]:
    """What went to NIXL since the last call."""
    taken = WRITES[:]
    WRITES.clear()
    return taken


def told(_: Any) -> list[Metadata]:
    """What D told P since the last call."""
    taken = TOLD[:]
    TOLD.clear()
    return taken


def steps(_: Any) -> list[Step]:
    """What P did since the last call."""
    taken = STEPS[:]
    STEPS.clear()
    return taken


def computes_early(_: Any, attempts: int) -> None:
    """Let P compute so often before it has heard from D (`--optimistic-prefill-attempts`)."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415

    get_context().override("test", optimistic_prefill_attempts=attempts)


def layout(scheduler: Any) -> Layout:
    """The pool as SGLang gave it to NIXL."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    queue = queue or scheduler.disagg_decode_prealloc_queue
    of = queue.kv_manager.kv_args
    return Layout(list(of.kv_data_ptrs), list(of.kv_data_lens), list(of.kv_item_lens))


def pool(scheduler: Any) -> list[np.ndarray[Any, Any]]:
    """A copy of the pool, by buffer and page."""
    of = layout(scheduler)
    return [
        np.frombuffer(ctypes.string_at(start, length), np.uint8).reshape(-1, page)
        for start, length, page in zip(of.addresses, of.lengths, of.page_bytes, strict=True)
    ]


def cached_pages(scheduler: Any, tokens: list[int], salt: str | None = None) -> list[int]:
    """The pages of the longest prefix that the radix tree has of these tokens."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: PLC0415
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415

    tree = scheduler.tree_cache
    key = RadixKey(token_ids=array("q", tokens), extra_key=None, cache_salt=salt)
    found = tree.match_prefix(MatchPrefixParams(key=key)).device_indices
    return [int(slot) // tree.page_size for slot in found[:: tree.page_size]]


def free_tokens(scheduler: Any) -> tuple[int, int]:
    """Tokens that are free, and those that the tree would give away."""
    return (
        int(scheduler.token_to_kv_pool_allocator.available_size()),
        int(scheduler.tree_cache.evictable_size()),
    )


def _watch_nixl() -> None:
    """Write down what SGLang's NIXL back end gives to its agent and to its peer."""
    from kvdelta_sglang_cpu import HostAgent  # noqa: PLC0415
    from sglang.srt.disaggregation.nixl import conn  # noqa: PLC0415

    prepared: dict[int, np.ndarray[Any, Any]] = {}
    described: dict[int, list[tuple[int, int]]] = {}

    def ranges(of: Any) -> list[tuple[int, int]]:
        return [(int(row[0]), int(row[1])) for row in of]

    def prepare(self: Any, name: str, rows: Any, *args: Any, **options: Any) -> Any:
        handle = stock["prep_xfer_dlist"](self, name, rows, *args, **options)
        prepared[id(handle)] = np.array(rows)
        return handle

    def make(  # noqa: PLR0917 NIXL's own
        self: Any, kind: str, local: Any, mine: Any, remote: Any, theirs: Any, notice: bytes, *args: Any, **options: Any
    ) -> Any:
        sources, targets = prepared[id(local)][np.array(mine)], prepared[id(remote)][np.array(theirs)]
        WRITES.append(Write(notice.decode(), ranges(sources), ranges(targets)))
        return stock["make_prepped_xfer"](self, kind, local, mine, remote, theirs, notice, *args, **options)

    def describe(self: Any, rows: Any, *args: Any, **options: Any) -> Any:
        descriptors = stock["get_xfer_descs"](self, rows, *args, **options)
        described[id(descriptors)] = ranges(rows)
        return descriptors

    def initialize(self: Any, kind: str, local: Any, remote: Any, *args: Any) -> Any:
        _, notice = args
        WRITES.append(Write(notice.decode(), described.pop(id(local)), described.pop(id(remote))))
        return stock["initialize_xfer"](self, kind, local, remote, *args)

    watched = {
        "prep_xfer_dlist": prepare,
        "make_prepped_xfer": make,
        "get_xfer_descs": describe,
        "initialize_xfer": initialize,
    }
    stock = {name: getattr(HostAgent, name) for name in watched}
    for name, method in watched.items():
        setattr(HostAgent, name, method)

    send = conn.NixlKVReceiver.send_metadata

    def send_metadata(
        self: Any, pages: Any, aux: Any = None, state: Any = None, decode_prefix_len: int | None = None
    ) -> None:
        TOLD.append(Metadata(self.bootstrap_room, [int(page) for page in pages], decode_prefix_len or 0))
        send(self, pages, aux, state, decode_prefix_len)

    conn.NixlKVReceiver.send_metadata = send_metadata


def _watch_prefill() -> None:
    """Write down the order of what P does."""
    from sglang.srt.disaggregation import prefill  # noqa: PLC0415
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415

    finalize = prefill.PrefillBootstrapQueue.finalize_bootstrap
    run_batch, send = Scheduler.run_batch, Scheduler.send_kv_chunk

    def finalize_bootstrap(self: Any, req: Any) -> Any:
        done = finalize(self, req)
        if done:
            STEPS.append(Step("known", req.bootstrap_room, req.disagg_decode_prefix_len))
        return done

    def run(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        STEPS.extend(
            Step("computes", req.bootstrap_room, req.extend_range.end - req.extend_range.start) for req in batch.reqs
        )
        return run_batch(self, batch, *args, **options)

    def send_kv_chunk(self: Any, req: Any, *args: Any, **options: Any) -> Any:
        STEPS.append(Step("sends", req.bootstrap_room, req.start_send_idx))
        return send(self, req, *args, **options)

    prefill.PrefillBootstrapQueue.finalize_bootstrap = finalize_bootstrap
    Scheduler.run_batch, Scheduler.send_kv_chunk = run, send_kv_chunk


def _serve(scheduler: Any, path: str) -> None:
    """Answer the tests, one after the other, while the scheduler has nothing to do."""
    with Listener(path) as listener:
        while True:
            with listener.accept() as asked:
                try:
                    while True:
                        function, args = asked.recv()
                        try:
                            asked.send((True, function(scheduler, *args)))
                        except Exception as error:  # noqa: BLE001 a test has to see it
                            asked.send((False, repr(error)))
                except EOFError:
                    pass


def run(*args: Any, **options: Any) -> None:
    """Run SGLang's scheduler, with the tests inside."""
    from sglang.srt.managers import scheduler as stock  # noqa: PLC0415
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    _watch_nixl()
    _watch_prefill()
    begin: Callable[..., None] = stock.Scheduler.__init__

    def begin_served(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        path = f"{os.environ[SOCKETS]}/{self.disaggregation_mode.value}-{get_parallel().dp_rank or 0}"
        threading.Thread(target=_serve, args=(self, path), daemon=True).start()

    stock.Scheduler.__init__ = begin_served
    stock.run_scheduler_process(*args, **options)
