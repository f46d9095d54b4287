# SPDX-License-Identifier: Apache-2.0
"""Real workers with real NIXL agents over CPU tensors, without a model: what the worker tests are made of."""

import gc
import itertools
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,sm,self")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import msgspec
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

LAYERS = 2
HEADS = 2
HEAD_SIZE = 64
BLOCK = 32
BLOCKS = 24
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


@lru_cache
def model_folder() -> Path:
    """The folder of the model's configuration, whose name is part of what workers compare in a handshake."""
    folder = Path(tempfile.gettempdir()) / f"kvdelta-test-model-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Worker:
    """A worker half with its caches, and the side channel that its scheduler half would serve."""

    def __init__(
        self,
        worker_class: type,
        *,
        rank: int = 0,
        ranks: int = 1,
        engine_id: str | None = None,
        port: int | None = None,
        extra: dict[str, Any] | None = None,
        serve: bool = True,
    ) -> None:
        folder = model_folder()
        self.engine_id = engine_id or str(uuid.uuid4())
        self.port = port or free_port()
        config = VllmConfig(
            model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=1024),
            cache_config=CacheConfig(block_size=BLOCK),
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role="kv_both",
                kv_buffer_device="cpu",
                engine_id=self.engine_id,
                kv_connector_extra_config={"num_threads": 1, **(extra or {})},
            ),
        )
        config.cache_config.kv_cache_layout = "LBHNC"
        heads = max(1, HEADS // ranks)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32)
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        caches = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )
        self.block_bytes = spec.page_size_bytes * LAYERS
        cores = os.sched_getaffinity(0)
        kept = base_worker.get_tensor_model_parallel_rank, base_worker.get_tensor_model_parallel_world_size
        base_worker.get_tensor_model_parallel_rank = lambda: rank
        base_worker.get_tensor_model_parallel_world_size = lambda: ranks
        try:
            with set_current_vllm_config(config):
                self.half: Any = worker_class(config, self.engine_id, caches)
        finally:
            base_worker.get_tensor_model_parallel_rank, base_worker.get_tensor_model_parallel_world_size = kept
            # A worker takes one core for itself.
            os.sched_setaffinity(0, cores)
        self.caches = {name: torch.zeros(BLOCKS, heads, BLOCK, 2 * HEAD_SIZE, dtype=torch.float32) for name in names}
        self.half.register_kv_caches(self.caches)
        self._stop = threading.Event()
        self.payload = self.half.xfer_handshake_metadata
        if serve:
            self.serve({(0, rank): self.payload})

    def serve(self, payloads: dict[tuple[int, int], Any]) -> None:
        """Serve handshakes as the scheduler half does."""
        ready = threading.Event()
        encoded = {ranks: msgspec.msgpack.encode(payload) for ranks, payload in payloads.items()}
        threading.Thread(
            target=NixlBaseConnectorScheduler._nixl_handshake_listener,
            args=(encoded, ready, self._stop, "127.0.0.1", self.port),
            daemon=True,
        ).start()
        ready.wait()

    def fill(self, blocks: list[int], value: float) -> None:
        """Write ``value`` plus the layer and the block into blocks, so that each differs."""
        for layer, cache in enumerate(self.caches.values()):
            for block in blocks:
                cache[block] = value + layer / 4 + block / 1024

    def holds(self, block: int, value: float, source: int) -> bool:
        """Whether a block is the one that was filled with ``value`` as block ``source``."""
        return all(
            bool((cache[block] == value + layer / 4 + source / 1024).all())
            for layer, cache in enumerate(self.caches.values())
        )

    def close(self) -> None:
        """End the worker."""
        self._stop.set()
        if self.half is None:
            return
        # Upstream's shutdown does not wait, and a handshake that goes on meanwhile frees twice what NIXL holds.
        self.half._handshake_initiation_executor.shutdown(wait=True)
        self.half.shutdown()
        self.half = None
        # Agents poll for as long as they live.
        gc.collect()


