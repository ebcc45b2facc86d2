"""Each law on observations made by hand: silent where it holds, one sentence for each way in which it is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvspec import laws
from kvspec.laws import LAWS, PoolView

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=100)

# The list of laws -----------------------------------------------------------------------------------------------------


def test_every_law_has_a_sentence_and_a_reason_of_its_own() -> None:
    assert all(law.id == id for id, law in LAWS.items())
    for texts in ([law.sentence for law in LAWS.values()], [law.reason for law in LAWS.values()]):
        assert len(set(texts)) == len(texts)
        assert all(text.endswith(".") and len(text.split()) > 4 for text in texts)


# CONSERVE-1 -----------------------------------------------------------------------------------------------------------


@st.composite
def pools(draw: st.DrawFn, free_min: int = 0, used_min: int = 0) -> PoolView:
    """A pool as its owner keeps it: what nothing refers to waits in the queue, in any order."""
    size = draw(st.integers(max(1, free_min + used_min + 1), 12))
    null = draw(st.integers(0, size - 1))
    others = draw(st.permutations([block for block in range(size) if block != null]))
    free = others[: draw(st.integers(free_min, len(others) - used_min))]
    counts = st.integers(1, 3)
    refs = [0 if block in free else draw(counts) for block in range(size)]
    refs[null] = draw(st.integers(-2, 2))  # it is not counted, so it may say anything
    return PoolView("GPU", refs, free, len(free), null)


def broken(pool: PoolView) -> list[str]:
    return list(laws.pool_is_conserved(pool))


def changed(values: Iterable[int], at: int, value: int) -> list[int]:
    return [value if i == at else old for i, old in enumerate(values)]


@FIXED
@given(pools())
def test_a_pool_that_queues_what_nothing_refers_to_is_conserved(pool: PoolView) -> None:
    assert broken(pool) == []


@FIXED
@given(pools(free_min=1), st.data())
def test_a_block_that_is_free_twice_is_reported(pool: PoolView, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(pool.free))
    free = list(pool.free)
    free.insert(data.draw(st.integers(0, len(free))), block)
    assert broken(pool._replace(free=free, free_count=len(free))) == [
        f"GPU block {block} with 0 references is 2 times in the free queue"
    ]


@FIXED
@given(pools(free_min=1), st.data())
def test_a_block_that_is_lost_is_reported(pool: PoolView, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(pool.free))
    free = [other for other in pool.free if other != block]
    assert broken(pool._replace(free=free, free_count=len(free))) == [
        f"GPU block {block} with 0 references is 0 times in the free queue"
    ]


@FIXED
@given(pools(free_min=1, used_min=1), st.data())
def test_a_block_that_is_free_and_referenced_is_reported_even_in_the_place_of_another(
    pool: PoolView, data: st.DataObject
) -> None:
    """The queue is as long as it should be, and holds no block twice."""
    lost = data.draw(st.sampled_from(pool.free))
    used = data.draw(st.sampled_from([b for b, count in enumerate(pool.refs) if count > 0 and b != pool.null]))
    free = [used if block == lost else block for block in pool.free]
    assert set(broken(pool._replace(free=free))) == {
        f"GPU block {lost} with 0 references is 0 times in the free queue",
        f"GPU block {used} with {pool.refs[used]} references is 1 times in the free queue",
    }


@FIXED
@given(pools(free_min=2), st.data())
def test_a_block_that_is_free_twice_is_reported_even_in_the_place_of_another(
    pool: PoolView, data: st.DataObject
) -> None:
    """The queue is as long as it should be, and nothing in it is referenced."""
    lost, twice = data.draw(st.permutations(pool.free))[:2]
    assert set(broken(pool._replace(free=[twice if block == lost else block for block in pool.free]))) == {
        f"GPU block {lost} with 0 references is 0 times in the free queue",
        f"GPU block {twice} with 0 references is 2 times in the free queue",
    }


@FIXED
@given(pools(), st.integers(-3, 20))
def test_a_pool_that_counts_its_free_blocks_wrong_is_reported(pool: PoolView, count: int) -> None:
    assume(count != pool.free_count)
    assert broken(pool._replace(free_count=count)) == [
        f"the GPU pool counts {count} free blocks and its queue holds {len(pool.free)}"
    ]


@FIXED
@given(pools(), st.data())
def test_the_null_block_in_the_queue_is_reported_whatever_its_count(pool: PoolView, data: st.DataObject) -> None:
    free = list(pool.free)
    free.insert(data.draw(st.integers(0, len(free))), pool.null)
    assert broken(pool._replace(free=free, free_count=len(free))) == [
        f"GPU block {pool.null} with {pool.refs[pool.null]} references is 1 times in the free queue "
        "(it is the null block)"
    ]


@FIXED
@given(pools(free_min=1), st.data())
def test_the_null_block_in_the_place_of_another_is_reported(pool: PoolView, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(pool.free))
    messages = broken(pool._replace(free=[pool.null if block == lost else block for block in pool.free]))
    assert len(messages) == 2
    assert any("(it is the null block)" in message for message in messages)


@FIXED
@given(pools(free_min=1), st.data(), st.integers(-3, -1))
def test_a_block_with_fewer_than_no_references_is_reported_in_the_queue_and_out_of_it(
    pool: PoolView, data: st.DataObject, count: int
) -> None:
    block = data.draw(st.sampled_from(pool.free))
    refs = changed(pool.refs, block, count)
    free = [other for other in pool.free if other != block]
    assert broken(pool._replace(refs=refs)) == [
        f"GPU block {block} with {count} references is 1 times in the free queue"
    ]
    assert broken(pool._replace(refs=refs, free=free, free_count=len(free))) == [
        f"GPU block {block} has {count} references"
    ]


@FIXED
@given(pools(), st.data())
def test_any_other_queue_or_count_is_reported(pool: PoolView, data: st.DataObject) -> None:
    """Against the definition, said anew: every block but the null one is free exactly if nothing refers to it."""
    size = len(pool.refs)
    refs = data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size))
    free = data.draw(st.lists(st.integers(0, size - 1), max_size=size))
    count = data.draw(st.sampled_from([len(free), len(free) + 1]))
    wanted = sorted(block for block in range(size) if refs[block] == 0 and block != pool.null)
    negative = any(refs[block] < 0 for block in range(size) if block != pool.null)
    holds = sorted(free) == wanted and count == len(free) and not negative
    assert (broken(pool._replace(refs=refs, free=free, free_count=count)) == []) == holds


# OWN-1 ----------------------------------------------------------------------------------------------------------------

STORE = "store of GPU block 3 into CPU block 5"
LOAD = "load of CPU block 5 into GPU block 3"


@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_copy_between_referenced_blocks_is_owned(to_gpu: bool) -> None:
    assert list(laws.copy_is_owned(3, 5, 1, 2, to_gpu, rank=0)) == []


@pytest.mark.parametrize(
    ("gpu_refs", "cpu_refs", "freed"),
    [
        (0, 1, ["GPU block 3"]),
        (1, 0, ["CPU block 5"]),
        (0, 0, ["GPU block 3", "CPU block 5"]),
        (-1, 1, ["GPU block 3"]),
    ],
)
@pytest.mark.parametrize(("to_gpu", "what"), [(False, STORE), (True, LOAD)])
def test_a_copy_from_or_to_a_free_block_is_reported_for_each_of_them(
    to_gpu: bool, what: str, gpu_refs: int, cpu_refs: int, freed: list[str]
) -> None:
    assert list(laws.copy_is_owned(3, 5, gpu_refs, cpu_refs, to_gpu, rank=2)) == [
        f"{what} executes on rank 2 while {block} is free" for block in freed
    ]


@pytest.mark.parametrize(("gpu", "cpu"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("refs", [0, 1])
def test_a_copy_from_or_to_the_null_block_is_reported_once_whatever_its_references(
    gpu: int, cpu: int, refs: int
) -> None:
    (message,) = laws.copy_is_owned(gpu, cpu, refs if gpu == 0 else 1, refs if cpu == 0 else 1, False, rank=1)
    assert message == f"store of GPU block {gpu} into CPU block {cpu} on rank 1 touches the null block"


@pytest.mark.parametrize("cpu_refs", [0, 1])
def test_the_first_block_of_a_tier_without_a_null_block_is_like_any_other(cpu_refs: int) -> None:
    freed = ["store of GPU block 3 into CPU block 0 executes on rank 1 while CPU block 0 is free"]
    found = list(laws.copy_is_owned(3, 0, 1, cpu_refs, False, rank=1, cpu_null=None))
    assert found == ([] if cpu_refs else freed)


@pytest.mark.parametrize("free", [[0, 2], [2], [0, 0, 2]])
def test_a_pool_without_a_null_block_counts_its_first_block_too(free: list[int]) -> None:
    found = broken(PoolView("CPU", [0, 1, 0], free, len(free), -1))
    assert bool(found) == (free != [0, 2])


@pytest.mark.parametrize("unstarted", [0, 3])
def test_stores_that_were_never_begun_are_told_with_their_number(unstarted: int) -> None:
    found = list(laws.stores_were_started(unstarted))
    assert len(found) == bool(unstarted)
    assert all("3 planned stores" in message for message in found)


@pytest.mark.parametrize(("gpu", "cpu"), [(-1, 5), (3, -1), (-1, -1)])
def test_a_copy_from_or_to_memory_that_is_in_no_block_is_reported_as_that(gpu: int, cpu: int) -> None:
    (message,) = laws.copy_is_owned(gpu, cpu, 1, 1, True, rank=1)
    assert message == f"load of CPU block {cpu} into GPU block {gpu} on rank 1 touches memory that is in no block"


# LOAD-1 ---------------------------------------------------------------------------------------------------------------


def test_each_rank_owes_one_report_of_each_load() -> None:
    due = Counter({("a", 0): 1, ("a", 1): 1, ("b", 0): 1, ("b", 1): 1})
    assert list(laws.report_is_due(due, ["a", "b"], rank=0)) == []
    assert list(laws.report_is_due(due, ["b"], rank=1)) == []
    assert list(laws.reports_were_made(due)) == [
        "idle, but these loads were never reported (request, rank): [('a', 1)]"
    ]
    assert list(laws.report_is_due(due, ["a"], rank=1)) == []
    assert list(laws.reports_were_made(due)) == []


def test_a_request_that_loads_twice_owes_two_reports() -> None:
    due = Counter({("a", 0): 2})
    assert list(laws.report_is_due(due, ["a"], rank=0)) == []
    assert list(laws.report_is_due(due, ["a"], rank=0)) == []
    assert list(laws.report_is_due(due, ["a"], rank=0)) == [
        "rank 0 reports the load of a as finished, which it doesn't owe"
    ]


@pytest.mark.parametrize(("reports", "rank"), [(["a", "a"], 0), (["a"], 1), (["c"], 0)])
def test_a_report_too_many_from_another_rank_or_of_another_request_is_told(reports: list[str], rank: int) -> None:
    due = Counter({("a", 0): 1, ("b", 0): 1})
    messages = list(laws.report_is_due(due, reports, rank))
    assert messages == [f"rank {rank} reports the load of {reports[-1]} as finished, which it doesn't owe"]


def test_a_report_that_is_not_owed_takes_nothing_from_what_is() -> None:
    due = Counter({("a", 0): 1})
    assert len(list(laws.report_is_due(due, ["a"], rank=1))) == 1
    assert len(list(laws.report_is_due(due, ["b"], rank=0))) == 1
    assert list(laws.reports_were_made(due)) == [
        "idle, but these loads were never reported (request, rank): [('a', 0)]"
    ]


@FIXED
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.booleans()), max_size=12))
def test_load_reports_are_counted_as_a_bag_of_what_is_owed(events: list[tuple[str, int, bool]]) -> None:
    """Loads start (True) and are reported (False) in any order; compare with a list of the debts."""
    due: Counter[tuple[str, int]] = Counter()
    debts: list[tuple[str, int]] = []
    for request, rank, starts in events:
        if starts:
            due[request, rank] += 1
            debts.append((request, rank))
            continue
        owed = (request, rank) in debts
        assert (list(laws.report_is_due(due, [request], rank)) == []) == owed
        if owed:
            debts.remove((request, rank))
    messages = list(laws.reports_were_made(due))
    assert [str(sorted(set(debts))) in message for message in messages] == ([True] if debts else [])


# RELEASE-1 ------------------------------------------------------------------------------------------------------------


def test_a_pool_of_which_only_the_null_block_is_referenced_holds_nothing() -> None:
    assert list(laws.nothing_is_held(PoolView("CPU", [1, 0, 0], [2, 1], 2, 0))) == []
    assert list(laws.nothing_is_held(PoolView("CPU", [0, 0, 5], [0, 1], 2, 2))) == []


def test_blocks_that_are_still_referenced_are_told_in_one_sentence() -> None:
    pool = PoolView("CPU", [1, 0, 2, -1], [1], 1, 0)
    assert list(laws.nothing_is_held(pool)) == [
        "idle, but CPU blocks are still referenced (block: references): {2: 2, 3: -1}"
    ]


def test_blocks_of_a_transfer_that_nobody_has_asked_about_are_excused_and_no_others() -> None:
    pool = PoolView("GPU", [1, 1, 1, 0], [3], 1, 0)
    assert list(laws.nothing_is_held(pool, {1, 2, 3})) == []
    assert list(laws.nothing_is_held(pool, {1})) == [
        "idle, but GPU blocks are still referenced (block: references): {2: 1}"
    ]


def test_empty_maps_keep_nothing_and_others_are_named_with_their_size() -> None:
    assert list(laws.nothing_is_kept({})) == []
    assert list(laws.nothing_is_kept({"loads": 0, "stores": 0})) == []
    assert list(laws.nothing_is_kept({"loads": 0, "stores": 2, "requests": 1})) == [
        "idle, but the connector still keeps (map: entries): {'stores': 2, 'requests': 1}"
    ]


# STORED-1 -------------------------------------------------------------------------------------------------------------


def test_blocks_that_were_never_stored_are_told_by_the_names_of_their_keys() -> None:
    assert not list(laws.blocks_were_stored([], bytes.decode))
    assert list(laws.blocks_were_stored([b"b", b"a"], bytes.decode)) == [
        "idle, and the CPU tier, which had room, never had: a, b"
    ]


# OFFER-1 --------------------------------------------------------------------------------------------------------------


def test_an_offer_is_all_that_there_is_and_no_more() -> None:
    assert not list(laws.offer_is_due(8, 8, 4))
    for offered in (4, 12):
        assert list(laws.offer_is_due(offered, 8, 4)) == [
            f"a lookup offers {offered} tokens behind a local hit of 4, and 8 are due"
        ]


# EVENT-1 --------------------------------------------------------------------------------------------------------------


def replay(counts: dict[bytes, int], index: Iterable[bytes]) -> list[str]:
    return list(laws.events_replay("CPU", counts, index, lambda key: f"block {key.decode()}"))


def test_events_that_give_the_index_are_fine_however_often_a_key_was_stored() -> None:
    assert replay({}, []) == []
    assert replay({b"a": 1, b"b": 3, b"c": 0}, [b"b", b"a"]) == []


@pytest.mark.parametrize(
    ("counts", "index", "messages"),
    [
        ({b"a": 1}, [b"a", b"c", b"b"], ["CPU: in the index, but no event says so: block b, block c"]),
        ({b"a": 0}, [b"a"], ["CPU: in the index, but no event says so: block a"]),
        ({b"a": 1}, [], ["CPU: the events leave it stored, but it isn't in the index: block a"]),
        ({b"a": -1}, [], ["CPU: removed more often than stored: block a"]),
        (
            {b"a": -1, b"b": 1},
            [b"a"],
            [
                "CPU: in the index, but no event says so: block a",
                "CPU: the events leave it stored, but it isn't in the index: block b",
                "CPU: removed more often than stored: block a",
            ],
        ),
    ],
    ids=["told too little", "told as removed", "told too much", "removed twice", "all at once"],
)
def test_events_that_do_not_give_the_index_are_told_by_the_names_of_the_keys(
    counts: dict[bytes, int], index: list[bytes], messages: list[str]
) -> None:
    assert replay(counts, index) == messages


# All of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check",
    [
        lambda: laws.pool_is_conserved(PoolView("GPU", [1, 0, 3], [], 1, 0)),
        lambda: laws.nothing_is_held(PoolView("GPU", [1, 2], [], 0, 0)),
        lambda: laws.nothing_is_kept({"loads": 1}),
        lambda: laws.blocks_were_stored([b"a"], bytes.decode),
        lambda: laws.copy_is_owned(0, -1, 0, 0, False, 0),
        lambda: laws.copy_is_owned(1, 1, 0, 0, False, 0),
        lambda: laws.report_is_due(Counter(), ["a", "b"], 0),
        lambda: laws.reports_were_made(Counter({("a", 0): 1})),
        lambda: laws.events_replay("GPU", {b"a": -1}, [b"b"], lambda key: key.decode()),
    ],
)
def test_each_message_is_one_line_that_stands_alone(check: Callable[[], Iterable[str]]) -> None:
    messages = list(check())
    assert messages
    assert all(message and "\n" not in message and not message.endswith(".") for message in messages)
