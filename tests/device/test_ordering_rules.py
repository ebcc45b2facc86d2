"""The simulated device's ordering rules, ORDER-1 to ORDER-8, each from both sides: what may happen, what not.

Small programs run under every schedule that there is; larger ones, drawn by Hypothesis, under drawn ones. The
last part breaks the device, rule by rule, and requires that the same programs tell. Not checked: that CUDA
keeps these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import comb
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvspec.device import simulated
from kvspec.device.adversary import FairAdversary
from kvspec.device.protocol import CopySpan, SrcAccessOrder
from kvspec.device.simulated import DeviceFault, Executed, SimulatedDevice, SimulatedEvent, SimulatedStream
from kvspec.errors import KvspecError

from .lab import ENQUEUEING, LOOKING, Call, Lab, Memory, NumberedAdversary, calls, outcomes, run, schedules

STREAM, DURING_API_CALL, ANY = SrcAccessOrder.STREAM, SrcAccessOrder.DURING_API_CALL, SrcAccessOrder.ANY
ALL_ORDERS = pytest.mark.parametrize("order", list(SrcAccessOrder), ids=lambda order: order.name)
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=300)
DRAWN_SMALL = given(program=calls(ENQUEUEING, max_size=6))

DRAWN = given(
    program=calls((*ENQUEUEING, *LOOKING), min_size=10, max_size=30),
    choices=st.binary(min_size=10, max_size=40),
)

Ran = tuple[str, ...]


# The explorer -----------------------------------------------------------------------------------------------


def test_the_explorer_runs_every_interleaving_exactly_once() -> None:
    def two_streams(lab: Lab) -> Ran:
        for label in "abc":
            lab.kernel(label, lab.load)
        for label in "xy":
            lab.kernel(label, lab.store)
        lab.device.synchronize()
        return lab.ran()

    found = list(schedules(two_streams))
    assert len(found) == len({ran for _, ran in found}) == len({schedule for schedule, _ in found}) == comb(5, 2)


def test_the_explorer_tries_every_moment_at_which_the_host_can_go_on() -> None:
    def watched(lab: Lab) -> Ran:
        for label in "abc":
            lab.kernel(label, lab.load)
        lab.device.yield_point()
        return lab.ran()

    assert outcomes(watched) == {(), ("a",), ("a", "b"), ("a", "b", "c")}


def test_the_explorer_refuses_a_program_that_has_too_many_schedules() -> None:
    with pytest.raises(AssertionError, match="more than 3 schedules"):
        list(schedules(one_stream, schedules_max=3))


# ORDER-1: stream order --------------------------------------------------------------------------------------


def one_stream(lab: Lab) -> tuple[Ran, Ran]:
    """What has run when the host looks, and in the end."""
    lab.kernel("a", lab.load)
    lab.device.yield_point()
    lab.kernel("b", lab.load)
    lab.device.yield_point()
    seen = lab.ran()
    lab.device.synchronize()
    return seen, lab.ran()


def copy_between_kernels(lab: Lab) -> tuple[str, ...]:
    """What two kernels around a batch of two copies read from its destinations."""
    for at in (0, 1):
        lab.read(lab.gpu, at, lab.load)
    lab.copy(lab.load, STREAM, *(lab.gpu.span_from(at, lab.pinned, at) for at in (0, 1)))
    for at in (0, 1):
        lab.read(lab.gpu, at, lab.load)
    lab.device.synchronize()
    return lab.ran()


def test_order_1_a_stream_may_lag_behind_the_host_by_any_number_of_operations() -> None:
    assert {seen for seen, _ in outcomes(one_stream)} == {(), ("a",), ("a", "b")}


def test_order_1_no_operation_overtakes_another_of_its_stream() -> None:
    assert {ran for _, ran in outcomes(one_stream)} == {("a", "b")}


def test_order_1_a_batch_runs_as_a_whole_between_its_neighbours_in_the_stream() -> None:
    assert outcomes(copy_between_kernels) == {("10", "11", "20", "21")}


# ORDER-2: streams are unordered, except through events ------------------------------------------------------


def unrelated_streams(lab: Lab) -> Ran:
    lab.kernel("a", lab.load)
    lab.kernel("x", lab.store)
    lab.device.synchronize()
    return lab.ran()


def event_between_streams(lab: Lab) -> Ran:
    lab.kernel("early", lab.store)
    lab.kernel("a", lab.load)
    event = lab.load.record_event()
    lab.kernel("b", lab.load)
    event.wait(lab.store)
    lab.kernel("x", lab.store)
    lab.device.synchronize()
    return lab.ran()


def chain_of_streams(lab: Lab) -> Ran:
    lab.kernel("a", lab.load)
    lab.store.wait_stream(lab.load)
    lab.compute.wait_stream(lab.store)
    lab.kernel("x", lab.compute)
    lab.kernel("b", lab.load)
    lab.device.synchronize()
    return lab.ran()


def test_order_2_operations_of_different_streams_run_in_either_order() -> None:
    assert outcomes(unrelated_streams) == {("a", "x"), ("x", "a")}


def test_order_2_nothing_after_a_wait_runs_before_what_the_event_captured() -> None:
    assert all(ran.index("a") < ran.index("x") for ran in outcomes(event_between_streams))


def test_order_2_a_wait_holds_neither_what_comes_before_it_nor_what_comes_after_the_record() -> None:
    found = outcomes(event_between_streams)
    assert {ran.index("early") < ran.index("a") for ran in found} == {True, False}
    assert {ran.index("b") < ran.index("x") for ran in found} == {True, False}


def test_order_2_wait_stream_waits_for_what_the_other_stream_holds_also_through_a_third_one() -> None:
    assert all(ran.index("a") < ran.index("x") for ran in outcomes(chain_of_streams))


def test_order_2_wait_stream_does_not_wait_for_what_the_other_stream_gets_later() -> None:
    assert {ran.index("b") < ran.index("x") for ran in outcomes(chain_of_streams)} == {True, False}


# ORDER-3: a wait refers to the latest record at the time of the call ----------------------------------------


def recorded_again_after_the_wait(lab: Lab) -> Ran:
    event = lab.device.new_event()
    lab.kernel("a", lab.load)
    event.record(lab.load)
    event.wait(lab.compute)
    lab.kernel("b", lab.store)
    event.record(lab.store)
    lab.kernel("x", lab.compute)
    lab.device.synchronize()
    return lab.ran()


def recorded_again_before_the_wait(lab: Lab) -> Ran:
    event = lab.device.new_event()
    lab.kernel("a", lab.load)
    event.record(lab.load)
    lab.kernel("b", lab.store)
    event.record(lab.store)
    event.wait(lab.compute)
    lab.kernel("x", lab.compute)
    lab.device.synchronize()
    return lab.ran()


def waited_for_before_any_record(lab: Lab) -> Ran:
    event = lab.device.new_event()
    lab.compute.wait_event(event)
    lab.kernel("a", lab.load)
    event.record(lab.load)
    lab.kernel("x", lab.compute)
    lab.device.synchronize()
    return lab.ran()


def test_order_3_a_wait_keeps_to_the_record_of_its_time_when_the_event_is_recorded_again() -> None:
    assert all(ran.index("a") < ran.index("x") for ran in outcomes(recorded_again_after_the_wait))


def test_order_3_a_wait_does_not_refer_to_a_later_record() -> None:
    assert {ran.index("b") < ran.index("x") for ran in outcomes(recorded_again_after_the_wait)} == {
        True,
        False,
    }


def test_order_3_a_wait_refers_to_the_latest_of_several_records() -> None:
    assert all(ran.index("b") < ran.index("x") for ran in outcomes(recorded_again_before_the_wait))


def test_order_3_a_wait_forgets_the_records_before_the_latest() -> None:
    assert {ran.index("a") < ran.index("x") for ran in outcomes(recorded_again_before_the_wait)} == {
        True,
        False,
    }


def test_order_3_a_wait_for_an_event_never_recorded_waits_for_nothing() -> None:
    assert outcomes(waited_for_before_any_record) == {("a", "x"), ("x", "a")}


def test_order_3_an_event_never_recorded_is_complete() -> None:
    def program(lab: Lab) -> bool:
        lab.kernel("a", lab.compute)
        event = lab.device.new_event()
        event.synchronize()
        return event.query()

    assert outcomes(program) == {True}


# ORDER-4: query and synchronize -----------------------------------------------------------------------------


def queried(lab: Lab) -> tuple[bool, Ran]:
    lab.kernel("a", lab.load)
    event = lab.load.record_event()
    lab.kernel("b", lab.load)
    return event.query(), lab.ran()


def synchronized(lab: Lab) -> Ran:
    lab.kernel("a", lab.load)
    event = lab.load.record_event()
    lab.kernel("b", lab.load)
    lab.kernel("x", lab.store)
    event.synchronize()
    return lab.ran()


def queried_after_a_second_record(lab: Lab) -> tuple[bool, Ran]:
    event = lab.device.new_event()
    lab.kernel("a", lab.load)
    event.record(lab.load)
    event.synchronize()
    lab.kernel("b", lab.load)
    event.record(lab.load)
    return event.query(), lab.ran()


def queried_stream(lab: Lab) -> tuple[bool, Ran]:
    lab.kernel("a", lab.load)
    lab.kernel("x", lab.store)
    return lab.load.query(), lab.ran()


class Producer:
    """Another host thread, which enqueues one kernel, and logs when."""

    code = "t0"

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._done = False

    def enabled(self) -> bool:
        return not self._done

    def advance(self) -> None:
        self._done = True
        self._lab.log.append("enqueue")
        self._lab.kernel("late", self._lab.load)


def synchronized_beside_a_thread(synchronize: Callable[[Lab], None]) -> Callable[[Lab], tuple[Ran, bool]]:
    """What has run when the call returns, and whether the stream holds more."""

    def program(lab: Lab) -> tuple[Ran, bool]:
        lab.device.add_actor(Producer(lab))
        lab.kernel("a", lab.load)
        synchronize(lab)
        return lab.ran(), lab.load.pending()

    return program


SYNCHRONIZE = pytest.mark.parametrize(
    "synchronize",
    [lambda lab: lab.load.synchronize(), lambda lab: lab.device.synchronize()],
    ids=["stream", "device"],
)


def test_order_4_a_query_is_never_true_before_the_captured_work_has_run() -> None:
    assert (True, ()) not in outcomes(queried)


def test_order_4_a_query_may_be_true_at_once_or_false_after_the_work_has_run() -> None:
    assert outcomes(queried) == {(False, ()), (False, ("a",)), (True, ("a",)), (True, ("a", "b"))}


def test_order_4_synchronize_never_returns_before_the_captured_work_has_run() -> None:
    assert all("a" in ran for ran in outcomes(synchronized))


def test_order_4_anything_else_may_or_may_not_run_while_the_host_is_blocked() -> None:
    with_x = {("x", "a"), ("a", "x"), ("x", "a", "b"), ("a", "x", "b"), ("a", "b", "x")}
    assert outcomes(synchronized) == {("a",), ("a", "b"), *with_x}


def test_order_4_a_query_refers_to_the_latest_record() -> None:
    found = outcomes(queried_after_a_second_record)
    assert (True, ("a",)) not in found
    assert found == {(False, ("a",)), (False, ("a", "b")), (True, ("a", "b"))}


def test_order_4_a_stream_s_query_is_true_exactly_when_the_stream_has_run_empty() -> None:
    found = outcomes(queried_stream)
    assert all(answer == ("a" in ran) for answer, ran in found)
    assert {answer for answer, _ in found} == {True, False}


@SYNCHRONIZE
def test_order_4_a_stream_or_device_is_synchronized_only_when_what_it_held_has_run(synchronize: Any) -> None:
    assert all("a" in ran for ran, _ in outcomes(synchronized_beside_a_thread(synchronize)))


@SYNCHRONIZE
def test_order_4_synchronize_does_not_wait_for_what_another_thread_enqueues_later(synchronize: Any) -> None:
    found = outcomes(synchronized_beside_a_thread(synchronize))
    assert (("enqueue", "a"), True) in found
    assert (("enqueue", "a", "late"), False) in found


def test_order_4_a_device_is_synchronized_only_when_every_stream_s_work_has_run() -> None:
    assert all(len(ran) == 2 for ran in outcomes(unrelated_streams))


# ORDER-1 to ORDER-4 together --------------------------------------------------------------------------------


def exactly_what_the_order_allows(program: list[Call]) -> None:
    def ran(lab: Lab) -> Ran:
        run(lab, program)
        return lab.ran()

    order, _, _ = run(Lab(FairAdversary()), program)
    assert outcomes(ran) == order.linear_extensions()


@FIXED
@DRAWN_SMALL
def test_a_program_s_schedules_give_exactly_the_sequences_that_its_events_allow(program: list[Call]) -> None:
    exactly_what_the_order_allows(program)


def nothing_is_too_early(program: list[Call], choices: bytes) -> None:
    _, breaches, _ = run(Lab(NumberedAdversary(choices)), program)
    assert not breaches


@FIXED
@DRAWN
def test_no_schedule_of_any_program_lets_anything_happen_too_early(program: list[Call], choices: bytes) -> None:
    nothing_is_too_early(program, choices)


# ORDER-5: a batch orders nothing within itself --------------------------------------------------------------


def dependent_copies(lab: Lab) -> tuple[int, int]:
    """A batch whose second copy reads what the first one writes: undefined in CUDA, telling here."""
    lab.copy(lab.load, STREAM, lab.gpu.span_from(1, lab.gpu, 0), lab.gpu.span_from(2, lab.gpu, 1))
    lab.device.synchronize()
    return lab.gpu[1], lab.gpu[2]


def watched_batch(lab: Lab) -> tuple[int, int]:
    """How much of a batch of two has arrived when the host looks."""
    lab.copy(lab.load, STREAM, *(lab.gpu.span_from(at, lab.pinned, at) for at in (0, 1)))
    return lab.gpu[0], lab.gpu[1]


def batch_and_event(lab: Lab) -> Ran:
    """What another stream sees of a batch for whose event it waits."""
    spans = [lab.gpu.span_from(at, lab.pinned, at) for at in range(3)]
    lab.copy(lab.load, STREAM, *spans)
    lab.compute.wait_event(lab.load.record_event())
    for at in range(3):
        lab.read(lab.gpu, at, lab.compute)
    lab.device.synchronize()
    return lab.ran()


def test_order_5_a_copy_may_run_before_or_after_another_of_its_batch() -> None:
    assert outcomes(dependent_copies) == {(10, 10), (10, 11)}


def test_order_5_a_batch_may_be_seen_half_done_from_either_end() -> None:
    assert outcomes(watched_batch) == {(10, 11), (20, 11), (10, 21), (20, 21)}


def test_order_5_whoever_waits_for_a_batch_sees_all_of_it() -> None:
    assert outcomes(batch_and_event) == {("20", "21", "22")}


def test_order_5_every_copy_of_a_batch_runs_once_and_the_observers_are_told() -> None:
    def program(lab: Lab) -> tuple[tuple[int, ...], ...]:
        told: list[Executed] = []
        lab.device.observers.append(told.append)
        spans = tuple(lab.gpu.span_from(at, lab.pinned, at) for at in range(3))
        lab.copy(lab.load, STREAM, *spans)
        lab.device.synchronize()
        assert {executed.stream for executed in told} == {"l0"}
        numbers = {span: number for number, span in enumerate(spans)}
        return tuple(tuple(numbers[span] for span in executed.spans) for executed in told)

    assert outcomes(program) == {((0, 1, 2),), ((2, 1, 0),), ((0,), (1, 2)), ((2,), (1, 0))}


# ORDER-6: when the source is read ---------------------------------------------------------------------------


def source_written_around(order: SrcAccessOrder) -> Callable[[Lab], int]:
    """Before the copy the stream writes 1 to its source (10 at first), after it 2. What arrives?"""

    def program(lab: Lab) -> int:
        lab.write(lab.gpu, 0, 1, lab.store)
        lab.copy(lab.store, order, lab.pinned.span_from(0, lab.gpu, 0))
        lab.write(lab.gpu, 0, 2, lab.store)
        lab.device.synchronize()
        return lab.pinned[0]

    return program


def source_reused_by_the_host(order: SrcAccessOrder) -> Callable[[Lab], int]:
    """The host overwrites the source (20 at first) with 1 as soon as the call has returned. What arrives?"""

    def program(lab: Lab) -> int:
        lab.copy(lab.load, order, lab.gpu.span_from(0, lab.pinned, 0))
        lab.pinned[0] = 1
        lab.device.synchronize()
        return lab.gpu[0]

    return program


def destination_read_before(order: SrcAccessOrder) -> Callable[[Lab], tuple[Ran, int]]:
    """A kernel ahead of the copy reads its destination (10 at first), which the copy sets to 20."""

    def program(lab: Lab) -> tuple[Ran, int]:
        lab.read(lab.gpu, 0, lab.load)
        lab.copy(lab.load, order, lab.gpu.span_from(0, lab.pinned, 0))
        lab.device.synchronize()
        return lab.ran(), lab.gpu[0]

    return program


def test_order_6_stream_reads_the_source_neither_before_nor_after_its_turn() -> None:
    assert outcomes(source_written_around(STREAM)) == {1}


def test_order_6_any_may_read_the_source_before_the_stream_has_written_it_but_not_after_its_turn() -> None:
    assert outcomes(source_written_around(ANY)) == {10, 1}


def test_order_6_during_api_call_reads_the_source_before_the_stream_has_written_it() -> None:
    assert outcomes(source_written_around(DURING_API_CALL)) == {10}


def test_order_6_stream_and_any_may_read_the_source_after_the_call_has_returned() -> None:
    assert outcomes(source_reused_by_the_host(STREAM)) == {20, 1}
    assert outcomes(source_reused_by_the_host(ANY)) == {20, 1}


def test_order_6_during_api_call_never_reads_the_source_after_the_call_has_returned() -> None:
    assert outcomes(source_reused_by_the_host(DURING_API_CALL)) == {20}


@ALL_ORDERS
def test_order_6_the_destination_is_written_in_stream_order_whenever_the_source_is_read(
    order: SrcAccessOrder,
) -> None:
    assert outcomes(destination_read_before(order)) == {(("10",), 20)}


# ORDER-7: pageable memory -----------------------------------------------------------------------------------


def copied_when_the_call_returns(host: str, *, to_gpu: bool) -> Callable[[Lab], bool]:
    """Whether a copy between the GPU and that kind of host memory has run when the call returns."""

    def program(lab: Lab) -> bool:
        memory: Memory = getattr(lab, host)
        target, source = (lab.gpu, memory) if to_gpu else (memory, lab.gpu)
        lab.kernel("a", lab.load)
        wanted = source[0]
        lab.copy(lab.load, STREAM, target.span_from(0, source, 0))
        if target[0] == wanted:
            assert lab.ran() == ("a",)
        return target[0] == wanted

    return program


def mixed_batch(lab: Lab) -> tuple[int, int]:
    lab.copy(lab.load, STREAM, lab.gpu.span_from(0, lab.pinned, 0), lab.gpu.span_from(1, lab.pageable, 1))
    return lab.gpu[0], lab.gpu[1]


BOTH_WAYS = pytest.mark.parametrize("to_gpu", [True, False], ids=["load", "store"])


@BOTH_WAYS
def test_order_7_a_copy_of_registered_memory_may_run_after_the_call_has_returned(to_gpu: bool) -> None:
    assert outcomes(copied_when_the_call_returns("pinned", to_gpu=to_gpu)) == {True, False}


@BOTH_WAYS
def test_order_7_a_copy_of_pageable_memory_has_always_run_when_the_call_returns(to_gpu: bool) -> None:
    assert outcomes(copied_when_the_call_returns("pageable", to_gpu=to_gpu)) == {True}


def test_order_7_one_pageable_copy_makes_its_whole_batch_synchronous() -> None:
    assert outcomes(mixed_batch) == {(20, 31)}


def test_order_7_memory_is_pageable_again_once_it_is_unregistered() -> None:
    def program(lab: Lab) -> bool:
        lab.device.host_unregister(lab.pinned.base)
        return copied_when_the_call_returns("pinned", to_gpu=True)(lab)

    assert outcomes(program) == {True}


# ORDER-8: side streams and the default stream ---------------------------------------------------------------


def side_stream_first(lab: Lab) -> Ran:
    lab.kernel("side", lab.load)
    lab.kernel("default", lab.compute)
    lab.device.synchronize()
    return lab.ran()


def default_stream_first(lab: Lab) -> Ran:
    lab.kernel("default", lab.compute)
    lab.kernel("side", lab.load)
    lab.device.synchronize()
    return lab.ran()


def default_stream_synchronized(lab: Lab) -> Ran:
    lab.kernel("side", lab.load)
    lab.kernel("default", lab.compute)
    lab.compute.synchronize()
    return lab.ran()


def default_stream_joined(lab: Lab) -> Ran:
    lab.kernel("side", lab.load)
    lab.compute.wait_stream(lab.load)
    lab.kernel("default", lab.compute)
    lab.device.synchronize()
    return lab.ran()


def test_order_8_the_default_stream_does_not_wait_for_side_streams_nor_they_for_it() -> None:
    either = {("side", "default"), ("default", "side")}
    assert outcomes(side_stream_first) == either
    assert outcomes(default_stream_first) == either


def test_order_8_synchronizing_the_default_stream_leaves_the_side_streams_alone() -> None:
    assert ("default",) in outcomes(default_stream_synchronized)


def test_order_8_only_an_explicit_wait_puts_the_default_stream_behind_a_side_stream() -> None:
    assert outcomes(default_stream_joined) == {("side", "default")}


# Several ranks ----------------------------------------------------------------------------------------------


def test_a_rank_s_stream_may_wait_for_an_event_of_another_rank_of_the_same_world() -> None:
    def program(lab: Lab) -> Ran:
        other = Lab(lab.adversary, rank=1, actors=lab.device.actors)
        other.log = lab.log
        other.kernel("a", other.compute)
        lab.load.wait_event(other.compute.record_event())
        lab.kernel("x", lab.load)
        lab.device.synchronize()
        return lab.ran()

    assert outcomes(program) == {("a", "x")}


def test_while_one_rank_s_host_is_blocked_another_rank_s_streams_may_run() -> None:
    def program(lab: Lab) -> Ran:
        other = Lab(lab.adversary, rank=1, actors=lab.device.actors)
        other.log = lab.log
        other.kernel("other", other.compute)
        lab.kernel("own", lab.compute)
        lab.device.synchronize()
        return lab.ran()

    assert outcomes(program) == {("own",), ("own", "other"), ("other", "own")}


# Faults -----------------------------------------------------------------------------------------------------


@pytest.fixture
def lab() -> Lab:
    return Lab(FairAdversary())


@pytest.mark.parametrize("handle", [0, 7], ids=["legacy default stream", "no stream"])
def test_a_copy_on_a_handle_that_is_no_stream_of_the_rank_is_a_fault(lab: Lab, handle: int) -> None:
    with pytest.raises(DeviceFault, match=f"0x{handle:x} is no stream of rank 0"):
        lab.device.copy_batch([lab.gpu.span_from(0, lab.pinned, 0)], STREAM, handle)


@pytest.mark.parametrize(
    ("offset", "size", "message"),
    [(3, 2, "leave the memory that ends at"), (-1, 2, "reach into the memory that begins at")],
    ids=["past the end", "before the beginning"],
)
@BOTH_WAYS
def test_a_copy_that_leaves_registered_memory_is_a_fault(
    lab: Lab, offset: int, size: int, message: str, to_gpu: bool
) -> None:
    gpu, host = lab.gpu.base, lab.pinned.base + offset
    span = CopySpan(gpu, host, size) if to_gpu else CopySpan(host, gpu, size)
    with pytest.raises(DeviceFault, match=message):
        lab.device.copy_batch([span], STREAM, lab.load.cuda_stream)


@BOTH_WAYS
def test_a_copy_that_leaves_device_memory_is_a_fault(lab: Lab, to_gpu: bool) -> None:
    gpu, host = lab.gpu.base + 3, lab.pinned.base
    span = CopySpan(gpu, host, 2) if to_gpu else CopySpan(host, gpu, 2)
    with pytest.raises(DeviceFault, match="leave the memory that ends at"):
        lab.device.copy_batch([span], STREAM, lab.load.cuda_stream)


def test_a_copy_between_two_places_on_the_host_is_a_fault(lab: Lab) -> None:
    with pytest.raises(DeviceFault, match="touches no memory of rank 0"):
        lab.copy(lab.load, STREAM, lab.pinned.span_from(0, lab.pageable, 0))


def test_a_copy_to_the_end_of_memory_is_no_fault(lab: Lab) -> None:
    lab.device.copy_batch([CopySpan(lab.gpu.base, lab.pinned.base, 4)], STREAM, lab.load.cuda_stream)
    lab.device.synchronize()
    assert list(lab.gpu.bytes) == [20, 21, 22, 23]


def test_a_faulty_batch_leaves_nothing_on_the_stream(lab: Lab) -> None:
    good = lab.gpu.span_from(0, lab.pinned, 0)
    with pytest.raises(DeviceFault):
        lab.copy(lab.load, STREAM, good, lab.pinned.span_from(0, lab.pageable, 0))
    assert not lab.device.pending()
    assert lab.gpu[0] == 10


def test_an_empty_batch_enqueues_nothing() -> None:
    lab = Lab(NumberedAdversary([]))
    lab.copy(lab.load, STREAM)
    assert not lab.device.pending()


@pytest.mark.parametrize("offset", [0, 3, -3], ids=["the same", "its end", "its beginning"])
@pytest.mark.parametrize("kind", ["pinned", "gpu"])
def test_registering_memory_that_overlaps_known_memory_is_a_fault(lab: Lab, kind: str, offset: int) -> None:
    base = getattr(lab, kind).base + offset
    with pytest.raises(DeviceFault, match="overlap memory that is registered already"):
        lab.device.host_register(base, 4)


def test_a_worker_that_has_registered_no_host_memory_is_no_finding() -> None:
    memory, gpu = Memory(*range(6)), Memory(*range(6))
    device = SimulatedDevice(0, FairAdversary(), [], pageable=False)
    device.add_device_memory(gpu.base, gpu.size)
    with pytest.raises(KvspecError, match="registers memory in a way that kvspec doesn't know"):
        device.copy_batch([CopySpan(gpu.base, memory.base, 4)], STREAM, device.new_stream("load").cuda_stream)


def test_memory_right_beside_registered_memory_can_be_registered(lab: Lab) -> None:
    memory = Memory(*range(6))
    lab.device.host_register(memory.base + 2, 2)
    lab.device.host_register(memory.base, 2)
    lab.device.host_register(memory.base + 4, 2)
    bases = [lab.device.find_region(memory.base + at, 1) for at in range(6)]
    assert [region and region.base - memory.base for region in bases] == [0, 0, 2, 2, 4, 4]


def test_memory_right_beside_registered_memory_is_pageable(lab: Lab) -> None:
    memory = Memory(*range(6))
    lab.device.host_register(memory.base + 2, 2)
    regions = [lab.device.find_region(memory.base + at, 2) for at in (0, 2, 4)]
    assert [region is None for region in regions] == [True, False, True]


def test_memory_can_be_registered_again_after_it_was_unregistered(lab: Lab) -> None:
    lab.device.host_unregister(lab.pinned.base)
    lab.device.host_register(lab.pinned.base, lab.pinned.size)
    region = lab.device.find_region(lab.pinned.base, lab.pinned.size)
    assert region is not None
    assert not region.on_device


@pytest.mark.parametrize(
    ("kind", "offset"),
    [("pageable", 0), ("pinned", 1), ("gpu", 0)],
    ids=["unknown", "inside", "device memory"],
)
def test_unregistering_what_was_not_registered_at_that_address_is_a_fault(lab: Lab, kind: str, offset: int) -> None:
    with pytest.raises(DeviceFault, match="no host memory is registered at"):
        lab.device.host_unregister(getattr(lab, kind).base + offset)


@pytest.mark.parametrize("what", ["an event", "stream l0", "the device"])
def test_a_host_that_waits_for_what_nothing_will_complete_is_a_fault(lab: Lab, what: str) -> None:
    elsewhere = Lab(FairAdversary(), rank=1)
    lab.load.wait_event(elsewhere.compute.record_event())
    waits = {
        "an event": lab.load.record_event().synchronize,
        "stream l0": lab.load.synchronize,
        "the device": lab.device.synchronize,
    }
    with pytest.raises(DeviceFault, match=f"the host waits for {what} of rank 0, which nothing queued"):
        waits[what]()


# The checker sees it when a rule is broken ------------------------------------------------------------------


def wait_is_always_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated._Wait, "ready", lambda self: True)


def newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: SimulatedStream) -> None:
        if self._queue[-1].step():
            self._queue.pop()
            self._completed += 1

    monkeypatch.setattr(SimulatedStream, "advance", advance)


def one_part_ends_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on after the first part of a batch; the others run behind whatever follows."""

    def advance(self: SimulatedStream) -> None:
        operation = self._queue.popleft()
        if not operation.step():
            self._queue.append(operation)
        else:
            self._completed += 1

    monkeypatch.setattr(SimulatedStream, "advance", advance)


