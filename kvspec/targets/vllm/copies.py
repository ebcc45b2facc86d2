"""The block copies of OffloadingConnector's worker, on a simulated device.

Both kinds get their addresses in three int64 tensors (sources, destinations, sizes in bytes). The copy engine's
``swap_blocks_batch`` reads them during the call, like ``cuMemcpyBatchAsync``. The Triton kernel reads them on the
device when it runs, from a copy that was made on the device in stream order. Source: vLLM 0.33.0, _custom_ops.py
(swap_blocks_batch), v1/kv_offload/cpu/swap_blocks_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvspec.device.cuda_names import current_device
from kvspec.device.protocol import CopySpan, SrcAccessOrder
from kvspec.device.simulated import DeviceFault
from kvspec.errors import KvspecError

_tensor_to = torch.Tensor.to
_zeros = torch.zeros
_empty = torch.empty


def swap_blocks_batch(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    """Stand for the custom op: one batched copy on the current stream."""
    device = current_device()
    order = SrcAccessOrder.ANY if is_src_access_order_any else SrcAccessOrder.STREAM
    device.copy_batch(_spans(src_ptrs, dst_ptrs, sizes), order, device.compute_stream.cuda_stream)


class SwapKernel:
    """Stands for the Triton kernel: ``kernel[grid](src, dst, sizes, n, BYTES_PER_CHUNK=…)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, count: int, **_: Any) -> None:
        device = current_device()
        stream = device.compute_stream
        label = device.label
        backwards = device.adversary.decide()  # programs of one launch are unordered

        def run() -> None:
            spans = _spans(src, dst, sizes)[:count]
            if any([device.is_pageable(span) for span in spans]):
                raise DeviceFault("a kernel reads or writes host memory that isn't registered")
            device.run_spans(stream.code, spans[::-1] if backwards else spans, None, by_kernel=True, label=label)

        device.launch("swap_blocks", run, stream)
        device.yield_point()


def tensor_to(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
    """Stand for ``torch.Tensor.to``: pinned host memory to the device is copied in stream order, read when it runs."""
    if args != ("cuda",):
        return _tensor_to(self, *args, **more)
    if not more.get("non_blocking"):
        raise KvspecError("The target waits for a copy to the GPU, which the simulated device doesn't have yet.")
    on_device = torch.empty_like(self)

    def upload() -> None:
        on_device.copy_(self)

    current_device().launch("upload", upload)
    return on_device


def pinned_zeros(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
    """Stand for ``torch.zeros``: pinned memory is registered with the device."""
    tensor = _zeros(*args, **more)
    if pin_memory and tensor.nbytes:
        current_device().host_register(tensor.data_ptr(), tensor.nbytes)
    return tensor


def pinned_empty(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
    """Stand for ``torch.empty``, of whose pinned tensors no address is ever copied from or to."""
    return _empty(*args, **more)


class CudaRuntime:
    """Stands for vLLM's own binding of the CUDA runtime (0.31 and later)."""

    def cudaHostRegister(self, address: int, size: int) -> int:
        current_device().host_register(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        current_device().host_unregister(address)
        return 0


def _spans(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> list[CopySpan]:
    return [CopySpan(*span) for span in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True)]
