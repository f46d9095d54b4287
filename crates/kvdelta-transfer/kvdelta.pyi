"""What kvdelta decides about a transfer, as plain state without I/O and without a clock.

Times are milliseconds of a clock that never goes back, given by the caller. Blocks are whole blocks, counted
from the start of the prompt. Lists of block ids stay with the caller: what comes back are counts and ranges.
"""

from typing import Final, Literal, TypeAlias, final

__version__: Final[str]
PROTOCOL_VERSION: Final[int]
"""The version of claims and cut offers that is written, and the only one that is read."""
OFFER_KEY: Final[str]
"""The one key of ``kv_transfer_params`` under which a cut offer stands."""
CLAIM_KEY: Final[str]
"""The key of ``kv_transfer_params`` under which a router's claim stands."""

GroupKind: TypeAlias = Literal["full_attention", "mla", "sliding_window", "mamba", "unknown"]

class KvdeltaError(ValueError):
    """Base of what this module raises; the message names the value and what is done instead."""

class BadClaim(KvdeltaError):
    """A claim that cannot be read or contradicts itself or its prompt."""

class BadOffer(KvdeltaError):
    """A cut offer that cannot be read or contradicts itself."""

class Refused(KvdeltaError):
    """A claim by which nothing is skipped: everything is offered.

    ``reason`` is the label of the metric.
    """

    reason: Literal["content", "capability", "invalid"]

@final
class Claim:
    """What a decode worker is believed to hold (``decode_cache_info``)."""

    def __new__(cls, value: object, prompt_tokens: int) -> Claim:
        """Read ``value``, a dict as it came over the wire; raises :class:`BadClaim`."""
    @property
    def claim_id(self) -> str: ...
    @property
    def decode_worker_id(self) -> int: ...
    @property
    def decode_dp_rank(self) -> int: ...
    @property
    def cached_prefix_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def prefix_hash(self) -> int: ...

@final
class Group:
    """The blocks that a prefill worker would offer of one cache group, in the order of the prompt.

    The list covers blocks ``[first_block, first_block + blocks)`` of ``block_size`` tokens each. A group of kind
    ``mamba`` has states and no positions.
    """

    def __new__(
        cls,
        kind: GroupKind,
        block_size: int,
        first_block: int,
        blocks: int,
        bytes_per_block: int,
    ) -> Group: ...

@final
class OfferPlan:
    """What a prefill worker skips and what it offers."""

    @property
    def first_block(self) -> int:
        """Blocks of the claim's size that are skipped from the start; absolute index of the first offered one."""
    @property
    def skip(self) -> list[int]:
        """Per group: how many of its listed blocks are skipped, from the front of its list."""
    @property
    def group_first_blocks(self) -> list[int]:
        """Per group: absolute index of the first block that is offered."""
    @property
    def skipped_blocks(self) -> int: ...
    @property
    def offered_blocks(self) -> int: ...
    @property
    def skipped_bytes(self) -> int: ...
    @property
    def offered_bytes(self) -> int: ...

def plan_offer(
    claim: Claim,
    *,
    block_size: int,
    prefix_caching: bool,
    own_hash: int | None,
    groups: list[Group],
) -> OfferPlan:
    """Plan what is skipped by ``claim``; raises :class:`Refused`.

    ``own_hash`` is this worker's own hash of block ``claim.cached_prefix_blocks - 1`` of the request as an unsigned
    64-bit number; ``None``: it has none. At least one block of every group that lists any is offered.
    """

