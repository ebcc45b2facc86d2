"""The CPU tier of OffloadingConnector: which chunks it holds, which of them may be read, and which go first.

A tier has a number of *slots*; a chunk is what fills one of them, under a key. A chunk is *pending* while it is being
stored, then *ready*; while it is being read it is *pinned*. Only chunks that are ready and not pinned can be evicted.
Which of them goes first is the policy's affair: ``Recency`` (LRU) or ``Adaptive`` (ARC).

Keys are any hashable values. Not modelled: the store threshold (0.22.1 and later), secondary tiers, statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvspec.model.clauses import clause
from kvspec.model.profile import Profile, TierRecency

K = TypeVar("K", bound=Hashable)


class Answer(Enum):
    """What a tier says about a key."""

    MISS = "not there"
    PENDING = "being stored: ask again"
    HIT = "can be loaded"


@dataclass(slots=True)
class Chunk:
    """The state of a slot that is in use."""

    slot: int
    ready: bool = False
    pins: int = 0

    def idle(self) -> bool:
        """Whether it may be evicted."""
        return self.ready and self.pins == 0


@dataclass
class Access(Generic[K]):
    """What one request has done to a tier."""

    positions: Mapping[K, int]
    """Key of its text -> where in the text the chunk ends, in tokens."""
    seen: dict[K, None] = field(default_factory=dict)
    """Keys that it stored, wanted to store, or read, in the order in which it did so first."""
    inserted: set[K] = field(default_factory=set)
    reused: set[K] = field(default_factory=set)
    """Keys that it found ready, and hasn't inserted itself."""
    missed: set[K] = field(default_factory=set)
    resets: int = 0
    """The tier's resets before its first access; after another one, all this is forgotten."""
    rank: int | None = None
    """Its place among all uses of the tier (``TierRecency.POSITION``)."""

    def by_position(self) -> list[K]:
        """Return the keys seen, head of the text first; of keys at one position, in the order of ``positions``."""
        return sorted((key for key in self.positions if key in self.seen), key=self.positions.__getitem__)


class StoreEvent(NamedTuple, Generic[K]):
    """Event: these keys can be found from now on, or (``removed``) no longer."""

    keys: tuple[K, ...]
    removed: bool
    failed: bool = False
    """Because their store has failed."""


class Placed(NamedTuple, Generic[K]):
    """The answer to an offer: what is to be stored, where to, and what had to go."""

    keys: list[K]
    slots: list[int]
    evicted: list[K]


class Policy(Protocol[K]):
    """Decides which chunk is evicted first."""

    def insert(self, key: K, access: Access[K]) -> None: ...
    def remove(self, key: K) -> None: ...
    def touch(self, keys: Sequence[K]) -> None: ...
    def freed(self, key: K) -> None: ...
    def found(self, keys: Sequence[K], access: Access[K]) -> None: ...
    def missed(self, keys: Sequence[K]) -> None: ...
    def finished(self, access: Access[K]) -> None: ...
    def victims(self, count: int, protected: set[K]) -> list[K] | None: ...
    def evicted(self, keys: Sequence[K]) -> None: ...
    def clear(self) -> None: ...


