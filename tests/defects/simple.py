"""Defects of SimpleCPUOffloadConnector and of what it stands on, planted in the real functions of vLLM 0.33.0.

Each changes one function, in the way in which a slip of its author would.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvspec.defects import Defect, Patch

# The copies and their order -------------------------------------------------------------------------------------------


def copy_ignores_the_compute_event(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

    real = DmaCopyBackend.launch_copy

    def launch_copy(self: Any, *args: Any, wait_event: Any = None, **more: Any) -> None:
        real(self, *args, **more)

    patch.setattr(DmaCopyBackend, "launch_copy", launch_copy)


def loads_raise_at_their_end_from_the_second_on(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._cleanup_load_request

    def cleanup(self: Any, req_id: str) -> int:
        if self._load_event_counter > 1:
            raise KeyError(req_id)
        return int(real(self, req_id))

    patch.setattr(Manager, "_cleanup_load_request", cleanup)


def copies_name_a_source_beyond_its_pool(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    real = copy_backend.copy_blocks
    patch.setattr(
        copy_backend,
        "copy_blocks",
        lambda src, dst, params: real([block + 100 for block in src], dst, params),
    )


def copies_name_a_destination_beyond_its_pool(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    real = copy_backend.copy_blocks
    patch.setattr(
        copy_backend, "copy_blocks", lambda src, dst, params: real(src, [block + 100 for block in dst], params)
    )


def a_finished_load_is_forgotten(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.get_finished

    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        sent, received = real(self, finished_req_ids)
        return sent, (received if self._load_hwm != 0 else None)

    patch.setattr(Worker, "get_finished", get_finished)


def a_load_is_reported_twice(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.get_finished

    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        sent, received = real(self, finished_req_ids)
        before, self.kvspec_before = getattr(self, "kvspec_before", None), received
        return sent, (received or set()) | (before or set()) or None

    patch.setattr(Worker, "get_finished", get_finished)


def touch_leaves_a_block_in_the_free_queue(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    def touch(self: Any, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def loads_do_not_pin_cpu_blocks(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    allocate, cleanup = Manager.update_state_after_alloc, Manager._cleanup_load_request

    def update_state_after_alloc(self: Any, request: Any, blocks: Any, external: int) -> None:
        allocate(self, request, blocks, external)
        state = self._reqs_to_load.get(request.request_id)
        if external and state is not None:
            self.cpu_block_pool.free_blocks([self.cpu_block_pool.blocks[i] for i in state.transfer_meta.cpu_block_ids])

    def cleanup_load_request(self: Any, req_id: str) -> int:
        state = self._reqs_to_load.get(req_id) or self._abandoned_reqs_to_load.get(req_id)
        if state is not None:
            self.cpu_block_pool.touch([self.cpu_block_pool.blocks[i] for i in state.transfer_meta.cpu_block_ids])
        return int(cleanup(self, req_id))

    patch.setattr(Manager, "update_state_after_alloc", update_state_after_alloc)
    patch.setattr(Manager, "_cleanup_load_request", cleanup_load_request)


def stores_swap_their_destinations(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.bind_connector_metadata

    def bind(self: Any, metadata: Any) -> None:
        metadata.store_cpu_blocks = metadata.store_cpu_blocks[::-1]
        real(self, metadata)

    patch.setattr(Worker, "bind_connector_metadata", bind)


def loads_swap_their_destinations(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.bind_connector_metadata

    def bind(self: Any, metadata: Any) -> None:
        metadata.load_gpu_blocks = metadata.load_gpu_blocks[::-1]
        real(self, metadata)

    patch.setattr(Worker, "bind_connector_metadata", bind)


def a_state_is_given_up_before_it_was_taken_along(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    patch.setattr(MambaManager, "get_num_skipped_tokens", lambda self, computed_tokens: computed_tokens)


def a_completed_store_keeps_its_gpu_blocks(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._process_store_completion

    def complete(self: Any, gpu_block_ids: list[int], *args: Any) -> None:
        self._gpu_block_pool.touch([self._gpu_block_pool.blocks[i] for i in gpu_block_ids[:1]])
        real(self, gpu_block_ids, *args)

    patch.setattr(Manager, "_process_store_completion", complete)


def reset_always_refuses(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    patch.setattr(Manager, "reset", lambda self: False)


def removals_are_not_told(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    patch.setattr(BlockPool, "_emit_block_removed_events", lambda self, block_hashes: None)


def loads_are_reported_before_they_are_done(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker._poll_stream_events

    def poll(self: Any, is_store: bool) -> int:
        done = real(self, is_store)
        return done if is_store else max(self._pending_load_event_indices, default=done)

    patch.setattr(Worker, "_poll_stream_events", poll)


def stores_are_reported_before_they_are_done(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker._poll_stream_events

    def poll(self: Any, is_store: bool) -> int:
        done = real(self, is_store)
        return max(self._pending_store_event_indices, default=done) if is_store else done

    patch.setattr(Worker, "_poll_stream_events", poll)


def the_compute_event_is_recorded_only_once(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

    real = DmaCopyBackend.launch_copy

    def launch_copy(self: Any, *args: Any, wait_event: Any = None, **more: Any) -> None:
        once, self.kvspec_waited = not getattr(self, "kvspec_waited", False), True
        real(self, *args, wait_event=wait_event if once else None, **more)

    patch.setattr(DmaCopyBackend, "launch_copy", launch_copy)


def the_store_watermark_stands_for_loads_too(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker._poll_stream_events

    def poll(self: Any, is_store: bool) -> int:
        done = real(self, is_store)
        return done if is_store else max(done, self._store_hwm)

    patch.setattr(Worker, "_poll_stream_events", poll)


def only_the_first_rank_is_asked_for_a_store(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.update_connector_output

    def update(self: Any, connector_output: Any) -> None:
        self._expected_worker_count = 1
        real(self, connector_output)

    patch.setattr(Manager, "update_connector_output", update)


def only_the_first_rank_is_asked_for_a_load(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator as Aggregator

    real = Aggregator.aggregate

    def aggregate(self: Any, outputs: Any, output_rank: int = 0) -> Any:
        self._expected_finished_count = 1
        return real(self, outputs, output_rank)

    patch.setattr(Aggregator, "aggregate", aggregate)


# Pins -----------------------------------------------------------------------------------------------------------------


def stores_do_not_pin_gpu_blocks(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    build, complete, release = (
        Manager.build_connector_meta,
        Manager._process_store_completion,
        Manager._release_transfer_refs,
    )

    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        metadata = build(self, scheduler_output)
        self._gpu_block_pool.free_blocks([self._gpu_block_pool.blocks[i] for i in metadata.store_gpu_blocks])
        return metadata

    def process_store_completion(self: Any, gpu_block_ids: list[int], *args: Any) -> None:
        self._gpu_block_pool.touch([self._gpu_block_pool.blocks[i] for i in gpu_block_ids])
        complete(self, gpu_block_ids, *args)

    def release_transfer_refs(self: Any, transfer: Any) -> None:
        self._gpu_block_pool.touch([self._gpu_block_pool.blocks[i] for i in transfer.gpu_block_ids])
        release(self, transfer)

    patch.setattr(Manager, "build_connector_meta", build_connector_meta)
    patch.setattr(Manager, "_process_store_completion", process_store_completion)
    patch.setattr(Manager, "_release_transfer_refs", release_transfer_refs)


def the_pin_of_a_lookup_outlives_its_request(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.request_finished

    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        self._pending_cpu_hits.pop(request.request_id, None)
        return real(self, request, block_ids)

    patch.setattr(Manager, "request_finished", request_finished)


def a_second_lookup_leaves_the_first_ones_pin(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.get_num_new_matched_tokens

    def matched(self: Any, request: Any, computed: int) -> Any:
        self._pending_cpu_hits.pop(request.request_id, None)
        return real(self, request, computed)

    patch.setattr(Manager, "get_num_new_matched_tokens", matched)


def a_finished_load_keeps_its_cpu_block(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._cleanup_load_request

    def cleanup(self: Any, req_id: str) -> int:
        state = self._reqs_to_load.get(req_id)
        if state is not None:
            self.cpu_block_pool.touch([self.cpu_block_pool.blocks[i] for i in state.transfer_meta.cpu_block_ids[:1]])
        return int(real(self, req_id))

    patch.setattr(Manager, "_cleanup_load_request", cleanup)


# Sizes and cursors ----------------------------------------------------------------------------------------------------


def loads_begin_at_the_first_block_of_the_table(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.get_num_new_matched_tokens

    def matched(self: Any, request: Any, computed: int) -> Any:
        answer = real(self, request, computed)
        if pending := self._pending_cpu_hits.get(request.request_id):
            self._pending_cpu_hits[request.request_id] = (*pending[:2], 0)
        return answer

    patch.setattr(Manager, "get_num_new_matched_tokens", matched)


def loads_leave_out_their_last_block(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.bind_connector_metadata

    def bind(self: Any, metadata: Any) -> None:
        metadata.load_gpu_blocks = metadata.load_gpu_blocks[: max(1, len(metadata.load_gpu_blocks) - 1)]
        metadata.load_cpu_blocks = metadata.load_cpu_blocks[: len(metadata.load_gpu_blocks)]
        real(self, metadata)

    patch.setattr(Worker, "bind_connector_metadata", bind)


def a_hit_is_counted_one_block_too_long(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.get_num_new_matched_tokens

    def matched(self: Any, request: Any, computed: int) -> Any:
        tokens, is_async = real(self, request, computed)
        if tokens and computed + tokens + self.block_size < request.num_tokens:
            tokens += self.block_size
        return tokens, is_async

    patch.setattr(Manager, "get_num_new_matched_tokens", matched)


def a_full_cpu_pool_is_noticed_one_block_too_late(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._select_eager_blocks_to_store

    def select(self: Any, *args: Any) -> Any:
        pool = self.cpu_block_pool
        count = pool.get_num_free_blocks
        pool.get_num_free_blocks = lambda: count() + 1
        try:
            return real(self, *args)
        finally:
            pool.get_num_free_blocks = count

    patch.setattr(Manager, "_select_eager_blocks_to_store", select)


def a_lookup_misses_a_block(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.get_num_new_matched_tokens

    def get_num_new_matched_tokens(self: Any, request: Any, computed: int) -> Any:
        coordinator, block = self.cpu_coordinator, self.block_size
        self.cpu_coordinator = SimpleNamespace(
            find_longest_cache_hit=lambda hashes, most: coordinator.find_longest_cache_hit(
                hashes, most - block if most > 2 * block else most
            )
        )
        try:
            return real(self, request, computed)
        finally:
            self.cpu_coordinator = coordinator

    patch.setattr(Manager, "get_num_new_matched_tokens", get_num_new_matched_tokens)


def serve_whoever_asks(patch: Patch, scheduler: Any) -> None:
    """Let the lookups of a connector's scheduler side forget that a request reads no cache."""
    real = scheduler.get_num_new_matched_tokens

    def get_num_new_matched_tokens(self: Any, request: Any, computed: int, **more: Any) -> Any:
        before, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        try:
            return real(self, request, computed, **more)
        finally:
            request.skip_reading_prefix_cache = before

    patch.setattr(scheduler, "get_num_new_matched_tokens", get_num_new_matched_tokens)


