"""The block pool: which blocks are free and in which order, who holds them, and what can be found in them.

A pool of N blocks has ids 0 to N - 1. Block 0 is the *null block*, a placeholder in block tables; it is
never free, never hashed and isn't counted. Every other block is either *held*, with one reference for each
holder, or *free*, and then it has its place in the free queue, whose head is reused first. A free block
keeps its hashes: it can be found, and held again, until it is reused.

Not modelled: several pools behind one (HiSparse, 0.30.0 and later), residency metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvspec.model.clauses import clause
from kvspec.model.keys import BlockHash, Extra, Key, Text
from kvspec.model.profile import FreeOrder, Profile, UncachedReuse

NULL = 0
"""The id of the null block."""


@dataclass(frozen=True)
class Stored:
    """Event: blocks can be found now. One hash for each of them, null and masked ones left out."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: tuple[int, ...]
    """The tokens of the whole range, null and masked blocks included."""
    block_tokens: int
    group: int
    extras: tuple[tuple[Extra, ...], ...]
    """As in the hash, one entry for each hash."""
    adapter: str | None
    """Name of the LoRA adapter."""
    lookahead: tuple[tuple[int, ...], ...] = ()
    """With lookahead hashes: the tokens after each block that its hash covers."""


@dataclass(frozen=True)
class Removed:
    """Event: this key doesn't lead to this block any more."""

    key: Key
    block: int