class Recency(Generic[K]):
    """LRU: the chunk goes whose last use is longest ago.

    Args:
        profile: what differs between releases.
        chunks: the tier's chunks.
        tie: an order for chunks that are equally recent. Any is right.
    """

    def __init__(self, profile: Profile, chunks: dict[K, Chunk], tie: Callable[[K], object] | None = None) -> None:
        self.recency = profile.tier_recency
        self.chunks = chunks
        self.ranks: dict[K, tuple[int, int]] = {}
        self.clock = 0
        self._tie = tie

    def _now(self) -> int:
        self.clock += 1
        return self.clock

    @clause
    def victims(self, count: int, protected: set[K]) -> list[K] | None:
        """LRU-1. Of the chunks that are neither pending nor pinned nor among the keys just offered, those used longest
        ago are evicted; all that are needed, or none.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy.evict.
        Releases: all.
        """
        free = [key for key in self.order() if self.chunks[key].idle() and key not in protected]
        return free[:count] if len(free) >= count else None

    def order(self) -> list[K]:
        """Return all chunks, the least recent first."""
        tie = self._tie
        return sorted(self.chunks, key=lambda key: (self.ranks[key], tie(key) if tie else 0))

    @clause
    def insert(self, key: K, access: Access[K]) -> None:
        """LRU-2. Storing a chunk is a use of it. Chunks that one request stores are as recent as its first use of the
        tier, its text's end being the oldest.

        The latter only where ``Profile.tier_recency`` says so; else a chunk is more recent than all that were inserted
        before.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy.insert.
        Releases: all, differently.
        """
        if self.recency is TierRecency.POSITION:
            self.ranks[key] = self._rank_in_request(key, access)
        else:
            self.ranks[key] = (self._now(), 0)

    def _rank_in_request(self, key: K, access: Access[K]) -> tuple[int, int]:
        if access.rank is None:
            access.rank = self._now()
        return access.rank, -access.positions[key]

    def remove(self, key: K) -> None:
        """A chunk is gone."""
        del self.ranks[key]

    @clause
    def touch(self, keys: Sequence[K]) -> None:
        """LRU-3. Touching chunks is a use of them, the last of the keys being the least recent.

        Where a chunk gets its place when it is released (``TierRecency.RELEASE``), pending and pinned ones are left
        alone.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy.touch.
        Releases: all, differently.
        """
        for key in reversed(keys):
            if key in self.chunks and (self.recency is not TierRecency.RELEASE or self.chunks[key].idle()):
                self.ranks[key] = (self._now(), 0)

    @clause
    def freed(self, key: K) -> None:
        """LRU-4. A chunk's place doesn't depend on when its transfer ended.

        Where it does (``TierRecency.RELEASE``), a chunk whose store or last load has ended is the most recent one.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy.mark_evictable.
        Releases: all but 0.24.0 to 0.30.0.
        """
        if self.recency is TierRecency.RELEASE:
            self.ranks[key] = (self._now(), 0)

    @clause
    def found(self, keys: Sequence[K], access: Access[K]) -> None:
        """LRU-5. Chunks that a request reads, or would have stored, become as recent as what it stores itself.

        None becomes less recent by it.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy.on_request_access.
        Releases: 0.33.0 and later.
        """
        if self.recency is TierRecency.POSITION:
            if access.rank is None:
                access.rank = self._now()
            for key in keys:
                if key in self.chunks:
                    self.ranks[key] = max(self.ranks[key], self._rank_in_request(key, access))

    def missed(self, keys: Sequence[K]) -> None:
        """Nothing is remembered of what isn't there."""

    @clause
    def finished(self, access: Access[K]) -> None:
        """LRU-6. The end of a request is a use of all that it stored or read, its text's end being the least recent.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy.on_request_finished.
        Releases: 0.31.0 and later.
        """
        self.touch(access.by_position())

    def evicted(self, keys: Sequence[K]) -> None:
        """Chunks were evicted."""
        for key in keys:
            del self.ranks[key]

    def clear(self) -> None:
        """All chunks are gone."""
        self.ranks.clear()
        self.clock = 0


