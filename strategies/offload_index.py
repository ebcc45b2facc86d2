"""The equality machines of target ``vllm-offload-index``: the model and OffloadingConnector, side by side.

As in ``kvspec.equality`` every op is applied to both, what they answer is compared, and so is all that can be seen of
their state. ``TierPair`` couples the CPU tier with ``CPUOffloadingManager``, ``IndexPair`` the scheduler side with the
connector of an engine.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec

from kvspec.equality.compare import Names, attempt
from kvspec.model import offload_ops as ops
from kvspec.model.clauses import ClauseBroken, agree
from kvspec.model.groups import Kind
from kvspec.model.keys import Key, Text
from kvspec.model.offload import Job, Offloader, OffloadRequest, Row, Transfer
from kvspec.model.offload import Plan as ModelPlan
from kvspec.model.profile import Profile, StoreMask, known_issues, profile_for
from kvspec.model.tiers import Access, Adaptive, Answer, Placed, Recency, Tier
from kvspec.targets.vllm import core as core_target
from kvspec.targets.vllm import offload_index as target

K = TypeVar("K", bound=Hashable)
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


def compare_tiers(
    model: Tier[K], name: Callable[[K], bytes], state: target.TierState, *, lru: str, arc: str, chunks: str
) -> None:
    """Compare all that can be seen of two tiers; the names say which clause each part belongs to."""
    expect = {name(key): (chunk.slot, chunk.ready, chunk.pins) for key, chunk in model.chunks.items()}
    agree(chunks, expect.keys(), state.chunks.keys())
    for part, clause in enumerate(("TIER-6", chunks, chunks)):
        agree(clause, {k: v[part] for k, v in expect.items()}, {k: v[part] for k, v in state.chunks.items()})
    match model.policy:
        case Recency() as policy:
            idle = sum(chunk.idle() for chunk in model.chunks.values())
            agree(lru, [name(key) for key in policy.victims(idle, set()) or []], state.order)
        case Adaptive() as policy:
            lists = (policy.once, policy.again, policy.ghosts_once, policy.ghosts_again)
            named = tuple([name(key) for key in some] for some in lists)
            agree(arc, named[:2], state.lists[:2])
            agree("ARC-2" if arc != "ARC-3" else arc, named[2:], state.lists[2:])
            agree("ARC-6" if arc == "ARC-3" else "ARC-5", policy.target, state.target)


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
        compare_tiers(self.model, self._name, self.real.state(), lru=lru, arc=arc, chunks=chunks)

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


class Known(Exception):
    """A known issue has made the two sides differ; from here on they can't be compared."""


