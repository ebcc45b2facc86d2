"""``vllm-offloading``: OffloadingConnector with its CPU manager, both sides, with its copies on the simulated device.

A chunk of the CPU tier is ``blocks_per_chunk`` GPU blocks. Stores of this connector hold no reference to the GPU
blocks that they read: a request that ends gives them up at once, and whoever gets such a block makes the workers
finish (*flush*) the store before the block is written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from kvspec.device.adversary import Adversary
from kvspec.device.cuda_names import current_device, installed, use
from kvspec.device.simulated import SimulatedDevice
from kvspec.engine.shadow import Batch, ShadowMemory
from kvspec.errors import KvspecError, SetupRefused
from kvspec.laws import PoolView
from kvspec.ops import EngineSetup
from kvspec.targets import CopiedBlock, Probe
from kvspec.targets.vllm.config import LAYERS, block_bytes, layouts, refusal
from kvspec.targets.vllm.copies import (
    CudaRuntime,
    SwapKernel,
    pinned_empty,
    pinned_zeros,
    swap_blocks_batch,
    tensor_to,
)
from kvspec.targets.vllm.core import own_files
from kvspec.targets.vllm.engine import KEY_BYTES, VllmEngine, group_of
from kvspec.targets.vllm.observe import ObservedEngine, Transfers, block_at, keys_of_hashes

CONNECTOR = "OffloadingConnector"

KERNEL_COPIES_MIN = 4
"""Copies from which a load is a kernel's: 16 in vLLM, which a single block of a model with 16 layers reaches; ours
has two."""


def connector_config(setup: EngineSetup) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` for ``setup.cpu_blocks`` chunks."""
    return {
        "cpu_bytes_to_use": region_bytes(setup),
        **_chunk_size(setup),
        "eviction_policy": setup.eviction,
        "offload_prompt_only": setup.prompt_only,  # 0.23 and later
    }


def _chunk_size(setup: EngineSetup) -> dict[str, int]:
    """Return the setting that says how long a chunk is: in blocks, or (up to 0.25) in tokens of the one size that
    blocks of all groups have; no setting if they have several sizes, which means one block."""
    if _import_any("vllm.v1.kv_offload.config"):
        return {"blocks_per_chunk": setup.blocks_per_chunk}
    spans = {layout.span for layout in layouts(setup)}
    return {"block_size": setup.blocks_per_chunk * spans.pop()} if len(spans) == 1 else {}


def region_bytes(setup: EngineSetup) -> int:
    """Return the bytes of all chunks, each rounded up as the release does it (to pages from 0.27.1 on)."""
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    alignment = getattr(CPUOffloadingSpec, "BLOCK_SIZE_ALIGNMENT", 1)
    chunk = block_bytes(setup) * setup.blocks_per_chunk * setup.world_size
    return int(setup.cpu_blocks * -(-chunk // alignment) * alignment)


def instant_output(metadata: Any, ranks: int) -> tuple[set[str], Any]:
    """Return (requests loaded, worker metadata) of a worker that has done at once all that the metadata asks for."""
    if not hasattr(metadata, "load_jobs"):
        raise KvspecError("OffloadingConnector can't be measured before 0.21: its transfers have no numbers there.")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

    jobs = [*metadata.load_jobs, *metadata.store_jobs]
    loaded = {job.req_id for job in metadata.load_jobs.values()}
    return loaded, OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, ranks)) if jobs else None


