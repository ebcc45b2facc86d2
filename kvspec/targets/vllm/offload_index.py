"""``vllm-offload-index``: OffloadingConnector's CPU manager and its scheduler side, and their state as plain data.

No expectations here: what the calls should have done is the model's business (``kvspec.model``).
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvspec.ops import EngineSetup
from kvspec.targets.vllm import config, core
from kvspec.targets.vllm.answers import Answers
from kvspec.targets.vllm.engine import children, make_scheduler

RawKey = bytes


class TierState(NamedTuple):
    """A CPU manager's state."""

    chunks: dict[RawKey, tuple[int, bool, int]]
    """Key -> slot, whether it is ready, pins."""
    order: list[RawKey]
    """LRU: the chunks that may be evicted, in the order in which they would be; empty of ARC."""
    recency: list[RawKey]
    """LRU: all chunks in that order; empty where only chunks that may be evicted have one, and of ARC."""
    lists: tuple[list[RawKey], ...]
    """ARC: used once, used again, the ghosts of both; none of LRU."""
    target: float
    """ARC: slots for chunks used once."""


class Noted(NamedTuple):
    """What a manager has noted of a request."""

    seen: set[RawKey]
    reused: set[RawKey]
    missed: set[RawKey]


class RealTier:
    """A ``CPUOffloadingManager``.

    Args:
        slots: chunks that it can hold.
        policy: ``lru`` or ``arc``.
    """

    def __init__(self, slots: int, policy: str) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        count = "num_chunks" if "num_chunks" in _parameters(CPUOffloadingManager.__init__) else "num_blocks"
        self.manager = CPUOffloadingManager(**{count: slots}, cache_policy=policy, enable_events=True)

    def context(self, name: str, positions: Mapping[RawKey, int]) -> Any:
        """Return what the manager is told of a request: where the chunks end in its text, in tokens."""
        context_class = _base().ReqContext
        named = {"req_id": name} if "req_id" in _parameters(context_class) else {}  # 0.22 and later
        context = context_class(**named)
        if hasattr(context, "set_offload_key_position"):
            for key, position in positions.items():
                context.set_offload_key_position(key, position)
        if hasattr(self.manager, "on_new_request"):
            self.manager.on_new_request(context)
        return context

    def lookup(self, key: RawKey, context: Any) -> str:
        """Look a key up: MISS, PENDING or HIT."""
        return answer_name(self.manager.lookup(key, context))

    def prepare_load(self, keys: Sequence[RawKey], context: Any) -> list[int]:
        """Pin what is to be loaded; the slots."""
        return _slots(self.manager.prepare_load(list(keys), context))

    def complete_load(self, keys: Sequence[RawKey], context: Any) -> None:
        """A load has ended."""
        self.manager.complete_load(list(keys), *self._context_argument("complete_load", context))

    def prepare_store(
        self, keys: Sequence[RawKey], context: Any
    ) -> tuple[list[RawKey], list[int], list[RawKey]] | None:
        """Offer keys: those to be stored, their slots, what was evicted; or None."""
        placed = self.manager.prepare_store(list(keys), context)
        if placed is None:
            return None
        return list(placed.keys_to_store), _slots(placed.store_spec), list(placed.evicted_keys)

    def complete_store(self, keys: Sequence[RawKey], context: Any, success: bool) -> None:
        """A store has ended."""
        self.manager.complete_store(list(keys), *self._context_argument("complete_store", context), success=success)

    def touch(self, keys: Sequence[RawKey], context: Any) -> None:
        """Count keys as used."""
        self.manager.touch(list(keys), *self._context_argument("touch", context))

    def noted(self, context: Any) -> Noted | None:
        """Return what is noted of a request; None up to 0.30."""
        if not hasattr(self.manager, "_get_request_cache_access"):
            return None
        noted = self.manager._get_request_cache_access(context)
        return Noted(set(noted.seen_keys), set(noted.reused_keys), set(noted.store_miss_keys))

    def finish(self, context: Any) -> None:
        """A request has ended."""
        if hasattr(self.manager, "on_request_finished"):
            self.manager.on_request_finished(context)

    def reset(self) -> None:
        """Drop everything."""
        self.manager.reset_cache()

    def _context_argument(self, method: str, context: Any) -> tuple[Any, ...]:
        return (context,) if "req_context" in _parameters(getattr(type(self.manager), method)) else ()

    def take_events(self) -> list[tuple[tuple[RawKey, ...], bool]]:
        """Take the recorded events: keys, and whether they were removed."""
        return [(tuple(event.keys), event.removed) for event in self.manager.take_events()]

    def state(self) -> TierState:
        """Return the manager's state."""
        return tier_state(self.manager)


