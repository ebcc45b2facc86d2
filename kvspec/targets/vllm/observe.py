"""One engine of vLLM as a world drives and sees it, whatever offload connector it has.

What differs between connectors (their CPU tier, the metadata of their transfers) is a :class:`Tier`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvspec.device.adversary import Adversary
from kvspec.device.simulated import Executed
from kvspec.engine.shadow import Batch
from kvspec.laws import PoolView
from kvspec.ops import Add, EngineSetup
from kvspec.targets import CopiedBlock, FullBlock, Plan, Probe, ResetAnswer
from kvspec.targets.vllm.config import longest_request
from kvspec.targets.vllm.engine import KEY_BYTES, VllmEngine, group_of
from kvspec.targets.vllm.flaws import Flaws

_STATUS = {"WAITING_FOR_REMOTE_KVS": "loading", "RUNNING": "running", "PREEMPTED": "preempted"}


class Transfers(NamedTuple):
    """What a connector's metadata tells the workers to do. ``stores`` and ``loads`` count GPU blocks."""

    stores: int
    loads: int
    trace: str


class Tier(Protocol):
    """The CPU tier of a connector: a pool of blocks, an index, and the transfers that fill it."""

    polls_when_idle: bool
    null_block: int | None
    """The CPU block that is never used, if there is one."""
    events_name_groups: bool
    """Whether CPU events say which attention group they are about."""

    @property
    def shortages(self) -> int:
        """How often no block was left for another store."""

    def allocated(self, request: str, external_tokens: int) -> None:
        """The scheduler has allocated blocks for a request."""

    def planned(self, output: Any, metadata: Any) -> Transfers:
        """A schedule is complete."""

    def reported(self, output: Any) -> None:
        """The scheduler has processed a ``KVConnectorOutput``."""

    def copied(self, block: CopiedBlock) -> None:
        """A copy has executed, and the world has seen it."""

    def block_of(self, rank: int, address: int) -> int:
        """Return the CPU block at an address in the memory of a rank's worker, -1 if there is none."""

    def stores_due(self) -> bool: ...
    def stores_queued(self) -> bool: ...
    def stores_unstarted(self) -> int: ...
    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]: ...
    def pool(self) -> PoolView: ...
    def group_of(self, block: CopiedBlock) -> int | None: ...
    def places_of(self, block: CopiedBlock) -> range | None:
        """Return which places of its chunk a copy moves; None if no transfer asks for it."""

    def is_partly_stored(self, block: CopiedBlock) -> bool:
        """Whether the source of a copy's store wasn't full when it was planned."""

    def refs(self, block: CopiedBlock, gpu_refs: int) -> tuple[int, int]: ...
    def kept(self) -> Mapping[str, int]: ...
    def index(self) -> Mapping[bytes, int]: ...
    def held_tokens(self, request: str, local: int) -> int | None: ...
    def keys_to_store(self, key: bytes) -> Iterable[bytes]:
        """Return the index keys that a GPU block must have here as soon as it is full, if there is room; none if the
        connector doesn't store eagerly."""

    def tags(self, key: bytes, rank: int, block: int) -> np.ndarray: ...
    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None: ...
    def describe_key(self, key: bytes) -> str: ...
    def keys_of_event(self, event: Any) -> Iterable[bytes]:
        """Return the index keys that a CPU event speaks of."""

    def drain_events(self) -> Iterable[Any]:
        """Return the CPU events that the connector hasn't handed out yet."""


