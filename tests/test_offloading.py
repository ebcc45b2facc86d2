"""OffloadingConnector as a target: for every law a planted defect that breaks it; what its copies may do; what it
leaves behind."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hunt import hunt

from kvspec.device.adversary import FairAdversary, ReplayAdversary
from kvspec.device.cuda_names import current_device, use
from kvspec.device.simulated import DeviceFault, SimulatedDevice
from kvspec.laws import LAWS
from kvspec.ops import Add, EngineSetup, Op, Reset, Settle, Step
from kvspec.targets import Target, load_target
from kvspec.world import EVENTS, Outcome, World

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

HISTORIES = 300
CLEAN_HISTORIES = 60


@pytest.fixture(scope="module")
def offloading(target: Target) -> Target:
    """Return the target with the release that this run checks."""
    return load_target(f"vllm-offloading{target.name[len('vllm-simple') :]}")


def run(target: Target, setup: EngineSetup, *ops: Op) -> Outcome:
    world = World(target, setup, "fair")
    for op in ops:
        world.apply(op)
    return world.finish()


# Planted defects ------------------------------------------------------------------------------------------------------


def copies_do_not_wait_for_the_forward(patch: pytest.MonkeyPatch) -> None:
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


def loads_raise_at_their_end_from_the_second_on(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    real = Manager.complete_load

    def complete_load(self: Any, *args: Any) -> None:
        self.kvspec_loads = getattr(self, "kvspec_loads", 0) + 1
        if self.kvspec_loads > 1:
            raise KeyError("planted")
        real(self, *args)

    patch.setattr(Manager, "complete_load", complete_load)


def copies_leave_their_pool(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu import gpu_worker

    real = gpu_worker.compute_sub_block_ptrs
    patch.setattr(gpu_worker, "compute_sub_block_ptrs", lambda ids, *args, **more: real(ids + 100, *args, **more))


def a_finished_load_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker as Worker

    patch.setattr(Worker, "get_finished", _reports(Worker.get_finished, lambda before, received: set()))


def a_load_is_reported_twice(patch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker as Worker

    patch.setattr(Worker, "get_finished", _reports(Worker.get_finished, lambda before, received: before | received))


def _reports(real: Any, choose: Any) -> Any:
    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        sent, received = real(self, finished_req_ids)
        before, self.kvspec_before = getattr(self, "kvspec_before", set()), received
        return sent, choose(before, received)

    return get_finished


def evicted_chunks_are_lost(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    def free_chunk(self: Any, chunk: Any) -> None:
        self._num_allocated_chunks -= 1

    patch.setattr(Manager, "_free_chunk", free_chunk)


def a_flush_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    patch.setattr(Worker, "wait", lambda self, job_ids: None)


def loads_do_not_pin_chunks(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    prepare, complete = Manager.prepare_load, Manager.complete_load

    def prepare_load(self: Any, keys: Any, context: Any) -> Any:
        spec = prepare(self, keys, context)
        complete(self, keys, context)
        return spec

    patch.setattr(Manager, "prepare_load", prepare_load)
    patch.setattr(Manager, "complete_load", lambda self, keys, context: None)


def stores_swap_their_destinations(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    real = Worker.submit_store

    def submit_store(self: Any, job_id: int, source: Any, destination: Any) -> Any:
        destination.block_ids = destination.block_ids[::-1].copy()
        return real(self, job_id, source, destination)

    patch.setattr(Worker, "submit_store", submit_store)


def loads_swap_their_destinations(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker as Worker

    real = Worker.submit_load

    def submit_load(self: Any, job_id: int, source: Any, destination: Any, **more: Any) -> Any:
        destination.block_ids = destination.block_ids[::-1].copy()
        return real(self, job_id, source, destination, **more)

    patch.setattr(Worker, "submit_load", submit_load)


def a_finished_load_keeps_its_pins(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    patch.setattr(Manager, "complete_load", lambda self, keys, context: None)


def reset_always_refuses(patch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    patch.setattr(OffloadingConnector, "reset_cache", lambda self: False)


def removals_are_not_told(patch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker as Tracker

    patch.setattr(Tracker, "_take_removed_event", lambda self, event: ())


def an_engine_does_not_wait_for_its_last_stores(patch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    patch.setattr(OffloadingConnector, "has_pending_push_work", lambda self: False)


DEFECTS = {
    copies_do_not_wait_for_the_forward: "SHADOW-1",
    loads_raise_at_their_end_from_the_second_on: "CRASH-1",
    copies_leave_their_pool: "DEVICE-1",
    a_finished_load_is_forgotten: "PROGRESS-1",
    an_engine_does_not_wait_for_its_last_stores: "PROGRESS-1",
    a_load_is_reported_twice: "LOAD-1",
    evicted_chunks_are_lost: "CONSERVE-1",
    a_flush_waits_for_nothing: "OWN-1",
    loads_do_not_pin_chunks: "OWN-1",
    stores_swap_their_destinations: "INDEX-1",
    loads_swap_their_destinations: "INDEX-2",
    a_finished_load_keeps_its_pins: "RELEASE-1",
    reset_always_refuses: "REFUSE-1",
    removals_are_not_told: "EVENT-1",
}


def test_every_law_has_a_defect_of_this_target() -> None:
    assert set(DEFECTS.values()) == LAWS.keys()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_the_defect_breaks_its_law(defect: Any, offloading: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    law = DEFECTS[defect]
    catch = hunt(offloading, number=1, histories=HISTORIES, until=law, but_known=True)
    assert law in catch.violations, f"{sorted(catch.violations)} broken in {catch.histories} histories"


def test_the_clean_target_breaks_no_law(offloading: Target) -> None:
    catch = hunt(offloading, number=1, histories=CLEAN_HISTORIES, but_known=True)
    assert not catch.violations
    assert catch.histories == CLEAN_HISTORIES


def test_the_target_tells_only_of_events_that_are_listed() -> None:
    from kvspec.targets.vllm import observe, offloading

    text = inspect.getsource(offloading) + inspect.getsource(observe)
    told = set(re.findall(r'saw\("([^"]+)"\)', text))
    assert len(told) > 5
    assert told <= EVENTS.keys()
    assert {"LRU eviction", "ARC eviction"} <= EVENTS.keys()


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Any:
    made = SimulatedDevice(0, FairAdversary(), [])
    before = use(made)
    yield made
    use(before)


def bytes_of(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def descriptors(source: torch.Tensor, destination: torch.Tensor) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in (source.data_ptr(), destination.data_ptr(), source.nbytes)]


def register(device: SimulatedDevice, source: torch.Tensor, destination: torch.Tensor) -> None:
    device.host_register(source.data_ptr(), source.nbytes)
    device.add_device_memory(destination.data_ptr(), destination.nbytes)


def test_a_copy_engine_reads_its_descriptors_during_the_call(device: SimulatedDevice) -> None:
    from kvspec.targets.vllm.copies import swap_blocks_batch

    device.adversary = ReplayAdversary("")
    source, destination = bytes_of(b"01234567"), bytes_of(b"........")
    register(device, source, destination)
    lists = descriptors(source, destination)
    swap_blocks_batch(*lists)
    lists[2].zero_()
    assert bytes(destination) == b"........"
    device.synchronize()
    assert bytes(destination) == b"01234567"


@pytest.mark.parametrize("registered", [True, False])
def test_a_kernel_reads_its_descriptors_when_it_runs(device: SimulatedDevice, registered: bool) -> None:
    from kvspec.targets.vllm.copies import SwapKernel, tensor_to

    device.adversary = ReplayAdversary("")
    source, destination, other = bytes_of(b"01234567"), bytes_of(b"........"), bytes_of(b"abcdefgh")
    register(device, source, destination)
    if registered:
        device.host_register(other.data_ptr(), other.nbytes)
    lists = descriptors(source, destination)
    SwapKernel()[(1,)](*(tensor_to(each, "cuda", non_blocking=True) for each in lists), 1, BYTES_PER_CHUNK=8)
    lists[0][0] = other.data_ptr()
    if registered:
        device.synchronize()
        assert bytes(destination) == b"abcdefgh"
    else:
        with pytest.raises(DeviceFault, match="isn't registered"):
            device.synchronize()


# What is left behind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_world_gives_its_shared_memory_back(offloading: Target, ranks: int) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(
            list(Path("/dev/shm").glob(f"vllm_offload_kvspec-{os.getpid()}-*"))
        )

    setup = EngineSetup(ranks=ranks)
    run(offloading, setup)
    before = held()
    for _ in range(3):
        run(offloading, setup, Add("a", shared=9), Settle())
    assert held() == before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("runner_v2", [False, True])
def test_chunks_are_stored_and_loaded_whole_on_every_rank(
    offloading: Target, ranks: int, blocks_per_chunk: int, runner_v2: bool
) -> None:
    setup = EngineSetup(
        ranks=ranks, blocks_per_chunk=blocks_per_chunk, runner_v2=runner_v2, step_tokens=48, gpu_blocks=12
    )
    prompt = Add("a", shared=28, tail=1)
    outcome = run(offloading, setup, prompt, Settle(), Reset(), Add("b", shared=28, tail=1), Step(2), Settle())
    assert not outcome.violations
    blocks = 7 // blocks_per_chunk * blocks_per_chunk
    assert (outcome.stores, outcome.loads) == (blocks, blocks)
