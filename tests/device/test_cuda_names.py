"""The names of PyTorch and of the driver that worker code calls, pointed at a simulated device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvspec.device.adversary import MOVE, FairAdversary, ReplayAdversary
from kvspec.device.cuda_names import (
    OneItemQueue,
    ThreadActor,
    batch_memcpy,
    code_of_a_rank_runs,
    current_device,
    installed,
    use,
)
from kvspec.device.protocol import CopySpan, SrcAccessOrder
from kvspec.device.simulated import DeviceFault, SimulatedDevice

from .lab import Lab, NumberedAdversary, outcomes

STREAM, DURING_API_CALL, ANY = SrcAccessOrder.STREAM, SrcAccessOrder.DURING_API_CALL, SrcAccessOrder.ANY

NAMES = [
    (torch.cuda, "Stream"),
    (torch.cuda, "Event"),
    (torch.cuda, "current_stream"),
    (torch.cuda, "stream"),
    (torch.cuda, "cudart"),
    (torch.cuda, "synchronize"),
    (torch, "Event"),
]
ORIGINALS = [getattr(owner, name) for owner, name in NAMES]


def restored() -> bool:
    return all(getattr(owner, name) is was for (owner, name), was in zip(NAMES, ORIGINALS, strict=True))


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """The device of the rank whose code runs, names installed. Streams run only while the host is blocked."""
    device = SimulatedDevice(0, NumberedAdversary([]), [])
    before = use(device)
    with installed():
        yield device
    use(before)


# Streams and events -----------------------------------------------------------------------------------------


def test_torch_cuda_stream_makes_the_device_s_side_streams_load_first_then_store(
    device: SimulatedDevice,
) -> None:
    low, high = torch.cuda.Stream.priority_range()
    assert low > high
    load, store = torch.cuda.Stream(priority=low), torch.cuda.Stream(torch.device("cuda:0"), high)
    assert device.side_streams == [load, store]
    assert [load.code, store.code] == ["l0", "s0"]
    assert len({load.cuda_stream, store.cuda_stream, torch.cuda.current_stream().cuda_stream}) == 3


def test_each_side_stream_has_a_code_of_its_own_that_no_other_actor_uses(device: SimulatedDevice) -> None:
    codes = [torch.cuda.Stream().code for _ in range(60)]
    assert len(set(codes)) == 60
    assert not {"c0", "h0", "t0"} & set(codes)
    assert not set(codes) & {f"{letter}{rank}" for letter in "lsxyz" for rank in range(1, 100)}
    assert all(MOVE.fullmatch(code) for code in codes)


def test_the_time_between_two_events_is_there_once_both_have_been_reached(device: SimulatedDevice) -> None:
    begin, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
    begin.record()
    with pytest.raises(DeviceFault, match="before both of them had been reached"):
        begin.elapsed_time(end)
    end.record()
    device.synchronize()
    assert begin.elapsed_time(end) == 1.0


def test_a_copy_bears_the_label_that_the_device_had_at_its_enqueue(device: SimulatedDevice) -> None:
    source, destination = np.zeros(8, np.int8), np.zeros(8, np.int8)
    device.host_register(source.ctypes.data, 8)
    device.add_device_memory(destination.ctypes.data, 8)
    seen: list[int | None] = []
    device.observers.append(lambda executed: seen.append(executed.label))
    device.adversary = ReplayAdversary("")
    for label in (7, None):
        device.label = label
        span = CopySpan(destination.ctypes.data, source.ctypes.data, 8)
        device.copy_batch([span], SrcAccessOrder.STREAM, device.compute_stream.cuda_stream)
    assert not seen
    device.synchronize()
    assert seen == [7, None]


@pytest.mark.parametrize(
    "make",
    [lambda: torch.Event(), lambda: torch.Event("cuda", enable_timing=True), lambda: torch.cuda.Event()],
)
def test_an_event_of_torch_is_an_event_of_the_device(device: SimulatedDevice, make: Callable[[], Any]) -> None:
    stream, event, ran = torch.cuda.Stream(), make(), []
    device.launch("a", lambda: ran.append("a"), stream)
    assert event.query()
    event.record(stream)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert ran == ["a"]


def test_an_event_is_recorded_on_the_current_stream_if_none_is_named(device: SimulatedDevice) -> None:
    stream, event = torch.cuda.Stream(), torch.Event()
    device.launch("busy", lambda: None, stream)
    event.record()
    event.synchronize()
    assert stream.pending()
    assert not torch.cuda.current_stream().pending()


def test_current_stream_is_the_compute_stream_outside_and_the_given_one_inside_of_torch_cuda_stream(
    device: SimulatedDevice,
) -> None:
    compute, outer, inner = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    assert compute is device.compute_stream
    with torch.cuda.stream(outer):
        assert torch.cuda.current_stream(torch.device("cuda:0")) is outer
        with torch.cuda.stream(inner), torch.cuda.stream(None):
            assert torch.cuda.current_stream() is inner
        assert torch.cuda.current_stream() is outer
    assert torch.cuda.current_stream() is compute


def test_current_stream_is_the_former_one_again_after_an_exception(device: SimulatedDevice) -> None:
    compute = torch.cuda.current_stream()
    with pytest.raises(KeyError), torch.cuda.stream(torch.cuda.Stream()):
        raise KeyError
    assert torch.cuda.current_stream() is compute


def test_inside_of_torch_cuda_stream_records_and_waits_go_to_that_stream(device: SimulatedDevice) -> None:
    side, event, ran = torch.cuda.Stream(), torch.Event(), []
    device.launch("a", lambda: ran.append("a"))
    event.record()
    with torch.cuda.stream(side):
        event.wait()
        device.launch("b", lambda: ran.append("b"))
    side.synchronize()
    assert ran == ["a", "b"]


def test_torch_cuda_synchronize_blocks_until_every_stream_has_run(device: SimulatedDevice) -> None:
    ran: list[str] = []
    device.launch("a", lambda: ran.append("a"))
    device.launch("b", lambda: ran.append("b"), torch.cuda.Stream())
    torch.cuda.synchronize()
    assert sorted(ran) == ["a", "b"]


# Host memory ------------------------------------------------------------------------------------------------


def test_cuda_host_register_registers_with_the_device_and_answers_success(device: SimulatedDevice) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    assert torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0).value == 0
    region = device.find_region(tensor.data_ptr(), 16)
    assert region is not None
    assert not region.on_device


def test_registering_the_same_memory_twice_is_a_fault(device: SimulatedDevice) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    with pytest.raises(DeviceFault, match="registered already"):
        torch.cuda.cudart().cudaHostRegister(tensor.data_ptr() + 8, 8, 0)


def test_cuda_host_unregister_makes_memory_pageable_again(device: SimulatedDevice) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    assert cudart.cudaHostUnregister(tensor.data_ptr()).value == 0
    assert device.find_region(tensor.data_ptr(), 16) is None
    with pytest.raises(DeviceFault, match="no host memory is registered"):
        cudart.cudaHostUnregister(tensor.data_ptr())


# The batched copy -------------------------------------------------------------------------------------------


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_uint),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", ctypes.c_uint),
    )


ENTRY_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
ENTRIES = pytest.mark.parametrize(
    "entry", [batch_memcpy, ENTRY_TYPE(batch_memcpy)], ids=["the function", "a pointer to it"]
)


def copy_two_bytes(lab: Lab, entry: Any, order: SrcAccessOrder, num_attrs: int = 1) -> int:
    """Load bytes 2 and 3 as a worker does: by addresses of arrays that are overwritten after the call."""
    scratch = np.array(
        [[lab.gpu.base + 2, lab.gpu.base + 3], [lab.pinned.base + 2, lab.pinned.base + 3], [1, 1]],
        dtype=np.uint64,
    )
    attributes = Attributes(srcAccessOrder=order)
    before = use(lab.device)
    try:
        answer = entry(
            scratch[0].ctypes.data,
            scratch[1].ctypes.data,
            scratch[2].ctypes.data,
            2,
            ctypes.addressof(attributes),
            ctypes.byref(ctypes.c_size_t(0)),
            num_attrs,
            ctypes.byref(ctypes.c_size_t(0)),
            lab.load.cuda_stream,
        )
    finally:
        use(before)
    scratch[:] = 1
    return int(answer)


@ENTRIES
def test_the_batched_copy_takes_raw_addresses_of_arrays_that_live_no_longer_than_the_call(entry: Any) -> None:
    lab = Lab(NumberedAdversary([]))
    assert copy_two_bytes(lab, entry, STREAM) == 0
    assert list(lab.gpu.bytes) == [10, 11, 12, 13]
    lab.device.synchronize()
    assert list(lab.gpu.bytes) == [10, 11, 22, 23]


@ENTRIES
@pytest.mark.parametrize(
    ("order", "num_attrs", "arrives"),
    [
        (STREAM, 1, {22, 99}),
        (ANY, 1, {22, 99}),
        (DURING_API_CALL, 1, {22}),
        (DURING_API_CALL, 0, {22, 99}),
    ],
    ids=["stream", "any", "during the call", "no attributes"],
)
def test_the_batched_copy_reads_its_source_in_the_order_that_its_attributes_say(
    entry: Any, order: SrcAccessOrder, num_attrs: int, arrives: set[int]
) -> None:
    def program(lab: Lab) -> int:
        copy_two_bytes(lab, entry, order, num_attrs)
        lab.pinned[2] = 99
        lab.device.synchronize()
        return lab.gpu[2]

    assert outcomes(program) == arrives


def test_the_batched_copy_enqueues_on_the_stream_with_the_raw_handle() -> None:
    lab = Lab(NumberedAdversary([]))
    copy_two_bytes(lab, batch_memcpy, STREAM)
    assert [stream.pending() for stream in lab.streams] == [False, True, False]


def test_a_source_access_order_that_cuda_does_not_have_is_refused() -> None:
    attributes = Attributes(srcAccessOrder=0)
    lab = Lab(FairAdversary())
    before = use(lab.device)
    try:
        with pytest.raises(ValueError, match="0 is not a valid SrcAccessOrder"):
            batch_memcpy(lab.gpu.base, lab.gpu.base, lab.gpu.base, 0, ctypes.addressof(attributes), None, 1, None, 0)
    finally:
        use(before)


def test_several_attributes_in_one_batch_are_refused_rather_than_ignored() -> None:
    with pytest.raises(NotImplementedError, match="2 attributes in one batch"):
        copy_two_bytes(Lab(FairAdversary()), batch_memcpy, STREAM, num_attrs=2)


# The copy thread --------------------------------------------------------------------------------------------


class CopyWorker:
    """A worker with a copy thread, in the shape that vLLM's has; logs what the loop does."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.did: list[str] = []
        self.ranks: list[int] = []
        before = use(lab.device)
        self.queue = OneItemQueue()
        self.thread = ThreadActor(target=self.copy_loop, args=(self.queue, "device"), daemon=True)
        use(before)

    def copy_loop(self, inbox: Any, device: str) -> None:
        while True:
            item = inbox.get()
            if item is None:
                self.did.append("end")
                return
            self.ranks.append(current_device().rank)
            self.did.append(f"{item} begins")
            self.lab.copy(self.lab.load, STREAM, self.lab.gpu.span_from(0, self.lab.pinned, 0))
            self.did.append(f"{item} ends")


