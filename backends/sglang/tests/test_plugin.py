# SPDX-License-Identifier: Apache-2.0
"""The hooks on SGLang's own classes, and what happens where they do not fit."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from entry_points import KVDELTA, installed
from sglang.srt.disaggregation import decode_hicache_mixin
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest, DecodeTransferQueue
from sglang.srt.disaggregation.decode_hicache_mixin import DecodePrefixMatch, HiCacheRestoreResult
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.plugins.hook_registry import HookRegistry

from kvdelta_sglang import compat, plugin, worker
from kvdelta_sglang.compat import Touched
from kvdelta_sglang.plugin import FAILED_LOAD_KEY, PREFIX_KEY
from kvdelta_sglang.worker import ClaimWorker

if TYPE_CHECKING:
    from pathlib import Path

PAGE, PAGE_BYTES = 16, 2048


@pytest.fixture
def _loaded() -> None:
    """Load the plugin as SGLang does; once is for the whole process."""
    plugin.register()
    HookRegistry.apply_hooks()


class Sender:
    """A sender that decode has told how much it holds."""

    def __init__(self, told: int) -> None:
        self.told, self.pages = told, 0

    def pop_decode_prefix_len(self) -> int:
        """As SGLang's."""
        return self.told

    def init(self, pages: int, _: int) -> None:
        """As SGLang's."""
        self.pages = pages