def stand_ins(make_region: Callable[[Any], Any]) -> tuple[tuple[Any, str, Any], ...]:
    """Return what must stand for CUDA in the target's modules: (module, attribute, stand-in).

    ``make_region`` wraps the class of the shared memory region.
    """
    import vllm._custom_ops as ops
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker as connector_worker
    from vllm.v1.kv_offload.cpu import shared_offload_region, spec

    worker = _import_any("vllm.v1.kv_offload.cpu.gpu_worker", "vllm.v1.kv_offload.worker.cpu_gpu")
    kernel = _import_any("vllm.v1.kv_offload.cpu.swap_blocks_triton")  # 0.23 and later
    register = _import_any("vllm.v1.kv_offload.cpu.host_register")  # 0.32 and later
    platform = SimpleNamespace(
        is_cuda_alike=lambda: True,
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        Stream=lambda: torch.cuda.Stream(),  # type: ignore[no-untyped-call]
        current_stream=lambda: torch.cuda.current_stream(),
        stream=lambda stream: torch.cuda.stream(stream),
    )
    candidates: tuple[tuple[Any, str, Any], ...] = (
        (ops, "swap_blocks_batch", swap_blocks_batch),
        (connector_worker, "get_layers_from_vllm_config", _attention_layers),  # up to 0.22
        (spec, "current_platform", platform),
        (spec, "_all_workers_barrier", lambda: None),  # the file is there already if there are several ranks
        (spec, "SharedOffloadRegion", make_region(getattr(spec, "SharedOffloadRegion", None))),  # 0.27.1 and later
        (shared_offload_region, "current_platform", platform),
        (worker, "current_platform", platform),
        (worker, "PIN_MEMORY", True),
        (worker, "is_pin_memory_available", lambda: True),
        (worker, "HAS_TRITON", True),
        (worker, "triton", SimpleNamespace(next_power_of_2=lambda size: 1 << (size - 1).bit_length())),
        (kernel, "_swap_blocks_kernel", SwapKernel()),
        (kernel, "MIN_N", KERNEL_COPIES_MIN),
        (register, "current_platform", platform),
        (register, "_load_cudart", CudaRuntime),
        (worker, "CudaRTLibrary", CudaRuntime),  # 0.31
        (torch, "zeros", pinned_zeros),
        (torch, "empty", pinned_empty),
        (torch.Tensor, "to", tensor_to),
        (torch.Tensor, "is_cuda", True),
        (torch.accelerator, "current_device_index", lambda: current_device().rank),
    )
    return tuple(stand_in for stand_in in candidates if hasattr(stand_in[0], stand_in[1]))


def _attention_layers(vllm_config: Any, kind: Any, names: list[str]) -> dict[str, Any]:
    """Stand for the model's attention layers: their backend has blocks first, so a block is one stretch of bytes."""
    backend = SimpleNamespace(get_kv_cache_shape=lambda num_blocks, **_: (num_blocks, -1))
    return dict.fromkeys(names, SimpleNamespace(get_attn_backend=lambda: backend))


def _import_any(*names: str) -> Any:
    """Return the first of the modules that the release has, or None."""
    import importlib

    for name in names:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def shares_one_region() -> bool:
    """Whether all OffloadingConnectors of an engine open one shared memory file, as in 0.27.1 and 0.28.0.

    Source: vLLM 0.28.0, v1/kv_offload/cpu/shared_offload_region.py: the file is named after the engine, and stays until
    it ends. From 0.29.0 on workers wait for each other (a barrier) and unlink it.
    """
    from vllm.v1.kv_offload.cpu import shared_offload_region, spec

    parameters = signature(shared_offload_region.SharedOffloadRegion).parameters
    return hasattr(spec, "SharedOffloadRegion") and "barrier" not in parameters