def two_items(lab: Lab) -> tuple[str, ...]:
    """What the thread has done after two items were posted and the host has made two more calls."""
    worker = CopyWorker(lab)
    worker.thread.start()
    for item in "ab":
        worker.queue.put(item)
        lab.device.yield_point()
    return tuple(worker.did)


ONE, OTHER = ("a begins", "a ends", "end"), ("b begins", "b ends", "end")


def test_the_copy_thread_may_lag_behind_the_host_by_any_number_of_items() -> None:
    assert outcomes(two_items) == {(), ONE, ONE + OTHER}


def test_the_copy_thread_never_begins_an_item_inside_of_another_one() -> None:
    def program(lab: Lab) -> tuple[str, ...]:
        worker = CopyWorker(lab)
        worker.thread.start()
        for item in "ab":
            worker.queue.put(item)
        lab.device.yield_point()
        return tuple(worker.did)

    assert outcomes(program) == {(), ONE, ONE + OTHER}


def test_the_copy_thread_handles_one_item_and_returns_to_whoever_woke_it() -> None:
    lab = Lab(NumberedAdversary([]))
    worker = CopyWorker(lab)
    for item in "ab":
        worker.queue.put(item)
    worker.thread.advance()
    assert tuple(worker.did) == ONE
    worker.thread.advance()
    assert tuple(worker.did) == ONE + OTHER


