"""What an offload worker may ask of a CUDA device, and what it may rely on.

Two backends can stand behind this protocol: a simulation on CPU tensors (``simulated``), and a real GPU.
The worker under test never sees these types by name: it calls ``torch.cuda``, ``torch.Event`` and the batched
copy entry of the driver, which :mod:`kvspec.device.cuda_names` points at a device of this protocol.

The guarantees, each with the CUDA documentation's own term:

* ORDER-1  operations of one stream run in the order in which they were enqueued (*stream order*);
* ORDER-2  operations of different streams are unordered, except through events (``wait_event``);
* ORDER-3  a wait refers to the latest record *at the time of the call*; an event never recorded is complete;
* ORDER-4  ``query`` is true, and ``synchronize`` returns, only after everything captured by the record has
  run;
* ORDER-5  a batched copy orders nothing within the batch;
* ORDER-6  with source access order STREAM the source is read in stream order, with ANY as early as the
  enqueue, with DURING_API_CALL before the call returns;
* ORDER-7  copies from or to host memory that isn't registered (pageable) are synchronous with the host;
* ORDER-8  side streams don't synchronize with the legacy default stream (``cudaStreamNonBlocking``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, Self, TypeVar

Event = TypeVar("Event", bound="DeviceEvent[Any]")
Event_co = TypeVar("Event_co", bound="DeviceEvent[Any]", covariant=True)
Stream = TypeVar("Stream", bound="DeviceStream[Any]")
Stream_contra = TypeVar("Stream_contra", bound="DeviceStream[Any]", contravariant=True)


class SrcAccessOrder(IntEnum):
    """``CUmemcpySrcAccessOrder`` of the CUDA driver API (12.8)."""

    STREAM = 1
    DURING_API_CALL = 2
    ANY = 3


class CopySpan(NamedTuple):
    """One member of a batched copy: addresses in bytes, ``size`` in bytes."""

    dst: int
    src: int
    size: int


class DeviceEvent(Protocol[Stream_contra]):
    """``torch.Event`` as a worker uses it."""

    def record(self, stream: Stream_contra | None = None) -> None:
        """Capture what the stream holds now; replaces an earlier record."""

    def wait(self, stream: Stream_contra | None = None) -> None:
        """Make the stream wait for the latest record."""

    def query(self) -> bool:
        """Whether everything captured by the latest record has run."""

    def elapsed_time(self, end: Self) -> float:
        """Return the milliseconds from this event to ``end``; an error unless both have been reached."""

    def synchronize(self) -> None:
        """Block the host until ``query`` is true."""


class DeviceStream(Protocol[Event]):
    """``torch.cuda.Stream`` as a worker uses it."""

    @property
    def cuda_stream(self) -> int:
        """The raw handle that the driver API takes."""

    def wait_event(self, event: Event) -> None:
        """Later operations of this stream wait for the event's latest record."""

    def wait_stream(self, stream: Self) -> None:
        """Later operations of this stream wait for what the other one holds now."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event (a new one if none is given) on this stream."""

    def query(self) -> bool:
        """Whether the stream is empty."""

    def synchronize(self) -> None:
        """Block the host until what the stream holds now has run."""


class Device(Protocol[Stream, Event_co]):
    """One GPU: streams, events, batched copies, registered host memory."""

    def new_stream(self, name: str) -> Stream:
        """Create a stream that doesn't synchronize with any other."""

    def new_event(self) -> Event_co:
        """Create an event that was never recorded."""

    @property
    def compute_stream(self) -> Stream:
        """The stream on which the model's forward is launched (``current_stream``)."""

    def launch(self, label: str, run: Callable[[], None], stream: Stream | None = None) -> None:
        """Enqueue a kernel; ``stream`` defaults to the compute stream."""

    def copy_batch(self, spans: Sequence[CopySpan], order: SrcAccessOrder, stream: int) -> None:
        """Enqueue ``cuMemcpyBatchAsync`` on the stream with that raw handle."""

    def host_register(self, address: int, size: int) -> None:
        """Page-lock ``size`` bytes of host memory (``cudaHostRegister``)."""

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register`` of the memory that begins at ``address``."""

    def synchronize(self) -> None:
        """Block the host until what every stream holds now has run."""