def tier_state(manager: Any) -> TierState:
    """Return a CPU manager's state."""
    policy = manager._policy
    if hasattr(policy, "t1"):
        lists = tuple(list(some) for some in (policy.t1, policy.t2, policy.b1, policy.b2))
        return TierState(_chunks({**policy.t1, **policy.t2}), [], [], lists, policy.target_t1_size)
    chunks = policy.chunks if hasattr(policy, "chunks") else policy.blocks
    return TierState(_chunks(chunks), _order(policy, chunks), _recency(policy, chunks), (), 0.0)


def _chunks(chunks: dict[RawKey, Any]) -> dict[RawKey, tuple[int, bool, int]]:
    return {
        key: (chunk.chunk_id if hasattr(chunk, "chunk_id") else chunk.block_id, chunk.is_ready, max(0, chunk.ref_cnt))
        for key, chunk in chunks.items()
    }


def _order(policy: Any, chunks: dict[RawKey, Any]) -> list[RawKey]:
    if hasattr(policy, "_ranks"):  # 0.31 and later
        return sorted(policy._evictable, key=lambda key: (policy._ranks[key], key))
    idle = getattr(policy, "evictable_chunks", getattr(policy, "evictable_blocks", None))
    return [key for key, chunk in chunks.items() if chunk.ref_cnt == 0] if idle is None else list(idle)


def _recency(policy: Any, chunks: dict[RawKey, Any]) -> list[RawKey]:
    if hasattr(policy, "_ranks"):  # 0.31 and later
        return sorted(chunks, key=lambda key: (policy._ranks[key], key))
    return [] if hasattr(policy, "mark_evictable") else list(chunks)


def make_key(block_hash: bytes, group: int) -> RawKey:
    """Return the target's key of a chunk."""
    return _base().make_offload_key(block_hash, group)  # type: ignore[no-any-return]


def answer_name(answer: Any) -> str:
    """Return what a lookup answered: MISS, PENDING or HIT. Up to 0.24 that is False, None or True."""
    names = {False: "MISS", None: "PENDING", True: "HIT"}
    return names[answer] if answer in (False, None, True) else answer.name.replace("HIT_PENDING", "PENDING")


def _slots(spec: Any) -> list[int]:
    return [int(slot) for slot in spec.block_ids]


@functools.cache
def _base() -> Any:
    try:
        return importlib.import_module("vllm.v1.kv_offload.base")
    except ModuleNotFoundError:  # 0.20
        return importlib.import_module("vllm.v1.kv_offload.abstract")


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# The scheduler side --------------------------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """A planned transfer, in the form of the connector's metadata."""

    job: int
    """Its id; up to 0.20 there is none, and it is -1."""
    request: str
    slots: list[int]
    """Of the CPU tier."""
    blocks: list[int]
    """Of the GPU, group by group."""
    sizes: list[int]
    """Blocks of each group."""
    firsts: list[int]
    """Per group, which block of the request's table the first one is."""


class Plan(NamedTuple):
    """What a step tells the workers."""

    loads: list[Transfer]
    stores: list[Transfer]
    flushed: set[Any]
    """Jobs that must end before the step writes; up to 0.20, requests all of whose stores must."""


class Row(NamedTuple):
    """What a step says of a request's block table."""

    request: str
    blocks: list[list[int]] | None
    """Per group; None: nothing new."""
    new: bool
    """Whether the request is new in the batch; its whole table, then."""
    resumed: bool
    """Whether it comes back after a preemption; its whole table, then."""


class StepSeen(NamedTuple):
    """A scheduler's output, as far as the connector reads it."""

    rows: list[Row]
    scheduled: dict[str, int]
    """Request -> tokens, in the order in which the connector goes through them."""
    computed: dict[str, int]
    """Request -> tokens computed before this step."""
    preempted: list[str]
    finished: list[str]


class RequestSeen(NamedTuple):
    """A request of the target, as far as the connector reads it."""

    tokens: list[int]
    hashes: list[bytes]
    computed: int
    aborted: bool
    """Whether it has ended before it was done."""