def test_streams_may_run_while_the_copy_thread_is_at_an_item() -> None:
    def program(lab: Lab) -> tuple[str, ...]:
        worker = CopyWorker(lab)
        worker.thread.start()
        lab.device.launch("kernel", lambda: worker.did.append("kernel"), lab.store)
        worker.queue.put("a")
        lab.device.yield_point()
        return tuple(worker.did)

    assert ("a begins", "kernel", "a ends", "end") in outcomes(program)


def test_the_copy_thread_does_not_run_before_it_is_started() -> None:
    lab = Lab(FairAdversary())
    worker = CopyWorker(lab)
    worker.queue.put("a")
    lab.device.yield_point()
    assert worker.did == []


def test_the_copy_thread_ends_on_none_and_joining_it_does_not_block() -> None:
    lab = Lab(FairAdversary())
    worker = CopyWorker(lab)
    worker.thread.start()
    worker.queue.put(None)
    lab.device.yield_point()
    worker.thread.join(timeout=5.0)
    assert worker.did == ["end"]
    assert not worker.thread.enabled()


def test_the_copy_thread_s_calls_go_to_its_own_rank_whichever_rank_s_code_wakes_it() -> None:
    lab = Lab(NumberedAdversary([]))
    other = Lab(lab.adversary, rank=1, actors=lab.device.actors)
    worker = CopyWorker(lab)
    worker.thread.start()
    worker.queue.put("a")
    before = use(other.device)
    worker.thread.advance()
    assert current_device() is other.device
    use(before)
    assert worker.ranks == [0]