class IndexPair:
    """The scheduler side of the connector, of the model and of an engine of vLLM's own scheduler.

    The scheduler decides what happens; each call that it makes to its connector is made to the model too.
    """

    def __init__(self, setup: ops.IndexSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.profile = profile
        self.avoid = known_issues(profile.release) if avoid is None else avoid
        self.reached: Counter[str] = Counter()
        self.names = Names()
        self.requests: dict[str, OffloadRequest] = {}
        self.over = False
        self.refused = False
        """Whether a store was refused in the step before."""
        self.came = 0
        self.tier: Tier[Key] = Tier(setup.tier.slots, profile, setup.tier.policy, events=True, tie=self._raw)
        self.model = Offloader(
            setup.groups,
            self.tier,
            profile,
            chunk_blocks=setup.chunk_blocks,
            prompt_only=setup.prompt_only,
        )
        self.offers: list[tuple[list[Key], list[Key] | None]] = []
        self._watch_model()
        self.real = target.RealEngine(
            [(group.kind.value, group.block_tokens, group.reach, False, True) for group in setup.groups],
            gpu_blocks=setup.gpu_blocks,
            slots=setup.tier.slots,
            policy=setup.tier.policy,
            chunk_blocks=setup.chunk_blocks,
            step_tokens=setup.step_tokens,
            running_max=setup.running_max,
            asynchronous=setup.asynchronous,
            prompt_only=setup.prompt_only,
            observe=self._observe,
        )

    # What happens

    def apply(self, op: ops.IndexOp) -> None:
        """Apply an op. ClauseBroken if the two sides differ."""
        if self.over:
            return
        try:
            _INDEX_ARMS[type(op)](self, op)
        except Known as known:
            self.reached[f"known:{known}"] += 1
            self.over = True

    def begin(self, op: ops.Begin) -> None:
        tokens = list(range(4 * op.shared)) + [100 * (op.branch + 1) + i for i in range(op.own)] or [0]
        most = (self.setup.gpu_blocks - 1) // len(self.setup.groups) * 4 - op.says - 4
        if len(self.real.requests) >= _LIVE_MAX or len(tokens) > most:
            return
        self.came += 1
        name, params = f"r{self.came}", ops.PARAMS[max(0, op.params)]
        reads = op.reads_cache > 0
        self.reached["reads-nothing"] += not reads
        if not reads and "offload-skip-reading-ignored" in self.avoid:
            self.reached["known:offload-skip-reading-ignored"] += 1
        self.requests[name] = OffloadRequest(
            name,
            Text(list(tokens), self.real.hash_tokens),
            len(tokens),
            params,
            reads_cache=reads or "offload-skip-reading-ignored" in self.avoid,
        )
        self.real.add(name, tokens, params=params, max_tokens=op.says, reads_cache=reads)

    def make_steps(self, op: ops.MakeSteps) -> None:
        for _ in range(op.count):
            if self.real.has_work():
                self.real.step()
            agree("JOB-4", self.model.keeps_stepping(), self.real.keeps_stepping())

    def end_transfer(self, op: ops.EndTransfer) -> None:
        self.real.workers[0].end(op.pick)

    def end_transfers(self, op: ops.EndTransfers) -> None:
        del op
        self.real.workers[0].end_all()

    def abort(self, op: ops.AbortOne) -> None:
        live = [name for name in self.requests if name in self.real.requests]
        if live:
            self.reached["aborted"] += 1
            self.real.abort(live[op.pick % len(live)])

    def reset(self, op: ops.ResetAll) -> None:
        connector = op.connector > 0 and self.profile.offload_reset
        try:
            self.real.reset(running=op.running > 0, connector=connector)
        except RuntimeError:  # refused, as documented, while blocks are in use
            self.reached["reset-refused"] += 1

    # What the scheduler tells the connector

    def _observe(self, call: str, answer: Any, *told: Any) -> None:
        for name, request in self.requests.items():
            if name in self.real.requests:
                self._learn(request)
        if isinstance(answer, Exception):
            self._explain(call, answer, *told)
        else:
            _CALL_ARMS[call](self, answer, *told)

    def _learn(self, request: OffloadRequest) -> None:
        seen = self.real.seen(request.name)
        request.text.append(seen.tokens[len(request.text.tokens) :])
        for group, size in enumerate(self.model.chunk_tokens):
            ratio = size // self.real.hash_tokens
            self.names.learn(group, request.text.view(size), seen.hashes[ratio - 1 :: ratio], ratio)

    def _raw(self, key: Key) -> bytes:
        return target.make_key(*self.names.of(key))

    def _raws(self, keys: Iterable[Key]) -> list[bytes]:
        return [self._raw(key) for key in keys]

    def _watch_model(self) -> None:
        offer, look_up = self.tier.prepare_store, self.tier.lookup

        def prepare_store(keys: Sequence[Key], access: Access[Key]) -> Placed[Key] | None:
            refused = len(self.real.offers) > len(self.offers) and self.real.offers[len(self.offers)][1] is None
            gives_up = refused and self.setup.tier.policy == "arc" and "offload-arc-gives-up" in self.avoid
            if gives_up and self.tier.room(keys) is not None:
                self.reached["known:offload-arc-gives-up"] += 1
                placed = None
            else:
                placed = offer(keys, access)
            self.offers.append((list(keys), None if placed is None else placed.keys))
            self.reached["refused"] += placed is None
            self.reached["evicted"] += bool(placed and placed.evicted)
            self.reached["passed"] += bool(placed and len(placed.keys) < len(keys))
            return placed

        def lookup(key: Key) -> Answer:
            answer = look_up(key)
            if answer is Answer.PENDING and "offload-in-flight-is-a-miss" in self.avoid:
                self.reached["known:offload-in-flight-is-a-miss"] += 1
                return Answer.MISS
            return answer

        self.tier.prepare_store = prepare_store  # type: ignore[method-assign]
        self.tier.lookup = lookup  # type: ignore[method-assign]

    def _arrived(self, answer: Any, name: str) -> None:
        self.model.arrive(self.requests[name])

    def _looked_up(self, answer: Any, name: str, local: int, most: int | None) -> None:
        assert most is None, "a cap on the hit, which isn't modelled"
        request = self.requests[name]
        if name not in self.model.tracked:
            self.model.arrive(request)
        if request.jobs and "offload-readmit-with-store-in-flight" in self.avoid:
            raise Known("offload-readmit-with-store-in-flight")
        waits = bool(request.jobs)
        expect = self.model.lookup(request, local)
        agree(self._lookup_clause(request, waits), expect, answer[0])
        agree("LOOKUP-1", bool(expect), answer[1])
        self.reached["hit"] += bool(expect)
        self.reached["hit-after-local"] += bool(expect and local)
        self.reached["asked-again"] += expect is None
        self._compare(index="STORE-2", tier="TOUCH-1")

    def _lookup_clause(self, request: OffloadRequest, waits: bool) -> str:
        if waits or not request.reads_cache:
            return "LOOKUP-1"
        if self.model.loading:
            return "LOOKUP-5"
        if len(self.setup.groups) > 1:
            return "LOOKUP-2"
        return "LOOKUP-3" if self.setup.groups[0].kind is Kind.FULL else "LOOKUP-4"

    def _admitted(self, answer: Any, name: str, rows: Any, found: Any, external: int) -> None:
        request = self.requests[name]
        self.model.admit(request, rows, found, external)
        self.reached["loaded"] += external > 0
        self.reached["loaded-for-remote"] += external > 0 and bool((request.params or {}).get("do_remote_decode"))
        asks = "do_remote_decode" in (request.params or {})
        self._compare(index="STORE-4" if asks else "STORE-3", tier="TIER-2")

    def _stepped(self, answer: target.Plan, seen: target.StepSeen) -> None:
        for name, tokens in seen.computed.items():
            self.requests[name].computed = tokens
        self._check_last(seen)
        rows = [Row(row.request, row.blocks, row.new or row.resumed, row.new) for row in seen.rows]
        plan = self.model.step(rows, seen.scheduled, seen.preempted, seen.finished)
        self._check_stale()
        self._compare_offers()
        agree("ADMIT-1", [tuple(load) for load in self._numbered(plan.loads)], list(map(tuple, answer.loads)))
        self._check_sizes(answer)
        agree("STORE-10", [tuple(store) for store in self._numbered(plan.stores)], list(map(tuple, answer.stores)))
        self._compare_flushed(plan, answer, seen)
        self.reached["stored"] += bool(plan.stores)
        self.reached["stored-at-end"] += any(self.requests[store.request].ended for store in plan.stores)
        self.reached["flushed"] += bool(plan.flushed)
        self.reached["preempted"] += bool(seen.preempted)
        ended = seen.preempted and not self.profile.jobs_by_number
        self._compare(index="STORE-9", tier="JOB-6" if ended else "STORE-10")

    def _numbered(self, transfers: list[Transfer]) -> list[Transfer]:
        if self.profile.jobs_by_number:
            return transfers
        return [transfer._replace(job=-1) for transfer in transfers]

    def _compare_offers(self) -> None:
        """Compare what was offered to the tier, and what it took of it."""
        offers, self.offers = self.offers, []
        actual, self.real.offers = self.real.offers, []
        expect, seen = [self._raws(keys) for keys, _ in offers], [keys for keys, _ in actual]
        agree("STORE-15" if sorted(expect) == sorted(seen) else self._offer_clause(), expect, seen)
        self.refused = any(keys is None for _, keys in actual)
        took = [None if keys is None else self._raws(keys) for _, keys in offers]
        agree("TIER-5", took, [keys for _, keys in actual])

    def _offer_clause(self) -> str:
        """Return the clause that says most about what can be offered now."""
        if self.refused:
            return "STORE-8"
        if self.model.dropped:
            return "STORE-5"
        known = [request for request in self.model.tracked.values() if request.table and request.ended]
        if any(len(request.table[0]) < len(request.keys[0]) * self.setup.chunk_blocks for request in known):
            return "STORE-7"
        if all(group.kind is Kind.FULL for group in self.setup.groups):
            return "STORE-6"
        if self.setup.groups[0].block_tokens > self.setup.groups[-1].block_tokens:
            return "STORE-13" if self.profile.store_mask is StoreMask.REGISTRATION else "STORE-12"
        return "STORE-11"

    def _compare_flushed(self, plan: ModelPlan, answer: target.Plan, seen: target.StepSeen) -> None:
        if self.profile.jobs_by_number:
            # Up to 0.22.1 jobs that are planned in the same step can be among them. The workers don't know those yet.
            planned = set() if self.profile.fences_whole_table else {store.job for store in answer.stores}
            idle = self.profile.flushes_when_idle and all(request.ended for request in self.model.tracked.values())
            clause = "FENCE-1" if seen.preempted else "FENCE-3" if idle else "FENCE-2"
            agree(clause, plan.flushed, answer.flushed - planned)

    def _reported(self, answer: Any, jobs: dict[int, list[bytes]], sent: set[str], received: set[str]) -> None:
        for number, order in jobs.items():
            known = self.model.jobs.get(number)
            if known is not None:
                self._check_forgotten(known)
                by_name = {self._raw(key): key for key in known.keys}
                agree("JOB-2", by_name.keys(), set(order))
                self.model.reported(number, [by_name[raw] for raw in order])
            else:
                self.reached["stale"] += 1
                agree("JOB-3", True, number < self.model.first_job)
                self.model.reported(number)
        if not self.profile.jobs_by_number:
            for number, job in list(self.model.jobs.items()):
                if job.request.name in (sent if job.store else received):
                    self.model.reported(number)
        self._compare(index="JOB-2", tier="JOB-2")

    def _finished(self, answer: Any, name: str) -> None:
        seen = self.real.seen(name)
        request = self.requests[name]
        request.computed = seen.computed
        self.model.finish(request, aborted=seen.aborted)
        self._compare(index="JOB-5", tier="JOB-5")

    def _was_reset(self, answer: Any) -> None:
        if "offload-reset-keeps-jobs" in self.avoid and self.model.jobs:
            raise Known("offload-reset-keeps-jobs")
        self.reached["reset"] += 1
        self.reached["reset-in-flight"] += bool(self.model.jobs)
        self.model.reset()
        self._compare(index="STORE-14", tier="STORE-14")

    # Comparing

    def _compare(self, *, index: str, tier: str) -> None:
        state = self.real.state()
        tracked = {name: request for name, request in self.model.tracked.items() if self._is_comparable(request)}
        agree("JOB-5", tracked.keys(), state.next_stored.keys())
        agree(index, {name: request.next_stored for name, request in tracked.items()}, state.next_stored)
        agree("STORE-1", {n: [self._raws(row) for row in request.keys] for n, request in tracked.items()}, state.keys)
        if self.profile.jobs_by_number:
            agree("JOB-1", {name: request.jobs for name, request in tracked.items()}, state.open_jobs)
            agree("FENCE-4", self.model.fences, state.fences)
        agree("LOOKUP-5", set(self._raws(self.model.loading)), state.loading)
        compare_tiers(self.tier, self._raw, self.real.tier(), lru=tier, arc=tier, chunks=tier)

    def _is_comparable(self, request: OffloadRequest) -> bool:
        return self.profile.jobs_by_number or not request.ended

    # Known issues

    def _explain(self, call: str, error: Exception, *told: Any) -> None:
        """Raise Known if a known issue is why the connector has raised."""
        aborted = call == "build_connector_meta" and any(self.requests[name].aborted for name in told[0].finished)
        if aborted and "offload-abort-never-scheduled" in self.avoid:
            raise Known("offload-abort-never-scheduled")
        loads = {job.request.name for job in self.model.jobs.values() if not job.store}
        loads_at_once = call == "build_connector_meta" and not loads.isdisjoint(told[0].preempted)
        if loads_at_once and "offload-reset-then-load" in self.avoid:
            raise Known("offload-reset-then-load")
        if call == "reset_cache" and "offload-second-reset" in self.avoid and self.model.flushes():
            raise Known("offload-second-reset")

    def _check_last(self, seen: target.StepSeen) -> None:
        """Raise Known if the last chunks of a request that has ended can't be compared."""
        for name in seen.finished if self.profile.stores_at_end else ():
            request = self.requests[name]
            request.computed = self.real.seen(name).computed
            tokens, known = self.model.offloadable(request, 0), len(request.text.tokens)
            limit = min(known, self.model.limit(request))
            differs = any(tokens // size != limit // size for size in self.model.chunk_tokens)
            issue = "offload-abort-never-scheduled" if request.aborted else "offload-last-slot-stored"
            if differs and issue in self.avoid and name in self.model.tracked:
                raise Known(issue)

    def _check_stale(self) -> None:
        """Raise Known if a block was left out because it was given to somebody else."""
        self.reached["given-away"] += self.model.dropped
        if self.model.dropped and "offload-stale-window-block" in self.avoid:
            raise Known("offload-stale-window-block")

    def _check_sizes(self, answer: target.Plan) -> None:
        wrong = any(sum(store.sizes) != len(store.blocks) for store in answer.stores)
        if wrong and "offload-group-sizes-null" in self.avoid:
            raise Known("offload-group-sizes-null")

    def _check_forgotten(self, job: Job) -> None:
        request = job.request
        if "offload-final-store-lost" in self.avoid and request.ended and not request.closed and len(request.jobs) == 1:
            raise Known("offload-final-store-lost")


_INDEX_ARMS: dict[type, Callable[[IndexPair, Any], None]] = {
    ops.Begin: IndexPair.begin,
    ops.MakeSteps: IndexPair.make_steps,
    ops.EndTransfer: IndexPair.end_transfer,
    ops.EndTransfers: IndexPair.end_transfers,
    ops.AbortOne: IndexPair.abort,
    ops.ResetAll: IndexPair.reset,
}
_CALL_ARMS: dict[str, Callable[..., None]] = {
    "on_new_request": IndexPair._arrived,
    "get_num_new_matched_tokens": IndexPair._looked_up,
    "update_state_after_alloc": IndexPair._admitted,
    "build_connector_meta": IndexPair._stepped,
    "update_connector_output": IndexPair._reported,
    "request_finished": IndexPair._finished,
    "reset_cache": IndexPair._was_reset,
}


EVENTS = {
    "evicted": "a chunk was evicted",
    "refused": "a store was refused",
    "passed": "a key was there already when it was offered",
    "pending": "a key was looked up while it was being stored",
    "pinned": "a load pinned chunks",
    "failed": "a store failed",
    "reused": "a request ended that had reused a chunk",
    "reset": "a tier was reset",
    "reset-in-flight": "a tier was reset with transfers in flight",
    "reset-refused": "a reset was refused because blocks were in use",
    "stale": "a transfer from before a reset was reported",
    "hit": "a request had a hit in the tier",
    "hit-after-local": "a request had a hit in the tier, after one on the GPU",
    "asked-again": "a request was told to ask again",
    "loaded": "a request began to load",
    "loaded-for-remote": "a request began to load that a remote engine will decode",
    "reads-nothing": "a request came that may not read the prefix cache",
    "stored": "a store was planned",
    "stored-at-end": "a store was planned of a request that had ended",
    "flushed": "a transfer had to end before a step",
    "preempted": "a request was preempted",
    "aborted": "a request was aborted",
    "given-away": "a block that had left a window was given to somebody before it was stored",
}
"""What a run can reach -> what it is."""

TIER_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(("evicted", "refused", "passed", "pending", "pinned", "failed"), lambda profile: True),
    "reused": lambda profile: profile.tier_counts_requests,
    "reset-in-flight": lambda profile: profile.offload_reset,
}
"""Events that a run of the tier must reach -> whether a release can."""


INDEX_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(("evicted", "refused", "passed", "stored", "loaded", "preempted", "aborted"), lambda profile: True),
    **dict.fromkeys(("hit-after-local", "loaded-for-remote", "reads-nothing"), lambda profile: True),
    "asked-again": lambda profile: "offload-in-flight-is-a-miss" not in known_issues(profile.release),
    "flushed": lambda profile: profile.jobs_by_number,
    "reset": lambda profile: profile.offload_reset,
    "stored-at-end": lambda profile: profile.stores_at_end,
    "given-away": lambda profile: profile.offload_policies,
}
"""Events that a run of the engine must reach -> whether a release can."""