class ConnectorState(NamedTuple):
    """The state of the connector's scheduler side."""

    next_stored: dict[str, list[int]]
    """Request -> next chunk to be offered, per group."""
    keys: dict[str, list[list[RawKey]]]
    tables: dict[str, list[list[int]]]
    """Request -> block ids, per group."""
    open_jobs: dict[str, set[int]]
    fences: dict[int, set[int]]
    """Block -> jobs that must end before it is written."""
    loading: set[RawKey]


class Offer(NamedTuple):
    """Keys that a request has offered to the tier."""

    request: str
    keys: list[RawKey]
    taken: list[RawKey] | None
    """Those that are to be stored; None if the offer was refused."""


class Search(NamedTuple):
    """A look-up of a group's keys."""

    keys: tuple[RawKey, ...]
    found: int | None
    """Chunks up to where the hit ends; None to ask again."""


Observer = Callable[..., None]
"""Called after each call that the scheduler makes to its connector: its name, its answer, and what it was told."""


class RealEngine:
    """vLLM's scheduler with OffloadingConnector and without a worker: transfers end when they are told to.

    Args:
        groups: all of them.
        gpu_blocks: blocks of the GPU, the null block included.
        slots: chunks of the CPU tier.
        policy: of the CPU tier.
        chunk_blocks: GPU blocks of a chunk.
        step_tokens: tokens of a step.
        running_max: requests at once.
        asynchronous: asynchronous scheduling, with two steps in flight.
        prompt_only: whether only prompts are stored (0.23 and later).
        drafts: tokens that an EAGLE drafter proposes for each step; 0 without one.
        observe: told of each call to the connector.
        connectors: under MultiConnector, how many of OffloadingConnector; 0 for one without MultiConnector.
    """

    def __init__(
        self,
        groups: Sequence[core.GroupSpec],
        *,
        gpu_blocks: int,
        slots: int,
        policy: str = "lru",
        chunk_blocks: int = 1,
        step_tokens: int = 64,
        running_max: int = 4,
        asynchronous: bool = False,
        prompt_only: bool = False,
        drafts: int = 0,
        observe: Observer | None = None,
        connectors: int = 0,
    ) -> None:
        self.asynchronous = asynchronous
        setup = EngineSetup(
            gpu_blocks=gpu_blocks,
            block_size=groups[0][1],
            step_tokens=step_tokens,
            running_max=running_max,
            async_scheduling=asynchronous,
            runner_v2=False,
            drafts=drafts,
            eagle=drafts > 0,
        )
        self.scheduler, self.hash_tokens = _scheduler(setup, groups, chunk_blocks, prompt_only, connectors)
        self.requests: dict[str, Any] = self.scheduler.requests
        self._drafts = drafts
        self._answers = Answers(self.requests, drafts)
        self.known: dict[str, Any] = {}
        self.connectors = [part.connector_scheduler for part in children(self.scheduler.connector)]
        for connector in self.connectors:
            connector.manager = RealTier(slots, policy).manager
        self.workers = [Worker() for _ in self.connectors]
        self.in_flight: collections.deque[tuple[Any, Any]] = collections.deque()
        self.offers: list[Offer] = []
        """To the first connector's tier, since whoever reads it has emptied it."""
        self.searches: list[Search] = []
        """Of the first connector, likewise."""
        self._watch_offers(self.connectors[0])
        self._watch_searches(self.connectors[0])
        if observe is not None:
            self._watch(self.connectors[0], observe)

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        params: dict[str, Any] | None = None,
        max_tokens: int = 1,
        reads_cache: bool = True,
    ) -> None:
        """Add a request. ``params`` are its ``kv_transfer_params``."""
        request = core.make_request(name, tokens, self.hash_tokens, max_tokens=max_tokens)
        request.kv_transfer_params = params
        request.skip_reading_prefix_cache = not reads_cache
        self.known[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """The client of a request goes away."""
        self.scheduler.finish_requests(name, _statuses().FINISHED_ABORTED)

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """Reset the prefix cache."""
        return bool(self.scheduler.reset_prefix_cache(running, connector))

    def has_work(self) -> bool:
        """Whether the engine's busy loop would make a step."""
        return bool(self.scheduler.has_requests() or self.in_flight)

    def step(self) -> None:
        """Make a step as the engine would: schedule, and process the output of the oldest step in flight when no more
        fit in or there was nothing to schedule.
        """
        depth = 2 if self.asynchronous else 1
        scheduled = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.in_flight.append((output, self._answer(output)))
            scheduled = output.total_num_scheduled_tokens > 0
        if self.in_flight and (len(self.in_flight) == depth or not scheduled):
            self.update()

    def update(self) -> None:
        """Process the output of the oldest step in flight."""
        output, answer = self.in_flight.popleft()
        self.scheduler.update_from_output(output, answer)
        if self._drafts and not self.asynchronous:  # An asynchronous scheduler leaves room for them by itself.
            self.scheduler.update_draft_token_ids(self._answers.proposed())

    def settle(self, steps: int = 200) -> None:
        """Step until there is no work, with transfers that end at once. AssertionError if that takes too long."""
        while self.has_work():
            for worker in self.workers:
                worker.end_all()
            self.step()
            steps -= 1
            assert steps, "the engine doesn't become idle"

    def _answer(self, output: Any) -> Any:
        """Return what the model runner would: a token for each request whose known tokens are computed, the drafts that
        are accepted, and the transfers that have ended.
        """
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        metadata = output.kv_connector_metadata
        parts = metadata.metadata if len(self.workers) > 1 else [metadata]
        reports = [worker.step(part, output.finished_req_ids) for worker, part in zip(self.workers, parts, strict=True)]
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=self._answers.sampled(output),
            kv_connector_output=KVConnectorOutput(
                finished_sending={name for report in reports for name in report.sent},
                finished_recving={name for report in reports for name in report.loaded},
                kv_connector_worker_meta=_worker_meta([report.jobs for report in reports]),
            ),
        )

    def seen(self, name: str) -> RequestSeen:
        """Return a request as the connector sees it."""
        request = self.known[name]
        return RequestSeen(
            list(request.all_token_ids),
            list(request.block_hashes),
            request.num_computed_tokens,
            request.status == _statuses().FINISHED_ABORTED,
        )

    def keeps_stepping(self) -> bool:
        """Whether the connector asks for steps although there is no request."""
        connector = self.connectors[0]
        return hasattr(connector, "has_pending_push_work") and bool(connector.has_pending_push_work())

    def tier(self) -> TierState:
        """Return the CPU tier's state."""
        return tier_state(self.connectors[0].manager)

    def state(self) -> ConnectorState:
        """Return the state of the connector's scheduler side."""
        connector = self.connectors[0]
        statuses = connector._req_status
        loading = getattr(connector, "_chunks_being_loaded", getattr(connector, "_blocks_being_loaded", None))
        return ConnectorState(
            {name: [_next_stored(group) for group in status.group_states] for name, status in statuses.items()},
            {name: [list(group.offload_keys) for group in status.group_states] for name, status in statuses.items()},
            {name: [list(group.block_ids) for group in status.group_states] for name, status in statuses.items()},
            {name: set(getattr(status, "transfer_jobs", ())) for name, status in statuses.items()},
            {block: set(jobs) for block, jobs in getattr(connector, "_block_id_to_pending_jobs", {}).items()},
            set(loading or ()),
        )

    def _watch_offers(self, connector: Any) -> None:
        prepare_store = connector.manager.prepare_store

        def watched(keys: Collection[RawKey], context: Any) -> Any:
            placed = prepare_store(keys, context)
            name = next(name for name, status in connector._req_status.items() if status.req_context is context)
            self.offers.append(Offer(name, list(keys), None if placed is None else list(placed.keys_to_store)))
            return placed

        connector.manager.prepare_store = watched

    def _watch_searches(self, connector: Any) -> None:
        for name in ("_maximal_prefix_lookup", "_sliding_window_lookup"):
            search = getattr(connector, name)

            def watched(keys: Collection[RawKey], *more: Any, search: Any = search) -> Any:
                keys = list(keys)
                found = search(keys, *more)
                self.searches.append(Search(tuple(keys), found))
                return found

            setattr(connector, name, watched)

    def _watch(self, connector: Any, observe: Observer) -> None:
        for name, describe in _CALLS.items():
            if hasattr(connector, name):
                setattr(connector, name, _watched(connector, name, describe, observe))


