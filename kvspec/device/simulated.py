"""A CUDA device on CPU memory that does only what CUDA guarantees.

Every operation is queued. Nothing runs until the adversary advances a stream, so whatever order the
guarantees of :mod:`kvspec.device.protocol` allow can happen, and nothing else. It doesn't model time,
bandwidth, or a copy that is torn inside one span; a batch can run in two parts and in either direction, and a
source that may be read early is read at the call or in stream order, not in between.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from kvspec.device.adversary import Actor, Adversary
from kvspec.device.protocol import CopySpan, Device, SrcAccessOrder
from kvspec.errors import KvspecError


class DeviceFault(Exception):
    """What a GPU would answer with an error, or a host that waits for ever."""


class Region(NamedTuple):
    """A range of memory that the device knows. ``base`` and ``size`` in bytes."""

    base: int
    size: int
    on_device: bool


class Executed(NamedTuple):
    """Copies that have just run, told to the device's observers."""

    stream: str
    spans: Sequence[CopySpan]
    by_kernel: bool = False
    """Done by a kernel, not by a copy engine."""
    label: int | None = None
    """The device's label when the copies were enqueued."""


class Marker:
    """One record of an event."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class _Operation:
    """Something queued on a stream. ``step`` runs one part and says whether it was the last."""

    __slots__ = ()

    def ready(self) -> bool:
        return True

    def step(self) -> bool:
        raise NotImplementedError


class _Kernel(_Operation):
    __slots__ = ("_run", "label")

    def __init__(self, label: str, run: Callable[[], None]) -> None:
        self.label = label
        self._run = run

    def step(self) -> bool:
        self._run()
        return True


class _Record(_Operation):
    __slots__ = ("_marker",)

    def __init__(self, marker: Marker) -> None:
        self._marker = marker

    def step(self) -> bool:
        self._marker.done = True
        return True


class _Wait(_Operation):
    __slots__ = ("_marker",)

    def __init__(self, marker: Marker) -> None:
        self._marker = marker

    def ready(self) -> bool:
        return self._marker.done

    def step(self) -> bool:
        return True


class _Copy(_Operation):
    """A batched copy: its spans in the order and the parts that the adversary chose."""

    __slots__ = ("_device", "_label", "_parts", "_snapshots", "_stream")

    def __init__(
        self,
        device: SimulatedDevice,
        stream: str,
        parts: list[Sequence[CopySpan]],
        snapshots: dict[CopySpan, bytes] | None,
    ) -> None:
        self._device = device
        self._label = device.label
        self._stream = stream
        self._parts = parts
        self._snapshots = snapshots

    def step(self) -> bool:
        spans = self._parts.pop(0)
        self._device.run_spans(self._stream, spans, self._snapshots, label=self._label)
        return not self._parts


class SimulatedEvent:
    """A ``torch.Event`` of a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.marker: Marker | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.marker = Marker()
        (stream or self._device.compute_stream).enqueue(_Record(self.marker))

    def wait(self, stream: SimulatedStream | None = None) -> None:
        (stream or self._device.compute_stream).wait_event(self)

    def query(self) -> bool:
        self._device.yield_point()
        return self.marker is None or self.marker.done

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return milliseconds, always 1: the device has no clock. DeviceFault unless both records have run."""
        if not all(event.marker is not None and event.marker.done for event in (self, end)):
            raise DeviceFault("the time between two events was asked for before both of them had been reached")
        return 1.0

    def synchronize(self) -> None:
        marker = self.marker
        if marker is not None:
            self._device.block_until(lambda: marker.done, "an event")


class SimulatedStream:
    """A ``torch.cuda.Stream`` of a simulated device, and the actor that runs what is queued on it."""

    def __init__(self, device: SimulatedDevice, code: str, handle: int) -> None:
        self._device = device
        self.code = code
        self.cuda_stream = handle
        self._queue: deque[_Operation] = deque()
        self._completed = 0

    def enqueue(self, operation: _Operation) -> None:
        self._queue.append(operation)

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.marker is not None:
            self.enqueue(_Wait(event.marker))

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or self._device.new_event()
        event.record(self)
        return event

    def query(self) -> bool:
        self._device.yield_point()
        return not self._queue

    def synchronize(self) -> None:
        self._device.block_until(self.when_drained(), f"stream {self.code}")

    def when_drained(self) -> Callable[[], bool]:
        """Return a test for whether what the stream holds now has run, whatever is enqueued later."""
        goal = self._completed + len(self._queue)
        return lambda: self._completed >= goal

    def enabled(self) -> bool:
        queue = self._queue
        return bool(queue) and queue[0].ready()

    def advance(self) -> None:
        if self._queue[0].step():
            self._queue.popleft()
            self._completed += 1

    def pending(self) -> bool:
        return bool(self._queue)


class SimulatedDevice:
    """One GPU of a world.

    ``actors`` are shared by all devices of a world: while one host waits, everything else may go on. ``rank``
    numbers the device; stream codes are a letter and the rank. ``pageable`` is false where a worker registers
    all the host memory that it copies from and to: an address outside of it is out of bounds then.
    """

    def __init__(self, rank: int, adversary: Adversary, actors: list[Actor], *, pageable: bool = True) -> None:
        self.rank = rank
        self._pageable = pageable
        self.adversary = adversary
        self.observers: list[Callable[[Executed], None]] = []
        self.label: int | None = None
        """What the host is at; copies that it enqueues meanwhile bear it when they execute."""
        self.actors = actors
        self._handles = count(0x1000)
        self._streams: dict[int, SimulatedStream] = {}
        self.side_streams: list[SimulatedStream] = []
        self._bases: list[int] = []
        self._regions: list[Region] = []
        self.default_stream = self.compute_stream = self._create_stream("c")

    # Streams and events -------------------------------------------------------------------------------------

    def new_stream(self, name: str, generation: int = 0) -> SimulatedStream:
        """Create a side stream; ``name`` is its letter in schedules, ``generation`` tells streams of one letter
        apart."""
        stream = self._create_stream(name, generation)
        self.side_streams.append(stream)
        return stream

    def _create_stream(self, name: str, generation: int = 0) -> SimulatedStream:
        number = f"{self.rank}" if not generation else f"{generation}{self.rank:02}"
        stream = SimulatedStream(self, f"{name}{number}", next(self._handles))
        self._streams[stream.cuda_stream] = stream
        self.actors.append(stream)
        return stream

    def add_actor(self, actor: Actor) -> None:
        """Let the adversary wake something else of this rank: a copy thread."""
        self.actors.append(actor)

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def launch(self, label: str, run: Callable[[], None], stream: SimulatedStream | None = None) -> None:
        """Enqueue a kernel. Not a yield point: a forward is many launches."""
        (stream or self.compute_stream).enqueue(_Kernel(label, run))

    def yield_point(self) -> None:
        """The host has made a call: let the adversary act."""
        self.adversary.yield_to(self.actors)

    def block_until(self, done: Callable[[], bool], what: str) -> None:
        """The host waits, then yields. DeviceFault if nothing that could still run would end the wait."""
        if not self.adversary.block(self.actors, done):
            raise DeviceFault(f"the host waits for {what} of rank {self.rank}, which nothing queued will complete")
        self.yield_point()

    def synchronize(self) -> None:
        drained = [stream.when_drained() for stream in self._streams.values()]
        self.block_until(lambda: all(test() for test in drained), "the device")

    def pending(self) -> bool:
        """Whether any stream holds work."""
        return any(stream.pending() for stream in self._streams.values())

    # Memory -------------------------------------------------------------------------------------------------

    def add_device_memory(self, base: int, size: int) -> None:
        """Declare ``size`` bytes at ``base`` to be this GPU's."""
        self._add_region(Region(base, size, on_device=True))

    def host_register(self, address: int, size: int) -> None:
        """``cudaHostRegister``; DeviceFault if the range overlaps one that is registered already."""
        self._add_region(Region(address, size, on_device=False))

    def host_unregister(self, address: int) -> None:
        """``cudaHostUnregister``; DeviceFault if no registered memory begins there."""
        at = bisect_right(self._bases, address) - 1
        if at < 0 or self._bases[at] != address or self._regions[at].on_device:
            raise DeviceFault(f"no host memory is registered at {address:#x}")
        del self._bases[at], self._regions[at]

    def _add_region(self, region: Region) -> None:
        at = bisect_right(self._bases, region.base)
        before = self._regions[at - 1] if at else None
        after = self._regions[at] if at < len(self._regions) else None
        if (before and before.base + before.size > region.base) or (after and region.base + region.size > after.base):
            raise DeviceFault(f"{region.size} bytes at {region.base:#x} overlap memory that is registered already")
        self._bases.insert(at, region.base)
        self._regions.insert(at, region)

    def find_region(self, address: int, size: int) -> Region | None:
        """Return the region that holds the range, None if it touches none; DeviceFault if it leaves one."""
        after = bisect_right(self._bases, address)
        if after:
            region = self._regions[after - 1]
            end = region.base + region.size
            if address + size <= end:
                return region
            if address < end:
                raise DeviceFault(f"{size} bytes at {address:#x} leave the memory that ends at {end:#x}")
        if after < len(self._bases) and address + size > self._bases[after]:
            raise DeviceFault(
                f"{size} bytes at {address:#x} reach into the memory that begins at {self._bases[after]:#x}"
            )
        return None

    # Copies -------------------------------------------------------------------------------------------------

    def copy_batch(self, spans: Sequence[CopySpan], order: SrcAccessOrder, stream: int) -> None:
        """Enqueue a batched copy. DeviceFault for an unknown stream, and for a span that isn't this GPU's."""
        target = self._streams.get(stream)
        if target is None:
            raise DeviceFault(f"{stream:#x} is no stream of rank {self.rank}")
        if not spans:
            return
        pageable = [self.is_pageable(span) for span in spans]
        decide = self.adversary.decide
        early = order is SrcAccessOrder.DURING_API_CALL or (order is SrcAccessOrder.ANY and decide())
        snapshots = {span: ctypes.string_at(span.src, span.size) for span in spans} if early else None
        ordered = list(reversed(spans)) if len(spans) > 1 and decide() else list(spans)
        parts: list[Sequence[CopySpan]] = [ordered]
        if len(ordered) > 1 and decide():
            middle = len(ordered) // 2
            parts = [ordered[:middle], ordered[middle:]]
        target.enqueue(_Copy(self, target.code, parts, snapshots))
        if any(pageable):
            target.synchronize()
        self.yield_point()

    def is_pageable(self, span: CopySpan) -> bool:
        """Whether one end of a copy isn't registered.

        DeviceFault if it leaves the memory that it begins in; KvspecError if the worker has registered no host memory.
        """
        source, destination = self.find_region(span.src, span.size), self.find_region(span.dst, span.size)
        if not any(region is not None and region.on_device for region in (source, destination)):
            raise DeviceFault(f"a copy from {span.src:#x} to {span.dst:#x} touches no memory of rank {self.rank}")
        pageable = source is None or destination is None
        if pageable and not self._pageable:
            if all(region.on_device for region in self._regions):
                raise KvspecError(
                    "The worker copies from or to host memory and has registered none with the simulated device: it "
                    "registers memory in a way that kvspec doesn't know in this release."
                )
            raise DeviceFault(f"a copy from {span.src:#x} to {span.dst:#x} leaves the host memory that was registered")
        return pageable

    def run_spans(
        self,
        stream: str,
        spans: Sequence[CopySpan],
        snapshots: dict[CopySpan, bytes] | None,
        by_kernel: bool = False,
        label: int | None = None,
    ) -> None:
        """Move the bytes, then tell the observers."""
        if snapshots is None:
            for dst, src, size in spans:
                ctypes.memmove(dst, src, size)
        else:
            for span in spans:
                ctypes.memmove(span.dst, snapshots[span], span.size)
        executed = Executed(stream, spans, by_kernel, label)
        for observer in self.observers:
            observer(executed)


if TYPE_CHECKING:
    _conforms: type[Device[SimulatedStream, SimulatedEvent]] = SimulatedDevice