def test_the_copy_thread_begins_on_the_default_stream_whatever_the_worker_s_current_one_is() -> None:
    lab = Lab(NumberedAdversary([]))
    seen = []
    queue = OneItemQueue()
    before = use(lab.device)
    with installed():
        thread = ThreadActor(lambda inbox: seen.append(torch.cuda.current_stream()), (queue,))
        queue.put("a")
        with torch.cuda.stream(lab.load):
            thread.advance()
            assert torch.cuda.current_stream() is lab.load
    use(before)
    assert seen == [lab.compute]


def test_a_copy_thread_that_fails_leaves_the_rank_the_stream_and_itself_as_they_were() -> None:
    lab = Lab(NumberedAdversary([]))
    queue = OneItemQueue()

    def fail(inbox: OneItemQueue) -> None:
        inbox.get()
        raise KeyError

    before = use(lab.device)
    thread = ThreadActor(fail, (queue,))
    lab.device.compute_stream = lab.store
    use(None)
    queue.put("a")
    queue.put("b")
    with pytest.raises(KeyError):
        thread.advance()
    assert not code_of_a_rank_runs()
    assert lab.device.compute_stream is lab.store
    assert thread.enabled()
    use(before)


# Installing and restoring -----------------------------------------------------------------------------------


def test_the_names_are_replaced_inside_of_the_context_and_restored_after_it() -> None:
    assert restored()
    with installed():
        assert not any(getattr(owner, name) is was for (owner, name), was in zip(NAMES, ORIGINALS, strict=True))
    assert restored()