class Report(NamedTuple):
    """What a worker reports with the output of a step."""

    jobs: list[int]
    loaded: list[str]
    sent: list[str]
    """Up to 0.20: requests that have ended and all of whose stores have."""


class Worker:
    """The worker side of the connector, without memory: it keeps its order of submitting, waiting and reporting."""

    def __init__(self) -> None:
        self.loads: dict[int, str] = {}
        self.stores: dict[int, str] = {}
        self._unsubmitted: list[int] = []
        self._ended: list[int] = []
        self._counter = 0
        self._finished: set[str] = set()
        self._stored: set[str] = set()

    def end(self, pick: int) -> None:
        """One of the transfers in flight ends."""
        submitted = [job for job in (*self.loads, *self.stores) if job not in self._unsubmitted + self._ended]
        if submitted:
            self._ended.append(submitted[pick % len(submitted)])

    def end_all(self) -> None:
        """All transfers in flight end."""
        self._ended += [job for job in (*self.loads, *self.stores) if job not in self._unsubmitted + self._ended]

    def step(self, metadata: Any, finished: set[str]) -> Report:
        """Take a step's metadata, and report what has ended."""
        if hasattr(metadata, "reqs_to_load"):
            return self._step_by_request(metadata, finished)
        flushed = metadata.jobs_to_flush or set()
        urgent = [job for job in metadata.store_jobs if job in flushed]
        self.stores.update({job: metadata.store_jobs[job].req_id for job in urgent})
        self._unsubmitted.clear()
        self._flush(flushed)
        self.loads.update({job: entry.req_id for job, entry in metadata.load_jobs.items()})
        later = {job: entry.req_id for job, entry in metadata.store_jobs.items() if job not in urgent}
        self.stores.update(later)
        self._unsubmitted += later
        return self._report()

    def _flush(self, jobs: Collection[int]) -> None:
        self._ended += [job for job in (*self.loads, *self.stores) if job in jobs and job not in self._ended]

    def _step_by_request(self, metadata: Any, finished: set[str]) -> Report:
        self._unsubmitted.clear()
        names = metadata.reqs_to_flush or ()
        self._flush([job for job, name in self.stores.items() if name in names])
        self.loads.update({self._next(): name for name in metadata.reqs_to_load})
        later = {self._next(): name for name in metadata.reqs_to_store}
        self.stores.update(later)
        self._stored.update(later.values())
        self._unsubmitted += later
        self._finished |= finished
        loaded = self._report().loaded
        sent = [name for name in sorted(self._finished & self._stored) if name not in self.stores.values()]
        self._stored.difference_update(sent)
        return Report([], loaded, sent)

    def _next(self) -> int:
        self._counter += 1
        return self._counter

    def _report(self) -> Report:
        jobs, self._ended = self._ended, []
        loaded = [self.loads.pop(job) for job in jobs if job in self.loads]
        for job in jobs:
            self.stores.pop(job, None)
        return Report(jobs, loaded, [])