# Many ops -------------------------------------------------------------------------------------------------------------

LEVELS = ("tier", "index")
HISTORY_OPS = 100
"""Ops of a history: enough to fill a tier several times."""
FINDINGS_MAX = 20
"""After so many differences a run stops."""


@dataclass
class Finding:
    """A history that shows a difference, and the difference."""

    history: ops.IndexHistory
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


def pair_for(history: ops.IndexHistory, avoid: frozenset[str] | None = None) -> TierPair | IndexPair:
    """Return a new pair for a history, with the implementation that is importable."""
    profile = profile_for(core_target.release())
    if isinstance(history.setup, ops.TierSetup):
        return TierPair(history.setup, profile, avoid)
    return IndexPair(history.setup, profile, avoid)


def replay(history: ops.IndexHistory, avoid: frozenset[str] | None = None) -> Counter[str]:
    """Apply a history to a new pair and return what it reached. ClauseBroken if there is a difference."""
    pair: Any = pair_for(history, avoid)
    for op in history.ops:
        pair.apply(op)
    reached: Counter[str] = pair.reached
    return reached


def difference(history: ops.IndexHistory, avoid: frozenset[str] | None = None) -> str | None:
    """Return the clause that a history breaks, or the exception that it causes; None for neither."""
    try:
        replay(history, avoid)
    except ClauseBroken as broken:
        return broken.clause.id
    except Exception as error:  # whatever the implementation raises is a finding
        return type(error).__name__
    return None


