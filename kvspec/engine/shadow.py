"""Shadow attention: a forward that writes what it should and reads what attention would.

For every scheduled token it writes the tag of its position to the slot that the block table names, then reads
*every* position that attention reads, and compares. As in a real layer all writes of a step come before its reads,
so requests of one step may read each other's blocks. Bytes differ per layer and rank: the tag, XORed with a
constant of both.

Drafts are computed like tokens that are known. Those that the model rejects leave bytes that nobody may ever read:
steps that go on overwrite them. What such a draft reads itself means nothing, and isn't compared.

Layers come in groups with a block table each; blocks of all groups live in the same memory. With context parallelism
a rank has a *shard* of each block's tokens: it writes those, and checks those.

A Mamba layer keeps one *state* in a block, that after the last token that was computed there. Before the layers run,
the runner copies the state that a request goes on from (its own, or one that it has hit or loaded) into the block of
the step's last token, if that is another one. There the layer reads it, and leaves the new one.

Source: vLLM 0.33.0, v1/worker/mamba_utils.py (preprocess_mamba) and v1/worker/gpu/model_states/mamba_hybrid.py
(preprocess_state).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvspec.device.simulated import DeviceFault
from kvspec.engine.text import Origins, Text, mix
from kvspec.model.scaling import slot

TORN = 0x7EA2_7EA2_7EA2_7EA2
"""Stands for an entry whose words aren't all the same; no tag is this number."""


@dataclass(frozen=True)
class Layout:
    """How a group's layers keep tokens in blocks."""

    block_tokens: int
    """Tokens of a block on one rank."""
    shards: int = 1
    """Ranks among which a block's tokens are shared out; other ranks hold copies of theirs."""
    interleave: int = 1
    """Tokens in a row that one of them keeps."""
    reach: int = 0
    """Tokens that attention reads, the query's own included; 0: all."""
    state: bool = False
    """A block has one entry, a state, instead of one for each token. Not with several shards, nor with a reach."""
    words: int = 1
    """64-bit words per entry and layer: blocks of all groups have equal bytes."""

    @property
    def entries(self) -> int:
        """What a block holds on one rank: tokens, or one state."""
        return 1 if self.state else self.block_tokens

    @property
    def span(self) -> int:
        """Tokens of a block on all shards together."""
        return self.block_tokens * self.shards

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """Which of a block's tokens each shard keeps once it is full, in the order of its memory; shape (shards,
        entries)."""
        if self.state:
            return np.array([[self.span - 1]])
        kept = np.zeros((self.shards, self.block_tokens), dtype=np.int64)
        for position in range(self.span):
            place = slot(position, self.span, self.shards, self.interleave)
            kept[place.rank, place.offset] = position
        return kept

    @functools.cached_property
    def _kept_before(self) -> np.ndarray:
        """How many of a block's first n tokens each shard keeps; shape (shards, span)."""
        before: np.ndarray = (self.kept[:, :, None] < np.arange(self.span)).sum(axis=1)
        return before

    def count(self, tokens: int, shard: int) -> int:
        """Return how many of the first ``tokens`` tokens of a request a shard keeps."""
        if self.shards == 1:
            return tokens
        blocks, rest = divmod(tokens, self.span)
        return blocks * self.block_tokens + int(self._kept_before[shard, rest])

    def positions(self, start: int, stop: int, shard: int) -> np.ndarray:
        """Return the positions of the ``start``-th to ``stop``-th token that a shard keeps; shape (stop - start,). Of
        states any may be kept for a while."""
        if self.state:
            return np.arange(start, stop)
        blocks, offsets = np.divmod(np.arange(start, stop), self.block_tokens)
        return blocks * self.span + self.kept[shard, offsets]  # type: ignore[no-any-return]

    def first_read(self, start: int) -> int:
        """Return the first position that the token at ``start`` reads; those after it in a step begin no earlier."""
        return max(0, start + 1 - self.reach) if self.reach else 0


class Scheduled(NamedTuple):
    """Tokens ``start`` to ``stop`` of a request, to be computed in this step, drafts included."""

    request: str
    start: int
    stop: int


