"""``vllm-simple``: SimpleCPUOffloadConnector, both sides, with its real copy loop on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvspec.device.adversary import Adversary
from kvspec.device.cuda_names import OneItemQueue, ThreadActor, batch_memcpy, installed
from kvspec.errors import SetupRefused
from kvspec.laws import PoolView
from kvspec.ops import EngineSetup
from kvspec.targets import CopiedBlock, Probe
from kvspec.targets.vllm.config import LAYERS, block_bytes, refusal
from kvspec.targets.vllm.core import own_files
from kvspec.targets.vllm.engine import VllmEngine, group_of
from kvspec.targets.vllm.observe import (
    ObservedEngine,
    Transfers,
    block_at,
    index_of_pool,
    keys_of_hashes,
    view_pool,
    waiting_events,
)

CONNECTOR = "SimpleCPUOffloadConnector"


def connector_config(setup: EngineSetup) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` that gives every rank ``setup.cpu_blocks`` CPU blocks."""
    per_rank = setup.cpu_blocks * block_bytes(setup)
    return {
        "cpu_bytes_to_use": per_rank * setup.world_size,
        "cpu_bytes_to_use_per_rank": per_rank,
        "lazy_offload": setup.lazy,
    }


def instant_output(metadata: Any, ranks: int) -> tuple[set[str], Any]:
    """Return (requests loaded, worker metadata) of a worker that has done at once all that the metadata asks for."""
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

    stored = {metadata.store_event: ranks} if metadata.store_event >= 0 else {}
    loaded = set(metadata.load_event_to_reqs.get(metadata.load_event, ()))
    return loaded, SimpleCPUOffloadWorkerMetadata(stored) if stored else None


def stand_ins() -> tuple[tuple[Any, str, Any], ...]:
    """Return what must stand for CUDA in the target's modules: (module, attribute, stand-in)."""
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    platform = SimpleNamespace(set_device=lambda device: None, is_rocm=lambda: False, is_cuda=lambda: True)
    candidates: tuple[tuple[Any, str, Any], ...] = (
        (copy_backend, "threading", SimpleNamespace(Thread=ThreadActor)),
        (copy_backend, "queue", SimpleNamespace(SimpleQueue=OneItemQueue)),
        (copy_backend, "current_platform", platform),
        (cuda_mem_ops, "current_platform", platform),
        (cuda_mem_ops, "_batch_memcpy", (batch_memcpy, 1)),  # 0.31 and later
        (cuda_mem_ops, "_batch_memcpy_fn", batch_memcpy),
        (worker, "PIN_MEMORY", True),  # 0.24 and later
        (worker, "is_pin_memory_available", lambda: True),
    )
    return tuple(stand_in for stand_in in candidates if hasattr(stand_in[0], stand_in[1]))


