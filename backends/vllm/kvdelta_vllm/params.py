# SPDX-License-Identifier: Apache-2.0
"""Reading and writing ``kv_transfer_params``.

All of it comes from another process, so every value that a connector reads is checked here before it is used.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

from kvdelta import CLAIM_KEY, OFFER_KEY

from .metadata import Lease, LeaseWord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEASE_KEY: Final = "kvdelta_lease"
"""Key of the lease in a whole offer, which stock connectors do not read."""
RELEASE_KEY: Final = "release"
"""Under ``OFFER_KEY`` in a prefill request: an older offer of this worker that is not fetched any more."""
STALE_CLAIM_KEY: Final = "stale_claim"
"""Under ``OFFER_KEY`` in what a decode worker answers."""

_U64: Final = 2**64


class BadParams(ValueError):  # noqa: N818
    """Transfer parameters that cannot be used; the message names the value and what is done instead."""


def _int(params: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = params.get(key)
    if type(value) is not int or not least <= value <= most:
        raise BadParams(f"{key} is {value!r:.80}, not a number from {least} to {most}; computing all here")
    return value


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise BadParams(f"{key} is {value!r:.80}, not a name; computing all here")
    return value


def check_address(params: Mapping[str, Any]) -> None:
    """Check where the prefill worker is and what it calls the request; raises :class:`BadParams`."""
    for key in ("remote_engine_id", "remote_request_id", "remote_host"):
        _text(params, key)
    _int(params, "remote_port", 1, 65535)
    _int(params, "tp_size", 1, 65536)
    for key in ("dcp_size", "pp_size"):
        if key in params:
            _int(params, key, 1, 65536)


def block_ids(value: object, groups: int) -> list[list[int]]:
    """Check lists of block ids, one a cache group; raises :class:`BadParams`."""
    if not isinstance(value, list | tuple) or len(value) != groups:
        raise BadParams(f"remote_block_ids is {value!r:.80}, not {groups} lists; computing all here")
    lists: list[list[int]] = []
    for index, ids in enumerate(value):
        if not isinstance(ids, list | tuple):
            raise BadParams(f"remote_block_ids[{index}] is {ids!r:.80}, not a list; computing all here")
        try:
            # One pass in C over what may be thousands of ids: whole numbers from 0 to 2^32 - 1.
            array("I", ids)
        except (OverflowError, TypeError, ValueError) as error:
            raise BadParams(f"remote_block_ids[{index}] holds no block ids: {error}; computing all here") from None
        lists.append(ids if isinstance(ids, list) else list(ids))
    if not any(lists):
        raise BadParams("remote_block_ids offers no block; computing all here")
    return lists


def remote_num_tokens(params: Mapping[str, Any]) -> int | None:
    """Tokens that the prefill worker computed; None: it does not say. Raises :class:`BadParams`."""
    return None if params.get("remote_num_tokens") is None else _int(params, "remote_num_tokens", 0, 2**32 - 1)


def check_rest(params: Mapping[str, Any]) -> None:
    """Check what else upstream reads of an offer; raises :class:`BadParams`."""
    expiry = params.get("remote_blocks_expiry_time")
    if expiry is not None and type(expiry) not in (int, float):
        raise BadParams(f"remote_blocks_expiry_time is {expiry!r:.80}, not a time; computing all here")
    if params.get("remote_block_size") is not None:
        _int(params, "remote_block_size", 1, 2**20)


def _table(place: object, entry: object) -> tuple[tuple[int, int], tuple[int, int]]:
    ranks = place.split(",") if isinstance(place, str) else []
    if len(ranks) != 2 or not all(rank.isascii() and rank.isdigit() and len(rank) < 6 for rank in ranks):  # noqa: PLR2004
        raise BadParams(f"a lease table stands under {place!r:.80}, not under two ranks; computing all here")
    if not isinstance(entry, list | tuple) or len(entry) != 2:  # noqa: PLR2004
        raise BadParams(f"a lease table is {entry!r:.80}, not an address and a device; computing all here")
    numbers = {"address of a lease table": entry[0], "device of a lease table": entry[1]}
    pp_rank, tp_rank = map(int, ranks)
    return (pp_rank, tp_rank), (
        _int(numbers, "address of a lease table", 1, _U64 - 1),
        _int(numbers, "device of a lease table", 0, 2**32 - 1),
    )


def read_lease(value: object) -> Lease | None:
    """Read the lease of an offer; None: it has none. Raises :class:`BadParams`."""
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("tables"), dict) or not value["tables"]:
        raise BadParams(f"the lease is {value!r:.80}, which has no tables; computing all here")
    return Lease(
        slot=_int(value, "slot", 0, 2**32 - 1),
        generation=_int(value, "generation", 1, _U64 - 1),
        tables=dict(_table(place, entry) for place, entry in value["tables"].items()),
    )


def lease_on_wire(word: LeaseWord, tables: Mapping[tuple[int, int], tuple[int, int]]) -> dict[str, Any]:
    """Write the lease of an offer."""
    return {
        "slot": word.slot,
        "generation": word.generation,
        "tables": {f"{pp},{tp}": list(entry) for (pp, tp), entry in tables.items()},
    }


def claim(params: Mapping[str, Any]) -> object | None:
    """Return the claim of a prefill request, as it came."""
    return params.get(CLAIM_KEY)


def release(params: Mapping[str, Any]) -> str | None:
    """Return the id of the offer that a prefill request takes back."""
    ours = params.get(OFFER_KEY)
    value = ours.get(RELEASE_KEY) if isinstance(ours, dict) else None
    return value if isinstance(value, str) else None


def cut_offer(params: Mapping[str, Any]) -> object | None:
    """Return the cut offer of a decode request, as it came; None: the offer is whole, or there is none."""
    return None if params.get("do_remote_decode") else params.get(OFFER_KEY)


def write_cut_offer(
    head: Mapping[str, Any], own: Mapping[str, Any], remote_block_ids: Sequence[list[int]], lease: object | None
) -> dict[str, Any]:
    """Write a cut offer: ``own`` are upstream's parameters of the whole one.

    To a stock connector it says that there is nothing to load.
    """
    offer: dict[str, Any] = {**head, "params": {**own, "remote_block_ids": list(remote_block_ids)}}
    if lease is not None:
        offer["lease"] = lease
    return {"do_remote_prefill": False, "do_remote_decode": False, OFFER_KEY: offer}


def write_stale_claim(report: Mapping[str, Any]) -> dict[str, Any]:
    """Write what a decode worker answers for a claim that did not hold."""
    return {OFFER_KEY: {STALE_CLAIM_KEY: dict(report)}}
