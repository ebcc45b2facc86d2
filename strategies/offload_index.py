"""The equality machines of target ``vllm-offload-index``: the model and OffloadingConnector, side by side.

As in ``core`` every op is applied to both, what they answer is compared, and so is all that can be seen of their
state. ``TierPair`` couples the CPU tier with ``CPUOffloadingManager``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from kvspec.model import offload_ops as ops
from kvspec.model.clauses import agree
from kvspec.model.profile import Profile, known_issues
from kvspec.model.tiers import Access, Adaptive, Answer, Recency, Tier
from kvspec.targets.vllm import offload_index as target
from strategies import core
from strategies.core import attempt

TierKey = tuple[int, int, int]
"""Branch of the text (0: the trunk), place in it, group."""

_CHUNK_TOKENS = 4
_LIVE_MAX = 6


@dataclass(eq=False)
class User:
    """A request, as both tiers know it."""

    keys: list[TierKey]
    access: Access[TierKey]
    context: Any


@dataclass(eq=False)
class Flight:
    """A transfer that hasn't ended."""

    keys: list[TierKey]
    user: User


class TierPair:
    """A CPU tier of the model and a ``CPUOffloadingManager``."""

    def __init__(self, setup: ops.TierSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.profile = profile
        self.avoid = known_issues(profile.release) if avoid is None else avoid
        self.model: Tier[TierKey] = Tier(setup.slots, profile, setup.policy, events=True, tie=self._name)
        self.real = target.RealTier(setup.slots, setup.policy)
        self.reached: Counter[str] = Counter()
        self.users: list[User] = []
        self.stores: list[Flight] = []
        self.loads: list[Flight] = []
        self.came = 0

    def _name(self, key: TierKey) -> bytes:
        branch, index, group = key
        return target.make_key(bytes([branch, index]) * 16, group)

    def _names(self, keys: list[TierKey]) -> list[bytes]:
        return [self._name(key) for key in keys]

    def apply(self, op: ops.TierOp) -> None:
        """Apply an op to both and compare. ClauseBroken if they differ."""
        _TIER_ARMS[type(op)](self, op)

    def _compare(self, *, lru: str, arc: str, chunks: str) -> None:
        state = self.real.state()
        expect = {self._name(key): (chunk.slot, chunk.ready, chunk.pins) for key, chunk in self.model.chunks.items()}
        agree(chunks, expect.keys(), state.chunks.keys())
        for part, clause in enumerate(("TIER-6", chunks, chunks)):
            agree(clause, {k: v[part] for k, v in expect.items()}, {k: v[part] for k, v in state.chunks.items()})
        match self.model.policy:
            case Recency() as policy:
                agree(lru, self._names(policy.victims(self._idle(), set()) or []), state.order)
            case Adaptive() as policy:
                lists = (policy.once, policy.again, policy.ghosts_once, policy.ghosts_again)
                agree(arc, tuple(map(self._names, lists[:2])), state.lists[:2])
                agree("ARC-2" if arc != "ARC-3" else arc, tuple(map(self._names, lists[2:])), state.lists[2:])
                agree("ARC-5", policy.target, state.target)

    def _idle(self) -> int:
        return sum(chunk.idle() for chunk in self.model.chunks.values())

    def _user(self, pick: int) -> User | None:
        return self.users[pick % len(self.users)] if self.users else None

    def come(self, op: ops.Come) -> None:
        if len(self.users) >= _LIVE_MAX:
            return
        text = [(0, i) for i in range(op.shared)] + [(op.branch + 1, op.shared + i) for i in range(op.own)]
        keys = [(branch, i, group) for group in (0, 1) for branch, i in text]
        positions = {key: (key[1] + 1) * _CHUNK_TOKENS for key in keys}
        self.came += 1
        context = self.real.context(f"r{self.came}", {self._name(key): at for key, at in positions.items()})
        self.users.append(User(keys, Access(positions, resets=self.model.resets), context))

    def look_up(self, op: ops.LookUp) -> None:
        user = self._user(op.pick)
        if user is None or not user.keys:
            return
        key = user.keys[op.index % len(user.keys)]
        expect, actual = self.model.lookup(key).name, self.real.lookup(self._name(key), user.context)
        self.reached["pending"] += expect == "PENDING"
        if expect == "PENDING" and actual == "MISS" and "offload-in-flight-is-a-miss" in self.avoid:
            self.reached["known:offload-in-flight-is-a-miss"] += 1
            return
        agree("TIER-1", expect, actual)
        self._compare(lru="TIER-1", arc="TIER-1", chunks="TIER-1")

    def offer(self, op: ops.Offer) -> None:
        user = self._user(op.pick)
        if user is None:
            return
        keys = user.keys[op.first : op.first + op.count]
        actual = self.real.prepare_store(self._names(keys), user.context)
        if actual is None and self.model.room(keys) is not None and self._gives_up():
            return
        expect = self.model.prepare_store(keys, user.access)
        agree("TIER-5", expect is None, actual is None)
        if expect is None or actual is None:
            self.reached["refused"] += 1
        else:
            agree("TIER-4", self._names(expect.keys), actual[0])
            agree("TIER-6", expect.slots, actual[1])
            agree("LRU-1" if self.setup.policy == "lru" else "ARC-1", self._names(expect.evicted), actual[2])
            self.reached["evicted"] += len(expect.evicted)
            self.reached["passed"] += len(keys) > len(expect.keys)
            if expect.keys:
                self.stores.append(Flight(expect.keys, user))
        self._compare(lru="LRU-2", arc="ARC-3", chunks="TIER-4")

    def _gives_up(self) -> bool:
        """Whether offload-arc-gives-up can be why a store is refused."""
        if self.setup.policy != "arc" or "offload-arc-gives-up" not in self.avoid:
            return False
        self.reached["known:offload-arc-gives-up"] += 1
        return True

    def end_store(self, op: ops.EndStore) -> None:
        if not self.stores:
            return
        flight = self.stores.pop(op.pick % len(self.stores))
        failed = op.failed > 0
        self.reached["failed"] += failed
        self.model.complete_store(flight.keys, success=not failed)
        self.real.complete_store(self._names(flight.keys), flight.user.context, not failed)
        self._compare(lru="LRU-4", arc="TIER-7", chunks="TIER-7")

    def load(self, op: ops.Load) -> None:
        user = self._user(op.pick)
        if user is None or not user.keys:
            return
        keys = user.keys[op.first % len(user.keys) :][: op.count]
        hits = [key for key in keys if self.model.lookup(key) is Answer.HIT]
        keys = keys[:1] if op.any_key > 0 else hits
        expect = attempt(self.model.prepare_load, keys, user.access)
        actual = attempt(self.real.prepare_load, self._names(keys), user.context)
        agree("TIER-2", expect, actual)
        if isinstance(expect, list) and keys:
            self.reached["pinned"] += 1
            self.loads.append(Flight(keys, user))
        self._compare(lru="LRU-5", arc="TIER-2", chunks="TIER-2")

    def end_load(self, op: ops.EndLoad) -> None:
        if not self.loads:
            return
        flight = self.loads.pop(op.pick % len(self.loads))
        self.model.complete_load(flight.keys)
        self.real.complete_load(self._names(flight.keys), flight.user.context)
        self._compare(lru="LRU-4", arc="TIER-3", chunks="TIER-3")

    def touch(self, op: ops.TouchKeys) -> None:
        user = self._user(op.pick)
        if user is None:
            return
        keys = user.keys[op.first : op.first + op.count]
        self.model.touch(keys)
        self.real.touch(self._names(keys), user.context)
        self._compare(lru="LRU-3", arc="ARC-4", chunks="TIER-1")

    def leave(self, op: ops.Leave) -> None:
        user = self._user(op.pick)
        if user is None:
            return
        self.users.remove(user)
        self.reached["reused"] += bool(user.access.reused)
        self.model.request_finished(user.access)
        self.real.finish(user.context)
        self._compare(lru="LRU-6", arc="ARC-7", chunks="TIER-1")

    def reset(self, op: ops.ResetTier) -> None:
        del op
        if not self.profile.offload_reset:
            return
        self.reached["reset"] += bool(self.stores or self.loads)
        self.model.reset()
        self.real.reset()
        self.stores.clear()
        self.loads.clear()
        self._compare(lru="TIER-8", arc="TIER-8", chunks="TIER-8")

    def take_events(self, op: ops.TakeTierEvents) -> None:
        del op
        expect = [(tuple(self._names(list(event.keys))), event.removed) for event in self.model.take_events()]
        agree("TIER-9", expect, self.real.take_events())


_TIER_ARMS: dict[type, Callable[[TierPair, Any], None]] = {
    ops.Come: TierPair.come,
    ops.Offer: TierPair.offer,
    ops.EndStore: TierPair.end_store,
    ops.LookUp: TierPair.look_up,
    ops.Load: TierPair.load,
    ops.EndLoad: TierPair.end_load,
    ops.TouchKeys: TierPair.touch,
    ops.Leave: TierPair.leave,
    ops.ResetTier: TierPair.reset,
    ops.TakeTierEvents: TierPair.take_events,
}


EVENTS = {
    "evicted": "a chunk was evicted",
    "refused": "a store was refused",
    "passed": "a key was there already when it was offered",
    "pending": "a key was looked up while it was being stored",
    "pinned": "a load pinned chunks",
    "failed": "a store failed",
    "reused": "a request ended that had reused a chunk",
    "reset": "a tier was reset with transfers in flight",
}
"""What a run can reach -> what it is."""

TIER_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(("evicted", "refused", "passed", "pending", "pinned", "failed"), lambda profile: True),
    "reused": lambda profile: profile.tier_counts_requests,
    "reset": lambda profile: profile.offload_reset,
}
"""Events that a run of the tier must reach -> whether a release can."""


def _draw_tier(random: Random, profile: Profile, family: str | None) -> ops.TierHistory:
    del family
    setup = ops.TierSetup(random.randint(1, 9), random.choice(("lru", "arc")))
    return ops.TierHistory(profile.release, setup, core.draw_ops(random, ops.TIER_WEIGHTS, ops.TIER_RANGES, 2))


core.PAIRS[ops.TierHistory] = TierPair
core.LEVELS["tier"] = core.Level(_draw_tier, TIER_REQUIRED)

if __name__ == "__main__":
    sys.exit(core.main("python -m strategies.offload_index", "tier"))
