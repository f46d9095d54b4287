# SPDX-License-Identifier: Apache-2.0
"""What SGLang loads in each of its processes: two hooks that look on, and one that keeps a promise.

SGLang's own decode radix cache decides what is sent. Where a scheduler knows something that the worker in front of it
needs, a hook puts it into ``customized_info``, which SGLang hands on as ``meta_info``.
"""

from __future__ import annotations

import importlib
import logging
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from . import compat

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

PREFIX_KEY: Final = "kvdelta_decode_prefix"
"""In a prefill worker's ``meta_info``: a list of one ``(tokens, bytes on this rank)`` that decode says it holds."""
FAILED_LOAD_KEY: Final = "kvdelta_failed_load"
"""In a decode worker's ``meta_info``: it could not load what it had told prefill that it holds."""


def _target(touched: compat.Touched) -> str:
    return f"{touched.module}.{touched.owner}.{touched.names[0].partition('(')[0]}"


def _tell(req: Any, key: str, value: object) -> None:  # noqa: ANN401
    # One entry for each output token, of which SGLang hands on those that it sends: one at prefill.
    req.customized_info = {**(req.customized_info or {}), key: [value]}


def _looks_on(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep what is wrong in a hook from the request; once as an error, then at debug level."""
    level = logging.ERROR

    @wraps(hook)
    def guarded(*arguments: object, **named: object) -> None:
        nonlocal level
        try:
            hook(*arguments, **named)
        except Exception:
            logger.log(level, "kvdelta: %s failed; the request goes on without it", hook.__name__, exc_info=True)
            level = logging.DEBUG

    return guarded


@_looks_on
def after_bootstrap(is_final: bool, queue: Any, req: Any) -> None:  # noqa: ANN401, FBT001
    """Note what decode told prefill that it holds; after ``PrefillBootstrapQueue.finalize_bootstrap``."""
    if is_final:
        held, args = int(req.disagg_decode_prefix_len), queue.kv_manager.kv_args
        _tell(req, PREFIX_KEY, (held, held // args.page_size * sum(args.kv_item_lens)))


@_looks_on
def after_load(_is_queued: bool, _queue: Any, dr: Any) -> None:  # noqa: ANN401, FBT001
    """Note a prefix that decode has promised and cannot load; after ``_try_hicache_queue_load_back``."""
    if dr.hicache_restore_status.name == "FAILED":
        # Without an output token the list arrives empty.
        _tell(dr.req, FAILED_LOAD_KEY, True)  # noqa: FBT003


def around_prefetch(original: Callable[..., None], queue: Any, req: Any, prefix_match: Any) -> None:  # noqa: ANN401
    """Hold decode to what it tells prefill; around ``DecodeHiCachePreallocMixin._start_hicache_prefetch``.

    Where the prefetch from storage cannot begin, SGLang 0.5.21 takes that length back and tells prefill the longer one
    all the same: nothing would fill those pages, and decode would read what is left in them. With the length kept, the
    load fails by SGLang's own check, and ``after_load`` notes it.
    """
    told_tokens = getattr(prefix_match, "l3_storage_hit_length", 0)
    original(queue, req, prefix_match)
    if told_tokens > 0:
        prefix_match.l3_storage_hit_length = told_tokens


_HOOKS: Final = (
    (compat.PREFILL, after_bootstrap, "AFTER"),
    (compat.LOAD, after_load, "AFTER"),
    (compat.PREFETCH, around_prefetch, "AROUND"),
)


def register() -> None:
    """Register the hooks; the entry point that SGLang calls. Where a name is missing none is."""
    if lacks := compat.missing():
        # The worker warns, once; this runs in each of its processes.
        logger.info("kvdelta: nothing is hooked: this SGLang lacks %s", ", ".join(lacks))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for touched, hook, kind in _HOOKS:
        HookRegistry.register(_target(touched), hook, HookType[kind])


def is_loaded() -> bool:
    """Whether all hooks are in place in this process."""
    for touched, _, _ in _HOOKS:
        owner = getattr(importlib.import_module(touched.module), touched.owner or "")
        if not hasattr(getattr(owner, _target(touched).rpartition(".")[2]), "__wrapped__"):
            return False
    return True
