"""The block pool of the model, alone: free order, references, eviction, refusals.

The vectors were seen by running vLLM.
"""

from __future__ import annotations

import pytest

from kvspec.model.keys import Key, Text
from kvspec.model.pool import NULL, BlockPool, Cleared, Removed, Stored
from kvspec.model.profile import RELEASES, Profile, profile_for

EVERY = [profile_for(release) for release in RELEASES]


def pool_of(profile: Profile, blocks: int = 8, **settings: bool) -> BlockPool:
    return BlockPool(blocks, profile, 2, **settings)


def before(release: str) -> list[Profile]:
    return EVERY[: RELEASES.index(release)]


def since(release: str) -> list[Profile]:
    return EVERY[RELEASES.index(release) :]


@pytest.mark.parametrize("profile", EVERY, ids=RELEASES)
def test_blocks_come_in_the_order_of_their_ids_and_the_null_block_never_does(profile: Profile) -> None:
    pool = pool_of(profile)
    assert pool.allocate(7) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    assert pool.usage() == 1.0


def test_a_negative_number_of_blocks_is_refused_and_changes_nothing() -> None:
    pool = pool_of(EVERY[-1])
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    assert len(pool.queue) == 7


@pytest.mark.parametrize(
    ("profiles", "queue"),
    [
        (before("0.24.0"), [4, 5, 6, 7, 3, 1, 2]),
        (since("0.24.0"), [3, 4, 5, 6, 7, 1, 2]),
    ],
    ids=["up to 0.23", "since 0.24"],
)
def test_blocks_that_cannot_be_found_are_reused_first_since_0_24(profiles: list[Profile], queue: list[int]) -> None:
    for profile in profiles:
        pool, text = pool_of(profile), Text([1, 2, 3, 4, 5], 2)
        pool.allocate(3)
        pool.register(text, [1, 2, 3], 0, 2, 2, group=0)
        pool.free([3, 1, 2])
        assert pool.queue == queue


def test_only_0_23_lets_the_caller_choose_the_head_of_the_queue() -> None:
    for profile in EVERY:
        pool, text = pool_of(profile), Text([1, 2], 2)
        pool.allocate(1)
        pool.register(text, [1], 0, 1, 2, group=0)
        pool.free([1], at_head=True)
        assert (pool.queue[0] == 1) == (profile.release == "0.23.0")


def test_without_caching_the_block_released_last_is_reused_first_but_for_some_releases() -> None:
    newest_first = {"0.24.0", "0.25.1", "0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"}
    for profile in EVERY:
        pool = pool_of(profile, caching=False)
        pool.allocate(2)
        pool.free([2])
        pool.free([1])
        expected = [1, 2] if profile.release in newest_first else [2, 1]
        assert (pool.queue[:2] if profile.release in newest_first else pool.queue[-2:]) == expected


def test_a_free_block_can_be_touched_wherever_it_stands_and_freed_only_by_its_last_holder() -> None:
    pool = pool_of(EVERY[-1])
    pool.touch([4, NULL])
    assert pool.queue == [1, 2, 3, 5, 6, 7]
    pool.touch([4])
    pool.free([4])
    assert 4 not in pool.queue
    pool.free([NULL, 4])
    assert pool.queue[0] == 4
    with pytest.raises(ValueError, match="nobody holds"):
        pool.free([4])


@pytest.mark.parametrize("profile", EVERY, ids=RELEASES)
def test_two_references_in_one_list_release_a_block_once(profile: Profile) -> None:
    pool = pool_of(profile, blocks=4)
    pool.allocate(1)
    pool.touch([1])
    pool.free([1, 1])
    assert sorted(pool.queue) == [1, 2, 3]


def test_a_block_is_found_until_it_is_reused_and_of_equal_blocks_the_first() -> None:
    pool, text = pool_of(EVERY[-1], blocks=4, events=True), Text([1, 2], 2)
    pool.allocate(2)
    for block in (1, 2):
        pool.register(text, [block], 0, 1, 2, group=0)
    pool.free([1])
    assert pool.find(text.hashes[0], [0]) == (1,)
    assert pool.find(text.hashes[0], [1]) is None
    assert pool.allocate(2) == [3, 1]
    assert pool.find(text.hashes[0], [0]) == (2,)
    stored, _, removed = pool.take_events()
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent, stored.tokens) == ((text.hashes[0],), None, (1, 2))
    assert removed == Removed(Key(text.hashes[0], 0), 1)
    assert pool.take_events() == []


def test_null_and_unwanted_blocks_are_left_out_of_a_registration() -> None:
    pool, text = pool_of(EVERY[-1], events=True), Text(list(range(8)), 2)
    pool.allocate(3)
    pool.register(text, [NULL, 1, 2, 3], 0, 4, 2, group=0, wanted=[True, True, False, True])
    (stored,) = pool.take_events()
    assert isinstance(stored, Stored)
    assert stored.hashes == (text.hashes[1], text.hashes[3])
    assert stored.tokens == tuple(range(8))
    with pytest.raises(AssertionError, match="registered already"):
        pool.register(text, [1], 0, 1, 2, group=0)


def test_a_block_registered_for_a_part_of_it_loses_that_hash_once_it_is_full() -> None:
    pool, text = pool_of(EVERY[-1]), Text(list(range(8)), 2)
    pool.allocate(1)
    pool.register_tail(text, 1, 2, group=0)
    assert pool.find(text.hashes[0], [0]) == (1,)
    pool.register(text, [1], 0, 1, 4, group=0)
    assert pool.find(text.hashes[0], [0]) is None
    pool.register_tail(text, 1, 2, group=0)
    assert pool.blocks[1].more_hashes == {Key(text.hashes[0], 0)}
    pool.evict([1])
    assert pool.index == {}


def test_hashes_can_move_and_nobody_is_told() -> None:
    pool, text = pool_of(EVERY[-1], events=True), Text([1, 2], 2)
    pool.allocate(2)
    pool.register(text, [1], 0, 1, 2, group=0)
    pool.take_events()
    pool.move_hashes(1, 2)
    pool.move_hashes(1, 2)
    assert pool.find(text.hashes[0], [0]) == (2,)
    assert pool.take_events() == []
    assert pool.is_writable(1)
    assert not pool.is_writable(2)
    assert not pool.is_writable(NULL)


def test_a_reader_is_told_once_that_its_block_is_reused_or_the_cache_reset() -> None:
    pool, told = pool_of(EVERY[-1], blocks=4), list[int]()
    pool.allocate(2)
    pool.unpin([1, 2], told.append)
    assert pool.queue == [3, 1, 2]
    pool.free(pool.allocate(2))
    assert told == [1]
    assert pool.reset()
    assert told == [1, 2]


def test_a_reset_is_refused_while_a_block_is_held_and_leaves_the_queue_as_it_is() -> None:
    pool, text = pool_of(EVERY[-1], events=True), Text([1, 2], 2)
    pool.allocate(1)
    pool.register(text, [1], 0, 1, 2, group=0)
    assert not pool.reset()
    assert pool.find(text.hashes[0], [0]) == (1,)
    pool.free([1])
    queue = list(pool.queue)
    assert pool.reset()
    assert pool.queue == queue
    assert pool.find(text.hashes[0], [0]) is None
    assert pool.take_events()[-1] == Cleared()


def test_only_ids_of_the_pool_can_be_evicted() -> None:
    with pytest.raises(AssertionError, match="no block 8"):
        pool_of(EVERY[-1]).evict([8])
