"""Context parallelism: every combination of sizes, and what lies exactly at an edge."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvspec.model.cache import CacheManager
from kvspec.model.groups import Group, Kind, blocks_for
from kvspec.model.profile import RELEASES, CpScaling, profile_for
from kvspec.model.requests import Request
from kvspec.model.scaling import (
    ContextParallel,
    Unsupported,
    alignment_tokens,
    hash_tokens,
    lazy_target_blocks,
    refuse_unsupported,
    slot,
    span_tokens,
    tokens_on_rank,
    whole_blocks,
)

FULL = Group(Kind.FULL, 4)
SIZES = list(product((1, 2, 4), (1, 2, 4), (1, 4, 16)))
"""Prefill size, decode size, tokens per block."""


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("prefill", "decode", "block_tokens"), SIZES)
def test_a_block_of_full_attention_spans_its_tokens_on_all_ranks_that_share_them(
    release: str, prefill: int, decode: int, block_tokens: int
) -> None:
    ranks = prefill * decode if RELEASES.index(release) < RELEASES.index("0.26.0") else decode
    span = span_tokens(Group(Kind.FULL, block_tokens), ContextParallel(prefill, decode), profile_for(release))
    assert span == ranks * block_tokens


@pytest.mark.parametrize(("prefill", "decode", "block_tokens"), SIZES)
def test_which_groups_are_scaled_is_what_each_release_says(prefill: int, decode: int, block_tokens: int) -> None:
    cp = ContextParallel(prefill, decode)
    window = Group(Kind.SLIDING_WINDOW, block_tokens, reach=8)
    mamba = Group(Kind.MAMBA, block_tokens)
    replicated = Group(Kind.FULL, block_tokens, sharded=False)
    ranks = {
        CpScaling.ALL_RANKS: (prefill * decode,) * 3,
        CpScaling.DECODE: (decode, 1, decode),
        CpScaling.DECODE_FULL: (1, 1, decode),
        CpScaling.DECODE_SHARDED: (decode, 1, 1),
    }
    for release in RELEASES:
        profile = profile_for(release)
        spans = tuple(span_tokens(group, cp, profile) for group in (window, mamba, replicated))
        assert spans == tuple(block_tokens * factor for factor in ranks[profile.cp_scaling])


@pytest.mark.parametrize("release", RELEASES)
def test_what_cannot_be_spread_is_refused(release: str) -> None:
    profile, cp = profile_for(release), ContextParallel(decode=2)
    pair = [FULL, Group(Kind.FULL, 8)]
    window = Group(Kind.SLIDING_WINDOW, 4, reach=8)
    refuse_unsupported([FULL], cp, profile)
    refuse_unsupported([FULL, window], ContextParallel(), profile)
    if profile.cp_with_several_groups:
        refuse_unsupported(pair, cp, profile)
        refuse_unsupported([FULL, Group(Kind.MAMBA, 4)], cp, profile)
    else:
        with pytest.raises(Unsupported, match="several groups"):
            refuse_unsupported(pair, cp, profile)
    with pytest.raises(Unsupported, match="sliding-window"):
        refuse_unsupported([window], cp, profile)
    if profile.cp_scaling is CpScaling.DECODE_SHARDED:
        refuse_unsupported([FULL, replace(window, sharded=False)], cp, profile)


def test_hits_end_at_the_lcm_of_the_spans_and_hash_blocks_are_their_gcd() -> None:
    groups, cp, profile = [Group(Kind.FULL, 4), Group(Kind.FULL, 6)], ContextParallel(decode=2), profile_for("0.33.0")
    assert alignment_tokens(groups, cp, profile) == 24
    assert hash_tokens(groups, cp, profile) == 4
    assert alignment_tokens([FULL], cp, profile) == hash_tokens([FULL], cp, profile) == 8


@pytest.mark.parametrize(("ranks", "interleave"), list(product((1, 2, 4), (1, 2, 4))))
def test_every_token_has_one_slot_and_each_rank_packs_its_own_without_gaps(ranks: int, interleave: int) -> None:
    span, tokens = 4 * ranks, 37
    slots = [slot(position, span, ranks, interleave) for position in range(tokens)]
    assert len(set(slots)) == tokens
    for rank in range(ranks):
        own = [4 * block + offset for block, at, offset in slots if at == rank]
        assert sorted(own) == list(range(len(own)))
        for length in range(tokens + 1):
            assert tokens_on_rank(length, rank, ranks, interleave) == sum(s.rank == rank for s in slots[:length])


def test_the_ranks_take_turns() -> None:
    assert [slot(position, 8, 2, 1).rank for position in range(4)] == [0, 1, 0, 1]
    assert [slot(position, 8, 2, 2).rank for position in range(4)] == [0, 0, 1, 1]
    assert slot(13, 8, 2, 2) == (1, 0, 3)


@pytest.mark.parametrize(
    ("tokens", "room", "reusable"), [(0, 0, 0), (7, 1, 0), (8, 1, 1), (9, 2, 1), (16, 2, 2), (17, 3, 2)]
)
def test_tokens_round_up_where_there_must_be_room_and_down_where_they_are_reused(
    tokens: int, room: int, reusable: int
) -> None:
    assert blocks_for(tokens, 8) == room
    assert whole_blocks(tokens, 8) == reusable


@pytest.mark.parametrize("decode", [1, 2, 4])
@pytest.mark.parametrize("spans", [1, 2, 3])
def test_a_prompt_of_k_spans_hits_k_minus_one_and_of_one_token_more_hits_k(decode: int, spans: int) -> None:
    cache = CacheManager([FULL], 40, profile_for("0.33.0"), cp=ContextParallel(decode=decode))
    span = 4 * decode
    writer = Request("writer", cache.text(range(100)), prompt_tokens=100)
    cache.allocate(writer, 100)
    for tokens, hit in ((spans * span, spans - 1), (spans * span + 1, spans)):
        reader = Request("reader", cache.text(range(tokens)), prompt_tokens=tokens)
        assert cache.lookup(reader).tokens == hit * span
        assert len(cache.lookup(reader).blocks[0]) == hit


@pytest.mark.parametrize(
    ("groups", "decode", "step_tokens", "blocks"),
    [
        ([FULL], 1, 16, 8),
        ([FULL], 1, 17, 10),
        ([FULL], 2, 16, 4),
        ([FULL], 2, 17, 6),
        ([Group(Kind.MAMBA, 4)], 2, 100, 4),
        ([Group(Kind.SLIDING_WINDOW, 4, reach=8)], 1, 100, 6),
        ([Group(Kind.SLIDING_WINDOW, 4, reach=9)], 1, 100, 8),
        ([FULL, Group(Kind.SLIDING_WINDOW, 4, reach=8), Group(Kind.MAMBA, 4)], 1, 16, 18),
        ([Group(Kind.CHUNKED_LOCAL, 4, reach=8)], 1, 16, 8),
    ],
)
def test_the_lazy_target_is_twice_what_one_step_needs(
    groups: list[Group], decode: int, step_tokens: int, blocks: int
) -> None:
    assert lazy_target_blocks(groups, step_tokens, ContextParallel(decode=decode), profile_for("0.33.0")) == blocks
