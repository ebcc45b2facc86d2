"""The forward against a loop over tokens, and what it says when bytes are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec.device.simulated import DeviceFault
from kvspec.engine.shadow import (
    Accesses,
    Batch,
    Layout,
    RunnerState,
    Scheduled,
    ShadowMemory,
    ShadowMismatch,
    layer_mask,
)
from kvspec.engine.text import STOP_TOKEN, Origins, Text, words
from kvspec.model.scaling import slot

FIXED = settings(derandomize=True, database=None, deadline=None)
LAYERS = 3
RANKS = 2
BLOCK_SIZE = 4
BLOCKS = 12

# A scheduler's outputs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cached:
    """A request that the runner knows: blocks to append, or with ``resumed`` the whole table (runner V1)."""

    request: str
    computed: int
    blocks: Sequence[int] | None = None
    outputs: int = 0
    resumed: bool = False


def new(
    request: str, prompt: Sequence[int], blocks: Sequence[int], computed: int = 0, prefill: Sequence[int] | None = None
) -> Any:
    """``NewRequestData``; with ``prefill`` as runner V2 gets a resumed request."""
    return SimpleNamespace(
        req_id=request,
        prompt_token_ids=list(prompt),
        prefill_token_ids=None if prefill is None else list(prefill),
        block_ids=(list(blocks),),
        num_computed_tokens=computed,
    )


def output(
    tokens: Mapping[str, int],
    new: Iterable[Any] = (),
    cached: Sequence[Cached] = (),
    finished: Iterable[str] = (),
    drafts: Mapping[str, list[int]] | None = None,
    **more: Any,
) -> Any:
    """``SchedulerOutput``."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(tokens),
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row.request for row in cached],
            resumed_req_ids={row.request for row in cached if row.resumed},
            new_block_ids=[None if row.blocks is None else (list(row.blocks),) for row in cached],
            num_computed_tokens=[row.computed for row in cached],
            num_output_tokens=[row.outputs for row in cached],
        ),
        finished_req_ids=set(finished),
        scheduled_spec_decode_tokens=dict(drafts or {}),
        **more,
    )


