"""A device to experiment on, every schedule of a program on it, and what the rules say of the same program.

``Order`` states ORDER-1 to ORDER-4 without a device: the two sides that the tests hold against each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import strategies as st

from kvspec.device.adversary import Actor, Adversary
from kvspec.device.protocol import CopySpan, SrcAccessOrder
from kvspec.device.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream

Outcome = TypeVar("Outcome", bound=Hashable)

SCHEDULES_MAX = 20_000
"""A program with more schedules than this is too large for a test that runs them all."""


class NumberedAdversary(Adversary):
    """Takes its choices from a list of numbers, 0 beyond its end; remembers how many options each had."""

    def __init__(self, choices: Sequence[int]) -> None:
        super().__init__()
        self._choices = choices
        self.taken: list[tuple[int, int]] = []

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        choice = self._choose(len(enabled) + 1)
        return enabled[choice - 1] if choice else None

    def pick_while_blocked(self, enabled: Sequence[Actor]) -> Actor:
        return enabled[self._choose(len(enabled))]

    def answer(self) -> bool:
        return bool(self._choose(2))

    def _choose(self, options: int) -> int:
        at = len(self.taken)
        choice = self._choices[at] % options if at < len(self._choices) else 0
        self.taken.append((choice, options))
        return choice


class Memory:
    """A few bytes at a known address."""

    def __init__(self, *values: int) -> None:
        self.bytes = (ctypes.c_ubyte * len(values))(*values)
        self.base = ctypes.addressof(self.bytes)
        self.size = len(values)

    def __getitem__(self, at: int) -> int:
        return self.bytes[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.bytes[at] = value

    def span_from(self, at: int, source: Memory, source_at: int) -> CopySpan:
        return CopySpan(self.base + at, source.base + source_at, 1)


class Lab:
    """One rank: three streams, four bytes of each kind of memory, and a log of the kernels that have run."""

    def __init__(self, adversary: Adversary, rank: int = 0, actors: list[Actor] | None = None) -> None:
        self.adversary = adversary
        self.device = SimulatedDevice(rank, adversary, [] if actors is None else actors)
        self.compute = self.device.compute_stream
        self.load = self.device.new_stream("l")
        self.store = self.device.new_stream("s")
        self.streams = (self.compute, self.load, self.store)
        self.gpu = Memory(10, 11, 12, 13)
        self.pinned = Memory(20, 21, 22, 23)
        self.pageable = Memory(30, 31, 32, 33)
        self.device.add_device_memory(self.gpu.base, self.gpu.size)
        self.device.host_register(self.pinned.base, self.pinned.size)
        self.log: list[str] = []

    def kernel(self, label: str, stream: SimulatedStream) -> None:
        """Launch a kernel that logs its name."""
        self.device.launch(label, lambda: self.log.append(label), stream)

    def write(self, memory: Memory, at: int, value: int, stream: SimulatedStream) -> None:
        """Launch a kernel that writes a byte."""
        self.device.launch("write", lambda: memory.__setitem__(at, value), stream)

    def read(self, memory: Memory, at: int, stream: SimulatedStream) -> None:
        """Launch a kernel that logs a byte."""
        self.device.launch("read", lambda: self.log.append(str(memory[at])), stream)

    def copy(self, stream: SimulatedStream, order: SrcAccessOrder, *spans: CopySpan) -> None:
        self.device.copy_batch(spans, order, stream.cuda_stream)

    def ran(self) -> tuple[str, ...]:
        return tuple(self.log)


def schedules(program: Callable[[Lab], Outcome], schedules_max: int = SCHEDULES_MAX) -> Iterator[tuple[str, Outcome]]:
    """Run the program under every schedule, depth first. Yield each with what the program returns."""
    choices: list[int] = []
    for _ in range(schedules_max):
        adversary = NumberedAdversary(choices)
        outcome = program(Lab(adversary))
        yield adversary.take_schedule(), outcome
        taken = adversary.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        choices = [choice for choice, _ in taken]
        choices[-1] += 1
    raise AssertionError(f"the program has more than {schedules_max} schedules")


def outcomes(program: Callable[[Lab], Outcome]) -> set[Outcome]:
    """Everything that can happen."""
    return {outcome for _, outcome in schedules(program)}


# Programs as data -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of the host: ``stream`` and ``other`` are numbers of streams, ``event`` of events."""

    kind: str
    stream: int = 0
    event: int = 0
    other: int = 0