class Adaptive(Generic[K]):
    """ARC: chunks used once (``once``) and chunks used again (``again``) compete for the slots.

    ``ghosts_once`` and ``ghosts_again`` remember what was evicted from each; a ghost that is wanted again moves the
    ``target``, the slots that ``once`` may have. Each list has the least recent first.

    Args:
        chunks: the tier's chunks.
        slots: the tier's slots.
    """

    def __init__(self, chunks: dict[K, Chunk], slots: int) -> None:
        self.chunks = chunks
        self.slots = slots
        self.clear()

    def clear(self) -> None:
        """All chunks are gone, and all that was learned from them."""
        self.once: list[K] = []
        self.again: list[K] = []
        self.ghosts_once: list[K] = []
        self.ghosts_again: list[K] = []
        self.target = 0.0

    @clause
    def victims(self, count: int, protected: set[K]) -> list[K] | None:
        """ARC-1. The least recent chunk used once is evicted while at least as many of them are left as the target
        says, else the least recent one used again; if there is none, one of the other kind.

        As many as are needed, or none. The target is rounded down.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy.evict.
        Releases: all.
        """
        once, again = ([key for key in some if self._may_go(key, protected)] for some in (self.once, self.again))
        left = len(self.once)
        taken: list[K] = []
        while len(taken) < count:
            first, second = (once, again) if left >= int(self.target) else (again, once)
            some = first or second
            if not some:
                return None
            left -= some is once
            taken.append(some.pop(0))
        return taken

    def _may_go(self, key: K, protected: set[K]) -> bool:
        return self.chunks[key].idle() and key not in protected

    @clause
    def evicted(self, keys: Sequence[K]) -> None:
        """ARC-2. An evicted chunk leaves a ghost of its kind; there are at most as many ghosts of a kind as slots, the
        most recent ones.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy.evict.
        Releases: all.
        """
        for key in keys:
            some, ghosts = (self.once, self.ghosts_once) if key in self.once else (self.again, self.ghosts_again)
            some.remove(key)
            _to_end(ghosts, key)
        for ghosts in (self.ghosts_once, self.ghosts_again):
            del ghosts[: max(0, len(ghosts) - self.slots)]

    @clause
    def insert(self, key: K, access: Access[K]) -> None:
        """ARC-3. A chunk that is stored counts as used once, even if it has a ghost; it has none from then on.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy.insert.
        Releases: all.
        """
        del access
        self.once.append(key)
        for ghosts in (self.ghosts_once, self.ghosts_again):
            if key in ghosts:
                ghosts.remove(key)

    def remove(self, key: K) -> None:
        """A chunk is gone without having been evicted: it leaves no ghost."""
        (self.once if key in self.once else self.again).remove(key)

    @clause
    def touch(self, keys: Sequence[K]) -> None:
        """ARC-4. A chunk that is touched counts as used again, and is the most recent of those; while it is pending it
        stays what it is. The last of the keys is the least recent.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy.touch.
        Releases: all.
        """
        for key in reversed(keys):
            if key in self.once and not self.chunks[key].ready:
                _to_end(self.once, key)
            elif key in self.chunks:
                self._promote(key)
            else:
                self._learn(key)

    def _promote(self, key: K) -> None:
        if key in self.once:
            self.once.remove(key)
        _to_end(self.again, key)

    @clause
    def _learn(self, key: K) -> None:
        """ARC-5. A ghost of a chunk used once that is wanted again raises the target, one of the other kind lowers it:
        by the ratio of the ghosts of the other kind to those of its own, at least by 1, within 0 and the slots.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy._adapt_to_ghost_hit.
        Releases: all.
        """
        once, again = len(self.ghosts_once), len(self.ghosts_again)
        if key in self.ghosts_once:
            self.target = min(self.target + max(1, again / once), self.slots)
            _to_end(self.ghosts_once, key)
        elif key in self.ghosts_again:
            self.target = max(self.target - max(1, once / again), 0)
            _to_end(self.ghosts_again, key)

    def freed(self, key: K) -> None:
        """When a transfer ends doesn't matter."""

    def found(self, keys: Sequence[K], access: Access[K]) -> None:
        """Nothing happens before the request's end."""

    @clause
    def missed(self, keys: Sequence[K]) -> None:
        """ARC-6. A request that wants to store a chunk which has a ghost moves the target, once for each chunk, even
        if the store is refused.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy.on_store_miss.
        Releases: 0.31.0 and later.
        """
        for key in reversed(keys):
            self._learn(key)

    @clause
    def finished(self, access: Access[K]) -> None:
        """ARC-7. At the end of a request, what it read counts as used again; what it stored stays what it is, but
        becomes recent.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/policies/arc.py, ARCCachePolicy.on_request_finished.
        Releases: 0.31.0 and later.
        """
        for key in reversed(access.by_position()):
            if key not in self.chunks:
                continue
            if key in access.inserted - access.reused:
                _to_end(self.once if key in self.once else self.again, key)
            elif key in access.reused:
                self._promote(key)


def _to_end(some: list[K], key: K) -> None:
    if key in some:
        some.remove(key)
    some.append(key)


