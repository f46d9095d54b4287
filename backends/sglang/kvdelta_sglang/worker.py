# SPDX-License-Identifier: Apache-2.0
"""What a worker of Dynamo asks: may claims be made about it, did this one hold, is this failure to be asked again."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from . import compat
from .content import event_hash
from .plugin import FAILED_LOAD_KEY, PREFIX_KEY
from .stats import Stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

with suppress(ImportError):
    # Without it `compat.plain_reason` says so, and none of these is asked for.
    from kvdelta import OFFER_KEY, PROTOCOL_VERSION, BadClaim, Claim

logger = logging.getLogger(__name__)

STALE_CLAIM_KEY: Final = "stale_claim"
HELD_CLAIM_KEY: Final = "held_claim"
"""Under ``OFFER_KEY`` in what a worker answers."""
NO_CLAIMS: Final = 0
"""The version of a capability under which no claim is settled."""


def cache_groups(model_config: Any) -> list[str]:  # noqa: ANN401
    """Return the kinds of a model's KV cache groups, as the router knows them."""
    from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: PLC0415

    kinds = {"MLA": ["mla_attention"], "MHA": ["full_attention"], "SSM": ["mamba"]}
    groups = kinds.get(getattr(model_config.attention_arch, "name", ""), ["unknown"])
    if model_config.is_hybrid_swa:
        groups = [*groups, "sliding_window"]
    if mambaish_config(model_config) is not None:
        groups = [*groups, "mamba"]
    return groups


def _options(server_args: Any, *, events: bool, indexer: bool) -> list[str]:  # noqa: ANN401
    """Name the options for want of which no claims can be made about a decode worker."""
    wanting = []
    if not getattr(server_args, "disaggregation_decode_enable_radix_cache", False):
        wanting.append("--disaggregation-decode-enable-radix-cache is off")
    if not events:
        wanting.append("--kv-events-config names no publisher")
    if not indexer:
        wanting.append("Dynamo's local indexer is off (enable_local_indexer)")
    if (getattr(server_args, "dcp_size", 1) or 1) > 1:
        wanting.append("decode context parallelism is on")
    if getattr(server_args, "enable_lora", False):
        wanting.append("--enable-lora is on, and SGLang's KV events do not name the adapter")
    if getattr(server_args, "enable_unified_cache_external_linker", False):
        wanting.append(
            "--enable-unified-cache-external-linker is on, whose blocks a decode worker tells and does not load"
        )
    if getattr(server_args, "elastic_ep_backend", None):
        wanting.append("--elastic-ep-backend is on, and SGLang's KV events do not tell its caches apart")
    return wanting


def has_lower_tiers(server_args: Any) -> bool:  # noqa: ANN401
    """Whether a decode worker promises prefill what is below device memory, and may be unable to load."""
    return bool(
        getattr(server_args, "disaggregation_decode_enable_radix_cache", False)
        and getattr(server_args, "enable_hierarchical_cache", False)
    )


class ClaimWorker:
    """The claims of one worker process."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.plain_reason = compat.plain_reason()
        """Why transfers are SGLang's own and claims are not settled; None: they are."""
        if self.plain_reason is not None:
            logger.warning("kvdelta: transfers are SGLang's own: %s", self.plain_reason)

    def capability(
        self,
        server_args: Any,  # noqa: ANN401
        model_config: Any,  # noqa: ANN401
        *,
        block_size: int,
        events: bool,
        indexer: bool,
    ) -> dict[str, Any] | None:
        """Return what a decode worker advertises; None: nothing.

        Where no claims may be made about it a warning says why. It still tells of lower tiers (version ``NO_CLAIMS``),
        since a load from them can fail without a claim.
        """
        if self.plain_reason is not None:
            return None
        tiers = has_lower_tiers(server_args)
        wanting = _options(server_args, events=events, indexer=indexer)
        if wanting:
            logger.warning("kvdelta: no claims are made about this decode worker: %s", "; ".join(wanting))
            if not tiers:
                return None
        return {
            "version": NO_CLAIMS if wanting else PROTOCOL_VERSION,
            "block_size": block_size,
            "prefix_caching": True,
            "cache_groups": cache_groups(model_config),
            **({"lower_tiers": True} if tiers else {}),
        }

    def settle(
        self,
        claim: object | None,
        *,
        token_ids: Sequence[int] | None,
        cache_salt: str | None,
        meta_info: Mapping[str, Any],
    ) -> dict[str, Any] | None:
        """Compare a prefill request's claim with what decode told this worker; return what the router is to hear.

        Decode's own number always wins: SGLang has sent by it already. ``token_ids`` is None where they are not what
        SGLang hashes.
        """
        if self.plain_reason is not None:
            return None
        prompt_tokens = meta_info.get("prompt_tokens")
        told = _told(meta_info.get(PREFIX_KEY))
        # Of a transfer that failed nobody knows what was sent.
        is_aborted = (meta_info.get("finish_reason") or {}).get("type") == "abort"
        if told is None or is_aborted or not isinstance(prompt_tokens, int):
            if claim is not None:
                self.stats.count("claims", label="unsettled")
            return None
        held_tokens, held_bytes = told
        self.stats.count("skipped_tokens", held_tokens)
        self.stats.count("skipped_bytes", held_bytes)
        self.stats.count("sent_tokens", max(0, prompt_tokens - held_tokens))
        if claim is None:
            return None
        try:
            read = Claim(claim, prompt_tokens)
        except BadClaim as error:
            self.stats.count("claims", label="invalid")
            logger.warning("kvdelta: a claim cannot be read: %s", error)
            return None
        return {OFFER_KEY: self._verdict(read, held_tokens, token_ids, cache_salt)}

    def _verdict(
        self, claim: Claim, held_tokens: int, token_ids: Sequence[int] | None, cache_salt: str | None
    ) -> dict[str, Any]:
        said = claim.cached_prefix_blocks
        had = min(said, held_tokens // claim.block_size)
        own = None if token_ids is None else event_hash(token_ids, claim.block_size, said, cache_salt)
        outcome = "held" if had == said else "stale"
        if own is not None and own != claim.prefix_hash:
            outcome = "content"
        self.stats.count("claims", label=outcome)
        self.stats.count("claimed_blocks", said)
        if outcome == "held":
            return {HELD_CLAIM_KEY: claim.claim_id}
        self.stats.count("stale_blocks", said - had)
        return {STALE_CLAIM_KEY: _report(claim.claim_id, said, had, outcome, "sent")}

    def failed_load(self, meta_info: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what the router is to hear of a request that a decode worker ends without a token; None: nothing.

        It had promised prefill a prefix that it could not load. Prefill is to be asked again.
        """
        if self.plain_reason is not None or FAILED_LOAD_KEY not in meta_info:
            return None
        self.stats.count("failed_loads")
        # No claim is at fault, which is about device memory: such a prefix is on a lower tier.
        return {OFFER_KEY: {STALE_CLAIM_KEY: _report("", 0, 0, "load_failed", "ask_again")}}


def _report(claim_id: str, said: int, had: int, reason: str, recovered: str) -> dict[str, Any]:
    return {
        "version": PROTOCOL_VERSION,
        "claim_id": claim_id,
        "said_blocks": said,
        "had_blocks": had,
        "reason": reason,
        "recovered": recovered,
    }


def _told(value: object) -> tuple[int, int] | None:
    """Read what the hook noted; other requests of its batch have a list of None."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list | tuple):
        return None
    tokens, held_bytes = value[0]
    return int(tokens), int(held_bytes)