def wait_refers_to_the_record_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateWait(simulated._Operation):
        def __init__(self, event: SimulatedEvent) -> None:
            self._event = event

        def ready(self) -> bool:
            return self._event.marker is None or self._event.marker.done

        def step(self) -> bool:
            return True

    monkeypatch.setattr(SimulatedStream, "wait_event", lambda self, event: self.enqueue(LateWait(event)))


def second_record_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SimulatedEvent.record

    def once(self: SimulatedEvent, stream: SimulatedStream | None = None) -> None:
        if self.marker is None:
            record(self, stream)

    monkeypatch.setattr(SimulatedEvent, "record", once)


def query_is_always_true(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(self: SimulatedEvent) -> bool:
        self._device.yield_point()
        return True

    monkeypatch.setattr(SimulatedEvent, "query", query)


def query_is_never_true_early_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too strict: true only when the whole device is idle."""

    def query(self: SimulatedEvent) -> bool:
        self._device.yield_point()
        return not self._device.pending()

    monkeypatch.setattr(SimulatedEvent, "query", query)


def synchronize_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEvent, "synchronize", lambda self: self._device.yield_point())


def synchronize_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too strict: everything has run when any wait returns."""
    monkeypatch.setattr(SimulatedEvent, "synchronize", lambda self: self._device.synchronize())


def with_order(change: dict[SrcAccessOrder, SrcAccessOrder]) -> Callable[[pytest.MonkeyPatch], None]:
    """Treat a source access order as another one."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        copy_batch = SimulatedDevice.copy_batch

        def changed(self: SimulatedDevice, spans: Any, order: SrcAccessOrder, stream: int) -> None:
            copy_batch(self, spans, change.get(order, order), stream)

        monkeypatch.setattr(SimulatedDevice, "copy_batch", changed)

    return patch


def destination_is_written_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_batch = SimulatedDevice.copy_batch

    def eager(self: SimulatedDevice, spans: Sequence[CopySpan], order: SrcAccessOrder, stream: int) -> None:
        self.run_spans("", spans, None)
        copy_batch(self, spans, order, stream)

    monkeypatch.setattr(SimulatedDevice, "copy_batch", eager)


def copies_of_a_batch_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too strict: one batch for each copy."""
    copy_batch = SimulatedDevice.copy_batch

    def one_by_one(self: SimulatedDevice, spans: Any, order: SrcAccessOrder, stream: int) -> None:
        for span in spans:
            copy_batch(self, [span], order, stream)

    monkeypatch.setattr(SimulatedDevice, "copy_batch", one_by_one)


def all_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDevice, "is_pageable", lambda self, span: False)


