"""Attention groups: which of its earlier blocks a group still reads, and so which must be there for a hit,
can go, or need not be found.

All layers of a group share one block table. What tells the kinds of attention apart is one question: *which
blocks does the token at position n read?* Everything else in this module follows from the answer.

Not modelled: reference sliding window, circular buffers, attention sinks, cross attention, tokens that a window
keeps for multi-module drafting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from kvspec.errors import refuse_outside
from kvspec.model.clauses import clause


class Kind(Enum):
    """What a token reads besides itself."""

    FULL = "full"
    """All tokens before it."""
    SLIDING_WINDOW = "sliding-window"
    """The ``reach - 1`` tokens before it."""
    CHUNKED_LOCAL = "chunked-local"
    """The tokens before it in its chunk of ``reach`` tokens."""
    MAMBA = "mamba"
    """The state after the token before it."""


@dataclass(frozen=True)
class Group:
    """The layers that share a block table."""

    kind: Kind
    block_tokens: int
    """Tokens of a block on one rank."""
    reach: int = 0
    """Window or chunk, in tokens; 0 where the kind has none."""
    eagle: bool = False
    """Whether there are layers of an EAGLE or MTP draft model among them."""
    sharded: bool = True
    """Whether decode context parallelism spreads the tokens of a block over the ranks."""
    align: bool = False
    """Mamba: states are kept at the ends of chunks only (cache mode "align"), see ``states``."""
    spares: int = 0
    """With ``align``: blocks for the states after draft tokens."""
    checkpoint_unit: int = 0
    """With ``align``: its kernel can export the states that lie a multiple of so many tokens after a chunk's beginning;
    0 for none. See ``checkpoints``."""

    def __post_init__(self) -> None:
        windowed = self.kind in (Kind.SLIDING_WINDOW, Kind.CHUNKED_LOCAL)
        refuse_outside("block_tokens of a group", self.block_tokens, 1, 4096)
        refuse_outside("checkpoint_unit of a group", self.checkpoint_unit, 0, 4096 if self.align else 0)
        refuse_outside(f"reach of a {self.kind.value} group", self.reach, 1 if windowed else 0, 65536)

    def __str__(self) -> str:
        reach = f" {self.reach}" if self.reach else ""
        notes = " with drafts" * self.eagle + " replicated" * (not self.sharded)
        notes += " with checkpoints" * (self.checkpoint_unit > 0)
        return f"{self.kind.value}{reach} in blocks of {self.block_tokens}{notes}"

    def layout(self) -> Group:
        """Return what it is told apart from other groups by: groups of one layout are looked up together."""
        return replace(self, eagle=False)


def blocks_for(tokens: int, span: int) -> int:
    """Return the number of blocks of ``span`` tokens that hold ``tokens`` tokens."""
    return -(-tokens // span)


@clause
def skipped_tokens(group: Group, tokens: int) -> int:
    """WINDOW-1. With n tokens computed, the next token reads all of them; or the last w - 1 (window w); or
    those of its chunk; or a state.

    Returns how many tokens at the start it and all later ones don't read.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens of each manager.
    Releases: all.
    """
    match group.kind:
        case Kind.FULL:
            return 0
        case Kind.SLIDING_WINDOW:
            return max(0, tokens - group.reach + 1)
        case Kind.CHUNKED_LOCAL:
            return tokens // group.reach * group.reach
        case Kind.MAMBA:
            return max(0, tokens - 1)


@clause
def needed_for_hit(group: Group, span: int, tokens: int) -> range:
    """HIT-1. A hit of n tokens needs the blocks that the token after them reads, as far as they lie before
    n, and no others.

    ``span`` is the tokens of one block over all ranks. Only with full attention and Mamba can ``tokens`` end inside a
    block. Returns the indices of the blocks.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, find_longest_cache_hit of each manager.
    Releases: all.
    """
    return range(skipped_tokens(group, tokens) // span, blocks_for(tokens, span))


@clause
def proof_for_eagle(group: Group, span: int, tokens: int) -> range:
    """HIT-2. Where a draft model reads along, a hit of n tokens also needs the block after it to be found,
    which isn't used.

    The draft layers' last entry before n depends on the token at n: only the hash of the block after it says
    that the token is the same. Mamba groups have no draft layers. A hit of 0 tokens needs nothing.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, find_longest_cache_hit, drop_eagle_block.
    Releases: all.
    """
    return range(tokens // span, tokens // span + (tokens > 0 and group.kind is not Kind.MAMBA))


@clause
def worth_registering(
    group: Group,
    span: int,
    alignment: int,
    eagle: bool,
    interval: int | None,
    boundaries: Iterable[int],
    blocks: range,
) -> list[bool] | None:
    """REG-2. Of a sliding window only blocks that some later hit needs are registered: hits end at multiples
    of ``alignment``.

    With sparse retention that is every ``interval`` tokens (0: nowhere), and the last multiple of
    ``alignment`` up to each of ``boundaries``; then Mamba states are chosen likewise. A hit that needs as
    many blocks as lie between two ends makes all worth it (None).

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, reachable_block_mask of the managers.
    Releases: 0.22.1 and later; sparse retention 0.23.0 and later (of Mamba states 0.24.0).
    """
    match group.kind:
        case Kind.SLIDING_WINDOW:
            proof = int(eagle)
            need = blocks_for(group.reach - 1, span) + proof
        case Kind.MAMBA if interval is not None:
            proof, need = 0, 1
        case _:
            return None
    wanted: set[int] = set()
    if interval != 0:
        between = (alignment if interval is None else interval) // span
        if need >= between:
            return None
        wanted = {block for block in blocks if block >= proof and (block - proof) % between >= between - need}
    if interval is not None:
        for boundary in boundaries:
            end = boundary // alignment * alignment // span + proof
            wanted.update(range(end - need, end))
    return [block in wanted for block in blocks]


@clause
def admission_cap(group: Group, in_flight_tokens: int, max_tokens: int) -> int | None:
    """NEED-3. A request never holds more blocks of a window or chunk than cover it and what may be in
    flight: that is enough to admit it.

    A window can begin inside a block, so it takes one block more. None: no cap. Tokens of a block are those
    of one rank here.

    Source: vLLM 0.33.0, v1/kv_cache_interface.py, SlidingWindowSpec.max_admission_blocks_per_request.
    Releases: all.
    """
    match group.kind:
        case Kind.SLIDING_WINDOW:
            tokens = min(group.reach - 1 + in_flight_tokens, max_tokens)
            return blocks_for(tokens, group.block_tokens) + 1
        case Kind.CHUNKED_LOCAL:
            return blocks_for(min(group.reach + in_flight_tokens, max_tokens), group.block_tokens)
        case Kind.FULL | Kind.MAMBA:
            return None
