"""Context parallelism: how many tokens a block spans, and which rank keeps which of them.

With decode context parallelism of size D, a block id stands for one block on each of D ranks. A group whose
keys and values are *sharded* keeps every token on one of the ranks, so a block id spans D times the tokens;
a *replicated* group keeps every token on every rank. Prefill context parallelism splits work, and once (see
``Profile.cp_scaling``) split the tokens of a block too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvspec.model.clauses import clause
from kvspec.model.groups import Group, Kind, blocks_for
from kvspec.model.profile import CpScaling, Profile


@dataclass(frozen=True)
class ContextParallel:
    """Sizes of context parallelism, in ranks; and after how many tokens the next rank's turn comes."""

    prefill: int = 1
    decode: int = 1
    interleave: int = 1


ALONE = ContextParallel()
"""No context parallelism."""


class Slot(NamedTuple):
    """Where a token's keys and values are."""

    block: int
    """Index in the block table."""
    rank: int
    offset: int
    """Place in the block on that rank, in tokens."""


class Unsupported(ValueError):
    """The release refuses this combination of groups and context parallelism."""


@clause
def span_tokens(group: Group, cp: ContextParallel, profile: Profile) -> int:
    """SCALE-1. A block of a sharded group spans its tokens on all decode ranks; a block of a replicated one
    spans its own.

    Which groups are sharded, and whether prefill ranks count, differs between releases:
    ``Profile.cp_scaling``. Tokens.

    Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, resolve_dcp_kv_block_size.
    Releases: all, differently.
    """
    match profile.cp_scaling:
        case CpScaling.ALL_RANKS:
            ranks = cp.prefill * cp.decode
        case CpScaling.DECODE:
            ranks = 1 if group.kind is Kind.MAMBA else cp.decode
        case CpScaling.DECODE_FULL:
            ranks = cp.decode if group.kind is Kind.FULL else 1
        case CpScaling.DECODE_SHARDED:
            ranks = cp.decode if group.sharded and group.kind is not Kind.MAMBA else 1
    return group.block_tokens * ranks


@clause
def refuse_unsupported(groups: Sequence[Group], cp: ContextParallel, profile: Profile) -> None:
    """SCALE-2. Tokens are only spread over ranks for full attention: other groups are replicated, or the
    combination is refused (Unsupported).

    Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.__init__.
    Releases: all; 0.25.1 and older refuse context parallelism with several groups altogether.
    """
    ranks = cp.decode * (cp.prefill if profile.cp_scaling is CpScaling.ALL_RANKS else 1)
    if ranks == 1:
        return
    if len(groups) > 1 and not profile.cp_with_several_groups:
        raise Unsupported("context parallelism with several groups")
    for group in groups:
        replicated = profile.cp_scaling is CpScaling.DECODE_SHARDED and not group.sharded
        if group.kind in (Kind.SLIDING_WINDOW, Kind.CHUNKED_LOCAL) and not replicated:
            raise Unsupported(f"context parallelism with {group.kind.value} groups")


@clause
def alignment_tokens(groups: Sequence[Group], cp: ContextParallel, profile: Profile) -> int:
    """SCALE-3. Hits end at multiples of the least common multiple of the groups' spans, so that they end at
    block edges in all groups.

    Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes (scheduler_block_size).
    Releases: all.
    """
    return math.lcm(*(span_tokens(group, cp, profile) for group in groups))


@clause
def hash_tokens(groups: Sequence[Group], cp: ContextParallel, profile: Profile, unit: int = 0) -> int:
    """SCALE-4. A hash block is the greatest common divisor of the groups' spans, so that every block is a
    whole number of them.

    With several groups a smaller ``unit`` can be asked for that divides it.

    Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes (hash_block_size).
    Releases: all (groups that aren't cached aren't modelled).
    """
    largest = math.gcd(*(span_tokens(group, cp, profile) for group in groups))
    if unit and (largest % unit or len(groups) == 1):
        raise Unsupported(f"hash blocks of {unit} tokens")
    return unit or largest


