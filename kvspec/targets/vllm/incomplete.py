"""Chunks of the CPU tier that were stored without all of their blocks, or tokens, and where loads have taken that to.

Wrong bytes with that cause are told from others by it: see :meth:`kvspec.targets.Engine.in_incomplete_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvspec.engine.shadow import Batch, ShadowMemory
from kvspec.targets import CopiedBlock


class _Stored(NamedTuple):
    job: int
    """The latest store of a chunk of which a copy has executed."""
    places: set[int]
    """Which of the chunk's blocks it has copied so far, by their places in the chunk."""


@dataclass
class _Rank:
    chunks: dict[int, _Stored] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)
    """GPU blocks that a load has read where no store had written, or before such a place in the same chunk."""


class IncompleteChunks:
    """What the stores of one engine have left out of their chunks, on each rank."""

    def __init__(self, memories: Sequence[ShadowMemory], blocks_per_chunk: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._ranks = [_Rank() for _ in memories]
        for rank, memory in zip(self._ranks, memories, strict=True):
            memory.forward = partial(self._forward, rank, memory, memory.forward)  # type: ignore[method-assign]

    @staticmethod
    def _forward(rank: _Rank, memory: ShadowMemory, forward: Callable[[Batch], None], batch: Batch) -> None:
        """A block that is written from its first entry on has a new owner."""
        if rank.blocks:
            rank.blocks.difference_update(memory.begun(batch))
        forward(batch)

    def copied(self, block: CopiedBlock, place: int | None) -> None:
        """A copy has executed, between a GPU block and a place in a chunk. None: the chunk is one block, of which a
        part was there. -1: no transfer asks for the copy; what is wrong with that chunk is something else."""
        rank, job = self._ranks[block.rank], block.job or 0
        stored = rank.chunks.get(block.cpu, _Stored(-1, set()))
        if block.to_gpu:
            incomplete = self.has_chunk(block.rank, block.cpu, place or 0)
            (rank.blocks.add if incomplete else rank.blocks.discard)(block.gpu)
        elif job >= stored.job:
            if job > stored.job:
                stored = rank.chunks[block.cpu] = _Stored(job, set())
            if place is None:
                stored.places.clear()
            elif place < 0:
                stored.places.update(range(self._blocks_per_chunk))
            elif block.gpu in rank.blocks:
                stored.places.discard(place)
            else:
                stored.places.add(place)

    def has_block(self, rank: int, block: int) -> bool:
        """Whether what a GPU block holds came from an incomplete chunk."""
        return block in self._ranks[rank].blocks

    def has_chunk(self, rank: int, chunk: int, place: int) -> bool:
        """Whether the latest store of a chunk has left out the block at a place or one behind it, or has copied one
        from an incomplete chunk."""
        stored = self._ranks[rank].chunks.get(chunk)
        return stored is not None and not stored.places.issuperset(range(place, self._blocks_per_chunk))
