"""The equality machines of target ``vllm-core``: the model and vLLM's own objects, side by side.

Every op is applied to both, what they answer is compared, and so is everything that can be seen of their
state. A difference is a ``ClauseBroken``. The classes ``PoolPair`` and ``CachePair`` couple the two; the
machines at the end only draw ops.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from hypothesis.strategies import SearchStrategy

from kvspec.model import ops
from kvspec.model.cache import CacheManager, DeferredFrees, Hit, Request
from kvspec.model.clauses import ClauseBroken, agree
from kvspec.model.groups import Group, Kind, blocks_for, skipped_tokens
from kvspec.model.keys import PLAIN, BlockHash, Content, Image, Key, Text
from kvspec.model.ops import CoreHistory, CoreOp
from kvspec.model.pool import NULL, BlockPool, Event, Removed, Stored
from kvspec.model.profile import CpScaling, Profile, known_issues, profile_for
from kvspec.model.scaling import (
    ContextParallel,
    alignment_tokens,
    lazy_target_blocks,
    refuse_unsupported,
    slot,
    tokens_on_rank,
    whole_blocks,
)
from kvspec.targets.vllm import core as target

EVENTS = {
    "evicted": "a block that could be found was reused",
    "equal-blocks": "two blocks were registered under the same key",
    "held-again": "a free block was touched",
    "shared": "a block had two holders",
    "refused": "a call was refused",
    "found": "a look-up found something",
    "left-out": "a null or masked block was left out of a registration",
    "tail-registered": "a block was registered for a prefix that ends inside it",
    "promoted": "a block that was registered for a prefix inside it was filled",
    "hashes-moved": "the hashes of a block were moved",
    "reused-while-read": "a reader was told that its block is reused",
    "reset": "the prefix cache was reset",
    "reset-refused": "a reset was refused",
    "hit": "a request took over blocks that it had found",
    "parted": "full attention's hit was longer than the other groups'",
    "external": "a request took over tokens that came from elsewhere",
    "left-window": "a request gave up blocks that it didn't read any more",
    "refused-by-reserve": "a step was refused although there were enough free blocks",
    "preempted": "a request was preempted",
    "deferred": "the release of blocks waited for a step in flight",
}
"""What a run can reach -> what it is. A known issue that shortens or skips a step is counted as ``known:ID``."""

_ALWAYS = {"evicted", "held-again", "refused", "reset"}
POOL_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(_ALWAYS | {"equal-blocks", "shared", "found", "left-out"}, lambda profile: True),
    **dict.fromkeys({"tail-registered", "promoted"}, lambda profile: profile.secondary_hashes),
    "hashes-moved": lambda profile: profile.moves_hashes,
    "reused-while-read": lambda profile: profile.pins,
}
"""Events that a run of the pool must reach -> whether a release can."""
CACHE_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(_ALWAYS | {"hit", "external", "left-window", "preempted", "reset-refused"}, lambda profile: True),
    "parted": lambda profile: profile.retains_shared_prefix,
    "refused-by-reserve": lambda profile: profile.reserve,
    "deferred": lambda profile: profile.deferred_frees,
}
"""Events that a run of the cache must reach -> whether a release can."""


def avoided(setup: ops.PoolSetup | ops.CacheSetup, profile: Profile) -> frozenset[str]:
    """Return the known issues that a history must keep out of the way."""
    return known_issues(profile.release) if setup.avoids_known else frozenset()


class Refused(NamedTuple):
    """A call raised."""

    error: str


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns, or that it was refused with ValueError or AssertionError."""
    try:
        return call(*arguments)
    except (ValueError, AssertionError) as error:
        return Refused(type(error).__name__)


class Names:
    """Which hash of the implementation names which content: one to one in each group."""

    def __init__(self) -> None:
        self._names: dict[Key, bytes] = {}
        self._contents: dict[tuple[bytes, int], BlockHash] = {}

    def learn(self, group: int, expect: Sequence[BlockHash], actual: Sequence[bytes], hash_blocks: int = 1) -> None:
        """Check that the implementation's hashes of a text name the model's, and remember which.

        They are those of blocks of so many hash blocks.
        """
        agree("KEY-1" if hash_blocks == 1 else "KEY-3", len(expect), len(actual))
        for block_hash, name in zip(expect, actual, strict=True):
            known = self._contents.setdefault((name, group), block_hash)
            agree("KEY-2", block_hash, known)
            agree("KEY-2", self._names.setdefault(Key(block_hash, group), name), name)

    def of(self, key: Key) -> tuple[bytes, int]:
        """Return the implementation's form of a key."""
        return self._names[key], key.group

    def event(self, event: Event) -> target.RawEvent:
        """Return the implementation's form of an event. Extra keys are told without saying what they are."""
        if isinstance(event, Stored):
            names = tuple(self._told(Key(block_hash, event.group)) for block_hash in event.hashes)
            parent = None if event.parent is None else self._told(Key(event.parent, event.group))
            extras = tuple(
                tuple(extra[1:] if extra[0] == "image" else extra[1] for extra in block) for block in event.extras
            )
            rest = (event.tokens, event.block_tokens, event.group, extras, event.adapter, event.lookahead)
            return ("stored", names, parent, *rest)
        if isinstance(event, Removed):
            return ("removed", self._told(event.key), event.key.group)
        return ("cleared",)

    def _told(self, key: Key) -> bytes | int:
        return target.event_hash(self._names[key])


def compare_events(names: Names, expect: list[Event], actual: list[target.RawEvent]) -> None:
    """Compare events in order; of those that one block's loss of hashes causes, all but the first come in
    any order.
    """
    agree("EVENT-1", [type(event).__name__ for event in expect], [_EVENT_TYPES[event[0]] for event in actual])
    told = [names.event(event) for event in expect]
    start = 0
    while start < len(expect):
        end = start + 1
        event = expect[start]
        if isinstance(event, Removed):
            while end < len(expect) and isinstance(later := expect[end], Removed) and later.block == event.block:
                end += 1
            agree("EVENT-3", told[start], actual[start])
            agree("EVENT-3", sorted(told[start + 1 : end]), sorted(actual[start + 1 : end]))
        else:
            agree("EVENT-2", told[start], actual[start])
        start = end


_EVENT_TYPES = {"stored": "Stored", "removed": "Removed", "cleared": "Cleared"}