class Tier(Generic[K]):
    """A CPU tier.

    Args:
        slots: chunks that it can hold.
        profile: what differs between releases.
        policy: ``lru`` or ``arc``.
        events: whether events are recorded.
        tie: see ``Recency``.
    """

    def __init__(
        self,
        slots: int,
        profile: Profile,
        policy: str = "lru",
        *,
        events: bool = False,
        tie: Callable[[K], object] | None = None,
    ) -> None:
        if policy not in ("lru", "arc"):
            raise ValueError(f"{policy!r} is no policy; there are lru and arc")
        self.slots = slots
        self.profile = profile
        self.chunks: dict[K, Chunk] = {}
        self.policy: Policy[K] = Recency(profile, self.chunks, tie) if policy == "lru" else Adaptive(self.chunks, slots)
        self.resets = 0
        self._used_ever = 0
        self._released: list[int] = []
        self._records_events = events
        self._events: list[StoreEvent[K]] = []

    @clause
    def lookup(self, key: K) -> Answer:
        """TIER-1. A key is a hit if its chunk is ready; while it is being stored the answer is to ask again.

        Looking up changes nothing.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.lookup.
        Releases: all.
        """
        chunk = self.chunks.get(key)
        if chunk is None:
            return Answer.MISS
        return Answer.HIT if chunk.ready else Answer.PENDING

    @clause
    def prepare_load(self, keys: Sequence[K], access: Access[K]) -> list[int]:
        """TIER-2. What is to be loaded is pinned until the load has ended; each load has a pin of its own.

        Returns the slots. A key that isn't ready is refused (AssertionError), and nothing has changed.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.prepare_load.
        Releases: all.
        """
        for key in keys:
            if self.lookup(key) is not Answer.HIT:
                raise AssertionError(f"{key!r} can't be loaded: {self.lookup(key).value}")
        for key in keys:
            self.chunks[key].pins += 1
        self._note(keys, access)
        self._note_reuse(keys, access)
        return [self.chunks[key].slot for key in keys]

    @clause
    def complete_load(self, keys: Iterable[K]) -> None:
        """TIER-3. The end of a load takes its pins away.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.complete_load.
        Releases: all.
        """
        for key in keys:
            chunk = self.chunks[key]
            chunk.pins -= 1
            if chunk.pins == 0:
                self.policy.freed(key)

    @clause
    def missing(self, keys: Sequence[K]) -> list[K]:
        """TIER-4. Of the keys that are offered, those are stored that the tier hasn't got, pending ones included.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.prepare_store.
        Releases: all.
        """
        return [key for key in keys if key not in self.chunks]

    @clause
    def room(self, keys: Sequence[K]) -> list[K] | None:
        """TIER-5. An offer that doesn't fit in the unused slots evicts what it needs; what was offered along with it
        isn't evicted. If that isn't enough the offer is refused as a whole, and nothing is evicted.

        Returns what is to be evicted, or None.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.prepare_store.
        Releases: all.
        """
        short = len(self.missing(keys)) - (self.slots - len(self.chunks))
        return self.policy.victims(short, set(keys)) if short > 0 else []

    def prepare_store(self, keys: Sequence[K], access: Access[K]) -> Placed[K] | None:
        """Return where offered keys are to be stored, or None if the offer is refused."""
        missing = self.missing(keys)
        ready = [key for key in keys if self.lookup(key) is Answer.HIT]
        self._note_misses(missing, access)
        self._note([key for key in keys if key in missing or key in ready], access)
        self._note_reuse(ready, access)
        evicted = self.room(keys)
        if evicted is None:
            return None
        self._evict(evicted)
        slots = self._take_slots(len(missing))
        for key, slot in zip(missing, slots, strict=True):
            self.chunks[key] = Chunk(slot)
            self.policy.insert(key, access)
        if self.profile.tier_counts_requests:
            access.inserted.update(missing)
        return Placed(missing, slots, evicted)

    def _evict(self, keys: list[K]) -> None:
        self.policy.evicted(keys)
        self._released.extend(self.chunks.pop(key).slot for key in keys)
        self._tell(keys, removed=True)

    @clause
    def _take_slots(self, count: int) -> list[int]:
        """TIER-6. Slots that were never used are used first, in order; then the one that became free last.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager._allocate_chunks.
        Releases: all.
        """
        fresh = list(range(self._used_ever, min(self._used_ever + count, self.slots)))
        self._used_ever += len(fresh)
        return fresh + [self._released.pop() for _ in range(count - len(fresh))]

    @clause
    def complete_store(self, keys: Iterable[K], *, success: bool = True) -> None:
        """TIER-7. The end of a store makes its chunks ready; if it has failed they are gone.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.complete_store.
        Releases: all.
        """
        pending = [key for key in keys if key in self.chunks and not self.chunks[key].ready]
        for key in pending:
            if success:
                self.chunks[key].ready = True
                self.policy.freed(key)
            else:
                self.policy.remove(key)
                self._released.append(self.chunks.pop(key).slot)
        if success or self.profile.tier_tells_failed_stores:
            self._tell(pending, removed=not success, failed=not success)

    def touch(self, keys: Sequence[K]) -> None:
        """Count keys as used."""
        self.policy.touch(keys)

    @clause
    def _note(self, keys: Sequence[K], access: Access[K]) -> None:
        """USE-1. A request counts once as a user of a chunk, however often it offers or reads it, and that when it
        ends: of what it read, stored, or wanted to store.

        Pending chunks that somebody else stores are left out.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager._record_request_cache_access.
        Releases: 0.31.0 and later.
        """
        if self.profile.tier_counts_requests:
            self._forget_before_reset(access)
            new = [key for key in keys if key not in access.seen]
            access.seen.update(dict.fromkeys(new))
            if new:
                self.policy.found(new, access)

    @clause
    def _note_reuse(self, keys: Sequence[K], access: Access[K]) -> None:
        """USE-2. A chunk is reused by a request that reads it or finds it ready, unless the request has stored it
        itself.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager._record_request_cache_access.
        Releases: 0.31.0 and later.
        """
        if self.profile.tier_counts_requests:
            access.reused.update(key for key in keys if key not in access.inserted)

    @clause
    def _note_misses(self, keys: Sequence[K], access: Access[K]) -> None:
        """USE-3. The policy is told once for each request and key that the key isn't there.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.prepare_store.
        Releases: 0.31.0 and later.
        """
        if self.profile.tier_counts_requests:
            self._forget_before_reset(access)
            self.policy.missed([key for key in keys if key not in access.missed])
            access.missed.update(keys)

    @clause
    def _forget_before_reset(self, access: Access[K]) -> None:
        """USE-4. What a request did before a reset isn't counted.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager._get_request_cache_access.
        Releases: 0.31.0 and later.
        """
        if access.resets != self.resets:
            access.seen, access.inserted, access.reused, access.missed = {}, set(), set(), set()
            access.rank, access.resets = None, self.resets

    def request_finished(self, access: Access[K]) -> None:
        """Count what a request has used, now that it ends."""
        if self.profile.tier_counts_requests and access.resets == self.resets:
            self.policy.finished(access)

    @clause
    def reset(self) -> None:
        """TIER-8. A reset drops all chunks, pending and pinned ones too, and all that the policy has learned; the
        transfers in flight must not be reported any more.

        Nobody is told.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.reset_cache.
        Releases: 0.22.1 and later.
        """
        self.chunks.clear()
        self.policy.clear()
        self._used_ever = 0
        self._released.clear()
        self.resets += 1

    @clause
    def _tell(self, keys: Sequence[K], *, removed: bool, failed: bool = False) -> None:
        """TIER-9. Events tell which keys became ready and which were evicted, in the order in which that happened.

        Keys whose store has failed are told as removed, unless they are there again when events are taken.

        Source: vLLM 0.33.0, v1/kv_offload/cpu/manager.py, CPUOffloadingManager.take_events.
        Releases: all; failed stores 0.33.0 and later.
        """
        if keys and self._records_events:
            self._events.append(StoreEvent(tuple(keys), removed, failed))

    def take_events(self) -> list[StoreEvent[K]]:
        """Return and forget the recorded events."""
        events, self._events = self._events, []
        return [told for event in events if (told := self._still_true(event)).keys]

    def _still_true(self, event: StoreEvent[K]) -> StoreEvent[K]:
        gone = tuple(key for key in event.keys if key not in self.chunks)
        return event._replace(keys=gone) if event.failed else event
