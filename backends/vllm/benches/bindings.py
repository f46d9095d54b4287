# SPDX-License-Identifier: Apache-2.0
"""What the calls of kvdelta cost for one long request, beside vLLM's own scheduler in the same run.

The scheduler is vLLM's, without a model and without a connector: it takes a prompt in one step, as prefill does with
nothing in its cache and as decode does with the first half in its cache. Every round times, in turn, a step on each
side and the calls that kvdelta's connector adds on that side for that request: right after the step, whose data has
taken their place in the processor's caches, and again right after themselves. Shown are medians with the quartiles in
brackets; the ratio is taken in each round. Times are the thread's on the processor, so that a busy machine shows in
neither.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import kvdelta
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

T = TypeVar("T")

LAYERS = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}
BLOCK_BYTES = 1 << 21
WORKER = 2**63 + 1
LEASE_MS = 480_000


class Round(NamedTuple):
    """Nanoseconds of one round."""

    prefill_step: int
    prefill_calls: int
    prefill_again: int
    decode_step: int
    decode_calls: int
    decode_again: int


def scheduler(folder: Path, block_size: int, tokens: int) -> Scheduler:
    """Return vLLM's scheduler with room for two prompts of ``tokens``, each in one step."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    blocks = 2 * tokens // block_size + 16
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=tokens + 16
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=tokens + 16,
            is_encoder_decoder=False,
            max_num_batched_tokens=tokens + 16,
            max_num_seqs=16,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
    )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.float32)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )


def timed(call: Callable[[], T]) -> tuple[int, T]:
    """Return the nanoseconds of one call, and what it returned."""
    begin = time.thread_time_ns()
    result = call()
    return time.thread_time_ns() - begin, result