class OffloadingTarget:
    """The target ``vllm-offloading``, with or without a release."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_files = own_files()
        self._open: list[OffloadingTier] = []
        self._regions: list[tuple[SimulatedDevice, Any]] = []
        self._files: list[Path] = []
        self._ranks = 1

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Put the simulated device in place; afterwards give the memory of the engines started meanwhile back."""
        with installed(stand_ins(self._region_maker)):
            try:
                yield
            finally:
                self._close()

    def _region_maker(self, region_class: Any) -> Callable[..., Any]:
        """Return what makes a shared region and remembers it.

        Several workers open the file before the first of them unlinks it; ours are made one after the other. So with
        several ranks the file is there before the first, as if one more worker had won the race for it. A second
        connector of the engine has another file.
        """

        def make(*, engine_id: str, **more: Any) -> Any:
            device = current_device()
            earlier = sum(other is device for other, _ in self._regions)
            if earlier:
                engine_id = f"{engine_id}-{earlier}"
            path = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
            if self._ranks > 1 and device.rank == 0:
                chunks, chunk_bytes = more.get("num_chunks"), more.get("kv_bytes_per_chunk")
                path.touch()
                self._files.append(path)
                os.truncate(path, (chunks or more["num_blocks"]) * (chunk_bytes or more["kv_bytes_per_block"]))
            region = region_class(engine_id=engine_id, **more)
            self._regions.append((device, region))
            if self._ranks > 1 and device.rank == self._ranks - 1:
                path.unlink(missing_ok=True)
            return region

        return make

    def _close(self) -> None:
        """Unmap shared memory, which else holds two file descriptors per rank until it's garbage."""
        for tier in self._open:
            tier.close()
        self._open.clear()
        for device, region in self._regions:
            before = use(device)
            try:
                region.cleanup()
            finally:
                use(before)
        self._regions.clear()
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def refusal(self, setup: EngineSetup) -> str | None:
        """Say why the connector, or the release, can't run a setup; None if they can.

        Source: vLLM 0.20.2, v1/kv_offload/spec.py (OffloadingSpec); 0.21.0, v1/kv_offload/base.py, and 0.26.0,
        distributed/kv_transfer/kv_connector/v1/offloading/config.py (build_offloading_config).
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

        if not issubclass(OffloadingConnector, SupportsHMA):
            if len(setup.groups) > 1:
                return "up to 0.20 OffloadingConnector has one group only"
            if setup.context_ranks > 1:
                return "up to 0.20 OffloadingConnector doesn't count the ranks that share a block"
        if setup.blocks_per_chunk > 1 and not _chunk_size(setup):
            return "up to 0.25 chunks of several blocks need groups with blocks of equal sizes"
        return refusal(setup)

    def start(self, setup: EngineSetup, adversary: Adversary, probe: Probe) -> ObservedEngine:
        if reason := self.refusal(setup):
            raise SetupRefused(f"{self.name} can't run this engine: {reason}.")

        self.prepare(setup)
        return ObservedEngine(setup, CONNECTOR, connector_config(setup), adversary, probe, self.make_tier)

    def prepare(self, setup: EngineSetup) -> None:
        """Note how many workers the next engine has; their shared memory depends on it."""
        self._ranks = setup.world_size

    def make_tier(self, vllm: VllmEngine, probe: Probe) -> OffloadingTier:
        """Observe a connector's CPU tier, until the memory of its workers is given back."""
        tier = OffloadingTier(vllm, probe)
        self._open.append(tier)
        return tier


class _Place(NamedTuple):
    """Where a block of a transfer belongs."""

    group: int
    """The attention group whose table has it."""
    in_chunk: int
    """Which block of its chunk it is."""


@dataclass
class _Job:
    """A load or a store as it was planned."""

    number: int
    request: str
    is_store: bool
    pairs: Mapping[tuple[int, int], _Place]
    """(GPU block, chunk) -> where the block belongs."""
    schedule: int
    """Number of the schedule that planned it."""
    reports_due: int
    copies_due: int
    is_running: bool
    """Whether the request was scheduled then: if so, what others wrote in that step it shares with them."""
    is_let_go: bool = False
    """The manager has forgotten it; workers must finish it before they begin anything later."""


@dataclass
class _RankView:
    """What has executed on one rank's device."""

    tensors: list[np.ndarray]
    """Each layer's chunks, shape (chunks, bytes of a chunk), int8."""
    forwards: int = 0
    written: dict[int, tuple[int, str]] = field(default_factory=dict)
    """GPU block: the schedule whose forward or load wrote it last, and the request for which it did."""
    copied: dict[int, int] = field(default_factory=dict)
    """Chunk: the latest job of which a copy has executed."""
    stored: dict[int, int] = field(default_factory=dict)
    """Chunk: the latest store of which a copy has executed."""


class _Names(NamedTuple):
    """How a release names the parts of the CPU tier, in its manager, its policies and their entries."""

    allocated: str
    free: str
    evictable: str
    """Up to 0.23 there is no such counter."""
    table: str
    id: str


_CHUNK_NAMES = _Names(
    "_num_allocated_chunks", "_get_num_free_chunks", "_num_evictable_cache_chunks", "chunks", "chunk_id"
)
"""0.30 and later."""
_BLOCK_NAMES = _Names(
    "_num_allocated_blocks", "_get_num_free_blocks", "_num_evictable_cache_blocks", "blocks", "block_id"
)


