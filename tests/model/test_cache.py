"""The KV cache manager of the model, alone: hits, what is needed, what is refused, what is given back in which order.

The vectors were seen by running vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvspec.model.cache import CacheManager
from kvspec.model.deferred import DeferredFrees
from kvspec.model.groups import Group, Kind
from kvspec.model.pool import NULL
from kvspec.model.profile import RELEASES, profile_for
from kvspec.model.requests import Request

FULL = Group(Kind.FULL, 4)
NEWEST = profile_for(RELEASES[-1])
INDEX = {release: number for number, release in enumerate(RELEASES)}


def window(tokens: int, block_tokens: int = 4, eagle: bool = False) -> Group:
    return Group(Kind.SLIDING_WINDOW, block_tokens, reach=tokens, eagle=eagle)


def cache_of(*groups: Group, blocks: int = 60, release: str = RELEASES[-1], **settings: Any) -> CacheManager:
    return CacheManager(groups, blocks, profile_for(release), **settings)


def arrive(cache: CacheManager, name: str, tokens: int | Sequence[int], **state: Any) -> Request:
    said = range(tokens) if isinstance(tokens, int) else tokens
    return Request(name, cache.text(said), prompt_tokens=len(said), **state)


def compute(cache: CacheManager, request: Request, **settings: Any) -> None:
    """Look a request up and let it compute all that is left."""
    hit = cache.lookup(request)
    left = len(request.text.tokens) - hit.tokens - settings.get("external", 0)
    assert cache.allocate(request, left, hit, **settings) is not None
    request.computed, request.waiting = len(request.text.tokens), False


# Free order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_two_equal_requests_give_back_their_tails_first(release: str) -> None:
    cache = cache_of(FULL, blocks=11, release=release)
    first, second = arrive(cache, "a", 10), arrive(cache, "b", 10)
    compute(cache, first)
    compute(cache, second)
    cache.free(first)
    cache.free(second)
    old = [5, 6, 7, 8, 9, 10, 3, 4, 2, 1]
    assert cache.pool.queue == (old if INDEX[release] <= INDEX["0.23.0"] else [4, 3, 5, 6, 7, 8, 9, 10, 2, 1])


@pytest.mark.parametrize("release", RELEASES)
def test_without_caching_a_request_gives_back_its_tail_first_to_one_end_or_the_other(release: str) -> None:
    cache = cache_of(FULL, blocks=9, release=release, caching=False)
    request = arrive(cache, "a", 10)
    compute(cache, request)
    cache.free(request)
    at_tail = INDEX[release] <= INDEX["0.23.0"] or release == "0.27.1"
    assert cache.pool.queue == ([4, 5, 6, 7, 8, 3, 2, 1] if at_tail else [3, 2, 1, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("release", RELEASES)
def test_a_window_gives_back_what_was_not_registered_first_since_0_23(release: str) -> None:
    cache = cache_of(window(8), blocks=12, release=release)
    request = arrive(cache, "a", 30)
    assert cache.allocate(request, 16) == ([1, 2, 3, 4],)
    request.computed = 16
    assert cache.allocate(request, 14) == ([5, 6, 7, 8],)
    assert cache.tables["a"] == [[NULL, NULL, 3, 4, 5, 6, 7, 8]]
    request.computed = 30
    cache.free(request)
    old, new = [9, 10, 11, 2, 1, 8, 7, 6, 5, 4, 3], [8, 9, 10, 11, 2, 1, 7, 6, 5, 4, 3]
    assert cache.pool.queue == (old if INDEX[release] <= INDEX["0.22.1"] else new)


def test_groups_give_back_one_after_the_other_and_all_at_once_in_reverse_when_deferred() -> None:
    for deferred, queue in ((False, [2, 1, 4, 3]), (True, [4, 3, 2, 1])):
        cache = cache_of(FULL, window(100), blocks=9)
        frees = DeferredFrees(cache)
        request = arrive(cache, "a", 8)
        compute(cache, request)
        request.last_step = frees.scheduled = int(deferred)
        frees.free(request)
        if deferred:
            assert len(cache.pool.queue) == 4
            frees.step_processed()
        assert cache.pool.queue == [5, 6, 7, 8, *queue]


def test_deferred_blocks_wait_for_the_step_that_was_scheduled_last() -> None:
    cache = cache_of(FULL)
    frees = DeferredFrees(cache)
    request = arrive(cache, "a", 4)
    compute(cache, request)
    request.last_step, frees.scheduled = 1, 2
    frees.free(request)
    frees.step_processed()
    assert cache.pool.usage() > 0
    frees.step_processed()
    assert cache.pool.usage() == 0


# Hits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_hit_never_contains_the_last_token(tokens: int, hit: int) -> None:
    cache = cache_of(FULL)
    compute(cache, arrive(cache, "writer", 12))
    found = cache.lookup(arrive(cache, "reader", tokens))
    assert found.tokens == hit
    assert found.blocks == (list(range(1, hit // 4 + 1)),)


def test_nothing_is_looked_up_without_caching_or_for_whoever_may_not_read() -> None:
    cache = cache_of(FULL)
    compute(cache, arrive(cache, "writer", 12))
    assert cache.lookup(arrive(cache, "reader", 12, reads_cache=False)).tokens == 0
    assert cache_of(FULL, caching=False).lookup(arrive(cache, "reader", 12)).tokens == 0


def test_full_attention_needs_every_block_and_a_window_only_its_own() -> None:
    for group, hit in ((FULL, 4), (window(5), 16)):
        cache = cache_of(group)
        compute(cache, arrive(cache, "writer", 20))
        cache.evict([2])
        assert cache.lookup(arrive(cache, "reader", 20)).tokens == hit
    assert cache.lookup(arrive(cache, "reader", 20)).blocks == ([NULL, NULL, NULL, 4],)


def test_a_window_that_begins_inside_a_block_needs_that_block() -> None:
    for tokens, needed in ((2, 1), (5, 1), (6, 2), (9, 2), (10, 3)):
        cache = cache_of(window(tokens))
        compute(cache, arrive(cache, "writer", 21))
        row = cache.lookup(arrive(cache, "reader", 21)).blocks[0]
        assert row.count(NULL) == 5 - needed


def test_a_chunk_needs_only_what_lies_before_the_hit_in_it() -> None:
    cache = cache_of(Group(Kind.CHUNKED_LOCAL, 4, reach=8))
    assert cache.lookup(arrive(cache, "new", 17)).blocks == ([NULL] * 4,)
    assert cache.lookup(arrive(cache, "new", 16)).tokens == 8
    compute(cache, arrive(cache, "writer", 12))
    assert cache.lookup(arrive(cache, "reader", 16)).blocks == ([NULL, NULL, 1],)


def test_mamba_needs_the_state_at_the_end_of_the_hit() -> None:
    cache = cache_of(Group(Kind.MAMBA, 4), release="0.32.0")
    writer = arrive(cache, "writer", 8)
    compute(cache, writer)
    cache.evict([1])
    assert cache.lookup(arrive(cache, "reader", 9)).blocks == ([NULL, 2],)
    cache.evict([2])
    assert cache.lookup(arrive(cache, "reader", 9)).tokens == 0


def test_a_state_of_this_step_makes_the_request_wait_for_the_next() -> None:
    cache = cache_of(Group(Kind.MAMBA, 4), release="0.32.0")
    compute(cache, arrive(cache, "writer", 8))
    reader = arrive(cache, "reader", 9)
    assert cache.allocate(reader, 1, cache.lookup(reader)) is None
    cache.new_step()
    assert cache.allocate(reader, 1, cache.lookup(reader)) is not None


def test_groups_agree_on_the_longest_hit_that_all_accept_and_rows_cover_exactly_that() -> None:
    cache = cache_of(FULL, Group(Kind.FULL, 8), window(5))
    compute(cache, arrive(cache, "writer", 33))
    full, large, narrow = cache.tables["writer"]
    cache.evict([narrow[7], full[6]])
    hit = cache.lookup(arrive(cache, "reader", 33))
    assert hit.tokens == 24
    assert hit.blocks == (full[:6], large[:3], [NULL] * 5 + narrow[5:6])
    assert hit.shared_prefix == 0
    cache.evict([narrow[5]])
    assert cache.lookup(arrive(cache, "reader", 33))[1:] == (16, 24)


def test_groups_of_one_layout_hit_only_what_all_of_them_have() -> None:
    cache = cache_of(FULL, FULL, window(5))
    compute(cache, arrive(cache, "writer", 17))
    cache.evict([cache.tables["writer"][1][2]])
    assert cache.lookup(arrive(cache, "reader", 17)).tokens == 8


@pytest.mark.parametrize("release", RELEASES)
def test_a_draft_model_needs_one_block_more_than_the_hit(release: str) -> None:
    cache = cache_of(Group(Kind.FULL, 4, eagle=True), release=release)
    compute(cache, arrive(cache, "writer", 16))
    assert cache.lookup(arrive(cache, "reader", 17)).tokens == 12
    assert cache.lookup(arrive(cache, "reader", 16)).tokens == 8
    assert cache.lookup(arrive(cache, "reader", 5)).tokens == 0


@pytest.mark.parametrize("release", RELEASES)
def test_with_several_groups_the_proof_may_contain_the_last_token_since_0_32(release: str) -> None:
    cache = cache_of(Group(Kind.FULL, 4, eagle=True), window(100), release=release)
    compute(cache, arrive(cache, "writer", 16))
    assert cache.lookup(arrive(cache, "reader", 16)).tokens == (12 if INDEX[release] >= INDEX["0.32.0"] else 8)


# What is needed and refused -------------------------------------------------------------------------------------------


def test_a_step_needs_what_the_table_lacks_and_the_blocks_of_the_hit_that_are_free() -> None:
    cache = cache_of(FULL, blocks=8)
    writer = arrive(cache, "writer", 12)
    compute(cache, writer)
    reader = arrive(cache, "reader", 18)
    hit = cache.lookup(reader)
    assert cache.blocks_needed(reader, 18, hit, 12, main=18) == 2
    cache.free(writer)
    assert cache.blocks_needed(reader, 18, hit, 12, main=18) == 5
    assert cache.allocate(reader, 6, hit, reserved=3) is None
    assert cache.allocate(reader, 6, hit, reserved=2) == ([4, 5],)
    assert cache.tables["reader"] == [[1, 2, 3, 4, 5]]


def test_lookahead_takes_slots_but_none_beyond_the_longest_text() -> None:
    cache = cache_of(FULL, max_tokens=8)
    request = arrive(cache, "a", 4)
    assert cache.allocate(request, 4, lookahead=1) == ([1, 2],)
    request.computed = 4
    assert cache.allocate(request, 4, lookahead=9) == ([],)


def test_a_step_without_anything_to_do_is_refused() -> None:
    for release in RELEASES:
        cache = cache_of(FULL, release=release)
        compute(cache, arrive(cache, "writer", 8))
        with pytest.raises(ValueError, match="nothing to compute"):
            cache.allocate(arrive(cache, "a", 4), 0)
        reader = arrive(cache, "reader", 9)
        if INDEX[release] >= INDEX["0.31.0"]:
            assert cache.allocate(reader, 0, cache.lookup(reader)) == ([],)
        else:
            with pytest.raises(ValueError, match="nothing to compute"):
                cache.allocate(reader, 0, cache.lookup(reader))


@pytest.mark.parametrize("release", RELEASES)
def test_the_watermark_is_kept_only_when_a_request_is_admitted_while_others_run(release: str) -> None:
    for state, others, fits in (({}, True, False), ({}, False, True), ({"waiting": False}, True, True)):
        cache = cache_of(FULL, blocks=11, watermark=0.3, release=release)
        request = arrive(cache, "a", 32, **state)
        allocated = cache.allocate(request, 32, others_run=others) is not None
        assert allocated == (fits or INDEX[release] < INDEX["0.24.0"])


def test_a_request_that_would_not_fit_as_a_whole_is_not_admitted() -> None:
    cache = cache_of(FULL, blocks=6)
    assert cache.allocate(arrive(cache, "long", 24), 4, must_fit=True) is None
    assert cache.allocate(arrive(cache, "short", 20), 4, must_fit=True) == ([1],)


def test_a_window_fits_if_it_and_what_is_in_flight_do() -> None:
    cache = cache_of(window(8), blocks=6, in_flight_tokens=8)
    assert cache.allocate(arrive(cache, "long", 100), 4, must_fit=True) == ([1],)
    cache = cache_of(window(8), blocks=5, in_flight_tokens=8)
    assert cache.allocate(arrive(cache, "long", 100), 4, must_fit=True) is None
    cache = cache_of(Group(Kind.CHUNKED_LOCAL, 4, reach=8), blocks=5, in_flight_tokens=8)
    assert cache.allocate(arrive(cache, "long", 100), 4, must_fit=True) == ([1],)


def test_what_leaves_the_window_goes_even_if_the_step_is_refused_but_not_while_it_is_read() -> None:
    for in_flight, row in ((0, [NULL, NULL, 3]), (3, [NULL, 2, 3]), (7, [1, 2, 3])):
        cache = cache_of(window(5), blocks=4)
        request = arrive(cache, "a", 40)
        cache.allocate(request, 12)
        request.computed, request.in_flight = 12, in_flight
        assert cache.allocate(request, 28) is None
        assert cache.tables["a"] == [row]


# External tokens ------------------------------------------------------------------------------------------------------


def test_external_tokens_get_blocks_of_their_own_and_are_registered_unless_they_come_later() -> None:
    for delay in (False, True):
        cache = cache_of(FULL)
        request = arrive(cache, "a", 12)
        assert cache.allocate(request, 0, external=11, delay_registration=delay) == ([],)
        assert cache.tables["a"] == [[1, 2, 3]]
        assert len(cache.pool.index) == (0 if delay else 2)
        request.computed = 11
        cache.register(request, 11)
        assert len(cache.pool.index) == 2


def test_external_tokens_before_the_window_get_no_blocks() -> None:
    cache = cache_of(FULL, window(5))
    request = arrive(cache, "a", 21)
    cache.allocate(request, 1, external=20)
    assert cache.tables["a"] == [[1, 2, 3, 4, 5, 7], [NULL, NULL, NULL, NULL, 6, 8]]


def test_a_hit_is_held_before_blocks_for_external_tokens_are_taken() -> None:
    cache = cache_of(FULL, window(100), blocks=7)
    writer = arrive(cache, "writer", 8)
    compute(cache, writer)
    cache.free(writer)
    reader = arrive(cache, "reader", 12)
    hit = cache.lookup(reader)
    assert cache.allocate(reader, 1, hit, external=1) is not None
    assert [row[0] for row in cache.tables["reader"]] == [row[0] for row in hit.blocks]


# Registration ---------------------------------------------------------------------------------------------------------


def test_drafts_are_not_registered_and_a_block_is_once_its_last_token_is_known() -> None:
    cache = cache_of(FULL)
    request = arrive(cache, "a", 6)
    cache.allocate(request, 9)
    assert len(cache.pool.index) == 1
    request.computed = 7
    request.text.append([6, 7])
    cache.allocate(request, 1)
    assert len(cache.pool.index) == 2


def test_with_several_groups_only_what_a_hit_can_use_is_registered() -> None:
    cache = cache_of(Group(Kind.FULL, 8), window(5, block_tokens=2))
    compute(cache, arrive(cache, "writer", 22))
    registered = {key.group: 0 for key in cache.pool.index}
    for key in cache.pool.index:
        registered[key.group] += 1
    assert registered == {0: 2, 1: 4}
    old = cache_of(Group(Kind.FULL, 8), window(5, block_tokens=2), release="0.20.2")
    compute(old, arrive(old, "writer", 22))
    assert len(old.pool.index) == 2 + 11


def test_sparse_retention_keeps_where_a_resend_goes_on_and_every_kth_position() -> None:
    for interval, kept in ((None, 10), (0, 1), (16, 3)):
        cache = cache_of(window(5), interval=interval)
        compute(cache, arrive(cache, "writer", 40))
        assert len(cache.pool.index) == kept
        assert cache.lookup(arrive(cache, "resend", 40)).tokens == 36


@pytest.mark.parametrize("release", RELEASES[INDEX["0.23.0"] :])
def test_sparse_retention_leaves_out_mamba_states_since_0_24(release: str) -> None:
    cache = cache_of(FULL, Group(Kind.MAMBA, 8, align=True), window(5), release=release, interval=0)
    writer = arrive(cache, "writer", 41)
    for new in (8, 8, 24, 1):
        assert cache.allocate(writer, new) is not None
        writer.computed += new
    kept = Counter(key.group for key in cache.pool.index)
    assert kept == {0: 10, 1: 3 if release == "0.23.0" else 1, 2: 1}


def test_sparse_retention_keeps_where_two_requests_part() -> None:
    cache = cache_of(FULL, window(5), interval=0)
    first = arrive(cache, "first", 40)
    compute(cache, first)
    second = arrive(cache, "second", [*range(20), *range(100, 120)])
    hit = cache.lookup(second)
    assert (hit.tokens, hit.shared_prefix) == (0, 20)
    second.shared_prefix = hit.shared_prefix
    cache.allocate(second, 40, hit)
    assert cache.lookup(arrive(cache, "third", [*range(20), *range(200, 220)])).tokens == 20


def test_the_block_in_which_a_prompt_ends_is_registered_for_its_last_hash_block_too() -> None:
    cache = cache_of(Group(Kind.FULL, 8), window(100, block_tokens=4))
    request = arrive(cache, "a", 13)
    cache.allocate(request, 13)
    request.computed = 13
    request.text.append(range(13, 20))
    cache.allocate(request, 7)
    tail = cache.tables["a"][0][1]
    assert [len(cache.pool.blocks[block].more_hashes) for block in cache.tables["a"][0][:2]] == [0, 1]
    assert cache.pool.find(request.text.hashes[2], [0]) == (tail,)


def test_a_preempted_request_finds_what_it_registered() -> None:
    cache = cache_of(FULL, blocks=5)
    request = arrive(cache, "a", 14)
    compute(cache, request)
    cache.preempt(request)
    assert (request.computed, request.waiting) == (0, True)
    assert cache.lookup(request).tokens == 12
    assert cache.reset()
    assert cache.lookup(request).tokens == 0