def _worker_meta(jobs: list[list[int]]) -> Any:
    if not any(jobs):
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

    parts = [OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(some, 1)) if some else None for some in jobs]
    return parts[0] if len(parts) == 1 else MultiKVConnectorWorkerMetadata(metadata=tuple(parts))


def _next_stored(group: Any) -> int:
    return int(group.next_stored_chunk_idx if hasattr(group, "next_stored_chunk_idx") else group.next_stored_block_idx)


def _statuses() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus


def _scheduler(
    setup: EngineSetup,
    groups: Sequence[core.GroupSpec],
    chunk_blocks: int,
    prompt_only: bool,
    connectors: int,
) -> tuple[Any, int]:
    """Return a scheduler, and the tokens of a hash block."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    core.register_specs()
    settings: dict[str, Any] = {"cpu_bytes_to_use": 1 << 20, "offload_prompt_only": prompt_only}
    if chunk_blocks > 1:
        settings["block_size"] = chunk_blocks * setup.block_size
    name = "OffloadingConnector"
    if connectors:
        child = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
        name, settings = "MultiConnector", {"connectors": [child] * connectors}
    vllm_config = config.vllm_config(setup, name, settings)
    vllm_config.cache_config.prefix_cache_retention_interval = None
    kv_cache_config = core.cache_config(groups, setup.gpu_blocks, True, None)
    if "shared_by" in _parameters(KVCacheTensor):  # up to 0.29; 0.23 and 0.24 divide by what a block takes
        kv_cache_config.kv_cache_tensors = [
            KVCacheTensor(size=64 * setup.gpu_blocks, shared_by=group.layer_names)
            for group in kv_cache_config.kv_cache_groups
        ]
    return make_scheduler(vllm_config, kv_cache_config)


# What the scheduler tells its connector, as plain data ---------------------------------------------------------------


def _watched(connector: Any, name: str, describe: Callable[..., tuple[Any, ...]], observe: Observer) -> Any:
    method = getattr(connector, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        told = describe(connector, *arguments, **named)
        try:
            answer = method(*arguments, **named)
        except Exception as error:
            observe(name, error, *told)
            raise
        observe(name, plan_of(answer) if name == "build_connector_meta" else answer, *told)
        return answer

    return watched


def plan_of(metadata: Any) -> Plan:
    """Return the plan that is in a step's metadata."""
    if hasattr(metadata, "reqs_to_load"):  # 0.20
        loads = [_transfer_of_specs(-1, name, *specs) for name, specs in metadata.reqs_to_load.items()]
        stores = [_transfer_of_specs(-1, name, *specs) for name, specs in metadata.reqs_to_store.items()]
        return Plan(loads, stores, set(metadata.reqs_to_flush or ()))
    loads = [_transfer(job, entry) for job, entry in metadata.load_jobs.items()]
    stores = [_transfer(job, entry) for job, entry in metadata.store_jobs.items()]
    return Plan(loads, stores, set(metadata.jobs_to_flush or ()))