class ObservedEngine:
    """One engine with a connector, and what can be seen of it."""

    def __init__(
        self,
        setup: EngineSetup,
        connector: str,
        connector_config: dict[str, Any],
        adversary: Adversary,
        probe: Probe,
        make_tier: Callable[[VllmEngine, Probe], Tier],
    ) -> None:
        self._setup = setup
        self._probe = probe
        self._vllm = VllmEngine(setup, connector, connector_config, adversary, probe.mismatch, self._rank_has_output)
        self._tier = make_tier(self._vllm, probe)
        self.actors = self._vllm.actors
        self.polls_when_idle = self._tier.polls_when_idle
        self.cpu_null_block = self._tier.null_block
        self.longest_request = longest_request(setup)
        self._connector = self._vllm.connector
        self._scheduler = self._vllm.scheduler
        self._gpu_pool = self._scheduler.kv_cache_manager.block_pool
        self._loads_due: set[str] = set()
        self._confirmed: dict[str, int] = {}
        self._filling: dict[str, list[tuple[Any, bytes]]] = {}
        """Running request that the schedule which is being made has granted slots -> its blocks that these fill, and
        what they are registered under."""
        self._events: dict[str, Counter[bytes]] = {"GPU": Counter(), "CPU": Counter()}
        self._received: Counter[str] = Counter()
        self._flaws = Flaws([rank.memory for rank in self._vllm.ranks], setup.blocks_per_chunk)
        self._reset_answer: Any = None
        self._listen()

    # Listening --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wrap the connector's own calls; each wrapper passes everything on unchanged."""
        connector, probe, tier = self._connector, self._probe, self._tier
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
            tier.allocated(request.request_id, external)
            probe.allocated(request.request_id, external)

        def build_connector_meta(output: Any) -> Any:
            for name in output.num_scheduled_tokens:
                request = self._scheduler.requests[name]
                self._confirmed[name] = request.num_computed_tokens - request.num_output_placeholders
            metadata = build(output)
            probe.scheduled(_plan(output, tier.planned(output, metadata), self._leaves_uncomputed(output)))
            return metadata

        def update_connector_output(output: Any) -> None:
            complete(output)
            self._loads_due.difference_update(output.finished_recving or ())
            tier.reported(output)

        def reset_cache() -> Any:
            self._reset_answer = reset()
            return self._reset_answer

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc
        connector.build_connector_meta = build_connector_meta
        connector.update_connector_output = update_connector_output
        connector.reset_cache = reset_cache
        if self._setup.priority:
            self._listen_to_grants()
        if self._setup.events:
            self._listen_to_events()
        for rank in self._vllm.ranks:
            rank.device.observers.append(partial(self._copies_executed, rank.index))

    def _listen_to_grants(self) -> None:
        """Note what running requests fill: with priorities, one can be preempted in the schedule that has granted it
        slots. (One that waits can't: nobody is admitted in a schedule that has preempted.)"""
        manager = self._scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(request: Any, *arguments: Any, **named: Any) -> Any:
            granted = allocate(request, *arguments, **named)
            if granted is not None and request.status.name == "RUNNING":
                self._filling[request.request_id] = list(self._registered_from(request))
            return granted

        manager.allocate_slots = allocate_slots

    def _registered_from(self, request: Any) -> Iterator[tuple[Any, bytes]]:
        """Yield a request's registered blocks that hold tokens which aren't computed, and their keys."""
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        for manager, layout in zip(managers, self._vllm.layouts, strict=True):
            first = request.num_computed_tokens // layout.span
            for block in manager.req_to_blocks[request.request_id][first:]:
                if block.block_hash is not None:
                    yield block, block.block_hash

    def _leaves_uncomputed(self, output: Any) -> bool:
        """Whether a block of somebody whom this schedule has scheduled and then preempted is still registered."""
        filling, self._filling = self._filling, {}
        victims = filling.keys() & (output.preempted_req_ids or set())
        return any(block.block_hash == key for victim in victims for block, key in filling[victim])

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
            tier = "GPU" if event.medium == "GPU" else "CPU"
            keys = keys_of_hashes(event) if tier == "GPU" else self._tier.keys_of_event(event)
            for key in keys:
                self._events[tier][key] += 1 if kind == "BlockStored" else -1

    def _rank_has_output(self, rank: int, output: Any) -> None:
        connector_output = output.kv_connector_output
        if connector_output is not None and connector_output.finished_recving:
            self._probe.loaded(rank, sorted(connector_output.finished_recving))

    def _copies_executed(self, rank: int, executed: Executed) -> None:
        if executed.by_kernel:
            self._probe.saw("kernel copy")
        engine_rank = self._vllm.ranks[rank]
        gpu_base = engine_rank.memory.tags.ctypes.data
        gpu_bytes = engine_rank.memory.tags.nbytes
        for dst, src, size in executed.spans:
            to_gpu = 0 <= dst - gpu_base < gpu_bytes
            gpu_address, cpu_address = (dst, src) if to_gpu else (src, dst)
            gpu = (gpu_address - gpu_base) // size % self._setup.gpu_blocks
            block = CopiedBlock(rank, gpu, self._tier.block_of(rank, cpu_address), to_gpu, executed.label)
            self._probe.copied(block)
            self._tier.copied(block)
            self._flaws.copied(block, self._tier.places_of(block), partly=self._tier.is_partly_stored(block))

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
        except NotImplementedError as error:  # SimpleCPUOffload up to 0.23 and Offloading up to 0.21 have no reset
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

    def transfers_outstanding(self) -> bool:
        return bool(self._loads_due) or self._tier.stores_due()

    def stores_queued(self) -> bool:
        return self._tier.stores_queued()

    def stores_unstarted(self) -> int:
        return self._tier.stores_unstarted()

    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]:
        return self._tier.blocks_in_stores()

    def pools(self) -> tuple[PoolView, PoolView]:
        return view_pool("GPU", self._gpu_pool), self._tier.pool()

    def group_of_copy(self, block: CopiedBlock) -> int | None:
        return self._tier.group_of(block)

    def copy_refs(self, block: CopiedBlock) -> tuple[int, int]:
        gpu_refs = self._gpu_pool.blocks[block.gpu].ref_cnt if block.gpu >= 0 else 0
        return self._tier.refs(block, gpu_refs)

    def kept(self) -> Mapping[str, int]:
        return {**self._tier.kept(), "scheduler.requests": len(self._scheduler.requests)}

    def cpu_shortages(self) -> int:
        return self._tier.shortages

    def full_blocks(self, request: str) -> list[FullBlock]:
        stops = self._vllm.stops_of_full_blocks(request)
        registered = self._gpu_pool.cached_block_hash_to_block._cache
        return [
            FullBlock(stored, stops[key[-KEY_BYTES:]], frozenset(_ids(registered[key])))
            for key in registered
            if key[-KEY_BYTES:] in stops
            for stored in self._tier.keys_to_store(key)
        ]

    def held_tokens(self, request: str, local: int) -> int | None:
        return self._tier.held_tokens(request, local)

    def reads_cache(self, request: str) -> bool:
        return not self._scheduler.requests[request].skip_reading_prefix_cache

    def confirmed_tokens(self, request: str) -> int:
        return self._confirmed.get(request, 0)

    def cpu_index(self) -> Mapping[bytes, int]:
        return self._tier.index()

    def gpu_index(self) -> Mapping[bytes, int]:
        return index_of_pool(self._gpu_pool)

    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None:
        return self._tier.expected_tags(key, rank)

    def cpu_tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        return self._tier.tags(key, rank, block)

    def gpu_tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        return self._vllm.ranks[rank].memory.gpu_block(block, group_of(key))

    def flaw_of_gpu_block(self, rank: int, block: int) -> str:
        return self._flaws.of_block(rank, block)

    def flaw_of_cpu_block(self, key: bytes, rank: int, block: int, entry: int) -> str:
        return self._flaws.of_chunk(rank, block, entry // self._vllm.layouts[self.group_of(key)].entries)

    def describe_tag(self, key: bytes, rank: int, index: int, tag: int) -> str:
        memory = self._vllm.ranks[rank].memory
        return memory.describe(tag, memory.layer(self.group_of(key), index))

    def describe_key(self, key: bytes) -> str:
        return self._tier.describe_key(key)

    def group_of(self, key: bytes) -> int:
        # A chunk's key has a suffix; the last four bytes of any other are a group's number, which it can't be.
        return group_of(key.removesuffix(b"chunk"))

    def events(self, tier: str) -> Mapping[bytes, int] | None:
        names_groups = tier == "GPU" or len(self._setup.groups) == 1 or self._tier.events_name_groups
        if not (self._setup.events and names_groups):
            return None
        if tier == "CPU":
            self._replay(tier, self._tier.drain_events())
        else:
            self._replay(tier, waiting_events(self._gpu_pool))
        return self._events[tier]

    def state(self) -> str:
        """Return what must change between two steps of an engine that makes progress."""
        return repr([(r.status, r.num_computed_tokens, r.num_tokens) for r in self._scheduler.requests.values()])

    def waiting_requests(self) -> list[str]:
        return [
            f"{name} {request.status.name} with {request.num_computed_tokens} of {request.num_tokens} tokens computed"
            for name, request in self._scheduler.requests.items()
        ]


def block_at(views: Iterable[np.ndarray], address: int) -> int:
    """Return the row at ``address`` of one of the arrays, each of shape (blocks, bytes or words of a block)."""
    for view in views:
        row, within = divmod(address - view.ctypes.data, view.strides[0])
        if 0 <= row < len(view) and within < view.shape[1] * view.itemsize:
            return row
    return -1


def keys_of_hashes(event: Any) -> list[bytes]:
    """Return the keys that an event of a block pool speaks of: hash and group, as the pool's index has them."""
    group = (event.group_idx or 0).to_bytes(4, "big")
    return [block_hash + group for block_hash in event.block_hashes]


def waiting_events(pool: Any) -> list[Any]:
    """Take the events that nobody has asked a block pool for."""
    waiting = list(pool.kv_event_queue)
    pool.kv_event_queue.clear()
    return waiting


def view_pool(name: str, pool: Any) -> PoolView:
    """Return a view of a ``BlockPool``."""
    return PoolView(
        name,
        [block.ref_cnt for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        pool.get_num_free_blocks(),
        pool.null_block.block_id,
    )


def index_of_pool(pool: Any) -> dict[bytes, int]:
    """Return the block that a lookup of each key gives: the first one that was inserted and is still there."""
    return {key: next(iter(_ids(blocks))) for key, blocks in pool.cached_block_hash_to_block._cache.items()}


def _ids(blocks: Any) -> Collection[int]:
    """Return the ids of what the pool keeps under a key: a block, or several by their ids."""
    return blocks if isinstance(blocks, dict) else (blocks.block_id,)


def _plan(output: Any, transfers: Transfers, uncomputed: bool) -> Plan:
    new_blocks = {new.req_id: tuple(chain.from_iterable(new.block_ids)) for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            new_blocks[request] = tuple(chain.from_iterable(blocks))
    return Plan(
        preempted=frozenset(output.preempted_req_ids or ()),
        new_blocks=new_blocks,
        stores=transfers.stores,
        loads=transfers.loads,
        uncomputed=uncomputed,
        trace=f"{output.num_scheduled_tokens}{new_blocks}{transfers.trace}",
    )