def bootstrap(told: int, *, has_buffer: bool = True, **of_request: Any) -> SimpleNamespace:
    """Finish the bootstrap of a request of 100 tokens with SGLang's own code."""
    request = SimpleNamespace(
        pending_bootstrap=True,
        time_stats=SimpleNamespace(set_bootstrap_done_time=lambda: None),
        disagg_kv_sender=Sender(told),
        origin_input_ids=list(range(100)),
        metadata_buffer_index=3 if has_buffer else -1,
        customized_info=None,
        **of_request,
    )
    queue = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
    queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(available_size=lambda: 0)
    queue.scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE))
    queue.kv_manager = SimpleNamespace(
        kv_args=SimpleNamespace(page_size=PAGE, kv_item_lens=[PAGE_BYTES // 2, PAGE_BYTES // 2])
    )
    assert queue.finalize_bootstrap(request) is has_buffer
    return request


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("told", [0, 16, 96])
def test_prefill_notes_what_decode_told_and_sends_what_it_would(told: int) -> None:
    request = bootstrap(told)
    assert request.customized_info == {PREFIX_KEY: [(told, told // PAGE * PAGE_BYTES)]}
    assert request.start_send_idx == request.disagg_decode_prefix_len == told
    assert request.disagg_kv_sender.pages == -(-(100 - told) // PAGE)


@pytest.mark.usefixtures("_loaded")
def test_prefill_notes_nothing_before_the_end_of_the_bootstrap() -> None:
    assert bootstrap(16, has_buffer=False).customized_info is None


@pytest.mark.usefixtures("_loaded")
def test_what_others_put_there_stays() -> None:
    info = {"theirs": [1]}
    request = SimpleNamespace(customized_info=info, disagg_decode_prefix_len=0)
    args = SimpleNamespace(page_size=PAGE, kv_item_lens=[])
    plugin.after_bootstrap(True, SimpleNamespace(kv_manager=SimpleNamespace(kv_args=args)), request)  # noqa: FBT003
    assert request.customized_info == {"theirs": [1], PREFIX_KEY: [(0, 0)]}
    assert info == {"theirs": [1]}


class Tiers:
    """A decode worker's tree whose lower tiers load so many tokens."""

    hicache_storage_pass_prefix_keys = False

    def __init__(self, loaded: int) -> None:
        self.loaded, self.fetched, self.is_loaded = loaded, 0, False

    def get_last_hash_value(self, _: object) -> str:
        """As SGLang's."""
        return "hash"

    def prefetch_from_storage(
        self, _handle: object, _node: object, suffix: list[int], *_: object, **__: object
    ) -> None:
        """As SGLang's."""
        self.fetched = len(suffix)

    def has_ongoing_prefetch(self, _: object) -> bool:
        """As SGLang's."""
        return self.fetched > 0

    def check_prefetch_progress(self, _: object) -> bool:
        """As SGLang's where none runs any more."""
        return True

    def pop_prefetch_loaded_tokens(self, _: object) -> int:
        """As SGLang's."""
        return self.fetched

    def init_load_back(self, _: object) -> tuple[torch.Tensor, str]:
        """As SGLang's."""
        self.is_loaded = True
        return torch.arange(self.loaded), "node"

    def inc_lock_ref(self, _: object) -> SimpleNamespace:
        """As SGLang's."""
        return SimpleNamespace(to_dec_params=lambda: None)


def asking(host: int, storage: int) -> DecodeRequest:
    """A request of which decode has 16 tokens on the device, and so many on each of the lower tiers."""
    request = SimpleNamespace(
        rid="r",
        origin_input_ids=list(range(100)),
        customized_info=None,
        last_node=None,
        cache_request_handle="r",
        extra_key=None,
        cache_salt=None,
    )
    match = DecodePrefixMatch(torch.arange(16), host, storage, None, last_host_node="node")
    return DecodeRequest(req=request, kv_receiver=None, prefix_match=match)


def load_back(monkeypatch: pytest.MonkeyPatch, asked: DecodeRequest, tiers: Tiers) -> DecodeRequest:
    """Have SGLang's own code load its prefix."""
    found = SimpleNamespace(device_indices=torch.arange(16), best_match_node=None, host_hit_length=tiers.loaded)
    monkeypatch.setattr(decode_hicache_mixin, "match_prefix_for_req", lambda *_, **__: found)
    queue = DecodeTransferQueue.__new__(DecodeTransferQueue)
    queue.tree_cache = tiers
    queue._try_hicache_queue_load_back(asked)
    return asked


def prefetch(asked: DecodeRequest, tiers: Tiers) -> None:
    """Have SGLang's own code begin to fetch from storage."""
    queue = DecodePreallocQueue.__new__(DecodePreallocQueue)
    queue.tree_cache = tiers
    queue._start_hicache_prefetch(asked.req, asked.prefix_match)


@pytest.mark.usefixtures("_loaded")
def test_decode_notes_a_promise_that_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = load_back(monkeypatch, asking(host=48, storage=0), Tiers(loaded=32))
    assert asked.hicache_restore_status == HiCacheRestoreResult.FAILED
    assert asked.req.customized_info == {FAILED_LOAD_KEY: [True]}


@pytest.mark.usefixtures("_loaded")
def test_decode_notes_nothing_of_a_promise_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = load_back(monkeypatch, asking(host=48, storage=0), Tiers(loaded=48))
    assert asked.hicache_restore_status == HiCacheRestoreResult.PENDING
    assert asked.req.customized_info is None


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("host", [0, 32])
def test_a_prefetch_that_raises_is_a_promise_that_decode_cannot_keep(
    monkeypatch: pytest.MonkeyPatch, host: int
) -> None:
    tiers = Tiers(loaded=host)
    asked = asking(host=host, storage=48)
    told = asked.prefix_match.decode_prefix_len
    monkeypatch.setattr(tiers, "prefetch_from_storage", None)
    prefetch(asked, tiers)
    # What prefill was told still counts, though SGLang takes it back.
    assert asked.prefix_match.decode_prefix_len == told == 16 + host + 48
    load_back(monkeypatch, asked, tiers)
    assert asked.hicache_restore_status == HiCacheRestoreResult.FAILED
    assert asked.req.customized_info == {FAILED_LOAD_KEY: [True]}
    # No part of it is in the tree.
    assert not tiers.is_loaded


@pytest.mark.usefixtures("_loaded")
def test_a_prefetch_that_storage_declines_fails_as_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(loaded=0)
    asked = asking(host=0, storage=48)
    monkeypatch.setattr(tiers, "prefetch_from_storage", lambda *_, **__: None)
    prefetch(asked, tiers)
    assert asked.req.customized_info is None
    load_back(monkeypatch, asked, tiers)
    assert asked.hicache_restore_status == HiCacheRestoreResult.FAILED
    assert asked.req.customized_info == {FAILED_LOAD_KEY: [True]}


@pytest.mark.usefixtures("_loaded")
def test_a_prefetch_that_begins_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(loaded=48)
    asked = asking(host=0, storage=48)
    prefetch(asked, tiers)
    assert tiers.fetched == 48
    assert asked.prefix_match.prefetch_registered
    load_back(monkeypatch, asked, tiers)
    assert asked.hicache_restore_status == HiCacheRestoreResult.PENDING
    assert asked.req.customized_info is None


@pytest.mark.usefixtures("_loaded")
def test_without_a_prefix_nothing_is_fetched() -> None:
    tiers = Tiers(loaded=0)
    prefetch(DecodeRequest(req=None, kv_receiver=None, prefix_match=None), tiers)
    prefetch(asking(host=32, storage=0), tiers)
    assert tiers.fetched == 0


def test_what_is_wrong_in_a_hook_does_not_reach_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    plugin.after_bootstrap(True, SimpleNamespace(), SimpleNamespace())  # noqa: FBT003
    plugin.after_load(False, None, SimpleNamespace())  # noqa: FBT003
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_a_hook_is_heard_once_and_takes_arguments_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    got: list[object] = []

    @plugin._looks_on
    def hook(_result: object, _queue: object, req: object) -> None:
        got.append(req)
        raise ValueError(req)

    for number in range(3):
        hook(True, None, req=number)  # noqa: FBT003
    assert got == [0, 1, 2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.DEBUG, logging.DEBUG]


def test_nothing_is_missing_here() -> None:
    assert compat.missing() == ()


@pytest.mark.parametrize(
    ("touched", "said"),
    [
        (Touched("sglang.nowhere", "X", ()), "sglang.nowhere.X (No module named 'sglang.nowhere')"),
        (
            Touched("sglang.srt.disaggregation.prefill", "PrefillBootstrapQueue", ("gone",)),
            "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.gone",
        ),
        (
            Touched("sglang.srt.disaggregation.prefill", "PrefillBootstrapQueue", ("finalize_bootstrap(request)",)),
            "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.finalize_bootstrap(req) instead of",
        ),
    ],
)
def test_what_is_missing_is_named(touched: Touched, said: str) -> None:
    assert compat.missing((touched,))[0].startswith(said)


def test_another_sglang_is_left_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "missing", lambda: ("sglang.x.y",))
    registered: list[object] = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    plugin.register()
    assert registered == []
    assert ClaimWorker().plain_reason == "this SGLang lacks sglang.x.y"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == "kvdelta: transfers are SGLang's own: this SGLang lacks sglang.x.y"


def test_a_plugin_that_sglang_did_not_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "is_loaded", lambda: False)
    reason = compat.plain_reason()
    assert reason is not None
    assert "SGLANG_PLUGINS" in reason


def test_plugins_are_loaded_in_a_process_in_which_sglang_does_not(tmp_path: Path) -> None:
    installed(tmp_path, KVDELTA)
    asks = "from kvdelta_sglang import compat, plugin; print(plugin.is_loaded(), compat.plain_reason())"
    said = {}
    for allowed in ("", "another"):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "SGLANG_PLUGINS": allowed,
        }
        process = subprocess.run(  # noqa: S603
            [sys.executable, "-c", asks], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        said[allowed] = process.stdout.splitlines()[-1]
    assert said[""] == "False None"
    assert "SGLANG_PLUGINS leaves it out" in said["another"]


def test_a_wheel_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("kvdelta.OFFER_KEY")
    reason = compat.plain_reason()
    assert reason is not None
    assert "kvdelta is missing or another version" in reason
    assert "OFFER_KEY" in reason


def test_without_the_wheel_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvdelta", None)
    spec = importlib.util.spec_from_file_location("kvdelta_sglang.worker_alone", worker.__file__)
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    said = alone.ClaimWorker()
    assert "the Python package kvdelta is missing or another version" in said.plain_reason
    (warning,) = caplog.records
    assert said.plain_reason in warning.getMessage()
    assert said.settle({}, token_ids=None, cache_salt=None, meta_info={}) is None


@pytest.mark.usefixtures("_loaded")
def test_with_all_there_claims_are_settled(caplog: pytest.LogCaptureFixture) -> None:
    assert plugin.is_loaded()
    assert ClaimWorker().plain_reason is None
    assert not caplog.records


MODEL = SimpleNamespace(attention_arch=SimpleNamespace(name="MHA"), is_hybrid_swa=False)
RADIX = "--disaggregation-decode-enable-radix-cache is off"
EVENTS = "--kv-events-config names no publisher"


def capability(caplog: pytest.LogCaptureFixture, **asked: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """What a decode worker advertises, and what it warns of."""
    of = {"disaggregation_decode_enable_radix_cache": True, "dcp_size": 1, "enable_lora": False}
    events, indexer = asked.pop("events", True), asked.pop("indexer", True)
    worker = ClaimWorker()
    caplog.clear()
    said = worker.capability(SimpleNamespace(**of | asked), MODEL, block_size=PAGE, events=events, indexer=indexer)
    return said, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def _plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda _: None)


@pytest.mark.usefixtures("_loaded", "_plain_model")
def test_a_decode_worker_on_which_claims_can_hold_advertises_it(caplog: pytest.LogCaptureFixture) -> None:
    said, warnings = capability(caplog)
    assert said == {"version": 1, "block_size": PAGE, "prefix_caching": True, "cache_groups": ["full_attention"]}
    assert warnings == []


@pytest.mark.usefixtures("_loaded", "_plain_model")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (1, True)),
        # No claims, but promises that can fail.
        ({"enable_lora": True}, (0, True)),
        # A decode worker without the radix cache promises nothing.
        ({"disaggregation_decode_enable_radix_cache": False}, (None, None)),
    ],
)
def test_a_decode_worker_with_lower_tiers_says_so(
    caplog: pytest.LogCaptureFixture, asked: dict[str, Any], expected: tuple[int | None, bool | None]
) -> None:
    said, warnings = capability(caplog, enable_hierarchical_cache=True, **asked)
    assert ((said or {}).get("version"), (said or {}).get("lower_tiers")) == expected
    assert len(warnings) == (0 if asked == {} else 1)


@pytest.mark.usefixtures("_loaded", "_plain_model")
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"disaggregation_decode_enable_radix_cache": False}, [RADIX]),
        ({"events": False}, [EVENTS]),
        ({"disaggregation_decode_enable_radix_cache": False, "events": False}, [RADIX, EVENTS]),
        ({"indexer": False}, ["local indexer is off"]),
        ({"dcp_size": 2}, ["decode context parallelism is on"]),
        ({"enable_lora": True}, ["--enable-lora is on"]),
        ({"elastic_ep_backend": "mooncake"}, ["--elastic-ep-backend is on"]),
        ({"enable_unified_cache_external_linker": True}, ["--enable-unified-cache-external-linker is on"]),
    ],
)
def test_one_warning_names_the_options_that_are_wanting(
    caplog: pytest.LogCaptureFixture, asked: dict[str, Any], named: list[str]
) -> None:
    said, (warning,) = capability(caplog, **asked)
    assert said is None
    assert all(name in warning for name in named)
    assert (RADIX in warning) == (RADIX in named)


@pytest.mark.parametrize(
    ("arch", "swa", "mamba", "groups"),
    [
        ("MLA", False, None, ["mla_attention"]),
        ("MHA", True, None, ["full_attention", "sliding_window"]),
        ("MHA", False, object(), ["full_attention", "mamba"]),
        ("SSM", False, object(), ["mamba", "mamba"]),
        ("NEW", False, None, ["unknown"]),
    ],
)
def test_a_models_cache_groups(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    swa: bool,  # noqa: FBT001
    mamba: object,
    groups: list[str],
) -> None:
    from kvdelta_sglang.worker import cache_groups  # noqa: PLC0415

    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda _: mamba)
    model = SimpleNamespace(attention_arch=SimpleNamespace(name=arch), is_hybrid_swa=swa)
    assert cache_groups(model) == groups
