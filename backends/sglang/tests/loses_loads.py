# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang: decode cannot load what it has promised, as if that were on a lower tier.

There is no lower tier on a CPU. The code that finds out and ends the request is SGLang's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

FILE: Final = "KVDELTA_TEST_LOSES_LOAD"
"""While there is a file of this name, the next promise is not kept, and the file is removed."""


def lose(queue: Any) -> bool:
    """Have all that wait in a ``DecodeTransferQueue`` and rely on a promise lose it; False: there is none."""
    import torch  # noqa: PLC0415
    from sglang.srt.disaggregation import decode_hicache_mixin  # noqa: PLC0415

    asked = [one for one in queue.queue if one.prefix_match is not None and one.prefix_match.decode_prefix_len]
    match, tree = decode_hicache_mixin.match_prefix_for_req, queue.tree_cache
    nothing = SimpleNamespace(device_indices=torch.empty(0), best_match_node=None, host_hit_length=0)
    decode_hicache_mixin.match_prefix_for_req = lambda *_, **__: nothing
    queue.tree_cache = SimpleNamespace(init_load_back=lambda _: (torch.empty(0), None))
    for one in asked:
        queue._try_hicache_queue_load_back(one)
    decode_hicache_mixin.match_prefix_for_req, queue.tree_cache = match, tree
    return bool(asked)


def before_pop(queue: Any, *_: object, **__: object) -> None:
    """Lose what waits, if the file is there; before ``DecodeTransferQueue.pop_transferred``."""
    file = Path(os.environ[FILE])
    if queue.queue and file.exists() and lose(queue):
        file.unlink()


def install() -> None:
    """Register the hook, and let the worker say that it has lower tiers; the entry point that SGLang calls."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from kvdelta_sglang import worker  # noqa: PLC0415

    worker.has_lower_tiers = lambda server_args: server_args is not None
    target = "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred"
    HookRegistry.register(target, before_pop, HookType.BEFORE)