class OffloadingTier:
    """The chunks of OffloadingConnector's CPU manager and the jobs that move them."""

    null_block: int | None = None
    polls_when_idle = True
    """Up to 0.20 a request isn't gone before it is stored; from 0.24 on the engine steps while there are jobs."""
    shortages = 0

    def __init__(self, vllm: VllmEngine, probe: Probe) -> None:
        self._vllm = vllm
        self._probe = probe
        self._setup = vllm.setup
        self._scheduler = vllm.connector.connector_scheduler
        self._manager = self._scheduler.manager
        self._policy = self._manager._policy
        self._names = _CHUNK_NAMES if hasattr(self._manager, _CHUNK_NAMES.allocated) else _BLOCK_NAMES
        self._schedules = 0
        self._schedules_with_forward: list[int] = []
        self._numbers = itertools.count()
        self._due: dict[int, _Job] = {}
        self._let_go_stores: list[_Job] = []
        self._jobs: dict[int, _Job] = {}
        self._preempted: set[str] = set()
        events = _import_any("vllm.distributed.kv_transfer.kv_connector.v1.offloading.events")
        self.events_name_groups = events is not None  # 0.24 and later
        self._names_requests = not hasattr(self._scheduler, "_jobs")  # up to 0.20 reports name requests, not jobs
        if getattr(self._scheduler.config, "offload_prompt_only", False):  # 0.23 and later
            probe.saw("prompts only")
        self._ranks = [_RankView(_cpu_tensors(rank.connector)) for rank in vllm.ranks]
        for rank in vllm.ranks:
            self._listen_to_forwards(self._ranks[rank.index], rank.memory)
            _order_handlers(rank.connector)
            for handler in _handlers(rank.connector):
                _label_copies(rank.device, handler)
        self._listen()

    # Listening --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wrap calls of the scheduler side; each wrapper passes everything on unchanged."""
        connector, manager, policy, probe = self._vllm.connector, self._manager, self._policy, self._probe
        lookup, reset = connector.get_num_new_matched_tokens, connector.reset_cache
        prepare, evict = manager.prepare_store, policy.evict
        eviction = f"{self._setup.eviction.upper()} eviction"

        def get_num_new_matched_tokens(request: Any, local: int) -> Any:
            name = request.request_id
            if name in self._preempted and any(job.request == name for job in self._due.values()):
                probe.saw("re-admission before the report")
            return lookup(request, local)

        def reset_cache() -> Any:
            answer = reset()
            self._let_go(self._due.values())
            return answer

        def prepare_store(*args: Any, **more: Any) -> Any:
            answer = prepare(*args, **more)
            if answer is None:
                probe.saw("store refused")
            return answer

        def evict_chunks(*args: Any, **more: Any) -> Any:
            evicted = evict(*args, **more)
            if evicted:
                probe.saw(eviction)
            return evicted

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.reset_cache = reset_cache
        manager.prepare_store = prepare_store
        policy.evict = evict_chunks

    def _listen_to_forwards(self, view: _RankView, memory: ShadowMemory) -> None:
        """Note which blocks each forward writes, when it runs on the device."""
        forward = memory.forward

        def noted(batch: Batch) -> None:
            schedule = self._schedules_with_forward[view.forwards]
            view.forwards += 1
            for request, blocks in memory.writes(batch):
                view.written.update(dict.fromkeys(blocks, (schedule, request)))
            forward(batch)

        memory.forward = noted  # type: ignore[method-assign]

    def allocated(self, request: str, external_tokens: int) -> None:
        self._preempted.discard(request)

    def planned(self, output: Any, metadata: Any) -> Transfers:
        self._schedules += 1
        if output.total_num_scheduled_tokens:
            self._schedules_with_forward.append(self._schedules)
        self._note_preemptions(output)
        if hasattr(metadata, "load_jobs"):
            planned_loads, planned_stores, flushed = metadata.load_jobs, metadata.store_jobs, metadata.jobs_to_flush
        else:  # up to 0.20
            planned_loads, planned_stores = self._number(metadata.reqs_to_load), self._number(metadata.reqs_to_store)
            flushed = metadata.reqs_to_flush
            self._let_go(job for job in self._due.values() if job.request in (flushed or ()))
        loads = self._plan(output, planned_loads, is_store=False)
        stores = self._plan(output, planned_stores, is_store=True)
        if flushed:
            self._probe.saw("flush")
        trace = f"{[(job.number, job.request, tuple(job.pairs)) for job in loads + stores]}{sorted(flushed or ())}"
        return Transfers(sum(len(job.pairs) for job in stores), sum(len(job.pairs) for job in loads), trace)

    def _note_preemptions(self, output: Any) -> None:
        for request in output.preempted_req_ids or ():
            self._preempted.add(request)
            if any(job.is_store and job.request == request for job in self._due.values()):
                self._probe.saw("preemption with a store in flight")

    def _number(self, transfers: Mapping[str, Any]) -> dict[int, Any]:
        """Return transfers by request, as releases up to 0.20 name them, as jobs with numbers."""
        return {
            next(self._numbers): SimpleNamespace(req_id=request, transfer_spec=specs)
            for request, specs in transfers.items()
        }

    def _let_go(self, jobs: Iterable[_Job]) -> None:
        for job in jobs:
            job.is_let_go = True
            if job.is_store and job.copies_due and job not in self._let_go_stores:
                self._let_go_stores.append(job)

    def _plan(self, output: Any, planned: Mapping[int, Any], is_store: bool) -> list[_Job]:
        jobs = []
        for number, transfer in planned.items():
            gpu, cpu = _specs(transfer) if is_store else reversed(_specs(transfer))
            if not is_store and any(index % self._setup.blocks_per_chunk for index in gpu.block_indices):
                self._probe.saw("chunk behind a local hit")
            job = _Job(
                number=number,
                request=transfer.req_id,
                is_store=is_store,
                pairs=dict(_pairs(gpu, cpu.block_ids.tolist(), self._setup.blocks_per_chunk)),
                schedule=self._schedules,
                reports_due=self._setup.world_size,
                copies_due=self._setup.world_size * LAYERS * int(gpu.block_ids.size),
                is_running=transfer.req_id in output.num_scheduled_tokens,
            )
            self._jobs[number] = self._due[number] = job
            jobs.append(job)
        return jobs

    def reported(self, output: Any) -> None:
        for number, ranks in getattr(output.kv_connector_worker_meta, "completed_jobs", {}).items():
            if job := self._due.get(number):
                job.reports_due -= ranks
                if job.reports_due <= 0:
                    del self._due[number]
        if self._names_requests:
            ended = {True: output.finished_sending or (), False: output.finished_recving or ()}
            for job in [job for job in self._due.values() if job.request in ended[job.is_store]]:
                del self._due[job.number]

    def copied(self, block: CopiedBlock) -> None:
        job = self._job_of(block)
        if job is None:
            return
        job.copies_due -= 1
        view = self._ranks[block.rank]
        view.copied[block.cpu] = max(job.number, view.copied.get(block.cpu, -1))
        if job.is_store:
            view.stored[block.cpu] = max(job.number, view.stored.get(block.cpu, -1))
        else:
            view.written[block.gpu] = (job.schedule, job.request)

    def overwritten(self, block: CopiedBlock) -> None:
        """Another connector's load has written a GPU block."""
        self._ranks[block.rank].written[block.gpu] = (self._schedules, "")

    # Seeing -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the memory of the workers."""
        for view, rank in zip(self._ranks, self._vllm.ranks, strict=True):
            view.tensors.clear()
            for handler in _handlers(rank.connector):
                handler.src_tensors.clear()
                handler.dst_tensors.clear()

    def block_of(self, rank: int, address: int) -> int:
        return block_at(self._ranks[rank].tensors, address)

    def stores_due(self) -> bool:
        return bool(self._due)

    def stores_queued(self) -> bool:
        return False

    def stores_unstarted(self) -> int:
        return sum(job.copies_due > 0 for job in self._due.values() if job.is_store)

    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]:
        pairs = [pair for job in self._due.values() if job.is_store for pair in job.pairs]
        return {gpu for gpu, _ in pairs}, {chunk for _, chunk in pairs}

    def pool(self) -> PoolView:
        """A chunk that nobody pins is free for another key, whether it has one now or not."""
        manager, names = self._manager, self._names
        refs = [0] * self._setup.cpu_blocks
        free = [*manager._free_list, *range(getattr(manager, names.allocated), len(refs))]
        unpinned = []
        for status in self._chunks().values():
            chunk = getattr(status, names.id)
            refs[chunk] = abs(status.ref_cnt)
            if status.ref_cnt == 0:
                unpinned.append(chunk)
        free_count = getattr(manager, names.free)() + getattr(manager, names.evictable, len(unpinned))
        return PoolView("CPU", refs, free + unpinned, free_count, -1)

    def group_of(self, block: CopiedBlock) -> int | None:
        job = self._job_of(block)
        return job.pairs[block.gpu, block.cpu].group if job else None

    def places_of(self, block: CopiedBlock) -> range | None:
        job = self._job_of(block)
        if job is None:
            return None
        place = job.pairs[block.gpu, block.cpu].in_chunk
        return range(place, place + 1)

    def is_partly_stored(self, block: CopiedBlock) -> bool:
        return False  # chunks are of full blocks

    def refs(self, block: CopiedBlock, gpu_refs: int) -> tuple[int, int]:
        """A store's source is the store's until somebody else writes it; a job that was let go keeps its chunk until a
        later job has used it."""
        job = self._job_of(block)
        if job is None:
            return gpu_refs, 0
        view = self._ranks[block.rank]
        if job.is_store:
            schedule, writer = view.written.get(block.gpu, (0, ""))
            same_step = schedule == job.schedule and writer != job.request and not job.is_running
            is_lost = schedule > job.schedule or same_step
            gpu_refs = 0 if is_lost else max(gpu_refs, 1)
        latest = (view.copied if job.is_store else view.stored).get(block.cpu, -1)
        if latest > job.number:
            return gpu_refs, 0
        return gpu_refs, int(job.is_let_go or self._is_pinned(job, block.cpu))

    def _job_of(self, block: CopiedBlock) -> _Job | None:
        """Return the job that a copy is part of; None if no job says that it is to be made."""
        job = self._jobs.get(-1 if block.job is None else block.job)
        is_planned = job and job.is_store != block.to_gpu and (block.gpu, block.cpu) in job.pairs
        return job if is_planned else None

    def _is_pinned(self, job: _Job, chunk: int) -> bool:
        for status in self._chunks().values():
            if getattr(status, self._names.id) == chunk:
                return bool(status.ref_cnt == -1 if job.is_store else status.ref_cnt > 0)
        return False

    def kept(self) -> Mapping[str, int]:
        names = (
            "_req_status",
            "_jobs",
            "_block_id_to_pending_jobs",
            "_chunks_being_loaded",
            "_blocks_being_loaded",
            "_reset_fence",
            "_reqs_being_stored",
            "_reqs_being_loaded",
            "_reqs_to_load",
        )
        return {name: len(getattr(self._scheduler, name, None) or ()) for name in names}

    def index(self) -> Mapping[bytes, int]:
        """Return the ready chunks; one whose store was let go is as good as ready once the workers have done it."""
        self._let_go_stores = [job for job in self._let_go_stores if job.copies_due]
        unwritten = {chunk for job in self._let_go_stores for _, chunk in job.pairs}
        name = self._names.id
        ready = {key + _CHUNK: getattr(status, name) for key, status in self._chunks().items() if status.is_ready}
        return {key: chunk for key, chunk in ready.items() if chunk not in unwritten} if unwritten else ready

    def held_tokens(self, request: str, local: int) -> int | None:
        return None  # the model's clauses LOOKUP-1 to LOOKUP-6 say what it offers

    def keys_to_store(self, key: bytes) -> Iterable[bytes]:
        return ()  # the model's clauses STORE-1 to STORE-15 say what it stores

    def _chunks(self) -> Mapping[bytes, Any]:
        policy = self._policy
        if hasattr(policy, "t1"):
            return {**policy.t1, **policy.t2}
        chunks: Mapping[bytes, Any] = getattr(policy, self._names.table)
        return chunks

    def tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        words = np.stack([tensor[block].view(np.uint64) for tensor in self._ranks[rank].tensors])
        return self._vllm.ranks[rank].memory.read_block(words, _group_of(key))

    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None:
        group, memory = _group_of(key), self._vllm.ranks[rank].memory
        if not _is_chunk(key):
            tags = self._vllm.tags_of_block(key)
            return None if tags is None else memory.kept(tags, group)
        layout = self._vllm.layouts[group]
        tags = self._vllm.tags_of_hash(key[: -4 - len(_CHUNK)], self._setup.blocks_per_chunk * layout.span)
        if tags is None:
            return None
        blocks = [memory.kept(tags[i : i + layout.span], group) for i in range(0, len(tags), layout.span)]
        kept = np.concatenate(blocks)
        if layout.reach or layout.state:
            unread = len(kept) - 1 if layout.state else layout.first_read(len(kept))
            kept = np.ma.array(kept, mask=np.arange(len(kept)) < unread)
        return kept

    def describe_key(self, key: bytes) -> str:
        return self._vllm.describe_key(key.removesuffix(_CHUNK) if _is_chunk(key) else key)

    def keys_of_event(self, event: Any) -> Iterable[bytes]:
        return [key + _CHUNK for key in keys_of_hashes(event)]

    def drain_events(self) -> Iterable[Any]:
        return list(self._vllm.connector.connector_scheduler.take_events())