def shortest(history: ops.IndexHistory) -> ops.IndexHistory:
    """Leave ops out, one after the other, as long as what is left shows the same difference."""
    shown = difference(history)
    index = len(history.ops) - 1
    while index >= 0:
        shorter = msgspec.structs.replace(history, ops=history.ops[:index] + history.ops[index + 1 :])
        if difference(shorter) == shown:
            history, index = shorter, len(shorter.ops)
        index -= 1
    return history


def draw(random: Random, level: str, profile: Profile, family: str | None = None) -> ops.IndexHistory:
    """Draw a history of a level, ``tier`` or ``index``; of the latter, with groups of one family only.

    Weights differ from history to history, some ops don't occur at all: so one is all hits, another all evictions.
    """
    weights, ranges = (ops.TIER_WEIGHTS, ops.TIER_RANGES) if level == "tier" else (ops.INDEX_WEIGHTS, ops.INDEX_RANGES)
    drawn = [weight * (random.choice((0, 1, 1, 3)) or i < 2) for i, weight in enumerate(weights.values())]
    kinds = random.choices(list(weights), drawn, k=HISTORY_OPS)
    steps: tuple[Any, ...] = tuple(kind(**_drawn(random, ranges[kind])) for kind in kinds)
    if level == "tier":
        return ops.IndexHistory(ops.TierSetup(random.randint(1, 9), random.choice(("lru", "arc"))), steps)
    numbers = _drawn(random, ops.INDEX_SETUP_RANGES)
    if family is not None:
        numbers["family"] = ops.INDEX_FAMILIES.index(family)
    return ops.IndexHistory(ops.index_setup(profile, **numbers), steps)


