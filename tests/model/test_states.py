"""Mamba's cache mode "align" in the model, alone. The vectors were seen by running vLLM."""

from __future__ import annotations

import pytest

from kvspec.model.cache import CacheManager
from kvspec.model.groups import Group, Kind
from kvspec.model.profile import RELEASES, profile_for
from kvspec.model.requests import Request


def aligned(spares: int = 0, checkpoint_unit: int = 0, block_tokens: int = 4) -> Group:
    return Group(Kind.MAMBA, block_tokens, align=True, spares=spares, checkpoint_unit=checkpoint_unit)


def cache_of(*groups: Group, release: str = RELEASES[-1], blocks: int = 20) -> CacheManager:
    return CacheManager(groups, blocks, profile_for(release))


def arrive(cache: CacheManager, name: str, tokens: int) -> Request:
    return Request(name, cache.text(range(tokens)), prompt_tokens=tokens)


def step(cache: CacheManager, request: Request, tokens: int) -> None:
    assert cache.allocate(request, tokens) is not None
    request.computed += tokens
    request.waiting = False


def test_a_chunk_holds_one_state_and_jumps_over_the_others() -> None:
    cache = cache_of(aligned())
    request = arrive(cache, "a", 40)
    step(cache, request, 12)
    assert cache.tables["a"] == [[0, 0, 1]]
    step(cache, request, 8)
    assert cache.tables["a"] == [[0, 0, 1, 0, 2]]


def test_the_state_that_a_step_started_from_is_released_by_the_step_after_and_can_be_hit() -> None:
    cache = cache_of(aligned())
    request = arrive(cache, "a", 40)
    for tokens in (12, 8, 8):
        step(cache, request, tokens)
    assert cache.tables["a"] == [[0, 0, 0, 0, 2, 0, 3]]
    assert cache.lookup(arrive(cache, "b", 14)).blocks == ([0, 0, 1],)


def test_spares_move_to_the_end_of_the_row() -> None:
    cache = cache_of(aligned(spares=2))
    request = arrive(cache, "a", 40)
    step(cache, request, 4)
    assert cache.tables["a"] == [[1, 2, 3]]
    step(cache, request, 8)
    assert cache.tables["a"] == [[1, 0, 3, 2, 4]]


def test_lookahead_takes_no_state() -> None:
    cache = cache_of(aligned())
    assert cache.allocate(arrive(cache, "a", 8), 8, lookahead=4) == ([0, 1],)


@pytest.mark.parametrize("release", RELEASES)
def test_states_before_a_gap_are_released_since_0_30_even_if_steps_are_in_flight(release: str) -> None:
    cache = cache_of(aligned(), release=release)
    request = arrive(cache, "a", 60)
    for tokens, in_flight in ((8, 0), (8, 8), (8, 16), (8, 8)):
        request.in_flight = in_flight
        step(cache, request, tokens)
    first = 0 if profile_for(release).releases_past_gaps else 1
    assert cache.tables["a"] == [[0, first, 0, 2, 0, 3, 0, 4]]


@pytest.mark.parametrize(("release", "tables"), [("0.28.0", [0, 0, 0, 0, 0, 1]), ("0.29.0", [0, 0, 0, 0, 1, 2])])
def test_since_0_29_a_chunk_that_ends_inside_a_block_keeps_the_state_of_the_last_block(
    release: str, tables: list[int]
) -> None:
    cache = cache_of(aligned(checkpoint_unit=1), release=release)
    step(cache, arrive(cache, "a", 21), 21)
    assert cache.tables["a"] == [tables]
    assert cache.lookup(arrive(cache, "b", 21)).tokens == (20 if release == "0.29.0" else 0)


def test_a_checkpoint_ends_inside_a_block_and_is_hit_there() -> None:
    cache = CacheManager([Group(Kind.FULL, 8), aligned(0, 1, 8)], 20, profile_for("0.33.0"), unit=2)
    step(cache, arrive(cache, "a", 21), 21)
    assert cache.tables["a"] == [[1, 2, 3], [0, 4, 5]]
    cache.new_step()
    hit = cache.lookup(arrive(cache, "b", 21))
    assert (hit.tokens, hit.blocks) == (20, ([1, 2, 3], [0, 0, 4]))


def test_a_kernel_exports_states_only_at_multiples_of_its_unit() -> None:
    cache = cache_of(aligned(checkpoint_unit=8))
    step(cache, arrive(cache, "a", 21), 21)
    assert cache.tables["a"] == [[0, 0, 0, 0, 0, 1]]
    step(cache, arrive(cache, "b", 19), 19)
    assert cache.tables["b"] == [[0, 0, 0, 2, 3]]


def test_a_spare_becomes_the_block_of_a_checkpoint() -> None:
    cache = cache_of(aligned(spares=2, checkpoint_unit=1))
    request = arrive(cache, "a", 15)
    step(cache, request, 4)
    assert cache.tables["a"] == [[1, 2, 3]]
    step(cache, request, 11)
    assert cache.tables["a"] == [[1, 0, 3, 2, 4, 5]]


def test_the_state_that_a_chunk_with_a_checkpoint_begins_with_inside_a_block_is_not_that_of_its_end() -> None:
    cache = CacheManager([Group(Kind.FULL, 8), aligned(0, 1, 8)], 20, profile_for("0.33.0"), unit=4)
    step(cache, arrive(cache, "a", 5), 4)
    cache.new_step()
    request = arrive(cache, "b", 29)
    hit = cache.lookup(request)
    assert hit.tokens == 4
    assert cache.allocate(request, 25, hit) is not None
    kept = cache.tables["b"][1]
    assert [cache.pool.blocks[block].hash_end for block in kept if block] == [0, 28, 0]
