"""``vllm-simple``: SimpleCPUOffloadConnector, both sides, with its real copy loop on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvspec.device.adversary import Adversary
from kvspec.device.cuda_names import OneItemQueue, ThreadActor, batch_memcpy, installed
from kvspec.device.simulated import Executed
from kvspec.engine.shadow import Batch
from kvspec.errors import SetupRefused
from kvspec.laws import PoolView
from kvspec.ops import Add, EngineSetup
from kvspec.targets import CopiedBlock, Plan, Probe, ResetAnswer
from kvspec.targets.vllm.config import LAYERS, block_bytes, longest_request, page_bytes, refusal
from kvspec.targets.vllm.engine import VllmEngine, group_of

CONNECTOR = "SimpleCPUOffloadConnector"

_STATUS = {"WAITING_FOR_REMOTE_KVS": "loading", "RUNNING": "running", "PREEMPTED": "preempted"}


def connector_config(setup: EngineSetup) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` that gives every rank ``setup.cpu_blocks`` CPU blocks."""
    per_rank = setup.cpu_blocks * block_bytes(setup)
    return {
        "cpu_bytes_to_use": per_rank * setup.world_size,
        "cpu_bytes_to_use_per_rank": per_rank,
        "lazy_offload": setup.lazy,
    }


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
        import vllm

        self.name = name
        self.own_files: tuple[str, ...] = (str(Path(vllm.__file__).parent),)

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

    def start(self, setup: EngineSetup, adversary: Adversary, probe: Probe) -> SimpleOffloadEngine:
        if reason := self.refusal(setup):
            raise SetupRefused(f"{self.name} can't run this engine: {reason}.")
        return SimpleOffloadEngine(setup, adversary, probe)