def compare_pools(names: Names, model: BlockPool, actual: target.PoolState, clauses: dict[str, str]) -> None:
    """Compare all that can be seen of two pools; ``clauses`` says which clause each part belongs to after
    this op.
    """
    agree(clauses["references"], [block.references for block in model.blocks[1:]], actual.references[1:])
    agree(clauses["references"], sorted(model.queue), sorted(actual.queue))
    agree(clauses["references"], len(model.queue), actual.free)
    if model.profile.null_has_no_references:
        agree("POOL-5", 0, actual.references[NULL])
    agree(clauses["queue"], model.queue, actual.queue)
    agree(
        clauses["hashes"],
        [(block.hash and names.of(block.hash), set(map(names.of, block.more_hashes))) for block in model.blocks],
        actual.hashes,
    )
    if model.profile.secondary_hashes:
        agree(clauses["hashes"], [block.hash_end for block in model.blocks], actual.ends)
    agree(clauses["hashes"], {names.of(key): found for key, found in model.index.items()}, actual.found)


_TRUNK = list(range(16))
_CONTENTS = {
    5: Content(salt="salt"),
    6: Content(adapter=("lora", "/lora")),
    7: Content(images=(Image("dog", 1, 1), Image("cat", 3, 2))),
}


def _tokens(text: int) -> list[int]:
    """Texts 0, 1, 5, 6 and 7 are the trunk, 2 to 4 leave it after 4, 8 and 7 tokens."""
    shared = {2: 4, 3: 8, 4: 7}.get(text, 16)
    return _TRUNK[:shared] + [100 * text + i for i in range(16 - shared)]


