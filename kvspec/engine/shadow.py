"""Shadow attention: a forward that writes what it should and reads what attention would.

For every scheduled token it writes the tag of its position to the slot that the block table names, then reads
*every* position that attention reads, and compares. As in a real layer all writes of a step come before its reads,
so requests of one step may read each other's blocks. Bytes differ per layer and rank: the tag, XORed with a
constant of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvspec.device.simulated import DeviceFault
from kvspec.engine.text import Origins, Text, mix


class Scheduled(NamedTuple):
    """Tokens ``start`` to ``stop`` of a request, to be computed in this step."""

    request: str
    start: int
    stop: int


class ShadowMismatch(NamedTuple):
    """Attention of ``request`` read something else than token ``position``."""

    request: str
    position: int
    layer: int
    rank: int
    block: int
    found: str

    def __str__(self) -> str:
        return (
            f"attention of {self.request} reads token {self.position} in block {self.block} (layer {self.layer}, "
            f"rank {self.rank}) and finds {self.found}"
        )


@dataclass
class _Row:
    """What a runner keeps of a request: its block table (one group), and how many tokens it knows."""

    text: Text
    table: list[int]
    known: int
    slots: np.ndarray | None = None

    def all_slots(self, block_size: int, offsets: np.ndarray) -> np.ndarray:
        """Return the slot of every position that the table covers; shape (len(table) * block_size,)."""
        if self.slots is None:
            self.slots = (np.array(self.table, dtype=np.int64)[:, None] * block_size + offsets).ravel()
        return self.slots


@dataclass(frozen=True)
class Batch:
    """One step's forward, the same for all ranks.

    ``slots`` index (block, offset) as block * block_size + offset. ``write_*`` have one entry per scheduled token,
    ``read_*`` one per position read; ``rows`` tells which stretch of the reads belongs to which request.
    """

    rows: tuple[Scheduled, ...]
    write_slots: np.ndarray
    write_tags: np.ndarray
    read_slots: np.ndarray
    read_tags: np.ndarray
    sampled: dict[str, int | None]
    zero_blocks: tuple[int, ...]
    block_copies: tuple[tuple[int, int], ...]


class RunnerState:
    """The model runner's own view of the requests, kept from the scheduler's outputs alone.

    Source: vLLM 0.33.0, v1/worker/gpu_model_runner.py (_update_states) and v1/worker/gpu/model_runner.py
    (update_requests).
    """

    def __init__(self, block_size: int, texts: dict[str, Text]) -> None:
        self._block_size = block_size
        self._texts = texts
        self._offsets = np.arange(block_size, dtype=np.int64)
        self._rows: dict[str, _Row] = {}

    def apply(self, output: Any) -> Batch:
        """Take over a ``SchedulerOutput`` and return the step's forward."""
        rows = self._rows
        for request in output.finished_req_ids:
            rows.pop(request, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            known = len(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            rows[new.req_id] = _Row(self._texts[new.req_id], list(new.block_ids[0]), known)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            row = rows[request]
            blocks = cached.new_block_ids[i]
            if request in cached.resumed_req_ids:
                row.table = list(blocks[0])
                row.slots = None
                row.known = row.text.prompt_tokens + cached.num_output_tokens[i]
            elif blocks is not None and blocks[0]:
                row.table.extend(blocks[0])
                row.slots = None
            computed[request] = cached.num_computed_tokens[i]
        return self._forward(output, computed)

    def _forward(self, output: Any, computed: dict[str, int]) -> Batch:
        scheduled: list[Scheduled] = []
        write_slots, write_tags, read_slots, read_tags = [], [], [], []
        sampled: dict[str, int | None] = {}
        for request, tokens in output.num_scheduled_tokens.items():
            row = self._rows[request]
            start = computed[request]
            stop = start + tokens
            slots = row.all_slots(self._block_size, self._offsets)
            tags = row.text.tags(0, stop)
            if stop > len(slots):
                raise DeviceFault(f"{request} is scheduled up to token {stop} with a block table of {len(slots)} slots")
            scheduled.append(Scheduled(request, start, stop))
            write_slots.append(slots[start:stop])
            write_tags.append(tags[start:])
            read_slots.append(slots[:stop])
            read_tags.append(tags)
            sampled[request] = None
            if stop == row.known:
                sampled[request] = row.text.sample(stop)
                row.known += 1
        return Batch(
            rows=tuple(scheduled),
            write_slots=_join(write_slots, np.int64),
            write_tags=_join(write_tags, np.uint64),
            read_slots=_join(read_slots, np.int64),
            read_tags=_join(read_tags, np.uint64),
            sampled=sampled,
            zero_blocks=tuple(getattr(output, "new_block_ids_to_zero", None) or ()),
            block_copies=_block_copies(output),
        )


def _join(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)


def _block_copies(output: Any) -> tuple[tuple[int, int], ...]:
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return tuple((copy.src_block_id, copy.dst_block_id) for copy in copies)


class ShadowMemory:
    """The KV cache of one rank: what a forward writes to and reads from.

    ``tags`` has shape (layers, blocks * block_size), uint64, and views the bytes that the worker's copies move.
    """

    def __init__(
        self,
        tags: np.ndarray,
        block_size: int,
        rank: int,
        origins: Origins,
        report: Callable[[ShadowMismatch], None],
    ) -> None:
        self.tags = tags
        self.rank = rank
        self.block_size = block_size
        self.masks = np.array([[layer_mask(layer, rank)] for layer in range(len(tags))], dtype=np.uint64)
        self._origins = origins
        self._report = report

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks of every layer, as the runner does with blocks that may hold stale data."""
        for block in blocks:
            self.tags[:, block * self.block_size : (block + 1) * self.block_size] = 0

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of every layer: copy-on-write."""
        by_block = self.tags.reshape(len(self.tags), -1, self.block_size)
        for source, destination in copies:
            by_block[:, destination] = by_block[:, source]

    def forward(self, batch: Batch) -> None:
        """Write and read one step; report the first wrong position of each request."""
        self.tags[:, batch.write_slots] = batch.write_tags ^ self.masks
        found = self.tags[:, batch.read_slots] ^ self.masks
        if (found == batch.read_tags).all():
            return
        wrong = found != batch.read_tags
        begin = 0
        for row in batch.rows:
            stretch = wrong[:, begin : begin + row.stop]
            if stretch.any():
                position = int(np.flatnonzero(stretch.any(axis=0))[0])
                layer = int(np.flatnonzero(stretch[:, position])[0])
                block = int(batch.read_slots[begin + position]) // self.block_size
                raw = int(found[layer, begin + position])
                self._report(ShadowMismatch(row.request, position, layer, self.rank, block, self.describe(raw, layer)))
            begin += row.stop

    def describe(self, tag: int, layer: int) -> str:
        """Say what a tag is that was read from ``layer`` (its mask removed already)."""
        return self._origins.describe(0 if tag == int(self.masks[layer, 0]) else tag)


def layer_mask(layer: int, rank: int) -> int:
    """Return the constant that tells the bytes of one layer and rank from those of the others."""
    return mix(mix(0xCAFE, layer), rank)