def lookups_serve_whoever_asks(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    serve_whoever_asks(patch, Manager)


def the_end_of_a_request_stores_nothing(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    patch.setattr(Manager, "_queue_finished_eager_store", lambda self, request, block_ids: None)


def the_store_cursor_passes_a_block_more(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._select_eager_blocks_to_store

    def select(self: Any, state: Any, *args: Any) -> Any:
        blocks, advanced, meta = real(self, state, *args)
        return blocks, [count + bool(count) for count in advanced], meta

    patch.setattr(Manager, "_select_eager_blocks_to_store", select)


def a_whole_prompt_may_be_a_hit(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    real = KVCacheManager.get_computed_blocks
    patch.setattr(
        KVCacheManager,
        "get_computed_blocks",
        lambda self, request, limit=None: real(self, request, request.num_tokens),
    )


# Resets, preemptions, aborts ------------------------------------------------------------------------------------------


def a_reset_forgets_the_stores_in_flight(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.reset

    def reset(self: Any) -> bool:
        self._store_event_to_blocks.clear()
        return bool(real(self))

    patch.setattr(Manager, "reset", reset)


def a_reset_forgets_the_pins_of_lookups(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.reset

    def reset(self: Any) -> bool:
        self._pending_cpu_hits.clear()
        return bool(real(self))

    patch.setattr(Manager, "reset", reset)


def a_reset_leaves_the_gpu_index(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.reset_prefix_cache

    def reset(self: Any) -> bool:
        index = self.cached_block_hash_to_block
        done = bool(real(self))
        self.cached_block_hash_to_block = index
        return done

    patch.setattr(BlockPool, "reset_prefix_cache", reset)


def a_preempted_request_keeps_its_count_of_computed_tokens(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *args: Any, **more: Any) -> None:
        computed = request.num_computed_tokens
        real(self, request, *args, **more)
        request.num_computed_tokens = computed

    patch.setattr(Scheduler, "_preempt_request", preempt)


def a_preempted_request_keeps_a_block(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *args: Any, **more: Any) -> None:
        (blocks,) = self.kv_cache_manager.get_blocks(request.request_id).blocks
        self.kv_cache_manager.block_pool.touch(list(blocks)[:1])
        real(self, request, *args, **more)

    patch.setattr(Scheduler, "_preempt_request", preempt)


def a_preempted_request_is_forgotten(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *args: Any, **more: Any) -> None:
        real(self, request, *args, **more)
        self.waiting.remove_request(request)

    patch.setattr(Scheduler, "_preempt_request", preempt)


def an_abort_releases_a_load_in_flight(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.request_finished

    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        self._cleanup_load_request(request.request_id)
        return real(self, request, block_ids)

    patch.setattr(Manager, "request_finished", request_finished)


def an_aborted_request_keeps_its_blocks(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    real = Scheduler._free_request_blocks

    def free(self: Any, request: Any) -> None:
        if request.status is not RequestStatus.FINISHED_ABORTED:
            real(self, request)

    patch.setattr(Scheduler, "_free_request_blocks", free)


def blocks_are_freed_under_a_step_in_flight(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    patch.setattr(Scheduler, "_request_blocks_can_be_freed", lambda self, request: True)


# The pool and its index -----------------------------------------------------------------------------------------------


def a_reused_block_keeps_its_key(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    patch.setattr(BlockPool, "_maybe_evict_cached_block", lambda self, block: False)


def keys_leave_out_what_came_before(patch: Patch) -> None:
    from vllm.v1.core import kv_cache_utils

    real = kv_cache_utils.hash_block_tokens
    patch.setattr(
        kv_cache_utils, "hash_block_tokens", lambda function, parent, *args, **more: real(function, None, *args, **more)
    )


def keys_leave_out_the_salt(patch: Patch) -> None:
    from vllm.v1.core import kv_cache_utils

    real = kv_cache_utils.generate_block_hash_extra_keys

    def extra_keys(request: Any, *args: Any) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return real(request, *args)
        finally:
            request.cache_salt = salt

    patch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", extra_keys)


def a_block_that_is_taken_from_the_free_queue_is_still_counted(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue as Queue

    real = Queue.remove

    def remove(self: Any, block: Any) -> None:
        real(self, block)
        self.num_free_blocks += 1

    patch.setattr(Queue, "remove", remove)


def the_last_block_of_a_request_is_never_freed(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager as Manager

    real = Manager.pop_blocks_for_free
    patch.setattr(Manager, "pop_blocks_for_free", lambda self, request_id: real(self, request_id)[:-1])


def a_request_registers_a_block_that_is_not_full(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as Manager

    real = Manager.cache_blocks

    def cache_blocks(self: Any, request: Any, num_tokens: int, *args: Any, **more: Any) -> None:
        blocks = self.req_to_blocks[request.request_id]
        enough = min(len(blocks), len(request.block_hashes)) * self.block_size
        real(self, request, max(num_tokens, min(num_tokens + self.block_size, enough)), *args, **more)

    patch.setattr(Manager, "cache_blocks", cache_blocks)


# Events ---------------------------------------------------------------------------------------------------------------


def removals_from_the_cpu_tier_name_the_gpu(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    patch.setattr(Manager, "take_events", lambda self: self.cpu_block_pool.take_events())


def stores_into_the_cpu_tier_are_told_twice(patch: Patch) -> None:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.take_events

    def take_events(self: Any) -> Any:
        events = list(real(self))
        return events + [event for event in events if isinstance(event, BlockStored)]

    patch.setattr(Manager, "take_events", take_events)


def clearing_is_not_told(patch: Patch) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.take_events
    patch.setattr(
        BlockPool,
        "take_events",
        lambda self: [event for event in real(self) if not isinstance(event, AllBlocksCleared)],
    )


def _simple(kind: str, law: str, plant: Any, sentence: str) -> tuple[str, Defect]:
    return plant.__name__, Defect("vllm-simple", kind, law, sentence, plant)


DEFECTS = dict(
    [
        _simple(
            "ordering",
            "SHADOW-1",
            copy_ignores_the_compute_event,
            "A store doesn't wait for the forward that computes its blocks.",
        ),
        _simple(
            "ordering",
            "SHADOW-1",
            loads_are_reported_before_they_are_done,
            "A load is reported as finished while its copy is still running.",
        ),
        _simple(
            "ordering",
            "INDEX-1",
            stores_are_reported_before_they_are_done,
            "A store is reported as finished while its copy is still running.",
        ),
        _simple(
            "ordering",
            "INDEX-1",
            the_compute_event_is_recorded_only_once,
            "Only a worker's first store waits for the forward.",
        ),
        _simple(
            "ordering",
            "SHADOW-1",
            the_store_watermark_stands_for_loads_too,
            "How far stores have got is taken for how far loads have got.",
        ),
        _simple(
            "ordering",
            "INDEX-1",
            only_the_first_rank_is_asked_for_a_store,
            "A store counts as finished once one rank has reported it.",
        ),
        _simple(
            "ordering",
            "SHADOW-1",
            only_the_first_rank_is_asked_for_a_load,
            "A load counts as finished once one rank has reported it.",
        ),
        _simple(
            "ordering",
            "SHADOW-1",
            blocks_are_freed_under_a_step_in_flight,
            "A request's blocks are given back although a step in flight still writes them.",
        ),
        _simple("index", "INDEX-1", stores_swap_their_destinations, "The blocks of a store go to each other's places."),
        _simple("index", "INDEX-2", loads_swap_their_destinations, "The blocks of a load go to each other's places."),
        _simple(
            "index",
            "DEVICE-1",
            copies_name_a_source_beyond_its_pool,
            "A copy reads from a block id that its pool doesn't have.",
        ),
        _simple(
            "index",
            "DEVICE-1",
            copies_name_a_destination_beyond_its_pool,
            "A copy writes to a block id that its pool doesn't have.",
        ),
        _simple(
            "index",
            "SHADOW-1",
            a_reused_block_keeps_its_key,
            "A block that is given out again is still found under its old key.",
        ),
        _simple(
            "index",
            "SHADOW-1",
            keys_leave_out_what_came_before,
            "The key of a block says nothing of the blocks before it.",
        ),
        _simple("index", "OFFER-1", a_lookup_misses_a_block, "A hit of several blocks ends a block too early."),
        _simple("index", "OFFER-1", lookups_serve_whoever_asks, "A request that reads no cache is offered one."),
        _simple(
            "index",
            "STORED-1",
            the_end_of_a_request_stores_nothing,
            "What is full when a request ends isn't stored, unless a step of it follows.",
        ),
        _simple(
            "index",
            "STORED-1",
            the_store_cursor_passes_a_block_more,
            "Behind stored blocks the cursor passes one more.",
        ),
        _simple("index", "SHADOW-1", keys_leave_out_the_salt, "Requests with different cache salts share keys."),
        _simple(
            "index",
            "CRASH-1",
            a_whole_prompt_may_be_a_hit,
            "A hit may cover a prompt's last token, so that nothing is left to compute.",
        ),
        _simple(
            "index",
            "SHADOW-1",
            a_request_registers_a_block_that_is_not_full,
            "A block is registered a block's length of tokens too early.",
        ),
        _simple("pinning", "OWN-1", loads_do_not_pin_cpu_blocks, "A load doesn't hold the CPU blocks that it reads."),
        _simple("pinning", "OWN-1", stores_do_not_pin_gpu_blocks, "A store doesn't hold the GPU blocks that it reads."),
        _simple(
            "pinning",
            "RELEASE-1",
            a_completed_store_keeps_its_gpu_blocks,
            "A store holds one of its GPU blocks for ever.",
        ),
        _simple(
            "pinning", "RELEASE-1", a_finished_load_keeps_its_cpu_block, "A load holds one of its CPU blocks for ever."
        ),
        _simple(
            "pinning",
            "RELEASE-1",
            the_pin_of_a_lookup_outlives_its_request,
            "What a lookup has pinned stays pinned when its request ends before it is allocated.",
        ),
        _simple(
            "pinning",
            "RELEASE-1",
            a_second_lookup_leaves_the_first_ones_pin,
            "A second lookup of a request forgets what the first one has pinned.",
        ),
        _simple(
            "pinning",
            "CONSERVE-1",
            touch_leaves_a_block_in_the_free_queue,
            "A free block that is hit stays in the free queue.",
        ),
        _simple(
            "pinning",
            "CONSERVE-1",
            a_block_that_is_taken_from_the_free_queue_is_still_counted,
            "A block that is hit leaves the free queue, but not its count.",
        ),
        _simple(
            "pinning",
            "RELEASE-1",
            the_last_block_of_a_request_is_never_freed,
            "The last block of every request is lost.",
        ),
        _simple(
            "scaling",
            "SHADOW-1",
            loads_begin_at_the_first_block_of_the_table,
            "The blocks behind a local hit are loaded over it.",
        ),
        _simple("scaling", "SHADOW-1", loads_leave_out_their_last_block, "A load of several blocks lacks one."),
        _simple(
            "scaling", "SHADOW-1", a_hit_is_counted_one_block_too_long, "The connector offers a block more than it has."
        ),
        _simple(
            "scaling",
            "CRASH-1",
            a_full_cpu_pool_is_noticed_one_block_too_late,
            "One CPU block more is asked for than is free.",
        ),
        _simple(
            "completion", "CRASH-1", loads_raise_at_their_end_from_the_second_on, "The second load that ends raises."
        ),
        _simple("completion", "PROGRESS-1", a_finished_load_is_forgotten, "A load is never reported as finished."),
        _simple("completion", "LOAD-1", a_load_is_reported_twice, "A load is reported as finished in two steps."),
        _simple("reset", "REFUSE-1", reset_always_refuses, "The connector never drops its cache."),
        _simple(
            "reset",
            "RELEASE-1",
            a_reset_forgets_the_stores_in_flight,
            "Blocks of stores that were in flight at a reset are never given back.",
        ),
        _simple(
            "reset",
            "REFUSE-1",
            a_reset_forgets_the_pins_of_lookups,
            "A reset doesn't give back what lookups have pinned.",
        ),
        _simple("reset", "SHADOW-1", a_reset_leaves_the_gpu_index, "Keys survive a reset, their blocks don't know."),
        _simple(
            "preemption",
            "SHADOW-1",
            a_preempted_request_keeps_its_count_of_computed_tokens,
            "A preempted request believes that it still has what was computed.",
        ),
        _simple(
            "preemption", "RELEASE-1", a_preempted_request_keeps_a_block, "One block of a preempted request is lost."
        ),
        _simple(
            "preemption",
            "PROGRESS-1",
            a_preempted_request_is_forgotten,
            "A preempted request is never scheduled again.",
        ),
        _simple(
            "abort",
            "OWN-1",
            an_abort_releases_a_load_in_flight,
            "The blocks of an aborted request's load are given back while it runs.",
        ),
        _simple(
            "abort", "RELEASE-1", an_aborted_request_keeps_its_blocks, "The blocks of an aborted request are lost."
        ),
        _simple("events", "EVENT-1", removals_are_not_told, "A key that goes isn't told."),
        _simple(
            "events",
            "EVENT-1",
            removals_from_the_cpu_tier_name_the_gpu,
            "A key that leaves the CPU tier is told as one that leaves the GPU.",
        ),
        _simple(
            "events",
            "EVENT-1",
            stores_into_the_cpu_tier_are_told_twice,
            "A key that comes into the CPU tier is told twice.",
        ),
        _simple("events", "EVENT-1", clearing_is_not_told, "A reset isn't told."),
        _simple(
            "states",
            "SHADOW-1",
            a_state_is_given_up_before_it_was_taken_along,
            "A Mamba request gives up its state in the step that goes on from it.",
        ),
    ]
)