class SimpleOffloadTarget:
    """The target ``vllm-simple``, with or without a release."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_files = own_files()

    def activated(self) -> AbstractContextManager[Any]:
        return installed(stand_ins())

    def refusal(self, setup: EngineSetup) -> str | None:
        """Source: vLLM, v1/simple_kv_offload/manager.py, SimpleCPUOffloadScheduler.__init__, which asserts it."""
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

        if (
            setup.context_ranks > 1
            and "cp_world_size" not in signature(Manager._estimate_lazy_target_blocks).parameters
        ):
            return "up to 0.23 SimpleCPUOffload has no context parallelism"
        if not any(group.kind == "full" for group in setup.groups):
            return "SimpleCPUOffload needs a full-attention group"
        return refusal(setup)

    def start(self, setup: EngineSetup, adversary: Adversary, probe: Probe) -> ObservedEngine:
        if reason := self.refusal(setup):
            raise SetupRefused(f"{self.name} can't run this engine: {reason}.")
        return ObservedEngine(setup, CONNECTOR, connector_config(setup), adversary, probe, SimpleOffloadTier)


class SimpleOffloadTier:
    """The CPU block pool of SimpleCPUOffload, of the same kind as the GPU's."""

    null_block: int | None = 0
    events_name_groups = True

    def __init__(self, vllm: VllmEngine, probe: Probe) -> None:
        self._vllm = vllm
        self._manager = vllm.connector.scheduler_manager
        self._pool = self._manager.cpu_block_pool
        self.polls_when_idle = "has_pending_push_work" in type(vllm.connector).__dict__  # 0.30 and later
        self.shortages = 0
        self._stores_due: Counter[int] = Counter()
        self._store_blocks: dict[int, tuple[list[int], list[int]]] = {}
        self._partly_stored: set[int] = set()
        """CPU blocks whose source wasn't full when their last store was planned."""
        self._views = [_view_memory(rank.connector) for rank in vllm.ranks]
        self._count_shortages()

    def _count_shortages(self) -> None:
        """Wrap what a store asks of the pool: is anything free, and then to get it."""
        pool, count_free, allocate = self._pool, self._pool.get_num_free_blocks, self._pool.get_new_blocks

        def get_num_free_blocks() -> int:
            free: int = count_free()
            self.shortages += free == 0
            return free

        def get_new_blocks(count: int) -> Any:
            blocks = allocate(count)
            self.shortages += count_free() == 0
            return blocks

        pool.get_num_free_blocks, pool.get_new_blocks = get_num_free_blocks, get_new_blocks

    def allocated(self, request: str, external_tokens: int) -> None:
        pass

    def planned(self, output: Any, metadata: Any) -> Transfers:
        if metadata.store_event >= 0:
            self._stores_due[metadata.store_event] = self._vllm.setup.world_size
            self._store_blocks[metadata.store_event] = (metadata.store_gpu_blocks, metadata.store_cpu_blocks)
            self._note_partial_stores(metadata)
        trace = f"{list(vars(metadata).values())}"
        return Transfers(len(metadata.store_gpu_blocks), len(metadata.load_gpu_blocks), trace)

    def _note_partial_stores(self, metadata: Any) -> None:
        """Note which CPU blocks get one that is registered for a part of its tokens (from 0.26 on a block says for how
        many)."""
        blocks = self._vllm.scheduler.kv_cache_manager.block_pool.blocks
        self._partly_stored.difference_update(metadata.store_cpu_blocks)
        for gpu, cpu in zip(metadata.store_gpu_blocks, metadata.store_cpu_blocks, strict=True):
            if key := blocks[gpu].block_hash:
                layout = self._vllm.layouts[group_of(key)]
                tokens: int = getattr(blocks[gpu], "block_hash_num_tokens", None) or 0
                if tokens % layout.span and not layout.state:
                    self._partly_stored.add(cpu)

    def reported(self, output: Any) -> None:
        for event, ranks in getattr(output.kv_connector_worker_meta, "completed_store_events", {}).items():
            self._stores_due[event] -= ranks
            if self._stores_due[event] <= 0:
                del self._stores_due[event]

    def copied(self, block: CopiedBlock) -> None:
        pass

    def block_of(self, rank: int, address: int) -> int:
        return block_at(self._views[rank], address)

    def stores_due(self) -> bool:
        return bool(self._stores_due)

    def stores_queued(self) -> bool:
        return bool(getattr(self._manager, "_pending_finished_stores", ()))  # 0.30 and later

    def stores_unstarted(self) -> int:
        return 0  # its copies begin in the step that plans them

    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]:
        plans = [self._store_blocks[event] for event in self._stores_due]
        return {block for gpu, _ in plans for block in gpu}, {block for _, cpu in plans for block in cpu}

    def pool(self) -> PoolView:
        return view_pool("CPU", self._pool)

    def group_of(self, block: CopiedBlock) -> int | None:
        return None

    def places_of(self, block: CopiedBlock) -> range | None:
        return range(self._vllm.setup.blocks_per_chunk)  # a setting of OffloadingConnector; a block here is all of it

    def is_partly_stored(self, block: CopiedBlock) -> bool:
        return block.cpu in self._partly_stored

    def refs(self, block: CopiedBlock, gpu_refs: int) -> tuple[int, int]:
        return gpu_refs, self._pool.blocks[block.cpu].ref_cnt

    def kept(self) -> Mapping[str, int]:
        names = (
            "_reqs_to_load",
            "_load_event_to_reqs",
            "_pending_cpu_hits",
            "_store_event_to_blocks",
            "_reqs_to_store",
            "_store_event_to_reqs",
            "_store_event_pending_counts",
            "_in_flight_store_gpu_blocks",
            "_pending_finished_stores",
            "_abandoned_store_event_to_blocks",
            "_abandoned_reqs_to_load",
        )
        return {name: len(getattr(self._manager, name, ())) for name in names}

    def index(self) -> Mapping[bytes, int]:
        return index_of_pool(self._pool)

    def held_tokens(self, request: str, local: int) -> int | None:
        """With one full-attention group; EAGLE's hits end a block earlier, and several groups have to agree."""
        setup = self._vllm.setup
        if len(setup.groups) > 1 or setup.groups[0].kind != "full" or setup.eagle:
            return None
        return self._vllm.tokens_in_a_row(request, local, self._pool.cached_block_hash_to_block._cache)

    def keys_to_store(self, key: bytes) -> Iterable[bytes]:
        return () if self._vllm.setup.lazy else (key,)

    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None:
        tags = self._vllm.tags_of_block(key)
        return None if tags is None else self._vllm.ranks[rank].memory.kept(tags, group_of(key))

    def tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        words = np.stack([view[block] for view in self._views[rank]])
        return self._vllm.ranks[rank].memory.read_block(words, group_of(key))

    def describe_key(self, key: bytes) -> str:
        return self._vllm.describe_key(key)

    def keys_of_event(self, event: Any) -> Iterable[bytes]:
        return keys_of_hashes(event)

    def drain_events(self) -> Iterable[Any]:
        return waiting_events(self._pool)


def _view_memory(worker_connector: Any) -> list[np.ndarray]:
    """Return each region's CPU blocks, shape (blocks, words of a block), uint64, in the worker's own memory."""
    caches = worker_connector.worker_handler.cpu_kv_caches
    assert len(caches) == LAYERS
    return [tensor.numpy().view(np.uint64) for tensor in caches.values()]