_CHUNK = b"chunk"
"""What ends the key of a chunk, so that it isn't the key of the GPU block with the same hash."""
_CHUNK_KEY_BYTES = KEY_BYTES + len(_CHUNK)


def _is_chunk(key: bytes) -> bool:
    return len(key) == _CHUNK_KEY_BYTES and key.endswith(_CHUNK)


def _group_of(key: bytes) -> int:
    return group_of(key.removesuffix(_CHUNK) if _is_chunk(key) else key)


def _handlers(worker_connector: Any) -> list[Any]:
    """Return the transfer handlers of a worker, that of stores first."""
    spec = worker_connector.connector_worker.spec
    owner = getattr(spec, "_worker", None) or spec._handlers
    if hasattr(owner, "gpu_to_cpu_handler"):  # up to 0.24
        return [owner.gpu_to_cpu_handler, owner.cpu_to_gpu_handler]
    handlers = [owner._store_handler, owner._load_handler]
    return [*handlers, owner._expedited_load_handler] if hasattr(owner, "_expedited_load_handler") else handlers


def _order_handlers(worker_connector: Any) -> None:
    """Let a worker ask the handler of stores first what has finished, as later releases do.

    Up to 0.24 its handlers are a set, in the order of their addresses, and a copy may finish between two questions: one
    history ran in two ways.

    Source: vLLM 0.24.0, v1/kv_offload/worker/worker.py (OffloadingWorker.get_finished).
    """
    worker = worker_connector.connector_worker.worker
    if hasattr(worker, "handlers"):
        worker.handlers = _handlers(worker_connector)


