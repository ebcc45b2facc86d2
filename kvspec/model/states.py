"""Mamba's cache mode "align": of all states a request holds only the one that it runs on, and those that are cached.

A chunk of a prompt ends at the end of a block, so the running state is that of a block's end, and can be
registered. The blocks that a chunk jumps over hold no state: their places in the row are null. While a request
decodes, its state changes in place, in the row's last block; the ``spares`` blocks after it take the states
after each draft token.

A state can be registered for where a prompt ends inside a block (0.26.0 and later), and hit there. What is found is
never changed: who goes on from it does so in a copy, or, if it is the request's own state, leaves a copy behind.

A state in the middle of a chunk can be kept too (0.29.0 and later), see ``checkpoints``.

Not modelled: the hand-over of states to a connector; a connector whose tokens come while the step computes on (none of
vLLM's offload connectors): the count of needed blocks leaves out the block for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvspec.model.checkpoints import Checkpoint
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
    shared: int | None = None
    """The place in the row of a block that can be found and that its next step writes: it must be copied first."""
    checkpoint: Checkpoint | None = None
    """What its last step keeps in the middle of its chunk."""


class Copy(NamedTuple):
    """A copy of a block that must run before the step does. Both are held until it has."""

    source: int
    target: int


@clause
def own_tail(pool: BlockPool, row: list[int], running: Running) -> Copy | None:
    """ALLOC-9. Before a request goes on inside a block that it has hit, a new block takes that one's place in its row,
    as a copy.

    The request's reference to the block that was hit becomes one for the copying; the copy has a second one for it.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager._apply_cow.
    Releases: 0.26.0 and later.
    """
    if running.shared is None:
        return None
    place, running.shared = running.shared, None
    (target,) = pool.allocate(1)
    copy = Copy(row[place], target)
    pool.touch([target])
    row[place] = target
    return copy


@clause
def leave_state(pool: BlockPool, row: list[int], running: Running) -> Copy | None:
    """STATE-4. Before a request goes on from a state of its own that it has registered inside a block, a new block
    takes over the state's hashes, as a copy.

    A worker's row of a running request only grows at its end, so the request stays in its block. The copy can't be used
    in this step.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.allocate_new_blocks.
    Releases: 0.26.0 and later.
    """
    if running.shared is None:
        return None
    place, running.shared = running.shared, None
    (target,) = pool.allocate(1)
    pool.move_hashes(row[place], target)
    pool.touch([row[place]])
    return Copy(row[place], target)


@clause
def states_needed(
    group: Group,
    span: int,
    tokens: int,
    held: int,
    copies: int,
    running: Running,
    checkpoint: Checkpoint | None,
    profile: Profile,
) -> int:
    """STATE-1. A step takes at most one new block for its running state, one for a checkpoint, and at first one for
    each draft token besides: spares move on.

    Slots for a draft model's own lookahead don't count: it has no states. ``tokens`` are those after the step,
    ``held`` counts the row and the hit, ``copies`` is 1 if a block is copied. Blocks; negative where more is held than
    needed.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_blocks_to_allocate.
    Releases: all (0.30.0 and older count that many as soon as one is lacking; 0.30.0 not in a later step with a
    checkpoint).
    """
    lacking = blocks_for(tokens, span) + group.spares - held
    if copies:
        lacking = max(lacking, 0) + copies
    most = copies + (checkpoint is not None) + (1 if running.allocated else 1 + group.spares)
    at_checkpoint = running.allocated and checkpoint is not None and profile.counts_lacking_states_at_checkpoints
    if lacking > 0 and not (profile.counts_lacking_states or at_checkpoint):
        return most
    return min(lacking, most)


@clause
def extend_states(
    pool: BlockPool, group: Group, span: int, tokens: int, row: list[int], running: Running
) -> tuple[list[int], Copy | None]:
    """STATE-2. A row grows to the block of the step's last token and the spares: places jumped over are null, old
    spares move to the end.

    With a checkpoint the place before the running state's gets a block too, and keeps a spare that it has. Returns what
    is new in the row, null blocks and moved ones included, a copy first; and what must be copied.

    Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.allocate_new_blocks.
    Releases: all.
    """
    before = len(row)
    required = blocks_for(tokens, span) + group.spares
    if required <= before and running.shared is None:
        running.allocated |= pool.profile.counts_full_rows_as_allocated
        return [], None
    jumped = required - group.spares - 1 - (running.checkpoint is not None)
    if running.allocated:
        running.source = before - group.spares - 1
    elif before:
        running.source = before - 1
    row += [NULL] * (jumped - before)
    if running.allocated:
        for place in range(before - group.spares, min(before, jumped)):
            row.append(row[place])
            row[place] = NULL
    lacking = required - len(row) if running.shared is None else max(required - len(row), 0)
    copy = leave_state(pool, row, running) if running.allocated else own_tail(pool, row, running)
    new = [copy.target] if copy and not running.allocated else []
    row += pool.allocate(lacking)
    running.allocated = True
    return new + row[before:], copy


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