@final
class Offer:
    """The head of a cut offer; the lists of block ids stay with the caller."""

    def __new__(cls, value: object) -> Offer:
        """Read what stands under :data:`OFFER_KEY`; raises :class:`BadOffer`."""
    @staticmethod
    def cut(claim: Claim, plan: OfferPlan, block_size: int) -> Offer:
        """The head of an offer that was cut by ``plan``."""
    def head(self) -> dict[str, object]:
        """What goes on the wire beside the caller's lists."""
    @property
    def claim_id(self) -> str: ...
    @property
    def decode_worker_id(self) -> int: ...
    @property
    def prefix_hash(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def group_first_blocks(self) -> list[int]: ...

@final
class Confirmation:
    """What a decode worker's own lookup says of a cut offer."""

    @property
    def kind(self) -> Literal["covered", "stale", "content"]:
        """``content``: the worker's own hash at that depth is another, so nothing of the offer may be read."""
    @property
    def held_blocks(self) -> int:
        """Blocks of the skipped prefix that the worker holds."""
    @property
    def short_blocks(self) -> int:
        """Blocks of the skipped prefix that it lacks."""

def confirm(offer: Offer, *, block_size: int, held_tokens: int, own_hash: int | None) -> Confirmation:
    """Compare an offer with ``held_tokens``, what this worker's own lookup found from position 0.

    ``own_hash``: this worker's own hash of block ``offer.first_block - 1`` of the request.
    """

def pair(prefill_first: int, prefill_blocks: int, decode_first: int, decode_blocks: int) -> tuple[int, int, int]:
    """Pair two lists of blocks by absolute index.

    Returns ``(p, d, n)``: entries ``[p, p + n)`` of the prefill worker's list go to entries ``[d, d + n)`` of the
    decode worker's. ``n`` is 0 where they share no block.
    """

Ending: TypeAlias = Literal["notice", "expiry", "release", "abort"]

@final
class Closed:
    """An offer whose blocks are free again."""

    @property
    def ending(self) -> Ending: ...
    @property
    def pinned_block_ms(self) -> int:
        """Offered blocks times the time that they stayed leased."""

@final
class Ledger:
    """The offers of a prefill worker, from cut to release; every block is released exactly once."""

    def __new__(cls, ranks: int) -> Ledger:
        """``ranks``: how many of this worker's ranks have to report before an offer is closed."""
    def open(self, request_id: str, skipped_blocks: int, offered_blocks: int, now_ms: int, lease_ms: int) -> bool:
        """Lease ``offered_blocks``; ``False``: the request is known already and nothing changes."""
    def release_skipped(self, request_id: str) -> int:
        """Blocks that the caller must release now; 0 on every call but the first."""
    def notice(self, request_id: str, rank: int, now_ms: int) -> Closed | None:
        """A rank was told that its blocks were read; the last one closes the offer."""
    def close(self, request_id: str, ending: Ending, now_ms: int) -> Closed | None:
        """Close it whatever ranks have reported; ``None``: it is unknown or was closed before."""
    def extend(self, request_id: str, now_ms: int, lease_ms: int) -> bool:
        """Renew the lease, which never shortens it."""
    def expire(self, now_ms: int) -> list[tuple[str, Closed]]:
        """Close all whose lease has ended."""
    def pinned_blocks(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Recovery:
    """What a decode worker does about a stale claim.

    Many stale claims at once would send every prompt to prefill a second time, so asking again has a budget.
    """

    def __new__(
        cls,
        *,
        prefill_tokens_per_second: float = 10_000.0,
        decode_tokens_per_second: float = 5_000.0,
        link_bytes_per_second: float = 1.25e9,
        budget: int = 10,
        budget_per_second: float = 1.0,
        share: float = 0.1,
    ) -> Recovery:
        """Start values of what is measured, and the retry budget.

        At most ``budget`` repeats at once, refilled by ``budget_per_second`` and by ``share`` of a repeat for every
        claim that held.
        """
    def choose(
        self, *, missing_tokens: int, context_tokens: int, offered_bytes: int, skipped_bytes: int, now_ms: int
    ) -> Literal["recompute", "ask_again"]:
        """The faster way by estimate: compute ``missing_tokens`` here, or have all of it prefilled again and sent.

        An ``ask_again`` takes from the budget; where that is empty the answer is ``recompute``.
        """
    def confirmed(self, now_ms: int) -> None:
        """A claim held."""
    def observe_decode_prefill(self, tokens: int, ms: float) -> None:
        """This worker computed ``tokens`` of a prompt in ``ms``; out of range or not finite is ignored."""
    def observe_transfer(self, transferred_bytes: int, ms: float) -> None: ...
    @property
    def decode_tokens_per_second(self) -> float: ...
    @property
    def link_bytes_per_second(self) -> float: ...