ENQUEUEING = ("launch", "record", "wait", "join")
LOOKING = ("query", "idle", "synchronize", "drain", "yield")
EVENTS = 2


def calls(kinds: Sequence[str], max_size: int, min_size: int = 0) -> st.SearchStrategy[list[Call]]:
    """Programs of so many calls. Launches are more frequent than anything else."""
    every_call = [
        Call(kind, stream, event, other)
        for kind in ("launch", "launch", *kinds)
        for stream in range(3)
        for event in range(EVENTS)
        for other in range(3)
    ]
    return st.lists(st.sampled_from(every_call), min_size=min_size, max_size=max_size)


@dataclass
class Order:
    """What must have run before what."""

    front: list[frozenset[str]] = field(default_factory=lambda: [frozenset()] * 3)
    """Per stream: the kernels that come before whatever is enqueued next."""
    captured: list[frozenset[str]] = field(default_factory=lambda: [frozenset()] * EVENTS)
    """Per event: the kernels that its latest record captured."""
    before: dict[str, frozenset[str]] = field(default_factory=dict)
    """Per kernel: the kernels that come before it."""

    def launch(self, kernel: str, stream: int) -> None:
        self.before[kernel] = self.front[stream]
        self.front[stream] |= {kernel}

    def record(self, event: int, stream: int) -> None:
        self.captured[event] = self.front[stream]

    def wait(self, stream: int, event: int) -> None:
        self.front[stream] |= self.captured[event]

    def join(self, stream: int, other: int) -> None:
        self.front[stream] |= self.front[other]

    def linear_extensions(self) -> set[tuple[str, ...]]:
        """Every sequence of all kernels that the order allows."""
        return set(_extensions(self.before, ()))


def _extensions(before: dict[str, frozenset[str]], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if len(prefix) == len(before):
        yield prefix
    for kernel, needed in before.items():
        if kernel not in prefix and needed <= set(prefix):
            yield from _extensions(before, (*prefix, kernel))


def run(lab: Lab, program: Sequence[Call]) -> tuple[Order, list[str], list[bool]]:
    """Apply each call to the device and to ``Order``.

    Return the order, a sentence for each thing that happened too early, and the answers to queries.
    """
    order, breaches, answers = Order(), list[str](), list[bool]()
    events: list[SimulatedEvent] = [lab.device.new_event() for _ in range(EVENTS)]

    def require(kernels: frozenset[str], by: str) -> None:
        if missing := kernels - set(lab.log):
            breaches.append(f"{by} before {sorted(missing)} had run")

    for number, call in enumerate(program):
        stream, event, other = lab.streams[call.stream], events[call.event], lab.streams[call.other]
        match call.kind:
            case "launch":
                lab.kernel(f"{number}", stream)
                order.launch(f"{number}", call.stream)
            case "record":
                event.record(stream)
                order.record(call.event, call.stream)
            case "wait":
                stream.wait_event(event)
                order.wait(call.stream, call.event)
            case "join":
                stream.wait_stream(other)
                order.join(call.stream, call.other)
            case "query":
                answers.append(event.query())
                if answers[-1]:
                    require(order.captured[call.event], "the event's query was true")
            case "idle":
                answers.append(stream.query())
                if answers[-1]:
                    require(order.front[call.stream], "the stream's query was true")
            case "synchronize":
                event.synchronize()
                require(order.captured[call.event], "the event's synchronize returned")
            case "drain":
                stream.synchronize()
                require(order.front[call.stream], "the stream's synchronize returned")
            case "yield":
                lab.device.yield_point()
    lab.device.synchronize()
    require(frozenset(order.before), "the device's synchronize returned")
    for at, kernel in enumerate(lab.log):
        if missing := order.before[kernel] - set(lab.log[:at]):
            breaches.append(f"{kernel} ran before {sorted(missing)}")
    return order, breaches, answers