def _transfer(job: int, entry: Any) -> Transfer:
    specs = entry.transfer_spec if hasattr(entry, "transfer_spec") else (entry.src_spec, entry.dst_spec)
    return _transfer_of_specs(job, entry.req_id, *specs)


def _transfer_of_specs(job: int, name: str, source: Any, target: Any) -> Transfer:
    gpu, cpu = (source, target) if hasattr(source, "group_sizes") else (target, source)
    firsts = [int(index) for index in gpu.block_indices]
    return Transfer(job, name, _slots(cpu), _slots(gpu), [int(size) for size in gpu.group_sizes], firsts)


def _seen_request(connector: Any, request: Any, *_: Any) -> tuple[str]:
    return (request.request_id,)


def _seen_lookup(connector: Any, request: Any, computed: int, max_num_new_tokens: int | None = None) -> tuple[Any, ...]:
    return request.request_id, computed, max_num_new_tokens


def _seen_allocation(connector: Any, request: Any, blocks: Any, external: int) -> tuple[Any, ...]:
    rows = [[block.block_id for block in row] for row in blocks.blocks]
    found = [[block.is_null or block.block_hash is not None for block in row] for row in blocks.blocks]
    return request.request_id, rows, found, external


def _seen_step(connector: Any, output: Any) -> tuple[StepSeen]:
    rows = [Row(row.req_id, [list(ids) for ids in row.block_ids], True, False) for row in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        ids = None if blocks is None else [list(row) for row in blocks]
        rows.append(Row(name, ids, False, name in cached.resumed_req_ids))
    tracked = connector._req_status
    computed = {name: tracked[name].req.num_computed_tokens for name in output.num_scheduled_tokens if name in tracked}
    return (
        StepSeen(
            rows,
            dict(output.num_scheduled_tokens),
            computed,
            list(output.preempted_req_ids or ()),
            list(output.finished_req_ids or ()),
        ),
    )


def _seen_report(connector: Any, output: Any) -> tuple[Any, ...]:
    """Ended jobs with their keys in the order in which the release goes through them, or None if it doesn't know the
    job; up to 0.20, requests.
    """
    meta = getattr(output, "kv_connector_worker_meta", None)
    jobs = {
        job: list(connector._jobs[job].keys) if job in connector._jobs else None
        for job in (meta.completed_jobs if meta is not None else ())
    }
    return jobs, set(output.finished_sending or ()), set(output.finished_recving or ())


_CALLS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "on_new_request": _seen_request,
    "get_num_new_matched_tokens": _seen_lookup,
    "update_state_after_alloc": _seen_allocation,
    "build_connector_meta": _seen_step,
    "update_connector_output": _seen_report,
    "request_finished": _seen_request,
    "reset_cache": lambda connector: (),
}
"""Methods of the connector's scheduler side -> what they are told."""
