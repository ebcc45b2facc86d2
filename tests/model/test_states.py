"""Mamba's cache mode "align" in the model, alone. The vectors were seen by running vLLM."""

from __future__ import annotations

import pytest

from kvspec.model.cache import CacheManager
from kvspec.model.groups import Group, Kind
from kvspec.model.profile import RELEASES, profile_for
from kvspec.model.requests import Request


def aligned(spares: int = 0) -> Group:
    return Group(Kind.MAMBA, 4, align=True, spares=spares)


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
