"""A block pool of the model beside a ``BlockPool``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvspec.equality.compare import Names, Refused, attempt, avoided, compare_events, compare_pools, picked
from kvspec.model import ops
from kvspec.model.clauses import agree
from kvspec.model.keys import Content, Image, Key, Text
from kvspec.model.pool import NULL, BlockPool
from kvspec.model.profile import Profile
from kvspec.targets.vllm import core as target

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
        refused = isinstance(expect, Refused)
        self.reached["refused"] += refused
        self.reached["evicted"] += 0 if refused else len(found)
        agree("POOL-3" if Refused("ValueError") in (expect, actual) else "POOL-2", expect, actual)
        self.held += [] if refused else expect
        self.reached["reused-while-read"] = len(self.told[0])
        agree("POOL-10", *self.told)
        self._compare(queue="POOL-2", references="POOL-2", hashes="PREFIX-4")

    def touch(self, op: ops.Touch) -> None:
        some = self.held if op.held else [blocks[0] for blocks in self.model.index.values()]
        blocks = picked(some, op.pick, op.count, 1)
        self.reached["held-again"] += sum(self.model.blocks[block].references == 0 for block in set(blocks))
        self.reached["shared"] += sum(self.model.blocks[block].references > 0 for block in set(blocks))
        self.held += blocks
        blocks += [NULL] * op.null
        self.model.touch(blocks)
        self.real.touch(blocks)
        self._compare(queue="POOL-5", references="POOL-5", hashes="POOL-5")

    def free(self, op: ops.Free) -> None:
        blocks = picked(self.held, op.pick, op.count, op.step)
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
        blocks = picked(held, op.pick, end - first, 1)
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
        self.reached["promoted"] += shorter if expect is None else 0
        self.reached["refused"] += expect is not None
        agree("PREFIX-2", expect, actual)
        self._compare(queue="PREFIX-2", references="PREFIX-2", hashes="PREFIX-2")

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
        block = NULL if op.null > 0 else picked(held, op.pick, 1, 1)[0]
        self.reached["tail-registered"] += block != NULL
        key = self.model.register_tail(text, block, tokens, 1, replace=replace)
        actual = self.real.register_tail(self.requests[op.text], block, tokens, 1, block_tokens, replace)
        agree("PREFIX-3", key and self.names.of(key), actual)
        self._compare(queue="PREFIX-3", references="PREFIX-3", hashes="PREFIX-3")

    def find(self, op: ops.Find) -> None:
        text, groups = self.texts[op.text], [[0], [1], [0, 1]][op.groups]
        keys = [Key(block_hash, groups[-1]) for block_hash in text.view(self._block_tokens(groups[-1]))]
        if op.known:
            keys = [key for key in self.model.index if key.group == groups[-1]] or keys
        key = keys[op.index % len(keys)]
        if len(groups) > 1 and self.setup.ratio > 1:
            return
        expect = self.model.find(key.hash, groups)
        self.reached["found"] += expect is not None
        agree("PREFIX-1", expect, self.real.find(self.names.of(key)[0], groups))
        self._compare(queue="PREFIX-1", references="PREFIX-1", hashes="PREFIX-1")

    def move_hashes(self, op: ops.MoveHashes) -> None:
        sources = [block for block in dict.fromkeys(self.held) if self.model.blocks[block].hash]
        targets = [block for block in dict.fromkeys(self.held) if not self.model.blocks[block].hash]
        if not (self.profile.moves_hashes and sources and targets):
            return
        source, to = sources[op.pick % len(sources)], targets[op.to % len(targets)]
        self.reached["hashes-moved"] += 1
        self.model.move_hashes(source, to)
        self.real.move_hashes(source, to)
        self._compare(queue="PREFIX-6", references="PREFIX-6", hashes="PREFIX-6")

    def evict(self, op: ops.Evict) -> None:
        blocks = [op.first + i for i in range(op.count)]
        expect = attempt(self.model.evict, blocks)
        self.reached["refused"] += expect is not None
        agree("PREFIX-5", expect, attempt(self.real.evict, blocks))
        self._compare(queue="PREFIX-5", references="PREFIX-5", hashes="PREFIX-5")

    def unpin(self, op: ops.Unpin) -> None:
        if not self.profile.pins:
            return
        blocks = picked(self.held, op.pick, op.count, 1)
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
        agree("TELL-4", list(map(self.names.event, events[0])), events[1])

    def reset(self, op: ops.Reset) -> None:
        if op.empty:
            while self.held:
                self._release(list(dict.fromkeys(self.held)))
            self._compare(queue="POOL-7", references="POOL-6", hashes="POOL-6")
        several = any(block.more_hashes for block in self.model.blocks)
        expect = self.model.reset()
        self.reached["reset-several-hashes"] += expect and several
        self.reached["reset" if expect else "refused"] += 1
        agree("RESET-1", expect, self.real.reset())
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