class ShadowMismatch(NamedTuple):
    """Attention of ``request`` read something else than token ``position``, or Mamba than the state after it."""

    request: str
    position: int
    layer: int
    rank: int
    block: int
    found: str
    group: int = 0
    state: bool = False

    def __str__(self) -> str:
        what, reads = ("Mamba", "goes on from the state after") if self.state else ("attention", "reads")
        return (
            f"{what} of {self.request} {reads} token {self.position} in block {self.block} (layer {self.layer}, "
            f"rank {self.rank}) and finds {self.found}"
        )


@dataclass
class _Row:
    """What a runner keeps of a request: its block table in each group, and how many tokens it knows."""

    text: Text
    tables: list[list[int]]
    known: int
    slots: list[np.ndarray | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [None] * len(self.tables)

    def append(self, blocks: Sequence[Sequence[int]]) -> None:
        for group, more in enumerate(blocks):
            if more:
                self.tables[group].extend(more)
                self.slots[group] = None

    def all_slots(self, group: int, entries: int, offsets: np.ndarray) -> np.ndarray:
        """Return the slots of a group's table; shape (blocks * entries,)."""
        slots = self.slots[group]
        if slots is None:
            slots = (np.array(self.tables[group], dtype=np.int64)[:, None] * entries + offsets).ravel()
            self.slots[group] = slots
        return slots


class Reads(NamedTuple):
    """The tokens of one row that a shard reads: from its ``first`` on, in the shard's own order."""

    first: int
    tokens: int


class Accesses(NamedTuple):
    """What a step's forward does to the layers of one group on the ranks of one shard.

    Slots index (block, offset) as block * entries + offset. ``write_*`` have one entry per scheduled token that
    the shard keeps, ``read_*`` one per position read; ``reads`` and ``writes`` tell which stretch belongs to which row.
    """

    write_slots: np.ndarray
    write_tags: np.ndarray
    read_slots: np.ndarray
    read_tags: np.ndarray
    reads: tuple[Reads, ...]
    writes: tuple[int, ...]
    """Tokens of each row that are written, or states."""


@dataclass(frozen=True)
class Batch:
    """One step's forward. ``accesses[group][shard]``."""

    rows: tuple[Scheduled, ...]
    accesses: tuple[tuple[Accesses, ...], ...]
    sampled: dict[str, list[int]]
    """What each request says: nothing if its text isn't computed to its end, else a token, and one for each draft that
    was accepted."""
    zero_blocks: tuple[int, ...]
    block_copies: tuple[tuple[int, int], ...]
    """(source, destination) of copy-on-write."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) of the states that requests take along into another block."""
    rejected: int = 0
    """Drafts that the model doesn't say; padding isn't one."""

    @property
    def accepted(self) -> int:
        """Drafts that the model says too."""
        return sum(len(tokens) - 1 for tokens in self.sampled.values() if tokens)


class _Gather:
    """Puts the accesses of one group and shard together, row by row."""

    def __init__(self, layout: Layout, shard: int) -> None:
        self._layout = layout
        self._shard = shard
        self._all = layout.shards == 1 and not layout.reach and not layout.state
        self._write_slots: list[np.ndarray] = []
        self._write_tags: list[np.ndarray] = []
        self._read_slots: list[np.ndarray] = []
        self._read_tags: list[np.ndarray] = []
        self._reads: list[Reads] = []
        self._writes: list[int] = []

    def add(self, slots: np.ndarray, tags: np.ndarray, start: int, stop: int, said: int) -> None:
        """Add a row. ``slots``: of all that the shard keeps in the row's table; ``tags``: of positions 0 to stop;
        ``said``: where what the model says ends, and rejected drafts begin."""
        if self._all:  # The shortcut of the rule below.
            self._take(slots[start:stop], tags[start:], slots[:said], tags[:said], 0)
            return
        if self._layout.state:
            self._add_state(slots, tags, start, stop)
            return
        layout, shard = self._layout, self._shard
        first = layout.count(layout.first_read(start), shard)
        begin, end = layout.count(start, shard), layout.count(stop, shard)
        own = tags[first:] if layout.shards == 1 else tags[layout.positions(first, end, shard)]
        write_slots, write_tags = slots[begin:end], own[begin - first :]
        if layout.reach:  # The null block stands for what has left the window; nothing is ever kept in it.
            real = write_slots >= layout.block_tokens
            write_slots, write_tags = write_slots[real], write_tags[real]
        read = layout.count(said, shard)
        self._take(write_slots, write_tags, slots[first:read], own[: read - first], first)

    def _add_state(self, slots: np.ndarray, tags: np.ndarray, start: int, stop: int) -> None:
        place, before = (stop - 1) // self._layout.span, max(start - 1, 0)
        slot = slots[place : place + 1]
        read = slot if start else slot[:0]  # A request's first step goes on from no state.
        self._take(slot, tags[stop - 1 : stop], read, tags[before:start], before)

    def _take(
        self,
        write_slots: np.ndarray,
        write_tags: np.ndarray,
        read_slots: np.ndarray,
        read_tags: np.ndarray,
        first: int,
    ) -> None:
        self._write_slots.append(write_slots)
        self._write_tags.append(write_tags)
        self._read_slots.append(read_slots)
        self._read_tags.append(read_tags)
        self._reads.append(Reads(first, len(read_slots)))
        self._writes.append(len(write_slots))

    def done(self) -> Accesses:
        return Accesses(
            _join(self._write_slots, np.int64),
            _join(self._write_tags, np.uint64),
            _join(self._read_slots, np.int64),
            _join(self._read_tags, np.uint64),
            tuple(self._reads),
            tuple(self._writes),
        )


class RunnerState:
    """The model runner's own view of the requests, kept from the scheduler's outputs alone.

    Source: vLLM 0.33.0, v1/worker/gpu_model_runner.py (_update_states) and v1/worker/gpu/model_runner.py
    (update_requests, postprocess_sampled).
    """

    def __init__(self, layouts: Sequence[Layout], texts: dict[str, Text], ahead: bool = False) -> None:
        """``ahead``: the scheduler plans the next step before it knows which drafts were accepted, and takes all for
        accepted; the runner, which knows, begins behind those that were."""
        self._ahead = ahead
        self._layouts = layouts
        self._texts = texts
        self._offsets = [np.arange(layout.entries, dtype=np.int64) for layout in layouts]
        self._rows: dict[str, _Row] = {}

    def apply(self, output: Any) -> Batch:
        """Take over a ``SchedulerOutput`` and return the step's forward."""
        rows = self._rows
        for request in output.finished_req_ids:
            rows.pop(request, None)
        computed: dict[str, int] = {}
        begun = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            known = len(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            rows[new.req_id] = _Row(self._texts[new.req_id], list(map(list, new.block_ids)), known)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            row = rows[request]
            blocks = cached.new_block_ids[i]
            if request in cached.resumed_req_ids:
                known = row.text.prompt_tokens + cached.num_output_tokens[i]
                rows[request] = _Row(row.text, list(map(list, blocks)), known)
            elif blocks is not None:
                row.append(blocks)
            computed[request] = cached.num_computed_tokens[i]
        return self._forward(output, computed, begun)

    def _forward(self, output: Any, computed: dict[str, int], begun: Set[str]) -> Batch:
        """Return the forward. The drafts of a request that has just begun are padding, which is never accepted.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py (schedule, pad_spec_decode).
        """
        scheduled: list[Scheduled] = []
        state_copies: list[tuple[int, int]] = []
        gathers = [[_Gather(layout, shard) for shard in range(layout.shards)] for layout in self._layouts]
        sampled: dict[str, list[int]] = {}
        rejected = 0
        for request, tokens in output.num_scheduled_tokens.items():
            row = self._rows[request]
            start = min(computed[request], row.known - 1) if self._ahead else computed[request]
            stop = start + tokens
            drafts = len(output.scheduled_spec_decode_tokens.get(request, ()))
            said = stop - drafts
            if said > (known := len(row.text.tokens)):
                raise DeviceFault(f"{request} is scheduled up to token {said}, and knows only {known}")
            sampled[request] = []
            if said == row.known:
                accepted = 0 if request in begun else row.text.accepted(said, drafts)
                sampled[request] = [row.text.sample(said + i) for i in range(accepted + 1)]
                row.known += accepted + 1
                said += accepted
            rejected += 0 if request in begun else stop - said
            tags = row.text.tags_with_drafts(said, stop - said)
            for group, layout in enumerate(self._layouts):
                slots = row.all_slots(group, layout.entries, self._offsets[group])
                if stop > (room := len(row.tables[group]) * layout.span):
                    raise DeviceFault(f"{request} is scheduled up to token {stop} with a block table of {room} slots")
                for gather in gathers[group]:
                    gather.add(slots, tags, start, stop, said)
                if layout.state and start:
                    state_copies += _state_copy(row.tables[group], layout.span, start, stop)
            scheduled.append(Scheduled(request, start, stop))
        return Batch(
            rows=tuple(scheduled),
            accesses=tuple(tuple(gather.done() for gather in group) for group in gathers),
            sampled=sampled,
            zero_blocks=tuple(getattr(output, "new_block_ids_to_zero", None) or ()),
            block_copies=_block_copies(output),
            state_copies=tuple(state_copies),
            rejected=rejected,
        )


def _join(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)


def _state_copy(table: list[int], span: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the copy that takes the state after ``start`` tokens to where that after ``stop`` will be; none if it is
    there."""
    source, destination = (start - 1) // span, (stop - 1) // span
    return [] if source == destination else [(table[source], table[destination])]


def _block_copies(output: Any) -> tuple[tuple[int, int], ...]:
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return tuple((copy.src_block_id, copy.dst_block_id) for copy in copies)


class ShadowMemory:
    """The KV cache of one rank: what a forward writes to and reads from.

    ``tags`` has shape (layers of a group, blocks * words of a block), uint64, and views the bytes that the worker's
    copies move. Layer i of each group is in row i; layers are numbered group by group.
    """

    def __init__(
        self,
        tags: np.ndarray,
        layouts: Sequence[Layout],
        rank: int,
        shard: int,
        origins: Origins,
        report: Callable[[ShadowMismatch], None],
    ) -> None:
        self.tags = tags
        self.rank = rank
        self.shard = shard
        self._layouts = layouts
        self._block_words = layouts[0].entries * layouts[0].words
        self._views = [_by_entry(tags, layout) for layout in layouts]
        self._layers = len(tags)
        self._masks = [
            np.array([[layer_mask(self.layer(group, i), rank)] for i in range(len(tags))], dtype=np.uint64)
            for group in range(len(layouts))
        ]
        self._origins = origins
        self._report = report

    def layer(self, group: int, index: int) -> int:
        """Return the number of a group's ``index``-th layer."""
        return group * self._layers + index

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks of every layer, as the runner does with blocks that may hold stale data."""
        for block in blocks:
            self.tags[:, block * self._block_words : (block + 1) * self._block_words] = 0

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of every layer."""
        by_block = self.tags.reshape(len(self.tags), -1, self._block_words)
        for source, destination in copies:
            by_block[:, destination] = by_block[:, source]

    def forward(self, batch: Batch) -> None:
        """Write and read one step; report the first wrong position of each request."""
        for group, accesses in enumerate(self._accesses(batch)):
            self._attend(batch.rows, group, accesses)

    def writes(self, batch: Batch) -> Iterator[tuple[str, list[int]]]:
        """Yield (request, blocks) for each row and group of a step: what its forward writes in this memory."""
        for layout, accesses in zip(self._layouts, self._accesses(batch), strict=True):
            blocks = (accesses.write_slots // layout.entries).tolist()
            begin = 0
            for row, tokens in zip(batch.rows, accesses.writes, strict=True):
                yield row.request, blocks[begin : begin + tokens]
                begin += tokens

    def begun(self, batch: Batch, *, states: bool) -> Iterator[int]:
        """Yield the blocks of this memory whose first entry a step's forward writes: those of states, or the others."""
        for layout, accesses in zip(self._layouts, self._accesses(batch), strict=True):
            if layout.state == states:
                blocks, entries = np.divmod(accesses.write_slots, layout.entries)
                yield from blocks[entries == 0].tolist()

    def _accesses(self, batch: Batch) -> Iterator[Accesses]:
        """Yield this rank's accesses in each group."""
        for by_shard in batch.accesses:
            yield by_shard[self.shard if len(by_shard) > 1 else 0]

    def _attend(self, rows: tuple[Scheduled, ...], group: int, accesses: Accesses) -> None:
        view, masks, layout = self._views[group], self._masks[group], self._layouts[group]
        if layout.state:
            found = _one_word(view[:, accesses.read_slots], layout) ^ masks
        written = accesses.write_tags ^ masks
        view[:, accesses.write_slots] = written if layout.words == 1 else written[:, :, None]
        if not layout.state:
            found = _one_word(view[:, accesses.read_slots], layout) ^ masks
        if (found == accesses.read_tags).all():
            return
        wrong = found != accesses.read_tags
        begin = 0
        for row, (first, tokens) in zip(rows, accesses.reads, strict=True):
            stretch = wrong[:, begin : begin + tokens]
            if stretch.any():
                i = int(np.flatnonzero(stretch.any(axis=0))[0])
                index = int(np.flatnonzero(stretch[:, i])[0])
                self._report(
                    ShadowMismatch(
                        request=row.request,
                        position=int(layout.positions(first + i, first + i + 1, self._shard_of(layout))[0]),
                        layer=self.layer(group, index),
                        rank=self.rank,
                        block=int(accesses.read_slots[begin + i]) // layout.entries,
                        found=self.describe(int(found[index, begin + i]), self.layer(group, index)),
                        group=group,
                        state=layout.state,
                    )
                )
            begin += tokens

    def _shard_of(self, layout: Layout) -> int:
        return self.shard if layout.shards > 1 else 0

    def kept(self, tags: np.ndarray, group: int) -> np.ndarray:
        """Return those of a block's ``tags`` that this rank keeps in it, in the order of its memory.

        There is a tag for each of the block's tokens, or for the first of them.
        """
        layout = self._layouts[group]
        if layout.shards == 1 and not layout.state:
            return tags
        positions = layout.kept[self.shard]
        kept: np.ndarray = tags[positions[positions < len(tags)]]
        return kept

    def read_block(self, words: np.ndarray, group: int) -> np.ndarray:
        """Return the tags in a group's block, shape (layers, entries). ``words``: shape (layers, block words)."""
        return _one_word(_by_entry(words, self._layouts[group]), self._layouts[group]) ^ self._masks[group]

    def gpu_block(self, block: int, group: int) -> np.ndarray:
        """Return the tags in a block of this memory, shape (layers, entries)."""
        return self.read_block(self.tags[:, block * self._block_words : (block + 1) * self._block_words], group)

    def describe(self, tag: int, layer: int) -> str:
        """Say what a tag is that was read from ``layer`` (its mask removed already)."""
        group, index = divmod(layer, self._layers)
        return self._origins.describe(0 if tag == int(self._masks[group][index, 0]) else tag)


def _by_entry(words: np.ndarray, layout: Layout) -> np.ndarray:
    """Return a view of shape (layers, entries), or (layers, entries, words) if an entry has several."""
    return words if layout.words == 1 else words.reshape(len(words), -1, layout.words)


def _one_word(words: np.ndarray, layout: Layout) -> np.ndarray:
    """Return each entry's word, shape (layers, entries); TORN where its words differ."""
    if layout.words == 1:
        return words
    return np.where((words == words[:, :, :1]).all(axis=2), words[:, :, 0], np.uint64(TORN))


def layer_mask(layer: int, rank: int) -> int:
    """Return the constant that tells the bytes of one layer and rank from those of the others."""
    return mix(mix(0xCAFE, layer), rank)