@dataclass(frozen=True)
class Cleared:
    """Event: nothing can be found any more."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class Block:
    """What the pool knows about a block."""

    references: int = 0
    hash: Key | None = None
    """The first key that it was registered under."""
    hash_end: int = 0
    """How many tokens from the start of the text on ``hash`` stands for."""
    more_hashes: set[Key] = field(default_factory=set)


class BlockPool:
    """A block pool. Blocks are named by their ids.

    Args:
        num_blocks: the null block included.
        profile: what differs between releases.
        hash_tokens: tokens per hash block.
        caching: whether blocks are registered to be found again.
        events: whether events are recorded.
    """

    def __init__(
        self,
        num_blocks: int,
        profile: Profile,
        hash_tokens: int,
        *,
        caching: bool = True,
        events: bool = False,
    ) -> None:
        self.profile = profile
        self.hash_tokens = hash_tokens
        self.caching = caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self.queue = self._initial_queue()
        self.index: dict[Key, list[int]] = {}
        self.pins: dict[int, Callable[[int], None]] = {}
        self._records_events = events
        self._events: list[Event] = []

    @clause
    def _initial_queue(self) -> list[int]:
        """POOL-1. At the start all blocks but the null block are free, in the order of their ids, and
        nothing can be found.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.__init__.
        Releases: all.
        """
        return [block for block in range(len(self.blocks)) if block != NULL]

    @clause
    def usage(self) -> float:
        """POOL-8. The usage of a pool is the share of its blocks that are held, the null block left out.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.get_usage.
        Releases: all.
        """
        usable = len(self.blocks) - 1
        return 1.0 - len(self.queue) / usable if usable else 0.0

    def is_free(self, block: int) -> bool:
        """Whether a block is in the free queue."""
        return block != NULL and self.blocks[block].references == 0

    @clause
    def is_writable(self, block: int) -> bool:
        """POOL-11. A block may be changed in place by its only holder, unless it can be found.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.is_block_writable.
        Releases: 0.29.0 and later.
        """
        return block != NULL and self.blocks[block].references == 1 and self.blocks[block].hash is None

    # Holding and releasing

    @clause
    def allocate(self, count: int) -> list[int]:
        """POOL-2. New blocks come from the head of the free queue, in its order, and have one reference.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.get_new_blocks.
        Releases: all.
        """
        self._refuse_too_many(count)
        taken, self.queue = self.queue[:count], self.queue[count:]
        self._end_pins(taken)
        for block in taken:
            if self.caching:
                self._forget(block)
            self.blocks[block].references = 1
        return taken

    @clause
    def _refuse_too_many(self, count: int) -> None:
        """POOL-3. More blocks than are free are refused (ValueError), and nothing has changed.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.get_new_blocks.
        Releases: all.
        """
        if not 0 <= count <= len(self.queue):
            raise ValueError(f"{count} blocks asked for, {len(self.queue)} are free")

    @clause
    def touch(self, blocks: Iterable[int]) -> None:
        """POOL-5. Touching a block adds a reference; a free block leaves the queue, wherever it stands. The
        null block is left alone.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.touch.
        Releases: all (0.32.0 and older count references of the null block, but nothing depends on them).
        """
        for block in blocks:
            if block == NULL:
                continue
            if self.blocks[block].references == 0:
                self.queue.remove(block)
            self.blocks[block].references += 1

    @clause
    def free(self, blocks: Iterable[int], *, at_head: bool = False) -> None:
        """POOL-6. Freeing a block releases one reference; a block whose last reference goes becomes free,
        once.

        The caller lists first what is to be reused first: a request frees its last block first, so that a
        prefix outlives its continuations. Null blocks may be in the list.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.free_blocks.
        Releases: all.
        """
        freed: list[int] = []
        for block in blocks:
            if block == NULL:
                continue
            if self.blocks[block].references == 0:
                raise ValueError(f"block {block} is freed, but nobody holds it")
            self.blocks[block].references -= 1
            if self.blocks[block].references == 0:
                freed.append(block)
        self._queue_up(freed, at_head)

    @clause
    def _queue_up(self, freed: list[int], at_head: bool) -> None:
        """POOL-7. Blocks that can't be found are reused before those that can, and of the latter the one
        released longest ago.

        That is the order from 0.24.0 on; ``Profile.free_order`` and ``Profile.uncached_reuse`` say what each
        release does.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.free_blocks.
        Releases: all, differently.
        """
        match self.profile.free_order:
            case FreeOrder.APPEND:
                at_once: list[int] = []
            case FreeOrder.CALLER:
                at_once = freed if at_head else []
            case FreeOrder.UNHASHED_FIRST if self.caching:
                at_once = [block for block in freed if self.blocks[block].hash is None]
            case FreeOrder.UNHASHED_FIRST:
                at_once = freed if self.profile.uncached_reuse is UncachedReuse.NEWEST else []
        self.queue = at_once + self.queue + [block for block in freed if block not in at_once]

    @clause
    def unpin(self, blocks: Iterable[int], on_reuse: Callable[[int], None]) -> None:
        """POOL-9. An unpinned block loses a reference, joins the tail of the queue if it was the last one,
        and its reader is told of its reuse.

        The reader may go on reading until then. Each block has at most one such reader, the last one.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.unpin_blocks.
        Releases: 0.30.0 and later.
        """
        for block in blocks:
            self.blocks[block].references -= 1
            self.pins[block] = on_reuse
            if self.blocks[block].references == 0:
                self.queue.append(block)

    @clause
    def _end_pins(self, blocks: Iterable[int]) -> None:
        """POOL-10. A reader is told once: when the block is handed out again, or when the prefix cache is
        reset.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool._notify_reuse.
        Releases: 0.30.0 and later.
        """
        for block in blocks:
            if block in self.pins:
                self.pins.pop(block)(block)

    # Finding

    @clause
    def find(self, block_hash: BlockHash, groups: Sequence[int]) -> tuple[int, ...] | None:
        """PREFIX-1. A hash leads to one block in each group, or to nothing; of equal blocks it leads to the
        one registered first.

        Equal blocks aren't merged: a block table only ever grows at its end.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.get_cached_block, BlockHashToBlockMap.
        Releases: all.
        """
        found = [self.index.get(Key(block_hash, group)) for group in groups]
        return None if None in found else tuple(blocks[0] for blocks in found if blocks)

    @clause
    def register(
        self,
        text: Text,
        table: Sequence[int],
        first: int,
        end: int,
        block_tokens: int,
        group: int,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """PREFIX-2. Full blocks are registered under their hash and group: blocks ``first`` to ``end`` of a
        table, null ones and those not wanted left out.

        A block that was registered for a shorter prefix, which ended inside it, loses that hash
        (``Profile.secondary_hashes``). ``wanted`` has one entry for each block of the range.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.cache_full_blocks.
        Releases: all.
        """
        if first >= end:
            return
        hashes = text.view(block_tokens)
        chosen = [
            index for index in range(first, end) if table[index] != NULL and (wanted is None or wanted[index - first])
        ]
        for index in chosen:
            covered = (index + 1) * block_tokens
            self._replace_shorter(table[index], covered)
            self._enter(table[index], Key(hashes[index], group), covered)
        self._tell_stored(text, chosen, first, end, block_tokens, group)

    def _replace_shorter(self, block: int, covered: int) -> None:
        if self.blocks[block].hash is None:
            return
        if not self.profile.secondary_hashes or self.blocks[block].hash_end >= covered:
            raise AssertionError(f"block {block} is registered already")
        self._forget(block)

    @clause
    def register_tail(self, text: Text, block: int, tokens: int, group: int, *, replace: bool = False) -> Key | None:
        """PREFIX-3. A block can be registered for a prefix of ``tokens`` tokens that ends inside it, beside
        the hashes that it has.

        Hashes for a shorter prefix are replaced, and with ``replace`` all of them: then the block has new
        content.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.cache_partial_block.
        Releases: 0.24.0 and later (``replace``: 0.30.0).
        """
        if block == NULL:
            return None
        last = tokens // self.hash_tokens - 1
        key = Key(text.hashes[last], group)
        known = not replace and block in self.index.get(key, [])
        shorter = self.blocks[block].hash is not None and self.blocks[block].hash_end < tokens
        if replace or (shorter and not known):
            self._forget(block)
        self._enter(block, key, tokens)
        if not known:
            self._tell_stored(text, [last], last, last + 1, self.hash_tokens, group)
        return key

    def _enter(self, block: int, key: Key, covered: int) -> None:
        found = self.index.setdefault(key, [])
        if block in found:
            return
        found.append(block)
        if self.blocks[block].hash is None:
            self.blocks[block].hash, self.blocks[block].hash_end = key, covered
        else:
            self.blocks[block].more_hashes.add(key)

    @clause
    def _forget(self, block: int) -> None:
        """PREFIX-4. A block that is reused can't be found any more, under none of its hashes.

        This happens when it is taken from the queue, not when it is freed: until then it can be hit.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool._maybe_evict_cached_block.
        Releases: all.
        """
        state = self.blocks[block]
        if state.hash is None:
            return
        keys = [state.hash, *state.more_hashes]
        state.hash, state.hash_end, state.more_hashes = None, 0, set()
        for key in keys:
            self.index[key].remove(block)
            if not self.index[key]:
                del self.index[key]
        self._tell_removed(block, keys)

    @clause
    def evict(self, blocks: Iterable[int]) -> None:
        """PREFIX-5. Evicted blocks can't be found any more; they keep their references and their place in the
        queue.

        Ids that the pool hasn't got are refused (AssertionError).

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.evict_blocks.
        Releases: all.
        """
        for block in blocks:
            if block >= len(self.blocks):
                raise AssertionError(f"there is no block {block}")
            self._forget(block)

    @clause
    def move_hashes(self, source: int, target: int) -> None:
        """PREFIX-6. The hashes of a block can move to another, which has none; nobody is told, as everything
        can still be found.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.move_block_hashes.
        Releases: 0.26.0 and later.
        """
        state = self.blocks[source]
        if state.hash is None:
            return
        self.blocks[target].hash, self.blocks[target].hash_end = state.hash, state.hash_end
        self.blocks[target].more_hashes = state.more_hashes
        for key in (state.hash, *state.more_hashes):
            self.index[key].remove(source)
            self.index[key].append(target)
        state.hash, state.hash_end, state.more_hashes = None, 0, set()

    @clause
    def reset(self) -> bool:
        """RESET-1. A reset is refused while a block is held; else nothing can be found any more, and the
        queue stays as it is.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.reset_prefix_cache.
        Releases: all.
        """
        if len(self.queue) != len(self.blocks) - 1:
            return False
        self.index = {}
        self._end_pins(list(self.pins))
        for state in self.blocks:
            state.hash, state.hash_end, state.more_hashes = None, 0, set()
        self._record(Cleared())
        return True

    # Telling

    @clause
    def take_events(self) -> list[Event]:
        """TELL-1. Events are handed over once, in the order in which things happened.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.take_events.
        Releases: all.
        """
        events, self._events = self._events, []
        return events

    def events_waiting(self) -> int:
        """Return how many events wait to be taken."""
        return len(self._events)

    @clause
    def _tell_stored(self, text: Text, chosen: list[int], first: int, end: int, block_tokens: int, group: int) -> None:
        """TELL-2. Each registration of a range is one event, with the hash before the range as parent, even
        if every block of it was left out.

        It is told when the blocks are registered, which is before their keys and values exist.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.cache_full_blocks, cache_partial_block.
        Releases: all.
        """
        hashes = text.view(block_tokens)
        ends = [(index + 1) * block_tokens for index in chosen]
        self._record(
            Stored(
                hashes=tuple(hashes[index] for index in chosen),
                parent=hashes[first - 1] if first else None,
                tokens=tuple(text.tokens[first * block_tokens : end * block_tokens]),
                block_tokens=block_tokens,
                group=group,
                extras=tuple(text.content.extras(at - block_tokens, at + text.lookahead) for at in ends),
                adapter=text.content.adapter[0] if text.content.adapter else None,
                lookahead=tuple(tuple(text.tokens[at : at + text.lookahead]) for at in ends if text.lookahead),
            )
        )

    @clause
    def _tell_removed(self, block: int, keys: Sequence[Key]) -> None:
        """TELL-3. Each hash that a block loses is one event: the first that it had comes first, the others
        in any order.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool._emit_block_removed_events.
        Releases: all.
        """
        for key in keys:
            self._record(Removed(key, block))

    @clause
    def tell_hit(self, text: Text, count: int, block_tokens: int, group: int) -> None:
        """TELL-4. For those who ask, a hit of ``count`` blocks is told like a registration of the blocks 0
        to ``count``, null ones included.

        Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.emit_cached_block_events.
        Releases: 0.26.0 and later.
        """
        if count:
            self._tell_stored(text, list(range(count)), 0, count, block_tokens, group)

    def _record(self, event: Event) -> None:
        if self._records_events:
            self._events.append(event)
