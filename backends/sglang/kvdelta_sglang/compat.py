# SPDX-License-Identifier: Apache-2.0
"""Every name of SGLang that the hooks touch and that SGLang does not document for plugins.

One of them missing, or with other parameters: nothing is hooked and claims are not settled.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Touched:
    """Names of one class or module, ``name`` or ``name(parameters)`` in the order in which they are given."""

    module: str
    owner: str | None
    names: tuple[str, ...]
    seen: tuple[str, ...] = ("0.5.21",)
    """SGLang versions in which all of them were seen."""


PREFILL: Final = Touched(
    "sglang.srt.disaggregation.prefill", "PrefillBootstrapQueue", ("finalize_bootstrap(req)", "kv_manager")
)
_TIERS: Final = "sglang.srt.disaggregation.decode_hicache_mixin"
LOAD: Final = Touched(_TIERS, "DecodeHiCacheTransferMixin", ("_try_hicache_queue_load_back(dr)",))
PREFETCH: Final = Touched(_TIERS, "DecodeHiCachePreallocMixin", ("_start_hicache_prefetch(req, prefix_match)",))

TOUCHED: Final = (
    PREFILL,
    LOAD,
    PREFETCH,
    Touched(_TIERS, "DecodePrefixMatch", ("l3_storage_hit_length",)),
    Touched(_TIERS, "HiCacheRestoreResult", ("FAILED",)),
    Touched("sglang.srt.disaggregation.decode", "DecodeRequest", ("hicache_restore_status", "req")),
    Touched(
        "sglang.srt.managers.schedule_batch",
        "Req",
        ("customized_info", "disagg_decode_prefix_len"),
    ),
    Touched("sglang.srt.disaggregation.common.conn", "CommonKVManager", ("kv_args",)),
    Touched("sglang.srt.disaggregation.base.conn", "KVArgs", ("page_size", "kv_item_lens")),
    Touched("sglang.srt.managers.tokenizer_manager", "TokenizerManager", ("update_request_meta_info",)),
    Touched("sglang.srt.plugins.hook_registry", "HookRegistry", ("register(target, hook, hook_type)",)),
    Touched("sglang.srt.plugins.hook_registry", "HookType", ("AFTER", "AROUND")),
    Touched("sglang.srt.plugins", None, ("load_plugins()",)),
)
"""What the hooks touch."""


def _own(owner: Any, name: str) -> Any | None:  # noqa: ANN401
    """Look ``name`` up in a class or module; an attribute that an ``__init__`` sets counts as ``True``."""
    try:
        return getattr(owner, name)
    except AttributeError:
        pass
    for base in getattr(owner, "__mro__", ()):
        if name in getattr(base, "__annotations__", ()):
            return True
        code = getattr(base.__dict__.get("__init__"), "__code__", None)
        if code is not None and name in code.co_names:
            return True
    return None


def _lacks(touched: Touched) -> Iterator[str]:
    where = f"{touched.module}.{touched.owner}" if touched.owner else touched.module
    try:
        owner: Any = importlib.import_module(touched.module)
        if touched.owner:
            owner = getattr(owner, touched.owner)
    except Exception as error:  # noqa: BLE001 a module may fail in any way
        yield f"{where} ({error})"
        return
    for entry in touched.names:
        name, _, parameters = entry.rstrip(")").partition("(")
        found = _own(owner, name)
        if found is None:
            yield f"{where}.{name}"
        elif "(" in entry:
            wanted = [parameter for parameter in parameters.split(", ") if parameter]
            try:
                has = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
            except (TypeError, ValueError):
                has = ["?"]
            if has[: len(wanted)] != wanted:
                yield f"{where}.{name}({', '.join(has)}) instead of {entry}"


@cache
def missing(table: tuple[Touched, ...] = TOUCHED) -> tuple[str, ...]:
    """Names of ``table`` that this SGLang lacks, or has with other parameters."""
    return tuple(lack for touched in table for lack in _lacks(touched))


def plain_reason() -> str | None:
    """Say what keeps this process from settling claims; None: nothing does."""
    try:
        from kvdelta import OFFER_KEY, PROTOCOL_VERSION, BadClaim, Claim  # noqa: F401, PLC0415
    except ImportError as error:
        return f"the Python package kvdelta is missing or another version ({error})"
    if lacks := missing():
        return f"this SGLang lacks {', '.join(lacks)}"
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415

    from . import plugin  # noqa: PLC0415

    # SGLang has, but not in a process that only takes requests for an engine (--tokenizer-worker-num).
    load_plugins()
    if not plugin.is_loaded():
        return (
            "SGLang did not load the plugin kvdelta: its entry point is not installed, or SGLANG_PLUGINS leaves it out"
        )
    return None