@dataclass
class Lab:
    """A runner's state, the KV caches of all ranks, and what they have reported."""

    block_size: int = BLOCK_SIZE
    blocks: int = BLOCKS
    reports: list[ShadowMismatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origins = Origins()
        self.texts: dict[str, Text] = {}
        layouts = [Layout(self.block_size)]
        self.state = RunnerState(layouts, self.texts)
        self.memories = [
            ShadowMemory(
                np.zeros((LAYERS, self.blocks * self.block_size), dtype=np.uint64),
                layouts,
                rank,
                0,
                self.origins,
                self.reports.append,
            )
            for rank in range(RANKS)
        ]

    def say(self, request: str, prompt: Sequence[int]) -> Text:
        said = self.texts[request] = Text.of_prompt(request, list(prompt), 0, self.origins)
        return said

    def run(self, scheduled: Any) -> Batch:
        batch = self.state.apply(scheduled)
        for memory in self.memories:
            memory.zero(batch.zero_blocks)
            memory.copy_blocks(batch.block_copies)
            memory.forward(batch)
        return batch

    def bytes_of(self, rank: int, block: int) -> np.ndarray:
        """The tags of a block in all layers, to be read or written."""
        return self.memories[rank].tags[:, block * self.block_size : (block + 1) * self.block_size]


def only(batch: Batch) -> Accesses:
    """What a batch does to the one group, on ranks that all keep everything."""
    ((accesses,),) = batch.accesses
    return accesses


# The forward against a loop -------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, dict[str, tuple[list[int], int, int]]]:
    """A block size and, per request: its block table, and the tokens (start, stop) of one step."""
    block_size = draw(st.integers(1, 5))
    free = draw(st.permutations(range(1, BLOCKS)))
    requests: dict[str, tuple[list[int], int, int]] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        table = [free.pop() for _ in range(draw(st.integers(1, 3)))]
        stop = draw(st.integers(1, len(table) * block_size))
        requests[name] = (table, draw(st.integers(0, stop - 1)), stop)
    return block_size, requests


@FIXED
@given(tables())
def test_a_batch_writes_and_reads_the_slots_that_the_block_tables_name(
    drawn: tuple[int, dict[str, tuple[list[int], int, int]]],
) -> None:
    block_size, requests = drawn
    lab = Lab(block_size)
    writes: list[tuple[int, int]] = []
    reads: list[tuple[int, int]] = []
    for stem, (name, (table, start, stop)) in enumerate(requests.items()):
        said = lab.say(name, words(stem, 0, stop))
        for position in range(stop):
            slot = table[position // block_size] * block_size + position % block_size
            entry = (slot, int(said.tags(position, position + 1)[0]))
            reads.append(entry)
            if position >= start:
                writes.append(entry)
    batch = lab.state.apply(
        output(
            {name: stop - start for name, (_, start, stop) in requests.items()},
            new=[new(name, range(stop), table, start) for name, (table, start, stop) in requests.items()],
        )
    )
    assert list(zip(only(batch).write_slots.tolist(), only(batch).write_tags.tolist(), strict=True)) == writes
    assert list(zip(only(batch).read_slots.tolist(), only(batch).read_tags.tolist(), strict=True)) == reads
    assert batch.rows == tuple(Scheduled(name, start, stop) for name, (_, start, stop) in requests.items())


@FIXED
@given(tables(), st.data())
def test_after_any_sequence_of_steps_each_slot_holds_the_tag_of_its_token_and_nothing_was_wrong(
    drawn: tuple[int, dict[str, tuple[list[int], int, int]]], data: st.DataObject
) -> None:
    """Blocks come when they are needed or earlier, chunks are of any size, requests take turns in any way."""
    block_size, requests = drawn
    lab = Lab(block_size)
    computed = dict.fromkeys(requests, 0)
    given_blocks = dict.fromkeys(requests, 0)
    for stem, (name, (_, _, stop)) in enumerate(requests.items()):
        lab.say(name, words(stem, 0, stop))
    while any(computed[name] < requests[name][2] for name in requests):
        tokens: dict[str, int] = {}
        first: list[Any] = []
        later: list[Cached] = []
        for name, (table, _, stop) in requests.items():
            left = stop - computed[name]
            chunk = data.draw(st.integers(0, left)) if tokens else left and data.draw(st.integers(1, left))
            if not chunk:
                continue
            needed = -(-(computed[name] + chunk) // block_size)
            until = data.draw(st.integers(max(needed, given_blocks[name]), len(table)))
            blocks = table[given_blocks[name] : until]
            if given_blocks[name] == 0:
                first.append(new(name, range(stop), blocks))
            else:
                none = None if data.draw(st.booleans()) else []
                later.append(Cached(name, computed[name], blocks or none))
            tokens[name] = chunk
            given_blocks[name] = until
            computed[name] += chunk
        lab.run(output(tokens, first, later))
    assert lab.reports == []
    expected = np.zeros((LAYERS, RANKS, lab.blocks * block_size), dtype=np.uint64)
    for name, (table, _, stop) in requests.items():
        for position in range(stop):
            tag = int(lab.texts[name].tags(position, position + 1)[0])
            for layer in range(LAYERS):
                for rank in range(RANKS):
                    slot = table[position // block_size] * block_size + position % block_size
                    expected[layer, rank, slot] = tag ^ layer_mask(layer, rank)
    for rank, memory in enumerate(lab.memories):
        assert (memory.tags == expected[:, rank]).all()


def test_requests_of_one_step_may_read_what_the_others_write_in_it() -> None:
    """As in a real layer, all writes come before all reads; the reader comes first in the batch."""
    lab = Lab()
    lab.say("reader", words(1, 0, 5))
    lab.say("writer", words(1, 0, 4))
    lab.run(
        output(
            {"reader": 1, "writer": 4},
            new=[new("reader", range(5), [7, 2], computed=4), new("writer", range(4), [7])],
        )
    )
    assert lab.reports == []


def test_a_step_without_tokens_writes_and_reads_nothing() -> None:
    lab = Lab()
    batch = lab.run(output({}))
    assert batch.rows == ()
    assert only(batch).write_slots.size == only(batch).read_slots.size == 0
    assert not any(memory.tags.any() for memory in lab.memories)
    assert lab.reports == []


def test_layers_and_ranks_differ_in_every_byte_that_they_hold() -> None:
    masks = [layer_mask(layer, rank) for layer in range(8) for rank in range(8)]
    assert len(set(masks)) == len(masks)
    assert 0 not in masks


# Wrong bytes ----------------------------------------------------------------------------------------------------------

TABLE = [5, 2, 9]
PROMPT_TOKENS = 10


def two_requests() -> Lab:
    """Requests a and b, each with ten tokens in blocks of four: a in 5, 2 and 9, b in 1, 3 and 6."""
    lab = Lab()
    lab.say("a", words(1, 0, PROMPT_TOKENS))
    lab.say("b", words(2, 0, PROMPT_TOKENS))
    prompts = [new("a", range(PROMPT_TOKENS), TABLE), new("b", range(PROMPT_TOKENS), [1, 3, 6])]
    lab.run(output({"a": PROMPT_TOKENS, "b": PROMPT_TOKENS}, prompts))
    assert lab.reports == []
    return lab


def decode(lab: Lab, *requests: str, tables: Mapping[str, Sequence[int]] | None = None) -> list[ShadowMismatch]:
    """Let each request compute its next token, and return what is reported then."""
    rows = [
        Cached(
            request,
            PROMPT_TOKENS,
            tables[request] if tables else None,
            resumed=bool(tables),
            outputs=1,
        )
        for request in requests
    ]
    lab.run(output(dict.fromkeys(requests, 1), cached=rows))
    return lab.reports


PLACES = (st.integers(0, PROMPT_TOKENS - 1), st.integers(0, LAYERS - 1), st.integers(0, RANKS - 1))


def block_of(position: int) -> int:
    return TABLE[position // BLOCK_SIZE]


@FIXED
@given(*PLACES, st.integers(1, 2**64 - 1))
def test_wrong_bytes_are_reported_with_their_place(position: int, layer: int, rank: int, change: int) -> None:
    lab = two_requests()
    place = lab.bytes_of(rank, block_of(position))[layer]
    place[position % BLOCK_SIZE] ^= np.uint64(change)
    (mismatch,) = decode(lab, "a", "b")
    assert mismatch._replace(found="") == ShadowMismatch("a", position, layer, rank, block_of(position), "")
    unknown = int(lab.texts["a"].tags(position, position + 1)[0]) ^ change
    assert mismatch.found in {f"unknown bytes {unknown:#018x}", "bytes that nothing has written"}


@FIXED
@given(*PLACES)
def test_bytes_that_nothing_has_written_are_reported_as_that(position: int, layer: int, rank: int) -> None:
    lab = two_requests()
    lab.bytes_of(rank, block_of(position))[layer, position % BLOCK_SIZE] = 0
    assert decode(lab, "a", "b") == [
        ShadowMismatch("a", position, layer, rank, block_of(position), "bytes that nothing has written")
    ]


@FIXED
@given(PLACES[1], PLACES[2])
def test_blocks_that_were_swapped_are_reported_by_the_tokens_that_are_there(layer: int, rank: int) -> None:
    lab = two_requests()
    first, second = (lab.bytes_of(rank, block)[layer] for block in TABLE[:2])
    first[:], second[:] = second.copy(), first.copy()
    assert decode(lab, "a", "b") == [ShadowMismatch("a", 0, layer, rank, TABLE[0], f"token {BLOCK_SIZE} of a")]


def test_a_table_with_swapped_blocks_is_reported_on_every_rank_in_the_first_layer() -> None:
    lab = two_requests()
    assert decode(lab, "a", tables={"a": [5, 9, 2]}) == [
        ShadowMismatch("a", 4, 0, rank, 9, "token 8 of a") for rank in range(RANKS)
    ]


def test_a_block_of_another_request_is_reported_by_whose_it_is() -> None:
    lab = two_requests()
    assert decode(lab, "a", tables={"a": [5, 3, 9]}) == [
        ShadowMismatch("a", 4, 0, rank, 3, "token 4 of b") for rank in range(RANKS)
    ]


def test_a_block_that_another_request_has_overwritten_is_reported_by_what_it_wrote() -> None:
    lab = two_requests()
    lab.say("c", words(3, 0, 3))
    lab.run(output({"c": 3}, new=[new("c", range(3), [2])]))
    assert decode(lab, "a", "b") == [ShadowMismatch("a", 4, 0, rank, 2, "token 0 of c") for rank in range(RANKS)]


@FIXED
@given(*PLACES, st.data())
def test_bytes_of_another_layer_or_rank_are_reported_with_the_place_where_they_are_read(
    position: int, layer: int, rank: int, data: st.DataObject
) -> None:
    others = [(at, on) for at in range(LAYERS) for on in range(RANKS) if (at, on) != (layer, rank)]
    from_layer, from_rank = data.draw(st.sampled_from(others))
    lab = two_requests()
    block, offset = block_of(position), position % BLOCK_SIZE
    lab.bytes_of(rank, block)[layer, offset] = lab.bytes_of(from_rank, block)[from_layer, offset]
    (mismatch,) = decode(lab, "a", "b")
    assert mismatch[:5] == ("a", position, layer, rank, block)
    assert mismatch.found.startswith("unknown bytes")


def test_each_request_is_reported_once_at_its_first_wrong_position() -> None:
    lab = two_requests()
    for block, offset in [(9, 1), (2, 3), (2, 1), (3, 2), (6, 0)]:
        lab.bytes_of(1, block)[:, offset] = 0
    lab.bytes_of(1, 2)[0, 1] = lab.bytes_of(1, 5)[0, 0]
    assert decode(lab, "b", "a") == [
        ShadowMismatch("b", 6, 0, 1, 3, "bytes that nothing has written"),
        ShadowMismatch("a", 5, 0, 1, 2, "token 0 of a"),
    ]


def test_bytes_behind_the_last_token_are_nobodys_business() -> None:
    lab = two_requests()
    lab.bytes_of(0, 9)[:, PROMPT_TOKENS % BLOCK_SIZE + 1 :] = 12345
    assert decode(lab, "a", "b") == []


def test_a_mismatch_is_told_in_one_sentence() -> None:
    assert str(ShadowMismatch("a", 4, 1, 0, 9, "token 8 of b")) == (
        "attention of a reads token 4 in block 9 (layer 1, rank 0) and finds token 8 of b"
    )


# Shards, windows and groups -------------------------------------------------------------------------------------------


def loop_over_tokens(layout: Layout, table: Sequence[int], start: int, stop: int, shard: int) -> tuple[Any, Any]:
    """What a shard writes and reads of one row, as (slot, position): the rule, one token after the other."""
    writes, reads = [], []
    for position in range(stop):
        place = slot(position, layout.span, layout.shards, layout.interleave)
        if place.rank != shard or (layout.reach and position <= start - layout.reach):
            continue
        entry = (table[place.block] * layout.block_tokens + place.offset, position)
        reads.append(entry)
        if position >= start:
            writes.append(entry)
    return writes, reads


LAYOUTS = st.builds(
    lambda interleave, turns, shards, reach: Layout(interleave * turns, shards, interleave, reach),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.just(0) | st.integers(1, 12),
)


@FIXED
@given(LAYOUTS, st.data())
def test_a_shard_writes_and_reads_the_tokens_that_it_keeps_of_those_that_attention_reads(
    layout: Layout, data: st.DataObject
) -> None:
    texts = {"a": Text.of_prompt("a", words(1, 0, 3 * layout.span), 0, Origins())}
    stop = data.draw(st.integers(1, 3 * layout.span))
    start = data.draw(st.integers(0, stop - 1))
    table = data.draw(st.permutations([2, 5, 7]))
    request = new("a", range(3 * layout.span), table, start)
    (by_shard,) = RunnerState([layout], texts).apply(output({"a": stop - start}, [request])).accesses
    assert len(by_shard) == layout.shards
    tags = texts["a"].tags(0, stop).tolist()
    for shard, accesses in enumerate(by_shard):
        writes, reads = loop_over_tokens(layout, table, start, stop, shard)
        written = zip(accesses.write_slots.tolist(), accesses.write_tags.tolist(), strict=True)
        read = zip(accesses.read_slots.tolist(), accesses.read_tags.tolist(), strict=True)
        assert list(written) == [(at, tags[position]) for at, position in writes]
        assert list(read) == [(at, tags[position]) for at, position in reads]
        (stretch,) = accesses.reads
        positions = layout.positions(stretch.first, stretch.first + stretch.tokens, shard).tolist()
        assert positions == [position for _, position in reads]


@dataclass
class GroupLab:
    """Full attention in blocks of 4 (2 words a token in other groups), and whatever else, on one or more shards."""

    layouts: list[Layout]
    reports: list[ShadowMismatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origins = Origins()
        self.texts = {"a": Text.of_prompt("a", words(1, 0, 16), 0, self.origins)}
        self.state = RunnerState(self.layouts, self.texts)
        shards = max(layout.shards for layout in self.layouts)
        block_words = self.layouts[0].entries * self.layouts[0].words
        self.memories = [
            ShadowMemory(
                np.zeros((LAYERS, BLOCKS * block_words), dtype=np.uint64),
                self.layouts,
                shard,
                shard,
                self.origins,
                self.reports.append,
            )
            for shard in range(shards)
        ]

    def run(self, tokens: int, computed: int, tables: Sequence[Sequence[int]]) -> None:
        first = new("a", range(16), [], computed)
        first.block_ids = tuple(map(list, tables))
        batch = self.state.apply(output({"a": tokens}, [first]))
        for memory in self.memories:
            memory.forward(batch)


def test_each_rank_reports_what_is_wrong_in_its_own_share_with_the_position_in_the_request() -> None:
    lab = GroupLab([Layout(4, shards=2, interleave=2)])
    lab.run(16, 0, [[3, 5]])
    lab.memories[1].tags[2, 5 * 4 + 2] ^= np.uint64(9)  # The second block, its last token but one.
    lab.run(1, 15, [[3, 5]])
    assert [report[:5] for report in lab.reports] == [("a", 14, 2, 1, 5)]
    lab.reports.clear()
    lab.memories[1].tags[2, 5 * 4 + 2] ^= np.uint64(9)
    lab.memories[0].tags[1, 5 * 4 + 2] = 0
    lab.run(1, 15, [[3, 5]])
    assert [report[:5] for report in lab.reports] == [("a", 12, 1, 0, 5)]


def test_a_window_is_read_from_its_first_token_on_and_not_before() -> None:
    lab = GroupLab([Layout(4, reach=6)])
    lab.run(12, 0, [[3, 5, 6]])
    lab.memories[0].tags[:, 4 * 5 + 2] ^= np.uint64(1)  # Position 6.
    lab.run(1, 12, [[0, 5, 6, 7]])
    assert lab.reports == []
    lab.run(1, 11, [[0, 5, 6, 7]])
    assert [report.position for report in lab.reports] == [6]


def test_what_is_written_into_the_null_block_is_not_there_when_it_is_read() -> None:
    lab = GroupLab([Layout(4, reach=6)])
    lab.run(8, 0, [[3, 0]])
    assert [(report.position, report.block) for report in lab.reports] == [(4, 0)]


def test_groups_of_unequal_blocks_share_the_memory_and_a_block_of_one_is_wrong_for_the_other() -> None:
    lab = GroupLab([Layout(8), Layout(4, reach=9, words=2)])
    lab.run(16, 0, [[1, 2], [3, 4, 5, 6]])
    assert lab.reports == []
    lab.run(1, 15, [[1, 2], [3, 4, 5, 2]])
    (report,) = lab.reports
    assert (report.position, report.layer, report.block) == (12, LAYERS, 2)


def test_a_token_of_several_words_is_wrong_if_one_of_them_is() -> None:
    for word in range(2):
        lab = GroupLab([Layout(8), Layout(4, reach=9, words=2)])
        lab.run(16, 0, [[1, 2], [3, 4, 5, 6]])
        lab.memories[0].tags[1, 6 * 8 + word] ^= np.uint64(1)
        lab.run(1, 15, [[1, 2], [3, 4, 5, 6]])
        assert [report[:5] for report in lab.reports] == [("a", 12, LAYERS + 1, 0, 6)]


def test_a_block_is_read_back_as_the_tags_that_its_group_wrote() -> None:
    lab = GroupLab([Layout(8, shards=2, interleave=4)])
    lab.run(16, 0, [[1]])
    tags = lab.texts["a"].tags(0, 16)
    for shard, memory in enumerate(lab.memories):
        first = 4 * shard
        own = [*range(first, first + 4), *range(8 + first, 12 + first)]
        assert memory.kept(tags, 0).tolist() == tags[own].tolist()
        assert memory.kept(tags[:6], 0).tolist() == tags[first : min(6, first + 4)].tolist()
        assert (memory.gpu_block(1, 0) == memory.kept(tags, 0)).all()


# States ---------------------------------------------------------------------------------------------------------------


STATE = Layout(4, state=True, words=4)


def go_on(lab: GroupLab, tokens: int, computed: int, table: Sequence[int]) -> Batch:
    """Let the runner take states along, then run the forward."""
    first = new("a", range(16), table, computed)
    batch = lab.state.apply(output({"a": tokens}, [first]))
    for memory in lab.memories:
        memory.copy_blocks(batch.state_copies)
        memory.forward(batch)
    return batch


@FIXED
@given(st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_a_state_goes_from_block_to_block_and_each_holds_the_last_one_that_was_computed_there(
    chunks: list[int],
) -> None:
    lab = GroupLab([STATE])
    computed, expected = 0, {}
    for chunk in chunks:
        stop = min(computed + chunk, 16)
        if stop == computed:
            break
        batch = go_on(lab, stop - computed, computed, [3, 5, 6, 8])
        old, new_block = ([3, 5, 6, 8][(tokens - 1) // 4] for tokens in (max(computed, 1), stop))
        assert batch.state_copies == (((old, new_block),) if computed and old != new_block else ())
        computed = stop
        expected[new_block] = int(lab.texts["a"].tags(stop - 1, stop)[0])
        for block, tag in expected.items():
            assert lab.memories[0].gpu_block(block, 0).tolist() == [[tag]] * LAYERS
    assert lab.reports == []


@pytest.mark.parametrize("word", range(4))
def test_a_state_is_wrong_if_one_of_its_words_is(word: int) -> None:
    lab = GroupLab([STATE])
    go_on(lab, 6, 0, [3, 5])
    lab.memories[0].tags[1, 5 * 4 + word] ^= np.uint64(1)
    go_on(lab, 1, 6, [3, 5])
    (report,) = lab.reports
    assert (report.request, report.position, report.layer, report.block) == ("a", 5, 1, 5)
    assert str(report).startswith(
        "Mamba of a goes on from the state after token 5 in block 5 (layer 1, rank 0) and finds"
    )


def test_a_state_of_another_length_is_wrong_and_named() -> None:
    lab = GroupLab([STATE])
    go_on(lab, 8, 0, [3, 5])
    go_on(lab, 1, 7, [3, 5])
    assert [(report.position, report.found) for report in lab.reports] == [(6, "token 7 of a")]


def test_the_first_step_of_a_request_goes_on_from_no_state() -> None:
    lab = GroupLab([STATE])
    lab.memories[0].tags[:] = 7
    go_on(lab, 5, 0, [3, 5])
    assert lab.reports == []


def test_a_state_that_was_in_the_null_block_is_not_there() -> None:
    lab = GroupLab([STATE])
    go_on(lab, 4, 4, [0, 5])
    assert [(report.position, report.block) for report in lab.reports] == [(3, 5)]


def test_of_a_full_block_a_state_stands_for_all_its_tokens() -> None:
    lab = GroupLab([Layout(4), STATE])
    tags = lab.texts["a"].tags(4, 8)
    assert lab.memories[0].kept(tags, 0).tolist() == tags.tolist()
    assert lab.memories[0].kept(tags, 1).tolist() == tags[-1:].tolist()


# Blocks that are zeroed or copied -------------------------------------------------------------------------------------


def test_zeroed_blocks_lose_their_bytes_in_every_layer_and_no_others_do() -> None:
    lab = two_requests()
    lab.run(output({}, new_block_ids_to_zero=[2, 6]))
    for rank in range(RANKS):
        assert [bool(lab.bytes_of(rank, block).any()) for block in (5, 2, 9, 1, 3, 6)] == [1, 0, 1, 1, 1, 0]
    assert {str(mismatch.found) for mismatch in decode(lab, "a", "b")} == {"bytes that nothing has written"}


def test_copied_blocks_have_the_bytes_of_their_source_in_every_layer() -> None:
    lab = two_requests()
    copies = [SimpleNamespace(src_block_id=2, dst_block_id=7), SimpleNamespace(src_block_id=7, dst_block_id=8)]
    batch = lab.run(output({}, kv_cache_block_copies=copies))
    assert batch.block_copies == ((2, 7), (7, 8))
    assert decode(lab, "a", tables={"a": [5, 8, 9]}) == []


@pytest.mark.parametrize("nothing", [{}, {"new_block_ids_to_zero": None, "kv_cache_block_copies": None}])
def test_releases_that_know_no_zeroing_and_no_copies_do_neither(nothing: dict[str, None]) -> None:
    batch = Lab().state.apply(output({}, **nothing))
    assert (batch.zero_blocks, batch.block_copies) == ((), ())


# What a runner keeps of its requests ----------------------------------------------------------------------------------


def slots_of(table: Sequence[int], stop: int) -> list[int]:
    return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(stop)]


def test_a_known_request_keeps_its_table_and_new_blocks_are_appended() -> None:
    lab = Lab()
    lab.say("a", words(1, 0, 9))
    lab.run(output({"a": 3}, new=[new("a", range(9), [4])]))
    lab.run(output({"a": 1}, cached=[Cached("a", 3)]))
    batch = lab.run(output({"a": 4}, cached=[Cached("a", 4, [8])]))
    assert only(batch).read_slots.tolist() == slots_of([4, 8], 8)
    batch = lab.run(output({"a": 1}, cached=[Cached("a", 8, [1])]))
    assert only(batch).write_slots.tolist() == slots_of([4, 8, 1], 9)[-1:]
    assert lab.reports == []


def resumed_as_cached(request: str, said: Text, table: Sequence[int], computed: int) -> dict[str, Any]:
    """Runner V1: a known request with its whole table."""
    outputs = len(said.tokens) - said.prompt_tokens
    return {"cached": [Cached(request, computed, table, outputs, resumed=True)]}


def resumed_as_new(request: str, said: Text, table: Sequence[int], computed: int) -> dict[str, Any]:
    """Runner V2: a new request whose prefill is all that it has said."""
    return {"new": [new(request, said.tokens[: said.prompt_tokens], table, computed, prefill=said.tokens)]}


SHAPES = pytest.mark.parametrize("resumed", [resumed_as_cached, resumed_as_new])


@SHAPES
def test_a_resumed_request_has_a_table_of_its_own_and_goes_on_where_it_was(resumed: Any) -> None:
    """It has said two tokens, and computes its prompt and the first of them again, in two chunks."""
    lab = Lab()
    said = lab.say("a", words(1, 0, 6))
    lab.run(output({"a": 6}, new=[new("a", range(6), [4, 8])]))
    lab.run(output({"a": 1}, cached=[Cached("a", 6, outputs=1)]))
    before = list(said.tokens)
    assert len(before) == 8

    first = lab.run(output({"a": 5}, **resumed("a", said, [2, 3], 0)))
    assert only(first).write_slots.tolist() == slots_of([2, 3], 5)
    assert first.sampled == {"a": []}
    second = lab.run(output({"a": 3}, cached=[Cached("a", 5, outputs=2)]))
    assert only(second).read_slots.tolist() == slots_of([2, 3], 8)
    assert second.sampled == {"a": [said.tokens[8]]}
    third = lab.run(output({"a": 1}, cached=[Cached("a", 8, [6], outputs=3)]))
    assert only(third).write_slots.tolist() == slots_of([2, 3, 6], 9)[-1:]
    assert said.tokens[:8] == before
    assert lab.reports == []


@SHAPES
def test_a_token_whose_delivery_was_dropped_is_sampled_again_and_the_same(resumed: Any) -> None:
    """The scheduler never got the second token, so to it the request has said one."""
    lab = Lab()
    said = lab.say("a", words(1, 0, 6))
    lab.run(output({"a": 6}, new=[new("a", range(6), [4, 8])]))
    dropped = lab.run(output({"a": 1}, cached=[Cached("a", 6, outputs=1)])).sampled["a"]
    told = Text("a", lab.origins, said.prompt_tokens, said.tokens[:7])
    again = lab.run(output({"a": 7}, **resumed("a", told, [2, 3], 0)))
    assert again.sampled == {"a": dropped}
    assert len(said.tokens) == 8


@SHAPES
def test_a_resumed_request_that_finds_its_prefix_computes_only_the_rest(resumed: Any) -> None:
    lab = Lab()
    said = lab.say("a", words(1, 0, 6))
    lab.run(output({"a": 6}, new=[new("a", range(6), [4, 8])]))
    batch = lab.run(output({"a": 3}, **resumed("a", said, [4, 3], 4)))
    assert only(batch).write_slots.tolist() == slots_of([4, 3], 7)[4:]
    assert batch.sampled == {"a": [said.tokens[7]]}
    assert lab.reports == []


def test_a_finished_request_is_forgotten_and_one_that_was_never_seen_may_finish() -> None:
    lab = Lab()
    lab.say("a", words(1, 0, 4))
    lab.run(output({"a": 4}, new=[new("a", range(4), [4])]))
    lab.run(output({}, finished=["a", "nobody"]))
    with pytest.raises(KeyError, match="a"):
        lab.run(output({"a": 1}, cached=[Cached("a", 4, [5])]))


def test_a_name_that_finished_and_comes_again_in_one_step_is_a_new_request() -> None:
    lab = Lab()
    lab.say("a", words(1, 0, 4))
    lab.run(output({"a": 4}, new=[new("a", range(4), [4])]))
    lab.say("a", words(2, 0, 3))
    batch = lab.run(output({"a": 3}, new=[new("a", range(3), [6])], finished=["a"]))
    assert only(batch).write_slots.tolist() == slots_of([6], 3)


def test_only_what_is_scheduled_is_computed() -> None:
    lab = two_requests()
    batch = lab.run(output({"b": 1}, cached=[Cached("b", PROMPT_TOKENS)]))
    assert batch.rows == (Scheduled("b", PROMPT_TOKENS, PROMPT_TOKENS + 1),)


def test_a_token_that_nothing_has_said_is_a_fault_of_the_device() -> None:
    lab = two_requests()
    with pytest.raises(DeviceFault, match=f"b is scheduled up to token {PROMPT_TOKENS + 2}, and knows only"):
        lab.run(output({"b": 2}, cached=[Cached("b", PROMPT_TOKENS)]))


@pytest.mark.parametrize(("blocks", "enough"), [([4], False), ([4, 8], True)])
def test_a_table_that_is_too_short_for_its_tokens_is_a_fault_of_the_device(blocks: list[int], enough: bool) -> None:
    lab = Lab()
    lab.say("a", words(1, 0, 5))
    scheduled = output({"a": 5}, new=[new("a", range(5), blocks)])
    if enough:
        lab.run(scheduled)
        return
    with pytest.raises(DeviceFault, match="a is scheduled up to token 5 with a block table of 4 slots"):
        lab.run(scheduled)


# Sampling -------------------------------------------------------------------------------------------------------------


@FIXED
@given(st.integers(1, 20), st.data())
def test_a_token_is_sampled_exactly_when_all_that_is_known_has_been_computed(length: int, data: st.DataObject) -> None:
    lab = Lab()
    said = lab.say("a", words(1, 0, length))
    computed = 0
    while computed < length:
        chunk = data.draw(st.integers(1, length - computed))
        rows = {"cached": [Cached("a", computed)]} if computed else {"new": [new("a", range(length), [1, 2, 3, 4, 5])]}
        batch = lab.run(output({"a": chunk}, **rows))
        computed += chunk
        assert batch.sampled == {"a": [said.tokens[length]] if computed == length else []}
    assert len(said.tokens) == length + 1


def test_requests_with_equal_prompts_sample_equal_tokens() -> None:
    lab = Lab()
    lab.say("a", words(1, 0, 4))
    lab.say("b", words(1, 0, 4))
    batch = lab.run(output({"a": 4, "b": 4}, new=[new("a", range(4), [4]), new("b", range(4), [5])]))
    assert batch.sampled["a"] == batch.sampled["b"] != []


def test_a_request_that_is_to_stop_samples_the_stop_token() -> None:
    lab = two_requests()
    lab.texts["a"].stop_next = True
    batch = lab.run(output({"a": 1, "b": 1}, cached=[Cached("a", PROMPT_TOKENS), Cached("b", PROMPT_TOKENS)]))
    assert batch.sampled["a"] == [STOP_TOKEN]
    assert batch.sampled["b"] != [STOP_TOKEN]


# Drafts ---------------------------------------------------------------------------------------------------------------


def with_drafts(count: int, begun: bool = False, ahead: int = 0) -> tuple[Lab, Batch]:
    """Run a request whose first step is done, or isn't, with drafts; ``ahead``: drafts of the step before that the
    scheduler takes for accepted, and which weren't."""
    lab = Lab()
    lab.state = RunnerState([Layout(lab.block_size)], lab.texts, ahead=bool(ahead))
    lab.say("a", words(1, 0, PROMPT_TOKENS))
    rows = [new("a", range(PROMPT_TOKENS), [5, 2, 9, 1])]
    drafts = {"a": [-1] * count}
    if begun:
        return lab, lab.run(output({"a": PROMPT_TOKENS + count}, new=rows, drafts=drafts))
    lab.run(output({"a": PROMPT_TOKENS}, new=rows))
    cached = [Cached("a", PROMPT_TOKENS + ahead)]
    return lab, lab.run(output({"a": 1 + count}, cached=cached, drafts=drafts))


@pytest.mark.parametrize("count", range(4))
def test_accepted_drafts_are_said_and_rejected_ones_are_written_and_not_compared(count: int) -> None:
    lab, batch = with_drafts(count)
    said = lab.texts["a"]
    accepted = said.accepted(PROMPT_TOKENS + 1, count)
    assert batch.sampled == {"a": said.tokens[PROMPT_TOKENS + 1 :]}
    assert (batch.accepted, batch.rejected) == (accepted, count - accepted)
    assert len(only(batch).write_slots) == 1 + count
    assert len(only(batch).read_slots) == PROMPT_TOKENS + 1 + accepted
    assert lab.reports == []


def test_the_next_step_reads_what_was_accepted_and_overwrites_the_first_of_the_rest() -> None:
    lab, batch = with_drafts(3)
    known = len(lab.texts["a"].tokens)
    after = lab.run(output({"a": 1}, cached=[Cached("a", known - 1)]))
    assert batch.rejected > 0
    assert only(after).write_slots[0] == only(batch).write_slots[-batch.rejected]
    assert lab.reports == []


def test_who_reads_a_rejected_draft_is_told_so() -> None:
    lab, batch = with_drafts(3)
    said = lab.texts["a"]
    skipped = len(said.tokens) - 1
    assert batch.rejected > 0
    said.sample(skipped + 1)
    lab.state._rows["a"].known += 1
    lab.run(output({"a": 1}, cached=[Cached("a", skipped + 1)]))
    assert {mismatch.found for mismatch in lab.reports} == {f"a rejected draft of token {skipped} of a"}


def test_drafts_of_a_request_that_begins_are_padding_and_never_accepted() -> None:
    _, batch = with_drafts(3, begun=True)
    assert (batch.accepted, batch.rejected) == (0, 0)
    assert len(only(batch).write_slots) == PROMPT_TOKENS + 3


def test_a_step_that_was_planned_ahead_begins_behind_what_was_accepted() -> None:
    (_, behind), (_, told) = with_drafts(2, ahead=2), with_drafts(2)
    assert behind.rows == told.rows