class Results:
    """What workers reported so far."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        self.bad_blocks: set[int] = set()


class Side:
    """A worker and the metadata that its scheduler half would send it in the next step."""

    def __init__(self, worker: Worker, metadata_class: type) -> None:
        self.worker = worker
        self._metadata_class = metadata_class
        self.results = Results()
        self.next: Any = metadata_class()

    def step(self) -> None:
        """Run one step of the engine, as far as the worker half sees it."""
        metadata, self.next = self.next, self._metadata_class()
        metadata.scheduler_clock = time.perf_counter()
        self.worker.half.start_load_kv(metadata)
        results = self.worker.half.get_transfer_results()
        self.results.sent += results.finished_sending
        self.results.received += results.finished_recving - results.failed_recving
        self.results.failed += results.failed_recving
        self.results.bad_blocks |= self.worker.half.get_block_ids_with_load_errors()
        assert results.failed_recving <= results.finished_recving

    def offer(self, request: str, *, lease: float = 3600.0) -> None:
        """Finish a prompt of a prefill worker, whose blocks are leased for ``lease`` seconds."""
        self.next.reqs_in_batch.add(request)
        self.next.reqs_to_send[request] = time.perf_counter() + lease

    def params(self, request: str, blocks: list[list[int]], **changes: object) -> dict[str, Any]:
        """What the prefill worker answers."""
        return {
            "remote_block_ids": blocks,
            "remote_engine_id": self.worker.engine_id,
            "remote_request_id": request,
            "remote_host": "127.0.0.1",
            "remote_port": self.worker.port,
            "tp_size": 1,
            **changes,
        }

    def fetch(self, request: str, own: tuple[list[int], ...], params: dict[str, Any], *, parked: bool = True) -> None:
        """Have a decode worker read what is offered into blocks of its own."""
        self.next.add_new_req_to_recv(request, own, params, (), awaiting_kvs=parked)


def run(
    sides: list[Side], until: Callable[[], bool], seconds: float = float(os.environ.get("KVDELTA_TEST_SECONDS", "60"))
) -> None:
    """Step all workers until something is so; the limit only ends a test that hangs."""
    end = time.monotonic() + seconds
    while not until():
        for side in sides:
            side.step()
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def tensor_parallel(worker_class: type, metadata_class: type, ranks: int) -> list[Side]:
    """Make the ranks of one engine, behind one side channel."""
    first = Worker(worker_class, ranks=ranks, serve=False)
    made = [first] + [
        Worker(worker_class, rank=rank, ranks=ranks, engine_id=first.engine_id, port=first.port, serve=False)
        for rank in range(1, ranks)
    ]
    first.serve({(0, rank): worker.payload for rank, worker in enumerate(made)})
    return [Side(worker, metadata_class) for worker in made]


class Workers:
    """The ranks of a prefill and of a decode worker."""

    def __init__(self, prefill: list[Side], decode: list[Side]) -> None:
        self.prefills = prefill
        self.decodes = decode
        self.prefill = prefill[0]
        self.decode = decode[0]

    def run(self, until: Callable[[], bool]) -> None:
        """Step all until something is so."""
        run([*self.prefills, *self.decodes], until)

    def steps(self, count: int = 20) -> None:
        """Step all."""
        remaining = itertools.repeat(None, count)
        self.run(lambda: next(remaining, 0) == 0)

    def sent(self, request: str) -> list[int]:
        """How often each rank of the prefill worker reported a request as sent."""
        return [side.results.sent.count(request) for side in self.prefills]

    def kept(self, half: Any) -> list[Any]:
        """What a worker half keeps of requests."""
        return [
            half._reqs_to_send,
            half._reqs_to_process,
            half._recving_metadata,
            half._recving_transfers,
            half._recv_failures,
        ]

    def is_idle(self) -> bool:
        """Whether no worker keeps anything of a request."""
        return not any(kept for side in [*self.prefills, *self.decodes] for kept in self.kept(side.worker.half))

    def close(self) -> None:
        """End the workers."""
        for side in [*self.decodes, *self.prefills]:
            side.worker.close()