class SimpleOffloadEngine:
    """One engine with SimpleCPUOffloadConnector, and what can be seen of it."""

    def __init__(self, setup: EngineSetup, adversary: Adversary, probe: Probe) -> None:
        self._setup = setup
        self._probe = probe
        self._vllm = VllmEngine(
            setup, CONNECTOR, connector_config(setup), adversary, probe.mismatch, self._rank_has_output
        )
        self.actors = self._vllm.actors
        self.longest_request = longest_request(setup)
        self._connector = self._vllm.connector
        self._manager = self._connector.scheduler_manager
        self._scheduler = self._vllm.scheduler
        self._gpu_pool = self._scheduler.kv_cache_manager.block_pool
        self._cpu_pool = self._manager.cpu_block_pool
        self.polls_when_idle = "has_pending_push_work" in type(self._connector).__dict__  # 0.30 and later
        self._stores_due: Counter[int] = Counter()
        self._store_blocks: dict[int, tuple[list[int], list[int]]] = {}
        self._loads_due: set[str] = set()
        self._events: dict[str, Counter[bytes]] = {"GPU": Counter(), "CPU": Counter()}
        self._received: Counter[str] = Counter()
        self._cpu_views = [self._view_cpu_memory(rank.connector) for rank in self._vllm.ranks]
        self._reset_answer: Any = None
        self._listen()

    # Listening --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wrap the connector's own calls; each wrapper passes everything on unchanged."""
        connector, probe = self._connector, self._probe
        lookup, allocate, build = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
            connector.build_connector_meta,
        )
        complete, reset = connector.update_connector_output, connector.reset_cache

        def get_num_new_matched_tokens(request: Any, local: int) -> Any:
            answer = lookup(request, local)
            probe.looked_up(request.request_id, local, answer[0])
            return answer

        def update_state_after_alloc(request: Any, blocks: Any, external: int) -> None:
            if external:
                self._loads_due.add(request.request_id)
            allocate(request, blocks, external)
            probe.allocated(request.request_id, external)

        def build_connector_meta(output: Any) -> Any:
            metadata = build(output)
            if metadata.store_event >= 0:
                self._stores_due[metadata.store_event] = self._setup.world_size
                self._store_blocks[metadata.store_event] = (
                    metadata.store_gpu_blocks,
                    metadata.store_cpu_blocks,
                )
            probe.scheduled(_plan(output, metadata))
            return metadata

        def update_connector_output(output: Any) -> None:
            complete(output)
            self._loads_due.difference_update(output.finished_recving or ())
            for event, ranks in getattr(output.kv_connector_worker_meta, "completed_store_events", {}).items():
                self._stores_due[event] -= ranks
                if self._stores_due[event] <= 0:
                    del self._stores_due[event]

        def reset_cache() -> Any:
            self._reset_answer = reset()
            return self._reset_answer

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc
        connector.build_connector_meta = build_connector_meta
        connector.update_connector_output = update_connector_output
        connector.reset_cache = reset_cache
        if self._setup.events:
            self._listen_to_events()
        for rank in self._vllm.ranks:
            rank.device.observers.append(partial(self._copies_executed, rank.index))

    def _listen_to_events(self) -> None:
        """Count what each tier's own events say. A clear has no medium, so it counts for the tier that emitted it."""
        manager, connector = self._scheduler.kv_cache_manager, self._connector
        take_gpu, take_cpu = manager.take_events, connector.take_events

        def gpu_events() -> Any:
            events = take_gpu()
            self._replay("GPU", events)
            return events

        def cpu_events() -> Any:
            events = list(take_cpu())
            self._replay("CPU", events)
            return events

        manager.take_events, connector.take_events = gpu_events, cpu_events

    def _replay(self, source: str, events: Iterable[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._events[source].clear()
                continue
            counts = self._events["GPU" if event.medium == "GPU" else "CPU"]
            for block_hash in event.block_hashes:
                counts[block_hash + (event.group_idx or 0).to_bytes(4, "big")] += 1 if kind == "BlockStored" else -1

    def _rank_has_output(self, rank: int, output: Any) -> None:
        connector_output = output.kv_connector_output
        if connector_output is not None and connector_output.finished_recving:
            self._probe.loaded(rank, sorted(connector_output.finished_recving))

    def _copies_executed(self, rank: int, executed: Executed) -> None:
        engine_rank = self._vllm.ranks[rank]
        gpu_base = engine_rank.memory.tags.ctypes.data
        gpu_bytes = engine_rank.memory.tags.nbytes
        for dst, src, size in executed.spans:
            to_gpu = 0 <= dst - gpu_base < gpu_bytes
            gpu_address, cpu_address = (dst, src) if to_gpu else (src, dst)
            gpu = (gpu_address - gpu_base) // size % self._setup.gpu_blocks
            self._probe.copied(CopiedBlock(rank, gpu, self._cpu_block(rank, cpu_address), to_gpu))

    def _cpu_block(self, rank: int, address: int) -> int:
        page = page_bytes(self._setup)
        for view in self._cpu_views[rank]:
            offset = address - view.ctypes.data
            if 0 <= offset < view.nbytes:
                return offset // page
        return -1

    def _view_cpu_memory(self, worker_connector: Any) -> list[np.ndarray]:
        """Return each region's CPU blocks, shape (blocks, words of a block), uint64, in the worker's own memory."""
        caches = worker_connector.worker_handler.cpu_kv_caches
        assert len(caches) == LAYERS
        return [tensor.numpy().view(np.uint64) for tensor in caches.values()]

    # Acting -----------------------------------------------------------------------------------------------------------

    def set_adversary(self, adversary: Adversary) -> None:
        self._vllm.adversary = adversary
        for rank in self._vllm.ranks:
            rank.device.adversary = adversary

    def add(self, op: Add, prompt: list[int], arrival: int) -> None:
        request = self._vllm.new_request(
            op.request,
            prompt,
            max_tokens=op.max_tokens,
            salt=op.salt,
            reads_cache=op.reads_cache,
            priority=op.priority,
            arrival=arrival,
        )
        self._vllm.core.add_request(request)

    def said(self, request: str) -> list[int] | None:
        text = self._vllm.texts.get(request)
        return text.tokens[: text.prompt_tokens + self._received[request]] if text else None

    def status(self, request: str) -> str | None:
        found = self._scheduler.requests.get(request)
        return None if found is None else _STATUS.get(found.status.name, "waiting")

    def finish_next(self, request: str) -> None:
        self._vllm.texts[request].stop_next = True

    def abort(self, request: str, in_step: bool) -> None:
        if in_step:
            self._vllm.core.aborts_queue.put([request])
        else:
            self._vllm.core.abort_requests([request])

    def reset(self, running: bool, connector: bool) -> ResetAnswer:
        self._reset_answer = None
        try:
            done = self._vllm.core.scheduler.reset_prefix_cache(running, connector)
        except NotImplementedError as error:  # SimpleCPUOffload up to 0.23 has no reset
            return ResetAnswer(False, False, str(error))
        except RuntimeError as error:
            if "Failed to reset KV cache even when all the running requests" not in str(error):
                raise
            return ResetAnswer(False, False, str(error))
        return ResetAnswer(bool(done), self._reset_answer is False, "")

    def has_work(self) -> bool:
        return self._vllm.has_work()

    def step(self) -> bool:
        outputs, ran = self._vllm.step()
        for client in (outputs or {}).values():
            for output in client.outputs:
                self._received[output.request_id] += len(output.new_token_ids)
                if output.finish_reason is not None and output.new_token_ids:
                    self._probe.ended(output.request_id, output.finish_reason.name == "STOP")
        return bool(ran)

    # Seeing -----------------------------------------------------------------------------------------------------------

    def last_batch(self) -> Batch | None:
        return self._vllm.executor.last_batch

    def device_pending(self) -> bool:
        return self._vllm.device_pending()

    def transfers_outstanding(self) -> bool:
        return bool(self._loads_due or self._stores_due)

    def stores_queued(self) -> bool:
        return bool(getattr(self._manager, "_pending_finished_stores", ()))  # 0.30 and later

    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]:
        plans = [self._store_blocks[event] for event in self._stores_due]
        return {block for gpu, _ in plans for block in gpu}, {block for _, cpu in plans for block in cpu}

    def pools(self) -> tuple[PoolView, PoolView]:
        return _view("GPU", self._gpu_pool), _view("CPU", self._cpu_pool)

    def block_refs(self, gpu: int, cpu: int) -> tuple[int, int]:
        return self._gpu_pool.blocks[gpu].ref_cnt, self._cpu_pool.blocks[cpu].ref_cnt

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
        kept = {name: len(getattr(self._manager, name, ())) for name in names}
        kept["scheduler.requests"] = len(self._scheduler.requests)
        return kept

    def cpu_index(self) -> Mapping[bytes, int]:
        return _index(self._cpu_pool)

    def gpu_index(self) -> Mapping[bytes, int]:
        return _index(self._gpu_pool)

    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None:
        tags = self._vllm.tags_of_block(key)
        return None if tags is None else self._vllm.ranks[rank].memory.kept(tags, group_of(key))

    def cpu_tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        words = np.stack([view[block] for view in self._cpu_views[rank]])
        return self._vllm.ranks[rank].memory.read_block(words, group_of(key))

    def gpu_tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        return self._vllm.ranks[rank].memory.gpu_block(block, group_of(key))

    def describe_tag(self, key: bytes, rank: int, index: int, tag: int) -> str:
        memory = self._vllm.ranks[rank].memory
        return memory.describe(tag, memory.layer(group_of(key), index))

    def describe_key(self, key: bytes) -> str:
        return self._vllm.describe_key(key)

    def events(self, tier: str) -> Mapping[bytes, int] | None:
        if not self._setup.events:
            return None
        pool = self._gpu_pool if tier == "GPU" else self._cpu_pool
        waiting = list(pool.kv_event_queue)
        if waiting:
            pool.kv_event_queue.clear()
            self._replay(tier, waiting)
        return self._events[tier]

    def state(self) -> str:
        """Return what must change between two steps of an engine that makes progress."""
        return repr([(r.status, r.num_computed_tokens, r.num_tokens) for r in self._scheduler.requests.values()])

    def waiting_requests(self) -> list[str]:
        return [
            f"{name} {request.status.name} with {request.num_computed_tokens} of {request.num_tokens} tokens computed"
            for name, request in self._scheduler.requests.items()
        ]


def _view(name: str, pool: Any) -> PoolView:
    return PoolView(
        name,
        [block.ref_cnt for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        pool.get_num_free_blocks(),
        pool.null_block.block_id,
    )


def _index(pool: Any) -> dict[bytes, int]:
    """Return the block that a lookup of each key gives: the first one that was inserted and is still there."""
    return {
        key: (next(iter(blocks)) if isinstance(blocks, dict) else blocks.block_id)
        for key, blocks in pool.cached_block_hash_to_block._cache.items()
    }


def _plan(output: Any, metadata: Any) -> Plan:
    new_blocks = {new.req_id: _all_groups(new.block_ids) for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            new_blocks[request] = _all_groups(blocks)
    return Plan(
        preempted=frozenset(output.preempted_req_ids or ()),
        new_blocks=new_blocks,
        stores=len(metadata.store_gpu_blocks),
        loads=len(metadata.load_gpu_blocks),
        trace=f"{output.num_scheduled_tokens}{new_blocks}{list(vars(metadata).values())}",
    )


def _all_groups(blocks: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(blocks))