def no_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDevice, "is_pageable", lambda self, span: True)


def default_stream_is_legacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too strict: work of the default stream waits for the side streams, and they for it."""

    def others(device: SimulatedDevice, stream: SimulatedStream) -> list[SimulatedStream]:
        return device.side_streams if stream is device.default_stream else [device.default_stream]

    monkeypatch.setattr(SimulatedDevice, "launch", launch_behind(others))


def streams_are_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too strict: everything runs in the order in which it was enqueued."""

    def others(device: SimulatedDevice, stream: SimulatedStream) -> list[SimulatedStream]:
        return [other for other in (device.default_stream, *device.side_streams) if other is not stream]

    monkeypatch.setattr(SimulatedDevice, "launch", launch_behind(others))


def launch_behind(
    others: Callable[[SimulatedDevice, SimulatedStream], list[SimulatedStream]],
) -> Callable[..., None]:
    """Return a ``launch`` that makes the stream wait for others first."""
    launch = SimulatedDevice.launch

    def launch_later(
        self: SimulatedDevice, label: str, kernel: Callable[[], None], stream: SimulatedStream | None = None
    ) -> None:
        target = stream or self.compute_stream
        for other in others(self, target):
            target.wait_stream(other)
        launch(self, label, kernel, target)

    return launch_later


