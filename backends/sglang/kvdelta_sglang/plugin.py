# SPDX-License-Identifier: Apache-2.0
"""What SGLang loads in each of its processes: hooks that look on, and two that hold decode to its promise.

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

    Where the prefetch from storage raises, SGLang 0.5.21 takes that length back and tells prefill the longer one all
    the same. Nobody would send those tokens or load them, and decode would read the pages of an earlier request. With
    the length kept the request waits for its load, which ``around_load`` has fail.
    """
    told_tokens = getattr(prefix_match, "l3_storage_hit_length", 0)
    original(queue, req, prefix_match)
    if told_tokens > getattr(prefix_match, "l3_storage_hit_length", told_tokens):
        prefix_match.l3_storage_hit_length = told_tokens
        _tell(req, FAILED_LOAD_KEY, True)  # noqa: FBT003


def around_load(original: Callable[..., bool], queue: Any, dr: Any) -> bool:  # noqa: ANN401
    """Do not load a part of what ``around_prefetch`` knows to be lacking; around ``_try_hicache_queue_load_back``.

    SGLang has the part in its tree, as if it were there, before it sees that this is not all.
    """
    if FAILED_LOAD_KEY not in (dr.req.customized_info or {}):
        return original(queue, dr)
    from sglang.srt.disaggregation.decode_hicache_mixin import HiCacheRestoreResult  # noqa: PLC0415

    dr.hicache_restore_status = HiCacheRestoreResult.FAILED
    return False


_HOOKS: Final = (
    (compat.PREFILL, after_bootstrap, "AFTER"),
    (compat.LOAD, after_load, "AFTER"),
    (compat.LOAD, around_load, "AROUND"),
    (compat.PREFETCH, around_prefetch, "AROUND"),
)
"""Where each hook is, and of which kind."""


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