def test_the_names_are_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), installed():
        raise KeyError
    assert restored()


def test_the_names_are_restored_when_a_target_s_own_name_cannot_be_replaced() -> None:
    target = SimpleNamespace(threading=threading)
    with (
        pytest.raises(AttributeError),
        installed(((target, "threading", None), (target, "no such name", None))),
    ):
        raise AssertionError("unreachable: the names could not be installed")
    with pytest.raises(TypeError), installed(((target, "threading", None), (int, "real", None))):
        raise AssertionError("unreachable: the names could not be installed")
    assert restored()
    assert target.threading is threading


def test_contexts_nest() -> None:
    with installed():
        inside = torch.cuda.Stream
        with installed():
            pass
        assert torch.cuda.Stream is inside
    assert restored()


def test_a_target_s_own_names_are_replaced_and_restored_with_the_others() -> None:
    target = SimpleNamespace(threading=threading)
    stand_in = SimpleNamespace(Thread=ThreadActor)
    with installed(((target, "threading", stand_in),)):
        assert target.threading is stand_in
    assert target.threading is threading


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.Stream(),
        lambda: torch.cuda.Event(),
        lambda: torch.Event(),
        lambda: torch.cuda.current_stream(),
        lambda: torch.cuda.stream(None).__enter__(),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.cudart().cudaHostRegister(0, 0, 0),
        lambda: torch.cuda.cudart().cudaHostUnregister(0),
        lambda: copy_outside_of_a_rank(),
        lambda: ThreadActor(print, (OneItemQueue(),)),
    ],
    ids=[
        "Stream",
        "cuda.Event",
        "Event",
        "current_stream",
        "stream",
        "synchronize",
        "cudaHostRegister",
        "cudaHostUnregister",
        "batched copy",
        "Thread",
    ],
)
def test_a_call_outside_of_a_rank_says_so(call: Callable[[], Any]) -> None:
    assert not code_of_a_rank_runs()
    with (
        installed(),
        pytest.raises(RuntimeError, match="CUDA was called outside of a rank: wrap the call in"),
    ):
        call()


def copy_outside_of_a_rank() -> None:
    empty = np.zeros(1, dtype=np.uint64).ctypes.data
    batch_memcpy(empty, empty, empty, 0, empty, None, 0, None, 0)


def test_use_returns_the_device_before_and_decides_which_one_answers() -> None:
    first, second = (SimulatedDevice(rank, FairAdversary(), []) for rank in range(2))
    assert use(first) is None
    assert code_of_a_rank_runs()
    assert current_device() is first
    assert use(second) is first
    assert current_device() is second
    assert use(None) is second
    assert not code_of_a_rank_runs()


# The checker sees it when the stand-ins are broken ----------------------------------------------------------


def test_a_copy_thread_that_nests_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadActor, "enabled", lambda self: not self._inbox.empty())
    with pytest.raises(AssertionError):
        test_the_copy_thread_never_begins_an_item_inside_of_another_one()


def test_a_copy_thread_that_handles_all_items_at_once_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    get = OneItemQueue.get

    def get_while_there_is_one(self: OneItemQueue) -> Any:
        if not self.empty():
            self.arm()
        return get(self)

    monkeypatch.setattr(OneItemQueue, "get", get_while_there_is_one)
    with pytest.raises(AssertionError):
        test_the_copy_thread_handles_one_item_and_returns_to_whoever_woke_it()
