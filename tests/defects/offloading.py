"""Defects of OffloadingConnector, planted in the real functions of vLLM 0.33.0.

Each changes one function, in the way in which a slip of its author would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvspec.defects import Patch, registered
from kvspec.device.cuda_names import current_device

from .simple import serve_whoever_asks


def copies_do_not_wait_for_the_forward(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Handler

    real = Handler.transfer_async

    def transfer_async(self: Any, *args: Any) -> Any:
        device = current_device()
        stream = device.compute_stream
        device.compute_stream = device.side_streams[0] if device.side_streams else device.new_stream("l")
        try:
            return real(self, *args)
        finally:
            device.compute_stream = stream

    patch.setattr(Handler, "transfer_async", transfer_async)


def loads_raise_at_their_end_from_the_second_on(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    real = Manager.complete_load

    def complete_load(self: Any, *args: Any) -> None:
        self.kvspec_loads = getattr(self, "kvspec_loads", 0) + 1
        if self.kvspec_loads > 1:
            raise KeyError("planted")
        real(self, *args)

    patch.setattr(Manager, "complete_load", complete_load)


def copies_leave_their_pool(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu import gpu_worker

    real = gpu_worker.compute_sub_block_ptrs
    patch.setattr(gpu_worker, "compute_sub_block_ptrs", lambda ids, *args, **more: real(ids + 100, *args, **more))


def a_finished_load_is_forgotten(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker as Worker

    patch.setattr(Worker, "get_finished", _reports(Worker.get_finished, lambda before, received: set()))


def a_load_is_reported_twice(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker as Worker

    patch.setattr(Worker, "get_finished", _reports(Worker.get_finished, lambda before, received: before | received))


def _reports(real: Any, choose: Any) -> Any:
    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        sent, received = real(self, finished_req_ids)
        before, self.kvspec_before = getattr(self, "kvspec_before", set()), received
        return sent, choose(before, received)

    return get_finished


def evicted_chunks_are_lost(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    def free_chunk(self: Any, chunk: Any) -> None:
        self._num_allocated_chunks -= 1

    patch.setattr(Manager, "_free_chunk", free_chunk)


def a_flush_waits_for_nothing(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    patch.setattr(Worker, "wait", lambda self, job_ids: None)


def loads_do_not_pin_chunks(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    prepare, complete = Manager.prepare_load, Manager.complete_load

    def prepare_load(self: Any, keys: Any, context: Any) -> Any:
        spec = prepare(self, keys, context)
        complete(self, keys, context)
        return spec

    patch.setattr(Manager, "prepare_load", prepare_load)
    patch.setattr(Manager, "complete_load", lambda self, keys, context: None)


def lookups_serve_whoever_asks(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    serve_whoever_asks(patch, OffloadingConnectorScheduler)


def stores_swap_their_destinations(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    real = Worker.submit_store

    def submit_store(self: Any, job_id: int, source: Any, destination: Any) -> Any:
        destination.block_ids = destination.block_ids[::-1].copy()
        return real(self, job_id, source, destination)

    patch.setattr(Worker, "submit_store", submit_store)


def loads_swap_their_destinations(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    real = Worker.submit_load

    def submit_load(self: Any, job_id: int, source: Any, destination: Any, **more: Any) -> Any:
        destination.block_ids = destination.block_ids[::-1].copy()
        return real(self, job_id, source, destination, **more)

    patch.setattr(Worker, "submit_load", submit_load)


def a_finished_load_keeps_its_pins(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    patch.setattr(Manager, "complete_load", lambda self, keys, context: None)


def reset_always_refuses(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    patch.setattr(OffloadingConnector, "reset_cache", lambda self: False)


def removals_are_not_told(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker as Tracker

    patch.setattr(Tracker, "_take_removed_event", lambda self, event: ())


def an_engine_does_not_wait_for_its_last_stores(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    patch.setattr(OffloadingConnector, "has_pending_push_work", lambda self: False)


def loads_mix_up_groups(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    real = Worker.submit_load

    def submit_load(self: Any, job_id: int, source: Any, destination: Any, **more: Any) -> Any:
        destination.block_ids = np.roll(destination.block_ids, destination.group_sizes[0])
        return real(self, job_id, source, destination, **more)

    patch.setattr(Worker, "submit_load", submit_load)


def sizes_of_groups_are_named_in_reverse(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    real = Worker.submit_load

    def submit_load(self: Any, job_id: int, source: Any, destination: Any, **more: Any) -> Any:
        destination.group_sizes = destination.group_sizes[::-1]
        return real(self, job_id, source, destination, **more)

    patch.setattr(Worker, "submit_load", submit_load)


def a_window_is_looked_up_a_chunk_too_short(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig as Group

    real = Group.load_window_size_in_chunks

    def load_window_size_in_chunks(self: Any, tokens: int) -> Any:
        chunks = real(self, tokens)
        return chunks and max(1, chunks - 1)

    patch.setattr(Group, "load_window_size_in_chunks", load_window_size_in_chunks)


def hits_do_not_end_where_a_state_is(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    patch.setattr(scheduler, "resolve_mamba_align_size", lambda *args: None)


_DEFECTS: dict[Callable[[Patch], None], tuple[str, str, str]] = {
    copies_do_not_wait_for_the_forward: ("ordering", "SHADOW-1", "Copies run beside the forward, and not after it."),
    loads_raise_at_their_end_from_the_second_on: ("index", "CRASH-1", "The end of a second load raises."),
    copies_leave_their_pool: ("index", "DEVICE-1", "A copy reads and writes blocks that its pools don't have."),
    a_finished_load_is_forgotten: ("reports", "PROGRESS-1", "A load that has ended is never reported."),
    an_engine_does_not_wait_for_its_last_stores: (
        "reports",
        "PROGRESS-1",
        "An engine goes idle before its last stores have begun.",
    ),
    a_load_is_reported_twice: ("reports", "LOAD-1", "A load that has ended is reported by two steps."),
    evicted_chunks_are_lost: ("pinning", "CONSERVE-1", "A chunk that is given up doesn't come back to the free list."),
    a_flush_waits_for_nothing: (
        "ordering",
        "OWN-1",
        "Blocks are reused although the store that reads them hasn't ended.",
    ),
    loads_do_not_pin_chunks: ("pinning", "OWN-1", "A load doesn't hold the chunks that it reads."),
    stores_swap_their_destinations: ("index", "INDEX-1", "The chunks of a store are filled in the reverse order."),
    loads_swap_their_destinations: ("index", "INDEX-2", "The blocks of a load are filled in the reverse order."),
    a_finished_load_keeps_its_pins: ("pinning", "RELEASE-1", "A load holds its chunks for ever."),
    reset_always_refuses: ("reset", "REFUSE-1", "The connector never drops its cache."),
    lookups_serve_whoever_asks: ("index", "OFFER-1", "A request that reads no cache is offered one."),
    removals_are_not_told: ("events", "EVENT-1", "No event says that a chunk was given up."),
    sizes_of_groups_are_named_in_reverse: (
        "groups",
        "CRASH-1",
        "A load says of one group how many blocks another has.",
    ),
    a_window_is_looked_up_a_chunk_too_short: (
        "groups",
        "CRASH-1",
        "A hit needs a chunk less of a window than attention reads.",
    ),
    hits_do_not_end_where_a_state_is: (
        "states",
        "SHADOW-1",
        "A hit of a whole prompt ends before its last token, and Mamba's state stands behind it.",
    ),
    loads_mix_up_groups: ("groups", "SHADOW-1", "The blocks of one group are loaded from the chunks of another."),
}
"""Plant -> kind, law, sentence."""

DEFECTS = registered("vllm-offloading", _DEFECTS, "offloading_")