class Fleet:
    """The scheduler, and the state of kvdelta on both sides."""

    def __init__(self, folder: Path, block_size: int, tokens: int) -> None:
        self.block_size = block_size
        self.tokens = tokens
        self.blocks = tokens // block_size
        self.claimed = self.blocks // 2
        self.scheduler = scheduler(folder, block_size, tokens)
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.ledger = kvdelta.Ledger(1)
        self.recovery = kvdelta.Recovery()
        self.count = 0

    def request(self, prefix: int) -> Request:
        """Return a new request whose first half is that of all with the same ``prefix``."""
        self.count += 1
        half = self.tokens // 2
        rest = [(self.count * 7 + token) % 1000 for token in range(self.tokens - half - 1)]
        return Request(
            request_id=f"request-{self.count}",
            prompt_token_ids=[prefix % 1000] * half + [self.count % 1000, *rest],
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def step(self, request: Request, cached: int) -> int:
        """Return the time of the step that takes the whole prompt, of which ``cached`` tokens are there already."""
        self.scheduler.add_request(request)
        begin = time.thread_time_ns()
        output = self.scheduler.schedule()
        spent = time.thread_time_ns() - begin
        scheduled = output.num_scheduled_tokens[request.request_id]
        if scheduled != self.tokens - cached:
            message = f"{scheduled} tokens were scheduled, expected {self.tokens - cached}"
            raise RuntimeError(message)
        result = ModelRunnerOutput(
            req_ids=[request.request_id],
            req_id_to_index={request.request_id: 0},
            sampled_token_ids=[[5]],
        )
        self.scheduler.update_from_output(output, result)
        if self.scheduler.has_unfinished_requests():
            message = "the request is not finished"
            raise RuntimeError(message)
        return spent

    def prefill_calls(self, request: Request, value: dict[str, object]) -> dict[str, object]:
        """Do what a prefill worker does for a request with a claim."""
        claim = kvdelta.Claim(value, request.num_prompt_tokens)
        plan = kvdelta.plan_offer(
            claim,
            block_size=self.block_size,
            prefix_caching=True,
            own_hash=own_hash(request, claim.cached_prefix_blocks),
            groups=[kvdelta.Group("full_attention", self.block_size, 0, self.blocks, BLOCK_BYTES)],
        )
        head = kvdelta.Offer.cut(claim, plan, self.block_size).head()
        self.ledger.open(request.request_id, plan.skipped_blocks, plan.offered_blocks, 1000, LEASE_MS)
        self.ledger.release_skipped(request.request_id)
        self.ledger.notice(request.request_id, 0, 2000)
        return head

    def decode_calls(self, request: Request, value: dict[str, object]) -> kvdelta.Confirmation:
        """Do what a decode worker does with an offer, and also what it does about a stale claim."""
        offer = kvdelta.Offer(value)
        said = kvdelta.confirm(
            offer,
            block_size=self.block_size,
            held_tokens=self.claimed * self.block_size,
            own_hash=own_hash(request, offer.first_block),
        )
        offered = self.blocks - offer.first_block
        for first in offer.group_first_blocks:
            kvdelta.pair(first, offered, self.claimed, offered)
        self.recovery.confirmed(1000)
        self.recovery.observe_transfer(offered * BLOCK_BYTES, 100.0)
        self.recovery.observe_decode_prefill(self.tokens, 100.0)
        self.recovery.choose(
            missing_tokens=self.tokens // 2,
            context_tokens=self.tokens,
            offered_bytes=offered * BLOCK_BYTES,
            skipped_bytes=self.claimed * BLOCK_BYTES,
            now_ms=1000,
        )
        return said

    def round(self) -> Round:
        """Time both sides, on requests that nobody has seen."""
        prefill = self.request(prefix=self.count)
        self.scheduler.reset_prefix_cache()
        prefill_step = self.step(prefill, cached=0)
        value: dict[str, object] = {
            "version": kvdelta.PROTOCOL_VERSION,
            "claim_id": "0123456789abcdef0123456789abcdef",
            "decode_worker_id": WORKER,
            "decode_dp_rank": 0,
            "cached_prefix_blocks": self.claimed,
            "block_size": self.block_size,
            "prefix_hash": own_hash(prefill, self.claimed),
        }
        prefill_calls, head = timed(lambda: self.prefill_calls(prefill, value))
        # Its offer is closed, so the same id is another one.
        prefill_again, _ = timed(lambda: self.prefill_calls(prefill, value))
        decode = self.request(prefix=self.count - 1)
        decode_step = self.step(decode, cached=self.claimed * self.block_size)
        params = {"remote_block_ids": [list(range(self.claimed, self.blocks))], "remote_host": "127.0.0.1"}
        offered = {**head, "params": params}
        decode_calls, said = timed(lambda: self.decode_calls(decode, offered))
        decode_again, _ = timed(lambda: self.decode_calls(decode, offered))
        if said.kind != "covered" or len(self.ledger):
            message = f"the claim is {said.kind}, {len(self.ledger)} offers are open"
            raise RuntimeError(message)
        return Round(prefill_step, prefill_calls, prefill_again, decode_step, decode_calls, decode_again)


def own_hash(request: Request, blocks: int) -> int:
    """Return the engine's own hash of the last of ``blocks``."""
    return int.from_bytes(request.block_hashes[blocks - 1][-8:], "big")


def measure(block_size: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the quartiles for one block size: microseconds, and the ratio of each round in percent."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), block_size, tokens)
        fleet.round()
        results = [fleet.round() for _ in range(rounds)]
    columns: dict[str, list[float]] = {
        f"{name}_us": [value / 1000 for value in column]
        for name, column in zip(Round._fields, zip(*results, strict=True), strict=True)
    }
    for side in ("prefill", "decode"):
        pairs = zip(columns[f"{side}_calls_us"], columns[f"{side}_step_us"], strict=True)
        columns[f"{side}_percent"] = [100 * calls / step for calls, step in pairs]
    return {"block_size": block_size, **{name: statistics.quantiles(column) for name, column in columns.items()}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="cargo xtask bench bindings", description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32], metavar="TOKENS", help="default: 16 32")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args()
    if options.rounds <= 1 or min(options.block_sizes) < 1 or options.tokens % (2 * max(options.block_sizes)):
        parser.error("rounds are at least 2, block sizes at least 1; half of the prompt is whole blocks")
    torch.set_num_threads(1)
    init_none_hash(sha256)
    results = [measure(size, options.tokens, options.rounds) for size in options.block_sizes]
    if options.json:
        json.dump({"tokens": options.tokens, "rounds": options.rounds, "results": results}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    sys.stdout.write("| block size | side | scheduler step, us | calls, us | ratio, % | the calls again, us |\n")
    sys.stdout.write("| --: | --- | --: | --: | --: | --: |\n")
    for each in results:
        for side in ("prefill", "decode"):
            cells = [
                f"{middle:,.{digits}f} ({low:,.{digits}f}..{high:,.{digits}f})"
                for name, digits in (("step_us", 0), ("calls_us", 1), ("percent", 2), ("again_us", 1))
                for low, middle, high in [each[f"{side}_{name}"]]
            ]
            sys.stdout.write(f"| {each['block_size']} | {side} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
