"""Points the names that worker code calls (``torch.cuda.Stream``, ``torch.Event`` …) at a simulated device.

PyTorch resolves these names at call time, so replacing attributes is enough, and no file of the target is
touched. Which device answers is decided by :func:`use`: the worker of rank r runs inside ``use(devices[r])``.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from kvspec.device.protocol import CopySpan, SrcAccessOrder
from kvspec.device.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream

_STREAM_LETTERS = "lsxyzabdefgijkmnopqruvw"  # In the order of creation; both workers create the load stream first.

_current: SimulatedDevice | None = None


def current_device() -> SimulatedDevice:
    """Return the device of the rank whose code is running."""
    if _current is None:
        raise RuntimeError("CUDA was called outside of a rank: wrap the call in kvspec.device.cuda_names.use(device)")
    return _current


def use(device: SimulatedDevice | None) -> SimulatedDevice | None:
    """Make ``device`` answer from now on; return the one that did before."""
    global _current
    before, _current = _current, device
    return before


def code_of_a_rank_runs() -> bool:
    """Whether worker code is on the stack: ranks are interleaved between their messages, not inside one."""
    return _current is not None


class _Stream:
    """Stands for the class ``torch.cuda.Stream``: calling it makes a stream of the current device."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        current = current_device()
        generation, letter = divmod(len(current.side_streams), len(_STREAM_LETTERS))
        return current.new_stream(_STREAM_LETTERS[letter], generation)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (lowest, highest) priority, as CUDA numbers them."""
        return 0, -1


def _new_event(device: Any = None, **_: Any) -> SimulatedEvent:
    return current_device().new_event()


def _current_stream(device: Any = None) -> SimulatedStream:
    return current_device().compute_stream


@contextmanager
def _stream_context(stream: SimulatedStream | None) -> Iterator[None]:
    device = current_device()
    before = device.compute_stream
    if stream is not None:
        device.compute_stream = stream
    try:
        yield
    finally:
        device.compute_stream = before


def _cudart() -> SimpleNamespace:
    def host_register(address: int, size: int, flags: int) -> SimpleNamespace:
        current_device().host_register(address, size)
        return SimpleNamespace(value=0)

    def host_unregister(address: int) -> SimpleNamespace:
        current_device().host_unregister(address)
        return SimpleNamespace(value=0)

    return SimpleNamespace(cudaHostRegister=host_register, cudaHostUnregister=host_unregister)


def batch_memcpy(
    dsts: int,
    srcs: int,
    sizes: int,
    count: int,
    attrs: int,
    attrs_idx: Any,
    num_attrs: int,
    fail_idx: Any,
    stream: int,
) -> int:
    """``cuMemcpyBatchAsync`` as called through ctypes.

    The first three are addresses of ``count`` 64-bit integers each, valid during the call only; the first
    field of ``attrs`` is the source access order of all copies.
    """
    if num_attrs > 1:
        raise NotImplementedError(f"{num_attrs} attributes in one batch: only one, for all copies, is simulated")
    array = ctypes.c_uint64 * count
    spans = [
        CopySpan(*span)
        for span in zip(array.from_address(dsts), array.from_address(srcs), array.from_address(sizes), strict=True)
    ]
    order = SrcAccessOrder(ctypes.c_uint.from_address(attrs).value) if num_attrs else SrcAccessOrder.STREAM
    current_device().copy_batch(spans, order, stream)
    return 0


class ThreadActor:
    """Stands for ``threading.Thread`` around a copy loop: when woken, the real loop runs for one item."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> None:
        self._device = current_device()
        self._target = target
        self._args = args
        self._inbox = next(arg for arg in args if isinstance(arg, OneItemQueue))
        self._running = False
        self.code = f"t{self._device.rank}"

    def start(self) -> None:
        self._device.add_actor(self)

    def join(self, timeout: float | None = None) -> None:
        """Nothing to wait for: the loop runs inside ``advance``."""

    def enabled(self) -> bool:
        """Whether an item waits, and the thread isn't at one: the loop's own calls are yield points."""
        return not self._running and not self._inbox.empty()

    def advance(self) -> None:
        """Handle one item, on the default stream: PyTorch keeps the current stream per thread."""
        device = self._device
        before, stream = use(device), device.compute_stream
        device.compute_stream = device.default_stream
        self._running = True
        self._inbox.arm()
        try:
            self._target(*self._args)
        finally:
            self._running = False
            device.compute_stream = stream
            use(before)


class OneItemQueue:
    """Stands for ``queue.SimpleQueue`` between a worker and its copy thread.

    After ``arm`` it gives out one item and then ``None``, on which the copy loop returns.
    """

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._armed = False

    def arm(self) -> None:
        self._armed = True

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        if not self._armed:
            return None
        self._armed = False
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _new_event),
    (torch.cuda, "current_stream", _current_stream),
    (torch.cuda, "stream", _stream_context),
    (torch.cuda, "cudart", _cudart),
    (torch.cuda, "synchronize", lambda device=None: current_device().synchronize()),
    (torch, "Event", _new_event),
)


@contextmanager
def installed(more: tuple[tuple[Any, str, Any], ...] = ()) -> Iterator[None]:
    """Replace the names while in the context; ``more`` are the target's own (object, attribute, stand-in)."""
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, stand_in in (*_REPLACED, *more):
            original = getattr(owner, name)
            setattr(owner, name, stand_in)
            replaced.append((owner, name, original))
        yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)
