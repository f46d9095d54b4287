# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and block manager without a model: a step samples the same token for every request."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from vllm.lora.request import LoRARequest

TOKEN = 7
TABLES = {(0, 0): (4096, 0, 8)}
"""One rank with eight lease words."""

init_none_hash(sha256)


def _model_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvdelta-model-"))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_hidden_layers": 2,
                "vocab_size": 512,
                "max_position_embeddings": 262144,
                "torch_dtype": "float32",
            }
        )
    )
    return folder


_MODEL = _model_folder()


def full(block_size: int = 4) -> FullAttentionSpec:
    """Return the spec of a layer with full attention."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(size: int, block_size: int = 4) -> SlidingWindowSpec:
    """Return the spec of a layer with a sliding window."""
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=size
    )


def chunked(size: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    """Return the spec of a layer that attends within chunks."""
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=size
    )


def mla(block_size: int = 4) -> MLAAttentionSpec:
    """Return the spec of a layer with latent attention."""
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=4, dtype=torch.float32)


def state(block_size: int = 4) -> MambaSpec:
    """Return the spec of a layer with a running state."""
    return MambaSpec(
        block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align", page_size_padded=None
    )


@dataclass(eq=False)
class Engine:
    """A scheduler with a connector, and what a model runner would say."""

    stock: bool = False
    push: bool = False
    blocks: int = 64
    specs: tuple[Any, ...] = field(default_factory=lambda: (full(),))
    caching: bool = True
    policy: str = "fail"
    extra: dict[str, Any] = field(default_factory=dict)
    chunk: int = 1024
    length: int = 2048
    ahead: bool = False
    """Whether a step is scheduled before the output of the one before is there."""
    tables: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    sibling: dict[str, Any] | None = None
    """The options of a connector that stands beside this one in vLLM's MultiConnector."""
    behind: bool = False
    """Whether it is the first of the two."""

    def __post_init__(self) -> None:
        """Build the scheduler."""
        name = "NixlPushConnector" if self.push else "NixlConnector"
        block_size = self.specs[0].block_size
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=self.caching)
        cache.num_gpu_blocks = self.blocks
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(_MODEL),
                tokenizer=None,
                skip_tokenizer_init=True,
                dtype="float32",
                seed=0,
                max_model_len=self.length,
            ),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=self.chunk,
                max_model_len=self.length,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=self.ahead,
                disable_hybrid_kv_cache_manager=False,
            ),
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(),
            kv_transfer_config=self._transfer_config(name),
        )
        groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(self.specs)]
        self.kv_cache_config = KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        sizes = resolve_kv_cache_block_sizes(self.kv_cache_config, self.config)
        self.scheduler = (AsyncScheduler if self.ahead else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(sizes[1], sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        connector = self.scheduler.connector
        self.half = (connector.sub_connectors[int(self.behind)] if self.sibling else connector).connector_scheduler
        self.metas: list[Any] = []
        self._flying: deque[tuple[Any, dict[str, bool]]] = deque()
        self.watchers: list[Callable[[Engine, Any], None]] = []
        self.stats: list[Any] = []
        self.outputs: dict[str, Any] = {}
        if self.tables:
            self.half.prefill.set_tables(self.tables)

    def _transfer_config(self, name: str) -> KVTransferConfig:
        own = {
            "kv_connector": name,
            "kv_connector_module_path": None if self.stock else "kvdelta_vllm.connector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": self.extra,
        }
        if self.sibling is None:
            return KVTransferConfig(**own)
        both = [own, {**self.sibling, "kv_role": "kv_both"}]
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy=self.policy,
            kv_connector_extra_config={"connectors": both[::-1] if self.behind else both},
        )

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        free: int = self.pool.get_num_free_blocks()
        return free

    @property
    def meta(self) -> Any:
        """What the worker half was told last."""
        return self.metas[-1]

    def add(self, name: str, prompt: list[int], params: Any = None, *, max_tokens: int = 1, **more: Any) -> Request:
        """Add a request."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            **more.pop("sampling", {}),
        )
        sampling.update_from_generation_config({}, 511)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        # vLLM takes it out of the sampling parameters, which refuse some of what the tests send.
        request.kv_transfer_params = params
        self.scheduler.add_request(request)
        return request

    def step(
        self,
        *,
        sent: AbstractSet[str] = frozenset(),
        received: AbstractSet[str] = frozenset(),
        failed: AbstractSet[str] = frozenset(),
    ) -> None:
        """Run one step, with what the worker half says of transfers."""
        output = self.scheduler.schedule()
        self.metas.append(output.kv_connector_metadata)
        for watch in self.watchers:
            watch(self, output)
        # A prompt is sampled from at its end, which this step knows before another one is scheduled.
        ends = {
            name: request.num_computed_tokens >= request.num_tokens
            for name in output.num_scheduled_tokens
            for request in [self.scheduler.requests[name]]
        }
        self._flying.append((output, ends))
        if len(self._flying) > self.ahead:
            self._update(*self._flying.popleft(), sent, received, failed)

    def _update(
        self,
        output: Any,
        ends: dict[str, bool],
        sent: AbstractSet[str],
        received: AbstractSet[str],
        failed: AbstractSet[str],
    ) -> None:
        names = list(ends)
        sampled = [[TOKEN] if ends[name] else [] for name in names]
        told = None
        if sent or received or failed:
            told = KVConnectorOutput(
                finished_sending=set(sent) or None,
                finished_recving=set(received | failed) or None,
                failed_recving=set(failed) or None,
            )
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )
        outputs = self.scheduler.update_from_output(output, runner)
        for batch in outputs.values():
            for one in batch.outputs:
                if one.finish_reason is not None:
                    self.outputs[one.request_id] = one
            if batch.scheduler_stats and batch.scheduler_stats.kv_connector_stats:
                self.stats.append(batch.scheduler_stats.kv_connector_stats)

    def abort(self, name: str) -> None:
        """End a request from outside."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _probe(self, tokens: list[int], lora: LoRARequest | None = None) -> Request:
        sampling = SamplingParams(max_tokens=1)
        return Request("probe", list(tokens), sampling, None, lora_request=lora, block_hasher=self._hasher)

    def cached(self, tokens: list[int]) -> int:
        """Return the tokens that a lookup finds."""
        found: int = self.scheduler.kv_cache_manager.get_computed_blocks(self._probe(tokens))[1]
        return found

    def own_hash(self, tokens: list[int], blocks: int, lora: LoRARequest | None = None) -> int:
        """Return the hash that KV events tell of the last of ``blocks`` blocks."""
        hashes = self._probe(tokens, lora).block_hashes
        at = blocks * self.specs[0].block_size // self.pool.hash_block_size - 1
        own: int = maybe_convert_block_hash(hashes[at])
        return own

    def evict(self, tokens: list[int], indices: Iterable[int], group: int = 0) -> None:
        """Take blocks of a prompt out of the prefix cache."""
        hashes = self._probe(tokens).block_hashes
        found = [self.pool.get_cached_block(hashes[index], [group]) for index in indices]
        self.pool.evict_blocks({block.block_id for blocks in found if blocks for block in blocks})

    @property
    def released(self) -> list[str]:
        """What the worker half was told to release."""
        return [name for meta in self.metas for name in sorted(meta.releases)]

    def staged(self, name: str) -> list[int]:
        """Return the blocks that the worker half was told to copy to the host buffer."""
        saved = [meta.reqs_to_save[name].local_block_ids[0] for meta in self.metas if name in meta.reqs_to_save]
        return [block for ids in saved for block in ids]

    def meta_of(self, field: str) -> Any:
        """Return the last that the worker half was told of ``field``."""
        return next(getattr(meta, field) for meta in reversed(self.metas) if getattr(meta, field))

    def run(self, name: str, limit: int = 50) -> Any:
        """Step until ``name`` ends, and return its last output."""
        for _ in range(limit):
            if name in self.outputs:
                return self.outputs[name]
            self.step()
        raise AssertionError(f"{name} did not end in {limit} steps")

    def count(self, name: str, label: str | None = None) -> float:
        """Return one of our counters, of what was handed out and what was not yet."""
        key = f"kvdelta_{name}" + (f"/{label}" if label else "")
        return sum(sum(data.get(key, ())) for data in [*self.stats, self.half.shared.stats.data])


def prompt(tokens: int, start: int = 100) -> list[int]:
    """Return a prompt of ``tokens`` tokens."""
    return [(start + 3 * index) % 500 for index in range(tokens)]


def claim(
    engine: Engine, tokens: list[int], blocks: int, *, lora: LoRARequest | None = None, **changes: object
) -> dict[str, object]:
    """Return a claim that a decode worker holds the first blocks of a prompt."""
    return {
        "version": 1,
        "claim_id": "claim-1",
        "decode_worker_id": 42,
        "decode_dp_rank": 0,
        "cached_prefix_blocks": blocks,
        "block_size": engine.specs[0].block_size,
        "prefix_hash": engine.own_hash(tokens, blocks, lora),
        **changes,
    }


def prefill(
    engine: Engine,
    name: str,
    tokens: list[int],
    claimed: object = None,
    *,
    lora: LoRARequest | None = None,
    **params: object,
) -> dict[str, Any]:
    """Prefill a prompt, and return the offer as it comes over the wire."""
    if claimed is not None:
        params["decode_cache_info"] = claimed
    own = {"do_remote_decode": True, "do_remote_prefill": False, **params}
    engine.add(name, list(tokens), own, lora_request=lora)
    offer: dict[str, Any] = json.loads(json.dumps(engine.run(name).kv_transfer_params))
    return offer


def decode(engine: Engine, name: str, tokens: list[int], offer: Any, **more: Any) -> Request:
    """Add the decode leg of a prompt."""
    return engine.add(name, list(tokens), json.loads(json.dumps(offer)), **more)


def hold(engine: Engine, tokens: list[int], blocks: int, lora: LoRARequest | None = None) -> None:
    """Let the engine cache the first blocks of a prompt."""
    end = blocks * engine.specs[0].block_size
    engine.add("held", [*tokens[:end], 499], lora_request=lora)
    engine.run("held")
    del engine.outputs["held"]
    engine.step()