class PoolPair:
    """A block pool of the model and a ``BlockPool``."""

    def __init__(self, setup: ops.PoolSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.profile = profile
        self.avoid = avoided(setup, profile) if avoid is None else avoid
        caching, events = setup.caching, setup.events
        self.model = BlockPool(setup.blocks, profile, setup.hash_tokens, caching=caching, events=events)
        self.real = target.RealPool(
            setup.blocks, setup.hash_tokens, caching=caching, lookahead=setup.lookahead, events=events
        )
        self.names = Names()
        self.reached: Counter[str] = Counter()
        self.held: list[int] = []
        self.told: tuple[list[int], list[int]] = ([], [])
        self.texts: list[Text] = []
        self.requests: list[Any] = []
        for number in range(ops.TEXTS):
            self._add_text(number)
        self._compare(queue="POOL-1", references="POOL-1", hashes="POOL-1")

    def _add_text(self, number: int) -> None:
        content, setup = _CONTENTS.get(number, Content()), self.setup
        self.texts.append(Text(_tokens(number), setup.hash_tokens, content, setup.lookahead))
        self.requests.append(
            target.make_request(
                f"text {number}",
                _tokens(number),
                setup.hash_tokens,
                adapter=content.adapter,
                images=content.images,
                salt=content.salt,
                lookahead=setup.lookahead,
            )
        )
        for group in (0, 1):
            block_tokens = self._block_tokens(group)
            actual = target.group_hashes(self.requests[-1], setup.hash_tokens, block_tokens)
            self.names.learn(group, self.texts[-1].view(block_tokens), actual, block_tokens // setup.hash_tokens)
        if self.profile.secondary_hashes:  # A tail of group 1 is registered under the hash of a hash block.
            self.names.learn(1, self.texts[-1].hashes, self.requests[-1].block_hashes)

    def _block_tokens(self, group: int) -> int:
        return self.setup.hash_tokens * (self.setup.ratio if group else 1)

    def _compare(self, **clauses: str) -> None:
        compare_pools(self.names, self.model, self.real.state(), clauses)
        agree("POOL-8", self.model.usage(), self.real.usage())
        if self.profile.says_writable:
            agree(
                "POOL-11", [self.model.is_writable(block) for block in range(self.setup.blocks)], self.real.writable()
            )

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""
        return self.real.state()

    def apply(self, op: ops.PoolOp) -> None:
        """Apply an op to both and compare. ClauseBroken if they differ."""
        _POOL_ARMS[type(op)](self, op)

    def allocate(self, op: ops.Allocate) -> None:
        found = [block for block in self.model.queue[: op.count] if self.model.blocks[block].hash]
        expect = attempt(self.model.allocate, op.count)
        actual = attempt(self.real.allocate, op.count)
        agree("POOL-3" if Refused("ValueError") in (expect, actual) else "POOL-2", expect, actual)
        if isinstance(expect, list):
            self.held += expect
            self.reached["evicted"] += len(found)
        else:
            self.reached["refused"] += 1
        agree("POOL-10", *self.told)
        self.reached["reused-while-read"] = len(self.told[0])
        self._compare(queue="POOL-2", references="POOL-2", hashes="INDEX-4")

    def touch(self, op: ops.Touch) -> None:
        some = self.held if op.held else [blocks[0] for blocks in self.model.index.values()]
        blocks = _picked(some, op.pick, op.count, 1)
        self.reached["held-again"] += sum(self.model.blocks[block].references == 0 for block in set(blocks))
        self.reached["shared"] += sum(self.model.blocks[block].references > 0 for block in set(blocks))
        self.held += blocks
        blocks += [NULL] * op.null
        self.model.touch(blocks)
        self.real.touch(blocks)
        self._compare(queue="POOL-5", references="POOL-5", hashes="POOL-5")

    def free(self, op: ops.Free) -> None:
        blocks = _picked(self.held, op.pick, op.count, op.step)
        self._release(blocks, [NULL] * op.null, bool(op.at_head))
        self._compare(queue="POOL-7", references="POOL-6", hashes="POOL-6")

    def _release(self, blocks: list[int], nulls: Sequence[int] = (), at_head: bool = False) -> None:
        for block in blocks:
            self.held.remove(block)
        once = list(dict.fromkeys(blocks)) if "core-double-release" in self.avoid else blocks
        for part in (once, [block for block in once if blocks.count(block) > 1 and once is not blocks]):
            self.model.free([*part, *nulls], at_head=at_head)
            self.real.free([*part, *nulls], at_head)

    def register(self, op: ops.Register) -> None:
        text, block_tokens = self.texts[op.text], self._block_tokens(op.group)
        first = min(op.first, len(text.view(block_tokens)))
        end = min(first + op.count, len(text.view(block_tokens)))
        held = list(dict.fromkeys(self.held))
        if op.pick % 6:  # Mostly blocks that may be registered; sometimes whichever.
            held = [block for block in held if self.model.blocks[block].hash is None]
        blocks = _picked(held, op.pick, end - first, 1)
        end = first + len(blocks)
        if not self.setup.caching:
            return
        nulls = [bool(max(op.nulls, 0) >> i & 1) for i in range(len(blocks))]
        table = [NULL] * first + [NULL if null else block for null, block in zip(nulls, blocks, strict=True)]
        wanted = None
        if op.masked > 0 and self.profile.masks_unreachable:
            wanted = [not op.masked >> i & 1 for i in range(len(blocks))]
        keys = text.view(block_tokens)[first:end]
        self.reached["left-out"] += sum(nulls) + (wanted or []).count(False)
        self.reached["equal-blocks"] += sum(Key(key, op.group) in self.model.index for key in keys)
        kept = [block for block, keep in zip(table[first:], wanted or [True] * len(blocks), strict=True) if keep]
        shorter = sum(self.model.blocks[block].hash is not None for block in kept)
        expect = attempt(self.model.register, text, table, first, end, block_tokens, op.group, wanted)
        actual = attempt(self.real.register, self.requests[op.text], table, first, end, block_tokens, op.group, wanted)
        agree("INDEX-2", expect, actual)
        self.reached["promoted"] += shorter if expect is None else 0
        self.reached["refused"] += expect is not None
        self._compare(queue="INDEX-2", references="INDEX-2", hashes="INDEX-2")

    def register_tail(self, op: ops.RegisterTail) -> None:
        text, block_tokens = self.texts[op.text], self._block_tokens(1)
        tokens = min(op.units, len(text.hashes)) * self.setup.hash_tokens
        replace = bool(op.replace) and self.profile.pins
        usable = self.profile.secondary_hashes and self.setup.caching and self.setup.ratio > 1
        inside = tokens % block_tokens != 0
        if not (usable and self.held and inside) or (text.content.images and not self.profile.pins):
            return
        held = self.held
        if op.pick % 2:  # Often a block that has a hash already.
            held = [block for block in held if self.model.blocks[block].hash] or held
        block = NULL if op.null > 0 else _picked(held, op.pick, 1, 1)[0]
        self.reached["tail-registered"] += block != NULL
        key = self.model.register_tail(text, block, tokens, 1, replace=replace)
        actual = self.real.register_tail(self.requests[op.text], block, tokens, 1, block_tokens, replace)
        agree("INDEX-3", key and self.names.of(key), actual)
        self._compare(queue="INDEX-3", references="INDEX-3", hashes="INDEX-3")

    def find(self, op: ops.Find) -> None:
        text, groups = self.texts[op.text], [[0], [1], [0, 1]][op.groups]
        keys = [Key(block_hash, groups[-1]) for block_hash in text.view(self._block_tokens(groups[-1]))]
        if op.known:
            keys = [key for key in self.model.index if key.group == groups[-1]] or keys
        key = keys[op.index % len(keys)]
        if len(groups) > 1 and self.setup.ratio > 1:
            return
        expect = self.model.find(key.hash, groups)
        agree("INDEX-1", expect, self.real.find(self.names.of(key)[0], groups))
        self.reached["found"] += expect is not None
        self._compare(queue="INDEX-1", references="INDEX-1", hashes="INDEX-1")

    def move_hashes(self, op: ops.MoveHashes) -> None:
        sources = [block for block in dict.fromkeys(self.held) if self.model.blocks[block].hash]
        targets = [block for block in dict.fromkeys(self.held) if not self.model.blocks[block].hash]
        if not (self.profile.moves_hashes and sources and targets):
            return
        source, to = sources[op.pick % len(sources)], targets[op.to % len(targets)]
        self.reached["hashes-moved"] += 1
        self.model.move_hashes(source, to)
        self.real.move_hashes(source, to)
        self._compare(queue="INDEX-6", references="INDEX-6", hashes="INDEX-6")

    def evict(self, op: ops.Evict) -> None:
        blocks = [op.first + i for i in range(op.count)]
        expect = attempt(self.model.evict, blocks)
        agree("INDEX-5", expect, attempt(self.real.evict, blocks))
        self.reached["refused"] += expect is not None
        self._compare(queue="INDEX-5", references="INDEX-5", hashes="INDEX-5")

    def unpin(self, op: ops.Unpin) -> None:
        if not self.profile.pins:
            return
        blocks = _picked(self.held, op.pick, op.count, 1)
        for block in blocks:
            self.held.remove(block)
        self.model.unpin(blocks, self.told[0].append)
        self.real.unpin(blocks, self.told[1].append)
        self._compare(queue="POOL-9", references="POOL-9", hashes="POOL-9")

    def tell_hit(self, op: ops.TellHit) -> None:
        text, block_tokens = self.texts[op.text], self._block_tokens(op.group)
        if not self.profile.reports_hits:
            return
        count = min(op.count, len(text.view(block_tokens)))
        compare_events(self.names, self.model.take_events(), self.real.take_events())
        self.model.tell_hit(text, count, block_tokens, op.group)
        self.real.tell_hit(self.requests[op.text], count, block_tokens, op.group)
        events = self.model.take_events(), self.real.take_events()
        agree("EVENT-4", list(map(self.names.event, events[0])), events[1])

    def reset(self, op: ops.Reset) -> None:
        if op.empty:
            while self.held:
                self._release(list(dict.fromkeys(self.held)))
            self._compare(queue="POOL-7", references="POOL-6", hashes="POOL-6")
        expect = self.model.reset()
        agree("RESET-1", expect, self.real.reset())
        self.reached["reset" if expect else "refused"] += 1
        agree("POOL-10", *self.told)
        self._compare(queue="RESET-1", references="RESET-1", hashes="RESET-1")

    def take_events(self, op: ops.TakeEvents) -> None:
        del op
        compare_events(self.names, self.model.take_events(), self.real.take_events())


_POOL_ARMS: dict[type, Callable[[PoolPair, Any], None]] = {
    ops.Allocate: PoolPair.allocate,
    ops.Touch: PoolPair.touch,
    ops.Free: PoolPair.free,
    ops.Register: PoolPair.register,
    ops.RegisterTail: PoolPair.register_tail,
    ops.Find: PoolPair.find,
    ops.MoveHashes: PoolPair.move_hashes,
    ops.Evict: PoolPair.evict,
    ops.Unpin: PoolPair.unpin,
    ops.TellHit: PoolPair.tell_hit,
    ops.Reset: PoolPair.reset,
    ops.TakeEvents: PoolPair.take_events,
}


def _picked(some: list[int], pick: int, count: int, step: int) -> list[int]:
    """Return up to ``count`` different entries of a list from the ``pick``-th on, ``step`` apart."""
    places = [(pick + step * i) % len(some) for i in range(count)] if some else []
    return [some[place] for place in dict.fromkeys(places)]


_CONTENTS_OF_REQUESTS = {
    5: Content(salt="salt"),
    6: Content(adapter=("lora", "/lora")),
    7: Content(images=(Image("cat", 3, 6),)),
}
_LIVE_MAX = 6
"""Requests at once."""


def _needed_call(
    result: int, request: Request, slots: int, *rest: Any, capped: bool = False, **more: Any
) -> target.Call:
    del request, rest, more
    return "needed", capped, slots, result


def _register_call(
    result: None, text: Text, table: list[int], first: int, end: int, span: int, group: int, wanted: list[bool] | None
) -> target.Call:
    return "register", group, first, end, [True] * (end - first) if wanted is None else wanted


class Live(NamedTuple):
    """A request, on both sides."""

    model: Request
    real: Any


class CachePair:
    """A KV cache manager of the model and a ``KVCacheManager``."""

    def __init__(self, setup: ops.CacheSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.profile = profile
        self.avoid = avoided(setup, profile) if avoid is None else avoid
        self.names = Names()
        self.reached: Counter[str] = Counter()
        self.live: list[Live] = []
        self.arrived = 0
        groups = [replace(group, eagle=True) for group in setup.groups] if setup.eagle_fallback else setup.groups
        cp = ContextParallel(setup.prefill, setup.decode)
        interval = None
        if setup.interval >= 0:
            interval = setup.interval * alignment_tokens(groups, cp, profile)
        self.model = CacheManager(
            groups,
            setup.blocks,
            profile,
            cp=cp,
            caching=setup.caching,
            max_tokens=setup.max_tokens,
            in_flight_tokens=setup.in_flight_tokens,
            watermark=setup.watermark_percent / 100,
            interval=interval,
            events=True,
        )
        self.calls: list[target.Call] = []
        self._record(self.model, "blocks_needed", _needed_call)
        self._record(self.model.pool, "register", _register_call)
        self._record(
            self.model.pool, "register_tail", lambda result, text, block, tokens, group: ("tail", group, tokens)
        )
        self.deferred = DeferredFrees(self.model)
        self.real = target.RealCache(
            _described(setup.groups),
            setup.blocks,
            caching=setup.caching,
            prefill=setup.prefill,
            decode=setup.decode,
            eagle=any(group.eagle for group in groups),
            max_tokens=setup.max_tokens,
            in_flight_tokens=setup.in_flight_tokens,
            watermark=setup.watermark_percent / 100,
            interval=interval,
        )
        agree("SCALE-1", self.model.spans, self.real.sizes.spans)
        agree("SCALE-3", self.model.alignment, self.real.sizes.alignment)
        if setup.caching:
            agree("SCALE-4", self.model.hash_tokens, self.real.sizes.hash_tokens)
        self._compare(queue="POOL-1", references="POOL-1", hashes="POOL-1", rows="POOL-1")

    def _record(self, owner: Any, name: str, describe: Callable[..., target.Call]) -> None:
        method = getattr(owner, name)

        def recorded(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            self.calls.append(describe(result, *arguments, **named))
            return result

        setattr(owner, name, recorded)

    def _compare(self, *, rows: str, **clauses: str) -> None:
        compare_pools(self.names, self.model.pool, self.real.state(), clauses)
        empty: list[list[int]] = [[] for _ in self.setup.groups]
        for live in self.live:
            agree(rows, self.model.tables.get(live.model.name, empty), self.real.rows(live.real))

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""
        return self.real.state(), [self.real.rows(live.real) for live in self.live]

    def apply(self, op: ops.CacheOp) -> None:
        """Apply an op to both and compare. ClauseBroken if they differ."""
        _CACHE_ARMS[type(op)](self, op)

    def _picked(self, pick: int) -> Live | None:
        return self.live[pick % len(self.live)] if self.live else None

    def _learn(self, live: Live) -> None:
        if not self.setup.caching:
            return
        hash_tokens = self.real.sizes.hash_tokens
        for group, span in enumerate(self.model.spans):
            actual = target.group_hashes(live.real, hash_tokens, span)
            self.names.learn(group, live.model.text.view(span), actual, span // hash_tokens)
            if self.profile.registers_tails:
                self.names.learn(group, live.model.text.hashes, live.real.block_hashes)

    def arrive(self, op: ops.Arrive) -> None:
        if len(self.live) >= _LIVE_MAX:
            return
        content = _CONTENTS_OF_REQUESTS.get(op.content, PLAIN)
        tokens = list(range(4 * op.shared)) + [1000 * (op.branch + 1) + i for i in range(op.tail)]
        tokens = tokens[: self.setup.max_tokens - 8] or [0]
        self.arrived += 1
        name = f"r{self.arrived}"
        text = self.model.text(tokens, content)
        model = Request(name, text, len(tokens), reads_cache=op.reads_cache > 0)
        real = target.make_request(
            name,
            tokens,
            self.real.sizes.hash_tokens,
            adapter=content.adapter,
            images=content.images,
            salt=content.salt,
        )
        real.skip_reading_prefix_cache = not model.reads_cache
        self.live.append(Live(model, real))
        self._learn(self.live[-1])

    def schedule(self, op: ops.Schedule) -> None:
        live = self._picked(op.pick)
        if live is None:
            return
        request, real = live
        holds = request.name in self.model.tables
        for index, group in enumerate(self.model.groups):
            agree(
                "WINDOW-1", skipped_tokens(group, request.computed), self.real.skipped_tokens(index, request.computed)
            )
        hit = None
        if not holds and (hit := self._lookup(live)) is None:
            return
        local = request.computed + (hit.tokens if hit else 0)
        known = len(request.text.tokens)
        external = 0 if hit is None else max(0, min(op.external, known - local))
        delay = bool(op.delay and external)
        left = known - local - external
        new = 0 if delay else min(op.tokens, left) if left > 0 else min(op.tokens, 1)
        new += max(0, op.drafts) if 0 < new == left else 0
        too_far = left < (-3 if holds else 0) or local + external + new > self.setup.max_tokens
        if any(group.align for group in self.setup.groups) and external and not delay:
            return  # Offload connectors load states asynchronously, and the count of needed blocks is made for that.
        if "core-states-over-allocated" in self.avoid and self._over_allocated(request, local + external + new):
            return
        if too_far or (self._external_evicts_hits(hit, external) and "core-external-evicts-hits" in self.avoid):
            return
        request.in_flight = real.num_in_flight_tokens = min(max(0, op.in_flight), request.computed)
        if "core-window-freed-too-early" in self.avoid:
            request.in_flight = real.num_in_flight_tokens = 0
        settings: dict[str, Any] = {
            "lookahead": max(0, op.lookahead),
            "external": external,
            "must_fit": bool(op.must_fit and (new or external)) and not holds,
            "reserved": max(0, op.reserved),
            "others_run": bool(op.others_run),
        }
        self._look(request)
        expect = attempt(lambda: self.model.allocate(request, new, hit, delay_registration=delay, **settings))
        actual = attempt(
            lambda: self.real.allocate(
                real, new, hit.tokens if hit else 0, hit=hit is not None, delay=delay, **settings
            )
        )
        self._agree_on_refusal(request, settings, hit, expect, actual)
        self._agree_on_rows(live, local + external, external, holds)
        agree("STATE-2" if any(group.align for group in self.model.groups) else "ALLOC-7", expect, actual)
        self._agree_on_registration()
        self._compare(queue="ALLOC-7", references="ALLOC-5", hashes="INDEX-4", rows="ALLOC-7")
        self._count(request, hit, external, expect)
        if expect is None or isinstance(expect, Refused):
            return
        request.computed = real.num_computed_tokens = local + external + new
        request.waiting = False
        target.set_status(real, "RUNNING")
        self.deferred.scheduled += 1
        self.real.fence.sched_step_seq = self.deferred.scheduled
        request.last_step = real.last_sched_seq = self.deferred.scheduled
        if delay:
            self.model.register(request, request.computed)
            self.real.register(real, request.computed)
            self._agree_on_registration()
            self._compare(queue="REG-1", references="REG-1", hashes="REG-1", rows="REG-1")

    def _agree_on_refusal(
        self, request: Request, settings: dict[str, Any], hit: Hit | None, expect: Any, actual: Any
    ) -> None:
        """Compare whether a step was refused, and what was counted for that."""
        in_growth = Refused("AssertionError") in (expect, actual)
        agree("STATE-2" if in_growth else "ALLOC-1", isinstance(expect, Refused), isinstance(actual, Refused))
        counts = [[call for call in calls if call[0] == "needed"] for calls in (self.calls, self.real.calls)]
        fresh = hit is not None and any(
            row and group.kind is Kind.MAMBA and self.model.pool.blocks[row[-1]].hash in self.model.fresh
            for group, row in zip(self.model.groups, hit.blocks, strict=True)
        )
        aligned = any(group.align for group in self.model.groups)
        clauses = ["NEED-2" if fresh else "STATE-1" if aligned else "NEED-1"] * 2
        if settings["must_fit"] and not fresh:
            clauses[0] = "NEED-3"
        for clause, expected, seen in zip(clauses, *counts, strict=False):
            agree("ALLOC-3", expected[1], seen[1])
            agree("ALLOC-4", expected[2], seen[2])
            agree(clause, expected[3], seen[3])
        agree("ALLOC-3", len(counts[0]), len(counts[1]))
        self._needed = counts[0][-1][3] if counts[0] else 0
        watermark = self.setup.watermark_percent and request.waiting and not settings["reserved"]
        agree("ALLOC-2" if watermark else "ALLOC-8", expect is None, actual is None)

    def _agree_on_rows(self, live: Live, computed: int, external: int, held: bool) -> None:
        """Compare a request's rows: what it has given up, taken over, and got for external tokens."""
        rows = self.model.tables.get(live.model.name, [[] for _ in self.model.groups])
        sides = zip(self.model.groups, self.model.spans, rows, self.real.rows(live.real), strict=True)
        for group, span, row, actual in sides:
            nulls = [[index for index, block in enumerate(some) if block == NULL] for some in (row, actual)]
            agree(("STATE-3" if group.align else "WINDOW-2") if held else "ALLOC-5", *nulls)
            covered = blocks_for(computed, span)
            agree("ALLOC-6" if external else "ALLOC-5", row[:covered], actual[:covered])

    def _agree_on_registration(self) -> None:
        """Compare which blocks were registered."""
        full = [[call for call in calls if call[0] == "register"] for calls in (self.calls, self.real.calls)]
        ends = [[call[:4] for call in calls] for calls in full]
        agree("REG-1" if len(self.model.groups) == 1 else "REG-3", *ends)
        agree("REG-2" if self.setup.interval < 0 else "REG-4", *full)
        tails = [[call[1:] for call in calls if call[0] == "tail"] for calls in (self.calls, self.real.calls)]
        for index, group in enumerate(self.model.groups):
            agree("REG-6" if group.align else "REG-5", *([call for call in some if call[0] == index] for some in tails))
        self.calls.clear()
        self.real.calls.clear()
        if self.setup.caching:
            agree("NEED-2", set(map(self.names.of, self.model.fresh)), self.real.fresh())

    def _lookup(self, live: Live) -> Hit | None:
        """Look a request up on both sides. None if they differ as a known issue makes them differ."""
        if self.setup.caching and self._groups_differ(live):
            return None
        hit = self.model.lookup(live.model)
        actual = Hit(*self.real.lookup(live.real))
        text, limit = live.model.text, len(live.model.text.tokens) - 1
        if actual != hit and self._is_known(hit, actual):
            return None
        if not live.model.reads_cache or actual.tokens > limit:
            agree("HIT-3", hit.tokens, actual.tokens)
        for other in (limit, len(text.tokens)):
            if (
                any(self.model.drops)
                and hit.tokens != actual.tokens
                and self.model.longest(text, limit, range(len(self.model.groups)), other) == actual.tokens
            ):
                agree("HIT-5", hit.tokens, actual.tokens)
        agree("HIT-4", hit.tokens, actual.tokens)
        agree("HIT-6", hit.blocks, actual.blocks)
        agree("HIT-7", hit.shared_prefix, actual.shared_prefix)
        live.model.shared_prefix = hit.shared_prefix
        self._compare(queue="HIT-3", references="HIT-3", hashes="HIT-3", rows="HIT-3")
        return hit

    def _groups_differ(self, live: Live) -> bool:
        """Compare what each layout accepts alone. True if a known issue makes them differ."""
        text, limit = live.model.text, len(live.model.text.tokens) - 1
        for index, mates in enumerate(self.model.mates):
            agree(
                "HIT-1",
                self.model.longest(text, limit, mates, None),
                self.real.group_hit(live.real, limit, mates, False),
            )
            if not self.model.drops[index] or self.model.groups[index].kind is Kind.MAMBA:
                continue
            proof_limit = self.model.proof_limit_of(text, limit)
            reach = limit if proof_limit == limit else min(limit + self.model.spans[index], proof_limit)
            expect = self.model.longest(text, limit, mates, proof_limit)
            actual = self.real.group_hit(live.real, reach, mates, True)
            if expect > actual and self._cuts_twice(index):
                self.reached["known:core-eagle-first-window"] += 1
                return True
            agree("HIT-2", expect, actual)
        return False

    def _cuts_twice(self, index: int) -> bool:
        return (
            "core-eagle-first-window" in self.avoid
            and self.setup.groups[index].kind is Kind.SLIDING_WINDOW
            and self.model.spans[index] != self.model.alignment
        )

    def _is_known(self, expect: Hit, actual: Hit) -> bool:
        for issue, causes in sorted(_LOOKUP_ISSUES.items()):
            if issue in self.avoid and causes(self, expect, actual):
                self.reached[f"known:{issue}"] += 1
                return True
        return False

    def cuts_twice(self, expect: Hit, actual: Hit) -> bool:
        """Whether core-eagle-first-window can be why a hit is shorter than expected."""
        if not any(drops and self._cuts_twice(index) for index, drops in enumerate(self.model.drops)):
            return False
        parts_alone = all(group.kind is not Kind.FULL for group in self.setup.groups)
        return actual.tokens < expect.tokens or (actual[:2] == expect[:2] and parts_alone)

    def leaves_tail(self, expect: Hit, actual: Hit) -> bool:
        """Whether core-second-full-group-not-cut can be why a row is longer than the hit."""
        rows = zip(self.setup.groups, expect.blocks, actual.blocks, strict=True)
        cut = [seen[: len(row)] if group.kind is Kind.FULL else seen for group, row, seen in rows]
        return actual._replace(blocks=tuple(cut)) == expect

    def lacks_proof(self, expect: Hit, actual: Hit) -> bool:
        """Whether core-eagle-unproven-hit can be why a hit is longer than expected."""
        sides = zip(self.model.groups, self.model.drops, strict=True)
        layouts = {group.layout() for group, drops in sides if drops and group.kind is not Kind.MAMBA}
        return actual.tokens > expect.tokens and len(layouts) > 1

    def _over_allocated(self, request: Request, tokens: int) -> bool:
        rows = zip(self.model.groups, self.model.spans, self.model.tables.get(request.name, []), strict=False)
        return any(group.align and blocks_for(tokens, span) + group.spares < len(row) for group, span, row in rows)

    def reaches_too_far(self, expect: Hit, actual: Hit) -> bool:
        """Whether core-mamba-hit-disagrees can be why a hit is longer than expected."""
        kinds = zip(self.model.groups, self.model.drops, strict=True)
        return actual.tokens > expect.tokens and any(drops and group.kind is Kind.MAMBA for group, drops in kinds)

    def _external_evicts_hits(self, hit: Hit | None, external: int) -> bool:
        return hit is not None and len(self.setup.groups) > 1 and hit.tokens > 0 and external > 0

    def _look(self, request: Request) -> None:
        """Remember what a schedule can change."""
        self.calls.clear()
        self.real.calls.clear()
        self._queue = list(self.model.pool.queue)
        self._hashes = [block.hash for block in self.model.pool.blocks]
        self._nulls = sum(row.count(NULL) for row in self.model.tables.get(request.name, []))

    def _count(self, request: Request, hit: Hit | None, external: int, new: Any) -> None:
        """Count the named events that a schedule reached."""
        if isinstance(new, Refused):
            self.reached["refused"] += 1
        elif new is None:
            self.reached["refused"] += 1
            self.reached["refused-by-reserve"] += self._needed <= len(self.model.pool.queue)
        else:
            taken = [block for row in new for block in row]
            self.reached["evicted"] += sum(self._hashes[block] is not None for block in taken)
            self.reached["hit"] += hit is not None and hit.tokens > 0
            self.reached["external"] += external > 0
            self.reached["held-again"] += hit is not None and any(
                block in self._queue for row in hit.blocks for block in row
            )
        nulls = sum(row.count(NULL) for row in self.model.tables.get(request.name, []))
        self.reached["left-window"] += nulls > self._nulls > 0 or (nulls > 0 and hit is None and self._nulls == 0)
        self.reached["parted"] += hit is not None and hit.shared_prefix > 0

    def output(self, op: ops.Output) -> None:
        live = self._picked(op.pick)
        if live is None:
            return
        request, real = live
        ahead = request.computed - len(request.text.tokens)
        if ahead < 0 or request.waiting:
            return
        rejected = min(max(0, op.rejected), ahead)
        said = [10_000 + (len(request.text.tokens) + i) for i in range(min(op.tokens, ahead - rejected + 1))]
        room = self.setup.max_tokens - len(request.text.tokens)
        said = said[: max(room, 0)]
        request.computed = real.num_computed_tokens = request.computed - rejected
        request.text.append(said)
        real.append_output_token_ids(said)
        self._learn(live)

    def preempt(self, op: ops.Preempt) -> None:
        live = self._picked(op.pick)
        if live is None:
            return
        self.reached["preempted"] += live.model.name in self.model.tables
        self.model.preempt(live.model)
        self.real.free(live.real)
        live.real.num_computed_tokens = 0
        target.set_status(live.real, "PREEMPTED")
        self._compare(queue="FREE-1", references="FREE-1", hashes="FREE-1", rows="FREE-1")

    def finish(self, op: ops.Finish) -> None:
        live = self._picked(op.pick)
        if live is None:
            return
        if op.deferred and self.profile.deferred_frees:
            pending = len(self.deferred.pending)
            self.deferred.free(live.model)
            self.real.free_when_processed(live.real)
            self.reached["deferred"] += len(self.deferred.pending) > pending
            expect = [blocks for _, blocks in self.deferred.pending]
            actual = self.real.deferred_blocks()
            agree("FREE-3", len(expect), len(actual))
            agree("FREE-2", expect, actual)
        else:
            self.model.free(live.model)
            self.real.free(live.real)
        self._compare(queue="FREE-1", references="FREE-1", hashes="FREE-1", rows="FREE-1")
        self.live.remove(live)

    def step_processed(self, op: ops.StepProcessed) -> None:
        del op
        if not self.profile.deferred_frees or self.deferred.processed >= self.deferred.scheduled:
            return
        self.deferred.step_processed()
        self.real.step_processed()
        self._compare(queue="FREE-4", references="FREE-4", hashes="FREE-4", rows="FREE-4")

    def new_step(self, op: ops.NewStep) -> None:
        del op
        self.model.new_step()
        self.real.manager.new_step_starts()
        if self.setup.caching:
            agree("NEED-4", set(map(self.names.of, self.model.fresh)), self.real.fresh())

    def evict(self, op: ops.Evict) -> None:
        blocks = [op.first + i for i in range(op.count)]
        expect = attempt(lambda: self.model.evict(blocks))
        agree("INDEX-5", expect, attempt(lambda: self.real.manager.evict_blocks(blocks)))
        self._compare(queue="INDEX-5", references="INDEX-5", hashes="INDEX-5", rows="INDEX-5")

    def reset(self, op: ops.Reset) -> None:
        if op.empty:
            for live in self.live:
                self.preempt(ops.Preempt(self.live.index(live)))
        expect = self.model.reset()
        agree("RESET-1", expect, self.real.manager.reset_prefix_cache())
        self.reached["reset" if expect else "reset-refused"] += 1
        self._compare(queue="RESET-1", references="RESET-1", hashes="RESET-1", rows="RESET-1")

    def take_events(self, op: ops.TakeEvents) -> None:
        del op
        compare_events(self.names, self.model.take_events(), self.real.take_events())


_LOOKUP_ISSUES: dict[str, Callable[[CachePair, Hit, Hit], bool]] = {
    "core-eagle-first-window": CachePair.cuts_twice,
    "core-second-full-group-not-cut": CachePair.leaves_tail,
    "core-eagle-unproven-hit": CachePair.lacks_proof,
    "core-mamba-hit-disagrees": CachePair.reaches_too_far,
}

_CACHE_ARMS: dict[type, Callable[[CachePair, Any], None]] = {
    ops.Arrive: CachePair.arrive,
    ops.Schedule: CachePair.schedule,
    ops.Output: CachePair.output,
    ops.Preempt: CachePair.preempt,
    ops.Finish: CachePair.finish,
    ops.StepProcessed: CachePair.step_processed,
    ops.NewStep: CachePair.new_step,
    ops.Evict: CachePair.evict,
    ops.Reset: CachePair.reset,
    ops.TakeEvents: CachePair.take_events,
}


class Machine(RuleBasedStateMachine):
    """What both machines have in common: a pair, its history, and what it has reached."""

    reached: ClassVar[Counter[str]] = Counter()
    """What all histories of the class have reached; ``ops`` among it."""

    def __init__(self) -> None:
        super().__init__()
        self.pair: PoolPair | CachePair | None = None
        self.ops: list[Any] = []

    def _apply(self, op: Any) -> None:
        assert self.pair is not None
        self.ops.append(op)
        self.pair.apply(op)

    def teardown(self) -> None:
        if self.pair is not None:
            self.reached.update(self.pair.reached, ops=len(self.ops))


def _numbers(ranges: dict[str, tuple[int, int]]) -> SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({name: st.integers(*limits) for name, limits in ranges.items()})


def _arm(op_type: type) -> Any:
    def arm(self: Machine, numbers: dict[str, int]) -> None:
        self._apply(op_type(**numbers))

    arm.__name__ = op_type.__name__.lower()
    return rule(numbers=_numbers(ops.RANGES[op_type]))(arm)


class _PoolSetUp(Machine):
    @initialize(numbers=_numbers(ops.POOL_SETUP_RANGES))
    def set_up(self, numbers: dict[str, int]) -> None:
        profile = profile_for(target.release())
        self.pair = PoolPair(ops.pool_setup(profile, **numbers), profile)


class _CacheSetUp(Machine):
    @initialize(numbers=_numbers(ops.CACHE_SETUP_RANGES))
    def set_up(self, numbers: dict[str, int]) -> None:
        profile = profile_for(target.release())
        self.pair = CachePair(ops.cache_setup(profile, **numbers), profile)


PoolMachine = type("PoolMachine", (_PoolSetUp,), {kind.__name__.lower(): _arm(kind) for kind in _POOL_ARMS})
CacheMachine = type("CacheMachine", (_CacheSetUp,), {kind.__name__.lower(): _arm(kind) for kind in _CACHE_ARMS})


# Context parallelism -------------------------------------------------------------------------------------------------

_CP_GROUPS = tuple(
    tuple(Group(kind, 4 * size, reach=8) for kind, size in layout)
    for layout in (
        ((Kind.FULL, 1),),
        ((Kind.SLIDING_WINDOW, 1),),
        ((Kind.CHUNKED_LOCAL, 1),),
        ((Kind.FULL, 1), (Kind.FULL, 2)),
        ((Kind.FULL, 1), (Kind.SLIDING_WINDOW, 1)),
        ((Kind.FULL, 1), (Kind.MAMBA, 1)),
    )
)


def compare_scaling(profile: Profile) -> int:
    """Compare everything that follows from sizes alone, for all sizes up to 4. Returns the number of comparisons."""
    compared = 0
    layouts = list(_CP_GROUPS)
    if profile.cp_scaling is CpScaling.DECODE_SHARDED:
        layouts += [
            tuple(replace(group, sharded=index == 0) for index, group in enumerate(layout)) for layout in layouts
        ]
    for groups, prefill, decode in product(layouts, (1, 2, 4), (1, 2, 4)):
        cp = ContextParallel(prefill, decode)
        _compare_sizes(groups, cp, profile)
        if profile.offload_with_cp or prefill * decode == 1:
            for step_tokens in (1, 16, 17, 32, 33):
                _compare_lazy_target(groups, step_tokens, cp, profile)
        compared += 1
    for ranks, interleave, tokens in product((1, 2, 4), (1, 2, 4), range(40)):
        slots = [slot(position, 4 * ranks, ranks, interleave) for position in range(tokens)]
        for rank in range(ranks):
            actual = target.tokens_on_rank(tokens, rank, ranks, interleave)
            agree("SCALE-6", tokens_on_rank(tokens, rank, ranks, interleave), actual)
            agree("SCALE-5", sum(place.rank == rank for place in slots), actual)
            compared += 1
    for tokens, span in product(range(40), (2, 4, 8)):
        request = target.make_request("r", range(tokens), 2)
        agree("SCALE-7", whole_blocks(tokens, span), len(target.group_hashes(request, 2, span)))
        compared += 1
    return compared


def _compare_sizes(groups: tuple[Group, ...], cp: ContextParallel, profile: Profile) -> None:
    """Compare whether a combination is refused; the first lookup counts too, where construction doesn't mind."""

    cached = all(group.kind is not Kind.MAMBA for group in groups)  # how states are cached decides on sizes, too
    expect = attempt(refuse_unsupported, groups, cp, profile)
    actual = attempt(target.first_lookup, _described(groups), cp.prefill, cp.decode, cached)
    agree("SCALE-2", isinstance(expect, Refused), isinstance(actual, Refused))


def _compare_lazy_target(groups: tuple[Group, ...], step_tokens: int, cp: ContextParallel, profile: Profile) -> None:
    if isinstance(attempt(refuse_unsupported, groups, cp, profile), Refused):
        return
    expect = lazy_target_blocks(groups, step_tokens, cp, profile)
    agree("SCALE-8", expect, target.lazy_target_blocks(_described(groups), step_tokens, cp.prefill, cp.decode))


def _described(groups: Sequence[Group]) -> list[tuple[str, int, int, bool, bool]]:
    return [
        (
            "mamba-align" if group.align else group.kind.value,
            group.block_tokens,
            group.spares if group.align else group.reach,
            group.eagle,
            group.sharded,
        )
        for group in groups
    ]


# Many ops, without Hypothesis -----------------------------------------------------------------------------------------

HISTORY_OPS = 100
"""Ops of a history: enough to fill a pool several times."""
FINDINGS_MAX = 20
"""After so many differences a run stops."""


@dataclass
class Finding:
    """A history that shows a difference, and the difference."""

    history: CoreHistory
    clause: str
    """Or the exception, if the implementation raised one."""
    message: str


@dataclass
class Tally:
    """What a run has seen."""

    ops: int = 0
    seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def pair_for(history: CoreHistory, avoid: frozenset[str] | None = None) -> PoolPair | CachePair:
    """Return a new pair for a history, with the implementation that is importable."""
    profile = profile_for(target.release())
    if isinstance(history.setup, ops.PoolSetup):
        return PoolPair(history.setup, profile, avoid)
    return CachePair(history.setup, profile, avoid)


def replay(history: CoreHistory, avoid: frozenset[str] | None = None) -> Counter[str]:
    """Apply a history to a new pair and return what it reached. ClauseBroken if there is a difference."""
    pair = pair_for(history, avoid)
    for op in history.ops:
        pair.apply(op)  # type: ignore[arg-type]
    return pair.reached


def difference(history: CoreHistory, avoid: frozenset[str] | None = None) -> str | None:
    """Return the clause that a history breaks, or the exception that it causes; None for neither."""
    try:
        replay(history, avoid)
    except ClauseBroken as broken:
        return broken.clause.id
    except Exception as error:  # whatever the implementation raises is a finding
        return type(error).__name__
    return None


Mix = tuple[list[type[Any]], list[int]]
"""Kinds of ops, and how often each occurs."""


def draw_setup(random: Random, level: str, profile: Profile, **fixed: int) -> ops.PoolSetup | ops.CacheSetup:
    """Draw a setup of a level, ``pool`` or ``cache``; ``fixed`` are coarse numbers that aren't drawn."""
    if level == "pool":
        return ops.pool_setup(profile, **_drawn(random, ops.POOL_SETUP_RANGES) | fixed)
    return ops.cache_setup(profile, **_drawn(random, ops.CACHE_SETUP_RANGES) | fixed)


def draw_mix(random: Random, level: str) -> Mix:
    """Draw how often each op occurs. Some don't at all: so one history is all hits and another all evictions."""
    arms = _POOL_ARMS if level == "pool" else _CACHE_ARMS
    needed = 0 if level == "pool" else 2  # requests must arrive and be scheduled
    weights = [ops.WEIGHTS[kind] * (random.choice((0, 1, 1, 3)) or i < needed) for i, kind in enumerate(arms)]
    return list(arms), weights if any(weights) else [1] * len(weights)


def draw_ops(random: Random, mix: Mix, count: int) -> tuple[CoreOp, ...]:
    """Draw ops."""
    kinds, weights = mix
    return tuple(kind(**_drawn(random, ops.RANGES[kind])) for kind in random.choices(kinds, weights, k=count))


def _drawn(random: Random, ranges: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: random.randint(*limits) for name, limits in ranges.items()}


def draw(random: Random, level: str, profile: Profile, family: str | None = None) -> CoreHistory:
    """Draw a history of a level that keeps out of the way of known issues; of the cache, with groups of one family
    only.
    """
    fixed = {"avoids_known": 1} | ({} if family is None else {"family": ops.FAMILIES.index(family)})
    setup = draw_setup(random, level, profile, **fixed)
    return CoreHistory("vllm-core", setup, draw_ops(random, draw_mix(random, level), HISTORY_OPS))


def run(level: str, ops_wanted: int, seed: int, family: str | None = None, budget_s: float = float("inf")) -> Tally:
    """Apply random histories until there were so many ops, or time is up."""
    random, tally = Random(seed), Tally()
    profile = profile_for(target.release())
    target.warm_up()
    start = time.process_time()
    while tally.ops < ops_wanted and tally.seconds < budget_s and len(tally.findings) < FINDINGS_MAX:
        history = draw(random, level, profile, family)
        pair, done = None, 0
        try:
            pair = pair_for(history)
            for op in history.ops:
                done += 1
                pair.apply(op)  # type: ignore[arg-type]
        except ClauseBroken as broken:
            tally.findings.append(Finding(history, broken.clause.id, str(broken)))
        except Exception as error:  # whatever the implementation raises is a finding
            message = "".join(traceback.format_exception(error))
            tally.findings.append(Finding(history, type(error).__name__, message))
        tally.ops += done
        tally.reached += pair.reached if pair else Counter()
        tally.seconds = time.process_time() - start
    return tally


def hollow(tally: Tally, level: str, profile: Profile) -> set[str]:
    """Return the required events that a run has missed."""
    required = POOL_REQUIRED if level == "pool" else CACHE_REQUIRED
    return {event for event, when in required.items() if when(profile)} - (+tally.reached).keys()