def kernels_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too strict: nothing lags behind the host."""
    monkeypatch.setattr(SimulatedDevice, "launch", lambda self, label, kernel, stream=None: kernel())


Breakage = Callable[[pytest.MonkeyPatch], None]
Program = Callable[[Lab], Hashable]

TOO_LAX: dict[str, tuple[Breakage, Program]] = {
    "ORDER-1, the newest operation runs first": (newest_first, one_stream),
    "ORDER-1, a batch is overtaken after its first part": (one_part_ends_a_copy, copy_between_kernels),
    "ORDER-2, a wait never holds": (wait_is_always_ready, event_between_streams),
    "ORDER-2, a wait_stream never holds": (wait_is_always_ready, chain_of_streams),
    "ORDER-3, a second record is ignored": (second_record_is_ignored, recorded_again_before_the_wait),
    "ORDER-4, a query is always true": (query_is_always_true, queried),
    "ORDER-4, a query forgets a second record": (second_record_is_ignored, queried_after_a_second_record),
    "ORDER-4, synchronize returns at once": (synchronize_returns_at_once, synchronized),
    "ORDER-5, a batch's event doesn't cover its second part": (one_part_ends_a_copy, batch_and_event),
    "ORDER-6, STREAM reads early": (with_order({STREAM: ANY}), source_written_around(STREAM)),
    "ORDER-6, DURING_API_CALL reads late": (
        with_order({DURING_API_CALL: STREAM}),
        source_reused_by_the_host(DURING_API_CALL),
    ),
    "ORDER-6, the destination is written early": (
        destination_is_written_at_the_call,
        destination_read_before(ANY),
    ),
    "ORDER-7, a pageable load returns early": (
        all_memory_is_registered,
        copied_when_the_call_returns("pageable", to_gpu=True),
    ),
    "ORDER-7, a pageable store returns early": (
        all_memory_is_registered,
        copied_when_the_call_returns("pageable", to_gpu=False),
    ),
    "ORDER-7, a batch with one pageable copy returns early": (all_memory_is_registered, mixed_batch),
    "ORDER-8, an explicit wait doesn't hold": (wait_is_always_ready, default_stream_joined),
}

TOO_STRICT: dict[str, tuple[Breakage, Program]] = {
    "ORDER-1, kernels run at once": (kernels_run_at_once, one_stream),
    "ORDER-2, all streams are one queue": (streams_are_one_queue, unrelated_streams),
    "ORDER-2, a wait_stream holds for later work": (streams_are_one_queue, chain_of_streams),
    "ORDER-3, a wait refers to the record of its turn": (
        wait_refers_to_the_record_of_its_turn,
        recorded_again_after_the_wait,
    ),
    "ORDER-3, a wait refers to a first record that comes later": (
        wait_refers_to_the_record_of_its_turn,
        waited_for_before_any_record,
    ),
    "ORDER-4, a query is true only when the device is idle": (
        query_is_never_true_early_in_the_queue,
        queried,
    ),
    "ORDER-4, synchronize waits for the device": (synchronize_waits_for_the_device, synchronized),
    "ORDER-5, a batch runs in order": (copies_of_a_batch_run_in_order, dependent_copies),
    "ORDER-6, ANY is read in stream order": (with_order({ANY: STREAM}), source_written_around(ANY)),
    "ORDER-6, ANY is read during the call": (
        with_order({ANY: DURING_API_CALL}),
        source_reused_by_the_host(ANY),
    ),
    "ORDER-7, a registered copy is synchronous": (
        no_memory_is_registered,
        copied_when_the_call_returns("pinned", to_gpu=True),
    ),
    "ORDER-8, the default stream waits for side streams": (default_stream_is_legacy, side_stream_first),
    "ORDER-8, side streams wait for the default stream": (default_stream_is_legacy, default_stream_first),
}


@pytest.mark.parametrize(("breakage", "program"), TOO_LAX.values(), ids=TOO_LAX)
def test_a_device_that_lets_too_much_happen_is_seen(
    monkeypatch: pytest.MonkeyPatch, breakage: Breakage, program: Program
) -> None:
    allowed = outcomes(program)
    breakage(monkeypatch)
    assert outcomes(program) - allowed


@pytest.mark.parametrize(("breakage", "program"), TOO_STRICT.values(), ids=TOO_STRICT)
def test_a_device_that_lets_too_little_happen_is_seen(
    monkeypatch: pytest.MonkeyPatch, breakage: Breakage, program: Program
) -> None:
    allowed = outcomes(program)
    breakage(monkeypatch)
    assert allowed - outcomes(program)


@pytest.mark.parametrize(
    "breakage",
    [
        newest_first,
        wait_is_always_ready,
        second_record_is_ignored,
        query_is_always_true,
        synchronize_returns_at_once,
    ],
    ids=lambda breakage: breakage.__name__,
)
def test_drawn_programs_see_a_broken_device(monkeypatch: pytest.MonkeyPatch, breakage: Breakage) -> None:
    search = settings(FIXED, phases=[Phase.generate])(DRAWN(nothing_is_too_early))
    breakage(monkeypatch)
    with pytest.raises(AssertionError, match="assert not"):
        search()


@pytest.mark.parametrize(
    "breakage",
    [wait_is_always_ready, kernels_run_at_once],
    ids=lambda breakage: breakage.__name__,
)
def test_drawn_small_programs_see_a_device_that_is_broken_either_way(
    monkeypatch: pytest.MonkeyPatch, breakage: Breakage
) -> None:
    search = settings(FIXED, phases=[Phase.generate])(DRAWN_SMALL(exactly_what_the_order_allows))
    breakage(monkeypatch)
    with pytest.raises(AssertionError, match=r"assert \{"):
        search()
