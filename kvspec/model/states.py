"""Mamba's cache mode "align": of all states a request holds only the one that it runs on, and those that are cached.

A chunk of a prompt ends at the end of a block, so the running state is that of a block's end, and can be
registered. The blocks that a chunk jumps over hold no state: their places in the row are null. While a request
decodes, its state changes in place, in the row's last block; the ``spares`` blocks after it take the states
after each draft token.

Not modelled: checkpoints inside a chunk (0.29.0 and later, only with a backend that can export them); states
registered and hit inside a block, with copy-on-write (0.26.0 and later, Mamba blocks longer than a hash block);
the hand-over of states to a connector; a connector whose tokens come while the step computes on (none of vLLM's
offload connectors): the count of needed blocks leaves out the block for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvspec.model.clauses import clause
from kvspec.model.groups import Group, blocks_for, skipped_tokens
from kvspec.model.pool import NULL, BlockPool
from kvspec.model.profile import Profile


@dataclass
class Running:
    """What is known about the states of one request in one group."""

    allocated: bool = False
    """Whether it has blocks of its own, not only those of a hit."""
    source: int | None = None
    """The place in the row of the state that its last step started from."""


@clause
def states_needed(group: Group, span: int, tokens: int, held: int, running: Running, profile: Profile) -> int:
    """STATE-1. A step takes at most one new block for its running state, and at first one for each draft token
    besides: spares move on.

    Slots for a draft model's own lookahead don't count: it has no states. ``tokens`` are those after the step,
    ``held`` counts the row and the hit. Blocks; negative where more is held than needed.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_blocks_to_allocate.
    Releases: all (0.30.0 and older count that many as soon as one is lacking).
    """
    lacking = blocks_for(tokens, span) + group.spares - held
    most = 1 if running.allocated else 1 + group.spares
    if lacking > 0 and not profile.counts_lacking_states:
        return most
    return min(lacking, most)


@clause
def extend_states(pool: BlockPool, group: Group, span: int, tokens: int, row: list[int], running: Running) -> list[int]:
    """STATE-2. A row grows to the block of the step's last token and the spares: places jumped over are null, old
    spares move to the end.

    Returns what was appended to the row, null blocks and moved ones included.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.allocate_new_blocks.
    Releases: all.
    """
    before = len(row)
    required = blocks_for(tokens, span) + group.spares
    if required <= before:
        running.allocated |= pool.profile.counts_full_rows_as_allocated
        return []
    last = required - group.spares - 1
    if running.allocated:
        running.source = before - group.spares - 1
    elif before:
        running.source = before - 1
    row += [NULL] * (last - before)
    if running.allocated:
        for place in range(before - group.spares, min(before, last)):
            row.append(row[place])
            row[place] = NULL
    row += pool.allocate(required - len(row))
    running.allocated = True
    return row[before:]


@clause
def states_passed(
    group: Group, span: int, settled: int, row: list[int], running: Running, profile: Profile
) -> tuple[list[int], list[int]]:
    """STATE-3. A state is released once a later one is settled: all before the block of the last settled token.

    0.29.0 and older stop at the first null block from there, and release besides only the state that the last step
    started from. Two lists of places in the row, in the order of release; the second is for that state.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.remove_skipped_blocks.
    Releases: all, differently.
    """
    end = min(skipped_tokens(group, settled) // span, len(row))
    start = end
    while start and (row[start - 1] != NULL or profile.releases_past_gaps):
        start -= 1
    passed = [place for place in reversed(range(start, end)) if row[place] != NULL]
    source = running.source
    if source is None or source >= end or source in passed or row[source] == NULL:
        return passed, []
    return passed, [source]
