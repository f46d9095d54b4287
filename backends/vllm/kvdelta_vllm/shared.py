# SPDX-License-Identifier: Apache-2.0
"""What both sides of a scheduler half look at: cache groups, block hashes, counters, the next metadata."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from .metadata import KvdeltaConnectorMetadata
from .stats import KvdeltaConnectorStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    import kvdelta
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Subclasses of these may keep other blocks than their base, so only the classes themselves are known.
_KINDS: Final[dict[Any, kvdelta.GroupKind]] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    SlidingWindowMLASpec: "sliding_window",
    MambaSpec: "mamba",
}


def _kind(spec: Any) -> kvdelta.GroupKind:  # noqa: ANN401
    if type(spec) is UniformTypeKVCacheSpecs:
        kinds = {_kind(inner) for inner in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else "unknown"
    return _KINDS.get(type(spec), "unknown")


def blocks_of(tokens: int, block_size: int) -> int:
    """Return how many blocks ``tokens`` take up, the last one perhaps in part."""
    return -(-tokens // block_size)


def now_ms() -> int:
    """Return the milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True)
class Group:
    """A cache group that is transferred."""

    cache_group: int
    """Its index among all cache groups."""
    kind: kvdelta.GroupKind
    block_size: int
    bytes_per_block: int
    """Over all its layers and ranks."""

    @property
    def whole_prefix(self) -> bool:
        """Whether it keeps every block of the prompt."""
        return self.kind in ("full_attention", "mla")

    @property
    def positional(self) -> bool:
        """Whether its list of blocks ends where the computed tokens end."""
        return self.whole_prefix or self.kind == "sliding_window"


def groups_of(kv_cache_config: KVCacheConfig, ranks: int) -> list[Group]:
    """Return the groups that are transferred, in the order of the lists of block ids."""
    groups = []
    for index, group in zip(kv_cache_config.transfer_group_ids, kv_cache_config.transfer_groups, strict=True):
        spec = group.kv_cache_spec
        # A group of unlike layers counts the bytes of all of them itself.
        layers = 1 if type(spec) is UniformTypeKVCacheSpecs else len(group.layer_names)
        groups.append(Group(index, _kind(spec), spec.block_size, spec.page_size_bytes * layers * ranks))
    return groups


@dataclass
class Shared:
    """State of a scheduler half that both sides use."""

    groups: list[Group]
    manager: KVCacheManager | None = None
    """vLLM's block manager, bound after the half was built."""
    stats: KvdeltaConnectorStats = field(default_factory=KvdeltaConnectorStats)
    next: KvdeltaConnectorMetadata = field(default_factory=KvdeltaConnectorMetadata)
    """What the worker half is told at the end of this step."""

    def hashed_block_size(self, wanted: int) -> int:
        """Return ``wanted`` if a group that keeps the prefix has blocks of this size, else the size of the first one.

        0: no group keeps it.
        """
        sizes = [group.block_size for group in self.groups if group.whole_prefix]
        return wanted if wanted in sizes else next(iter(sizes), 0)

    def own_hash(self, request: Request, tokens: int) -> int | None:
        """Return this worker's hash of the first ``tokens`` tokens, as its KV events have it."""
        if self.manager is None:
            return None
        step = self.manager.block_pool.hash_block_size
        if tokens <= 0 or tokens % step or tokens // step > len(request.block_hashes):
            return None
        # Each hash is chained over its whole prefix, so it is the same for groups of larger blocks.
        own = maybe_convert_block_hash(request.block_hashes[tokens // step - 1])
        return own if isinstance(own, int) else None

    def bytes_of(self, counts: Iterable[int], *, prefix_only: bool = False) -> int:
        """Return the bytes of so many blocks of each group."""
        return sum(
            count * group.bytes_per_block
            for count, group in zip(counts, self.groups, strict=True)
            if group.whole_prefix or not prefix_only
        )