def _label_copies(device: SimulatedDevice, handler: Any) -> None:
    """Let the copies of a handler bear the number of their job.

    Up to 0.20 workers number jobs by themselves: a step's loads, then its stores, as the metadata names them.
    """
    transfer = handler.transfer_async

    def transfer_async(job_id: int, *specs: Any) -> Any:
        device.label = job_id
        try:
            return transfer(job_id, *specs)
        finally:
            device.label = None

    handler.transfer_async = transfer_async


def _cpu_tensors(worker_connector: Any) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in _handlers(worker_connector)[0].dst_tensors]


def _specs(transfer: Any) -> tuple[Any, Any]:
    """Return (source, destination) of a transfer job; one field of two up to 0.24."""
    if hasattr(transfer, "src_spec"):
        return transfer.src_spec, transfer.dst_spec
    source, destination = transfer.transfer_spec
    return source, destination


def _pairs(gpu: Any, chunks: list[int], blocks_per_chunk: int) -> Iterator[tuple[tuple[int, int], _Place]]:
    """Yield ((GPU block, chunk), where it belongs) for a transfer.

    The blocks of a group follow each other, from a block index on.
    Where the sizes name more blocks or chunks than there are, pairs go as far as both do.

    Source: vLLM 0.33.0, v1/kv_offload/cpu/gpu_worker.py (SingleDirectionOffloadingHandler.transfer_async).
    """
    blocks = gpu.block_ids.tolist()
    first_block = first_chunk = 0
    for group, (size, index) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
        skipped = index % blocks_per_chunk
        for i, block in enumerate(blocks[first_block : first_block + size]):
            chunk, place = divmod(skipped + i, blocks_per_chunk)
            if first_chunk + chunk < len(chunks):
                yield (block, chunks[first_chunk + chunk]), _Place(group, place)
        first_block += size
        first_chunk += -(-(size + skipped) // blocks_per_chunk) if size else 0