def _drawn(random: Random, ranges: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: random.randint(*limits) for name, limits in ranges.items()}


def run(level: str, ops_wanted: int, seed: int, family: str | None = None) -> Tally:
    """Apply random histories until there were so many ops."""
    random, tally = Random(seed), Tally()
    profile = profile_for(core_target.release())
    core_target.warm_up()
    start = time.process_time()
    while tally.ops < ops_wanted and len(tally.findings) < FINDINGS_MAX:
        history = draw(random, level, profile, family)
        pair: Any = None
        try:
            pair = pair_for(history)
            for op in history.ops:
                pair.apply(op)
                tally.ops += 1
        except ClauseBroken as broken:
            tally.findings.append(Finding(history, broken.clause.id, str(broken)))
        except Exception as error:  # whatever the implementation raises is a finding
            message = "".join(traceback.format_exception(error))
            tally.findings.append(Finding(history, type(error).__name__, message))
        tally.reached += pair.reached if pair else Counter()
    tally.seconds = time.process_time() - start
    return tally


def hollow(tally: Tally, level: str, profile: Profile) -> set[str]:
    """Return the required events that a run has missed."""
    required = TIER_REQUIRED if level == "tier" else INDEX_REQUIRED
    return {event for event, when in required.items() if when(profile)} - (+tally.reached).keys()


def main() -> int:
    """Run from the command line: ops, ops per second and differences on the vLLM that is importable."""
    parser = argparse.ArgumentParser(prog="python -m strategies.offload_index", description=main.__doc__)
    parser.add_argument("--level", choices=LEVELS, default="index")
    parser.add_argument("--ops", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=ops.INDEX_FAMILIES, default=None)
    arguments = parser.parse_args()
    tally = run(arguments.level, arguments.ops, arguments.seed, arguments.family)
    profile = profile_for(core_target.release())
    print(f"{arguments.level} {profile.release}: {tally.ops} ops, {tally.ops / tally.seconds:.0f}/s,", end=" ")
    print(f"{len(tally.findings)} differences, {dict(sorted(tally.reached.items()))}")
    for clause in sorted({finding.clause for finding in tally.findings}):
        finding = next(finding for finding in tally.findings if finding.clause == clause)
        print(finding.message, msgspec.json.format(msgspec.json.encode(shortest(finding.history))).decode(), sep="\n")
    if missed := hollow(tally, arguments.level, profile):
        print(f"hollow: never reached {', '.join(sorted(missed))}")
    return int(bool(tally.findings or missed))


if __name__ == "__main__":
    sys.exit(main())
