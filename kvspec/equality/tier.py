"""A CPU tier of the model beside a ``CPUOffloadingManager``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvspec.equality.compare import attempt, avoided
from kvspec.model import offload_ops as ops
from kvspec.model.clauses import agree
from kvspec.model.profile import Profile
from kvspec.model.tiers import Access, Adaptive, Answer, Recency, Tier
from kvspec.targets.vllm import offload_index as target

K = TypeVar("K", bound=Hashable)
TierKey = tuple[int, int, int]
"""Branch of the text (0: the trunk), place in it, group."""

_CHUNK_TOKENS = 4
_LIVE_MAX = 6
"""Requests at once."""


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


def compare_tiers(
    model: Tier[K],
    name: Callable[[K], bytes],
    state: target.TierState,
    *,
    lru: str,
    arc: str,
    chunks: str,
    stored: Collection[K] = (),
) -> None:
    """Compare all that can be seen of two tiers; the names say which clause each part belongs to.

    ``stored`` are the keys that have just been inserted.
    """
    expect = {name(key): (chunk.slot, chunk.ready, chunk.pins) for key, chunk in model.chunks.items()}
    agree(chunks, expect.keys(), state.chunks.keys())
    for part, clause in enumerate(("TIER-6", chunks, chunks)):
        agree(clause, {k: v[part] for k, v in expect.items()}, {k: v[part] for k, v in state.chunks.items()})
    new = set(map(name, stored))
    match model.policy:
        case Recency() as policy:
            recency = [name(key) for key in policy.order()] if state.recency else []
            before = [[key for key in some if key not in new] for some in (recency, state.recency)]
            agree("LRU-5" if lru == "LRU-2" else lru, *before)
            agree(lru, recency, state.recency)
            idle = sum(chunk.idle() for chunk in model.chunks.values())
            agree(lru, [name(key) for key in policy.victims(idle, set()) or []], state.order)
        case Adaptive() as policy:
            lists = (policy.once, policy.again, policy.ghosts_once, policy.ghosts_again)
            named = tuple([name(key) for key in some] for some in lists)
            agree(_TARGETS.get(arc, arc), policy.target, state.target)
            agree(arc, named[:2], state.lists[:2])
            kept = [[[key for key in some if key in new] for some in ghosts[2:]] for ghosts in (named, state.lists)]
            agree(arc, *kept)
            agree("ARC-2", named[2:], state.lists[2:])


_TARGETS = {"ARC-3": "ARC-6", "ARC-4": "ARC-5"}
"""What a call means to the lists of ARC -> what it means to its target."""


class TierPair:
    """A CPU tier of the model and a ``CPUOffloadingManager``."""

    def __init__(self, setup: ops.TierSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.profile = profile
        self.avoid = avoided(setup, profile) if avoid is None else avoid
        self.model: Tier[TierKey] = Tier(setup.slots, profile, setup.policy, events=True, tie=self._name)
        self.real = target.RealTier(setup.slots, setup.policy)
        self.reached: Counter[str] = Counter()
        self.users: list[User] = []
        self.stores: list[Flight] = []
        self.loads: list[Flight] = []
        self.came = 0

    def _name(self, key: TierKey) -> bytes:
        branch, index, group = key
        return target.make_key((branch.to_bytes(8) + index.to_bytes(8)) * 2, group)

    def _names(self, keys: list[TierKey]) -> list[bytes]:
        return [self._name(key) for key in keys]

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""
        return self.real.state()

    def apply(self, op: ops.TierOp) -> None:
        """Apply an op to both and compare. ClauseBroken if they differ."""
        _TIER_ARMS[type(op)](self, op)

    def _compare(self, *, lru: str, arc: str, chunks: str, stored: Collection[TierKey] = ()) -> None:
        compare_tiers(self.model, self._name, self.real.state(), lru=lru, arc=arc, chunks=chunks, stored=stored)

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
        self.reached["refused"] += expect is None
        self.reached["evicted"] += len(expect.evicted) if expect else 0
        self.reached["passed"] += expect is not None and len(keys) > len(expect.keys)
        agree("TIER-5", expect is None, actual is None)
        if expect is not None and actual is not None:
            agree("TIER-4", self._names(expect.keys), actual[0])
            agree("LRU-1" if self.setup.policy == "lru" else "ARC-1", self._names(expect.evicted), actual[2])
            agree("TIER-6", expect.slots, actual[1])
            if expect.keys:
                self.stores.append(Flight(expect.keys, user))
        stored = expect.keys if expect else ()
        self._compare(lru="LRU-2", arc="ARC-3", chunks="TIER-4", stored=stored)
        self._compare_access(user)

    def _compare_access(self, user: User) -> None:
        """Compare what the tiers have noted of a request."""
        noted = self.real.noted(user.context)
        if noted is not None:
            fresh = "USE-4" if self.model.resets else ""
            agree(fresh or "USE-1", set(self._names(list(user.access.seen))), noted.seen)
            agree(fresh or "USE-2", set(self._names(list(user.access.reused))), noted.reused)
            agree(fresh or "USE-3", set(self._names(list(user.access.missed))), noted.missed)

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
        if isinstance(expect, list):
            self._compare_access(user)

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
        self.reached["reset-in-flight" if self.stores or self.loads else "reset"] += 1
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
