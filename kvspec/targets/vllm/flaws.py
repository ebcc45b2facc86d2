"""Blocks whose store is known to be flawed: some of a chunk's blocks were left out, or a block wasn't full yet.

Wrong bytes with that cause are told from others by it. A flaw goes where the bytes go: into the blocks that a load
writes, and into the chunks that are stored from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvspec.engine.shadow import Batch, ShadowMemory
from kvspec.targets import CopiedBlock

INCOMPLETE, PARTLY_STORED = "incomplete chunk", "partly stored"


class _Chunk(NamedTuple):
    job: int
    """The latest store of which a copy has executed."""
    places: dict[int, str]
    """Which of the chunk's blocks it has copied so far, by their places in the chunk, and what is wrong with each."""


@dataclass
class _Rank:
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    blocks: dict[int, str] = field(default_factory=dict)
    """GPU block -> the flaw of what a load has written there."""


class Flaws:
    """What is wrong with the stores of one engine, on each rank."""

    def __init__(self, memories: Sequence[ShadowMemory], blocks_per_chunk: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._ranks = [_Rank() for _ in memories]
        for rank, memory in zip(self._ranks, memories, strict=True):
            memory.forward = partial(_forward, rank.blocks, memory, memory.forward)  # type: ignore[method-assign]
            memory.zero = partial(_zero, rank.blocks, memory.zero)  # type: ignore[method-assign]
            memory.copy_blocks = partial(_copy, rank.blocks, memory.copy_blocks)  # type: ignore[method-assign]

    def copied(self, block: CopiedBlock, places: range | None, *, partly: bool) -> None:
        """A copy has executed, between a GPU block and some places of a chunk.

        Without places no transfer asks for it, and what is wrong with those bytes is something else. ``partly``: it
        stores a block that isn't full.
        """
        rank, job = self._ranks[block.rank], block.job or 0
        if block.to_gpu:
            flaw = self.of_chunk(block.rank, block.cpu, places.start) if places else ""
            _mark(rank.blocks, block.gpu, flaw)
            return
        chunk = rank.chunks.get(block.cpu, _Chunk(-1, {}))
        if job < chunk.job:
            return
        if job > chunk.job:
            chunk = rank.chunks[block.cpu] = _Chunk(job, {})
        flaw = PARTLY_STORED if partly else rank.blocks.get(block.gpu, "")
        chunk.places.update(dict.fromkeys(places or range(self._blocks_per_chunk), flaw if places else ""))

    def of_block(self, rank: int, block: int) -> str:
        """Return the flaw of what a GPU block holds; nothing if none is known."""
        return self._ranks[rank].blocks.get(block, "")

    def of_chunk(self, rank: int, chunk: int, place: int) -> str:
        """Return the flaw of a chunk from a place on: a block that goes to the wrong place goes to an earlier one."""
        stored = self._ranks[rank].chunks.get(chunk)
        if stored is None:
            return ""
        flaws = (stored.places.get(at, INCOMPLETE) for at in range(place, self._blocks_per_chunk))
        return next(filter(None, flaws), "")


def _mark(blocks: dict[int, str], block: int, flaw: str) -> None:
    blocks.pop(block, None)
    if flaw:
        blocks[block] = flaw


def _forward(blocks: dict[int, str], memory: ShadowMemory, forward: Callable[[Batch], None], batch: Batch) -> None:
    """A block that is written from its first entry on has a new owner; a state is read before it is written."""
    for begun in memory.begun(batch, states=False) if blocks else ():
        blocks.pop(begun, None)
    forward(batch)
    for begun in memory.begun(batch, states=True) if blocks else ():
        blocks.pop(begun, None)


def _zero(blocks: dict[int, str], zero: Callable[[Sequence[int]], None], zeroed: Sequence[int]) -> None:
    zero(zeroed)
    for block in zeroed:
        blocks.pop(block, None)


def _copy(
    blocks: dict[int, str], copy: Callable[[Sequence[tuple[int, int]]], None], copies: Sequence[tuple[int, int]]
) -> None:
    copy(copies)
    for source, destination in copies:
        _mark(blocks, destination, blocks.get(source, ""))
