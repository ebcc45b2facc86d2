"""Checkpoints of Mamba's cache mode "align": a state that is kept in the middle of a chunk.

A kernel that can export a state while it computes needs no chunk that ends there: a prompt's last chunk can be computed
at once, and the state that a resend of the prompt goes on from is found all the same. It is kept in the row's
place before that of the running state; the step takes one block more for it.

Not modelled: hashes that cover tokens after their block, with which a checkpoint ends earlier (0.33.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvspec.model.clauses import clause
from kvspec.model.groups import blocks_for
from kvspec.model.layout import Layout
from kvspec.model.pool import NULL
from kvspec.model.profile import CheckpointEnd


class Checkpoint(NamedTuple):
    """A state that a step keeps in the middle of its chunk."""

    begin: int
    """Where the chunk begins, in tokens."""
    end: int
    """The tokens that it is the state after."""
    place: int
    """Its place in the row."""


@clause
def checkpoint_end(layout: Layout, index: int, tokens: int) -> int:
    """STATE-5. A checkpoint ends where a resend of the chunk's text goes on, before its last token; with a draft model
    that is one unit earlier (a hash block; from 0.32.0 on, where hits can end).

    ``tokens`` are all tokens up to the chunk's end. Tokens; 0 for nowhere.

    Source: vLLM 0.33.0, v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position.
    Releases: 0.29.0 and later, differently (``Profile.checkpoint_end``).
    """
    drafts = any(layout.drops)
    match layout.profile.checkpoint_end:
        case CheckpointEnd.NOWHERE:
            return 0
        case CheckpointEnd.BLOCK:
            return tokens // layout.spans[index] * layout.spans[index]
        case CheckpointEnd.HASH_BLOCK:
            unit = layout.hash_tokens
            return max(0, (tokens - 1) // unit * unit - drafts * unit)
        case CheckpointEnd.HIT:
            unit = layout.hit_tokens
            return max(0, (tokens if drafts else tokens - 1) // unit * unit - drafts * unit)


@clause
def checkpoint_in(
    layout: Layout, index: int, row: Sequence[int], begin: int, tokens: int, *, allocated: bool
) -> Checkpoint | None:
    """STATE-6. A step keeps a checkpoint if its kernel can export the state there, and if the place before that of the
    running state is free, or holds a spare.

    The kernel begins at the end of a hash block, and exports the states that lie a multiple of the group's
    ``checkpoint_unit`` after that. The chunk must be one of several blocks: the place isn't that of the state it begins
    with. ``row`` is what the request holds before the step, without a hit; ``allocated`` as in ``Running``.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager._needs_internal_checkpoint.
    Releases: 0.29.0 and later (0.29.0: chunks from the end of a block to the middle of another, and no spares).
    """
    group, span, unit = layout.groups[index], layout.spans[index], layout.hash_tokens
    if not group.checkpoint_unit:
        return None
    by_block = layout.profile.checkpoint_end is CheckpointEnd.BLOCK
    end, place = checkpoint_end(layout, index, tokens), blocks_for(tokens, span) - 2
    if end <= 0 or place < 0:
        return None
    if by_block:
        exports = begin % span == 0 and tokens % span > 0
    else:
        inside = begin + unit <= end < tokens and place > (begin - 1) // span
        exports = begin % unit == 0 and inside and (end - begin) % group.checkpoint_unit == 0
    is_spare = allocated and not by_block and place >= len(row) - group.spares
    if exports and (place >= len(row) or row[place] == NULL or is_spare):
        return Checkpoint(begin, end, place)
    return None