def ends_inside(groups: Sequence[Group], cp: ContextParallel, profile: Profile, hash_tokens: int) -> bool:
    """Return whether hits are looked for inside blocks, see ``hit_tokens``."""
    least = hash_tokens if cp.decode > 1 and profile.hits_inside_with_cp else hash_tokens + 1
    long = any(group.align and group.block_tokens >= least for group in groups)
    if not (profile.hits_inside and long) or (cp.decode > 1 and not profile.hits_inside_with_cp):
        return False
    able = all(
        group.kind in (Kind.FULL, Kind.MAMBA) or span_tokens(group, cp, profile) == hash_tokens for group in groups
    )
    if not able and not profile.hits_inside_if_all_can:
        raise Unsupported("hits inside blocks with groups that can't be hit there")
    return able


@clause
def hit_tokens(groups: Sequence[Group], cp: ContextParallel, profile: Profile, hash_tokens: int) -> int:
    """SCALE-9. Where a Mamba group in align mode has blocks longer than a hash block, hits end at multiples of a hash
    block, inside blocks too.

    All other groups must be full attention, or have blocks of one hash block; else hits end as ``SCALE-3`` says. With
    decode context parallelism blocks of one hash block are long enough. 0.27.1 and older don't ask the other groups;
    what comes of it isn't modelled (Unsupported).

    Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, partial_hash_hits_enabled.
    Releases: 0.26.0 and later; with decode context parallelism 0.29.0 and later.
    """
    inside = ends_inside(groups, cp, profile, hash_tokens)
    return hash_tokens if inside else alignment_tokens(groups, cp, profile)


@clause
def slot(position: int, span: int, ranks: int, interleave: int) -> Slot:
    """SCALE-5. Inside a block the ranks take turns, ``interleave`` tokens at a time, and each packs its
    tokens without gaps.

    Source: vLLM 0.33.0, v1/worker/block_table.py, ComputeSlotMappingKernel.
    Releases: all.
    """
    block, inside = divmod(position, span)
    turn, within = divmod(inside, interleave)
    return Slot(block, turn % ranks, turn // ranks * interleave + within)


@clause
def tokens_on_rank(tokens: int, rank: int, ranks: int, interleave: int) -> int:
    """SCALE-6. Of n tokens each rank keeps its whole turns, and the rank whose turn it is keeps what has
    come of the last one.

    Source: vLLM 0.33.0, v1/attention/backends/utils.py, get_dcp_local_seq_lens.
    Releases: all.
    """
    rounds, rest = divmod(tokens, interleave * ranks)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


@clause
def whole_blocks(tokens: int, span: int) -> int:
    """SCALE-7. Tokens map to blocks rounded up where there must be room for them, and rounded down where
    they may be reused.

    This is the second; ``blocks_for`` is the first.

    Source: vLLM 0.33.0, v1/simple_kv_offload/manager.py; v1/core/single_type_kv_cache_manager.py.
    Releases: all.
    """
    return tokens // span


@clause
def lazy_target_blocks(groups: Sequence[Group], step_tokens: int, cp: ContextParallel, profile: Profile) -> int:
    """SCALE-8. Lazy offload keeps twice the blocks of one step ready to be reused: a step's tokens, or a
    window and one, or two states.

    Blocks, summed over the groups. ``step_tokens`` is the most that one step computes.

    Source: vLLM 0.33.0, v1/simple_kv_offload/manager.py, _estimate_lazy_target_blocks.
    Releases: all; without context parallelism in 0.23.0 and older.
    """
    blocks = 0
    for group in groups:
        span = span_tokens(group, cp, profile)
        match group.kind:
            case Kind.MAMBA:
                blocks += 2
            case Kind.SLIDING_WINDOW:
                blocks += blocks_for(group.reach, span) + 1
            case Kind.FULL | Kind.CHUNKED_LOCAL:
                blocks += blocks_for(step_tokens, span)
    return 2 * blocks
