"""The scheduler side of OffloadingConnector: the model's beside that of an engine with vLLM's own scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from kvspec.equality.compare import EndsAtKnown, Known, Names, Refused, avoided, described
from kvspec.equality.tier import compare_tiers
from kvspec.model import offload_ops as ops
from kvspec.model.clauses import ClauseBroken, agree
from kvspec.model.groups import Kind
from kvspec.model.keys import Key, Text
from kvspec.model.offload import Job, Offloader, OffloadRequest, Row, Transfer
from kvspec.model.offload import Plan as ModelPlan
from kvspec.model.pool import NULL
from kvspec.model.profile import Profile, StoreMask
from kvspec.model.tiers import Access, Answer, Placed, Tier
from kvspec.targets.vllm import offload_index as target

Rows = Sequence[Sequence[int]]

_LIVE_MAX = 6
"""Requests at once."""


@dataclass(eq=False)
class Offer:
    """What the model offers of a request in a step."""

    request: OffloadRequest
    before: list[int]
    """The store index before that."""
    scheduled: int
    keys: list[Key] = field(default_factory=list)
    taken: list[Key] | None = None
    """Those that are to be stored; None if the offer was refused."""


class Search(NamedTuple):
    """What a group of the model has found of some keys."""

    keys: list[Key]
    found: int | None
    """Keys up to the end of the hit; None to ask again."""
    needs_more_at_end: bool
    """Whether a hit that ends behind the last key needs a chunk more than a window covers."""


class IndexPair(EndsAtKnown):
    """The scheduler side of the connector, of the model and of an engine of vLLM's own scheduler.

    The scheduler decides what happens; each call that it makes to its connector is made to the model too.
    """

    def __init__(self, setup: ops.IndexSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.profile = profile
        self.avoid = avoided(setup, profile) if avoid is None else avoid
        self.reached: Counter[str] = Counter()
        self.names = Names()
        self.requests: dict[str, OffloadRequest] = {}
        self.came = 0
        self.tier: Tier[Key] = Tier(setup.slots, profile, setup.policy, events=True, tie=self._raw)
        unmarked = setup.drafts > 0 and not any(group.eagle for group in setup.groups)
        self.reached["unmarked-drafts"] += unmarked
        self.may_be_drafted = tuple(replace(group, eagle=group.eagle or unmarked) for group in setup.groups)
        """The groups, those marked that a draft model's layers may be in: all, if none is marked."""
        self.groups = self.may_be_drafted if "offload-unmarked-drafts" in self.avoid else setup.groups
        if self.groups != setup.groups:
            self.reached["known:offload-unmarked-drafts"] += 1
        self.model = Offloader(
            self.groups,
            self.tier,
            profile,
            chunk_blocks=setup.chunk_blocks,
            prompt_only=setup.prompt_only,
        )
        self.offers: list[Offer] = []
        self.searches: list[Search] = []
        self.agreed: int | None = 0
        """What the groups agreed on in the last lookup that asked them."""
        self._watch_model()
        self.real = target.RealEngine(
            described(setup.groups),
            gpu_blocks=setup.gpu_blocks,
            slots=setup.slots,
            policy=setup.policy,
            chunk_blocks=setup.chunk_blocks,
            step_tokens=setup.step_tokens,
            running_max=setup.running_max,
            asynchronous=setup.asynchronous,
            prompt_only=setup.prompt_only,
            drafts=setup.drafts,
            observe=self._observe,
        )

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""
        return self.real.state(), self.real.tier()

    # What happens

    def _apply(self, op: ops.IndexOp) -> None:
        _INDEX_ARMS[type(op)](self, op)

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
        self.real.add(name, tokens, params=params, max_tokens=max(1, op.says), reads_cache=reads)

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
            return
        arm, clause = _CALL_ARMS[call]
        try:
            arm(self, answer, *told)
        except (AssertionError, LookupError, ValueError) as refused:
            if isinstance(refused, ClauseBroken):
                raise
            raise ClauseBroken(clause, Refused(f"{type(refused).__name__}: {refused}"), answer) from refused

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
        store, look_up = self.tier.prepare_store, self.tier.lookup
        offer, agree_on = self.model._offer, self.model._agreed_hit

        def offers(request: OffloadRequest | None, scheduled: int) -> Transfer | None:
            if request is not None:
                self.offers.append(Offer(request, list(request.next_stored), scheduled))
                tokens = self.model.offloadable(request, scheduled)
                self.reached["held-back"] += any(
                    request.next_stored[group] < tokens // size and self.model.is_held_back(request, group, tokens)
                    for group, size in enumerate(self.model.chunk_tokens)
                )
            return offer(request, scheduled)

        def prepare_store(keys: Sequence[Key], access: Access[Key]) -> Placed[Key] | None:
            made = sum(bool(one.keys) for one in self.offers)
            refused = len(self.real.offers) > made and self.real.offers[made].taken is None
            gives_up = refused and self.setup.policy == "arc" and "offload-arc-gives-up" in self.avoid
            if gives_up and self.tier.room(keys) is not None:
                self.reached["known:offload-arc-gives-up"] += 1
                placed = None
            else:
                placed = store(keys, access)
            self.offers[-1].keys = list(keys)
            self.offers[-1].taken = None if placed is None else placed.keys
            self.reached["refused"] += placed is None
            self.reached["evicted"] += bool(placed and placed.evicted)
            self.reached["passed"] += bool(placed and len(placed.keys) < len(keys))
            return placed

        def agreed_hit(request: OffloadRequest, local: int) -> int | None:
            self.agreed = agree_on(request, local)
            return self.agreed

        def lookup(key: Key) -> Answer:
            answer = look_up(key)
            if answer is Answer.PENDING and "offload-in-flight-is-a-miss" in self.avoid:
                self.reached["known:offload-in-flight-is-a-miss"] += 1
                return Answer.MISS
            return answer

        self.model._offer = offers  # type: ignore[method-assign]
        self.tier.prepare_store = prepare_store  # type: ignore[method-assign]
        self.tier.lookup = lookup  # type: ignore[method-assign]
        self.model._agreed_hit = agreed_hit  # type: ignore[method-assign]
        for name in ("_prefix", "_window"):
            setattr(self.model, name, self._watched_search(getattr(self.model, name)))

    def _watched_search(self, search: Callable[..., int | None]) -> Callable[..., int | None]:
        def watched(keys: Sequence[Key], *more: int) -> int | None:
            found = search(keys, *more)
            self.searches.append(Search(list(keys), found, len(set(more)) > 1))
            return found

        return watched

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
        self.reached["hit"] += bool(expect)
        self.reached["hit-proven"] += bool(expect and any(group.eagle for group in self.groups))
        self.reached["hit-after-local"] += bool(expect and local)
        self.reached["asked-again"] += expect is None
        self._compare_searches()
        agree(self._lookup_clause(request, waits, expect, answer[0]), expect, answer[0])
        agree("LOOKUP-1", bool(expect), answer[1])
        self._compare(index="STORE-2", tier="TOUCH-1")

    def _compare_searches(self) -> None:
        """Compare what the groups find, alone, of the keys that both sides have looked up."""
        searches, self.searches = self.searches, []
        actual, self.real.searches = self.real.searches, []
        seen = {search.keys: search.found for search in reversed(actual)}
        for search in searches:
            names = tuple(self._raws(search.keys))
            if names not in seen:
                continue
            found = seen.pop(names)
            if search.needs_more_at_end and search.found != found and "offload-window-chunk-missed" in self.avoid:
                raise Known("offload-window-chunk-missed")
            is_full = not names or self.setup.groups[search.keys[0].group].kind is Kind.FULL
            agree("LOOKUP-3" if is_full else "LOOKUP-4", search.found, found)

    def _lookup_clause(self, request: OffloadRequest, waits: bool, *answers: int | None) -> str:
        if waits or not request.reads_cache:
            return "LOOKUP-1"
        if None in answers and self.agreed:
            return "LOOKUP-5"
        return "LOOKUP-6" if any(group.eagle for group in self.may_be_drafted) else "LOOKUP-2"

    def _admitted(self, answer: Any, name: str, rows: Rows, found: Sequence[Sequence[bool]], external: int) -> None:
        self._check_hits(name, rows, found, external)
        request = self.requests[name]
        self.model.admit(request, rows, found, external)
        self.reached["loaded"] += external > 0
        self.reached["loaded-for-remote"] += external > 0 and bool((request.params or {}).get("do_remote_decode"))
        asks = "do_remote_decode" in (request.params or {})
        self._compare(index="STORE-4" if asks else "STORE-3", tier="TIER-2")

    def _step(self, seen: target.StepSeen) -> ModelPlan:
        """Let the model make a step."""
        for name, tokens in seen.computed.items():
            self.requests[name].computed = tokens
        rows = [Row(row.request, row.blocks, row.new or row.resumed, row.new) for row in seen.rows]
        return self.model.step(rows, seen.scheduled, seen.preempted, seen.finished)

    def _stepped(self, answer: target.Plan, seen: target.StepSeen) -> None:
        self._check_last(seen)
        plan = self._step(seen)
        self.reached["stored"] += bool(plan.stores)
        self.reached["stored-at-end"] += any(self.requests[store.request].ended for store in plan.stores)
        self.reached["flushed"] += bool(plan.flushed)
        self.reached["preempted"] += bool(seen.preempted)
        self._check_stale()
        state = self.real.state()
        tables = {name: request.table for name, request in self._comparable().items()}
        agree("STORE-5", tables, {name: table for name, table in state.tables.items() if name in tables})
        offers = self._compare_offers()
        loads, stores = self._numbered(plan.loads), self._numbered(plan.stores)
        planned = [transfer.job for transfer in answer.loads + answer.stores]
        agree("JOB-1", [transfer.job for transfer in loads + stores], planned)
        agree("ADMIT-1", [tuple(load) for load in loads], list(map(tuple, answer.loads)))
        agree("STORE-11", [tuple(store) for store in stores], list(map(tuple, answer.stores)))
        self._compare_flushed(plan, answer, seen)
        refused = [offer.request for offer in offers if offer.taken is None and offer.request.name in state.next_stored]
        for request in refused:
            agree("STORE-8", request.next_stored, state.next_stored[request.name])
        self._follow_passed(state)
        stored = [key for offer in offers for key in offer.taken or ()]
        ended = seen.preempted and not self.profile.jobs_by_number
        first = "LRU-1" if self.setup.policy == "lru" else "ARC-1"
        self._compare(index="STORE-9", tier="JOB-6" if ended else first, lru="LRU-2", arc="ARC-3", stored=stored)

    def _numbered(self, transfers: list[Transfer]) -> list[Transfer]:
        if self.profile.jobs_by_number:
            return transfers
        return [transfer._replace(job=-1) for transfer in transfers]

    def _compare_offers(self) -> list[Offer]:
        """Compare what was offered to the tier, and what it took of it; return the model's offers of something."""
        tried, self.offers = self.offers, []
        actual, self.real.offers = self.real.offers, []
        offers = [offer for offer in tried if offer.keys]
        expect = [(offer.request.name, self._raws(offer.keys)) for offer in offers]
        seen = [(offer.request, offer.keys) for offer in actual]
        if expect != seen:
            same = sorted(expect) == sorted(seen)
            agree("STORE-15" if same else self._offer_clause(tried, dict(expect), dict(seen)), expect, seen)
        agree("TIER-5", [offer.taken is None for offer in offers], [offer.taken is None for offer in actual])
        agree("TIER-4", [self._raws(offer.taken or ()) for offer in offers], [offer.taken or [] for offer in actual])
        return offers

    def _offer_clause(self, tried: list[Offer], expect: dict[str, list[bytes]], seen: dict[str, list[bytes]]) -> str:
        """Return the clause that the first chunk is about which only one side has offered."""
        for offer in tried:
            ours, theirs = (set(some.get(offer.request.name, ())) for some in (expect, seen))
            for group, keys in enumerate(offer.request.keys):
                for chunk, key in enumerate(keys):
                    if (self._raw(key) in ours) != (self._raw(key) in theirs):
                        return self._chunk_clause(offer, group, chunk, self._raw(key) in ours)
        return "JOB-5"

    def _chunk_clause(self, offer: Offer, group: int, chunk: int, only_ours: bool) -> str:
        """Return the clause that says whether a chunk is offered that only one side has offered."""
        request, is_full = offer.request, self.setup.groups[group].kind is Kind.FULL
        tokens = self.model.offloadable(request, offer.scheduled)
        if chunk < offer.before[group]:
            return "STORE-10"
        if self.may_be_drafted[group].eagle and chunk == tokens // self.model.chunk_tokens[group] - 1:
            return "STORE-16"
        if (is_full and only_ours) or chunk >= tokens // self.model.chunk_tokens[group]:
            return "STORE-6"
        if chunk >= self.model.storable(request, group, tokens):
            return "STORE-7"
        last = (chunk + 1) * self.setup.chunk_blocks - 1
        if is_full or request.table[group][last] == NULL or self.profile.store_mask is StoreMask.ALL:
            return "STORE-11"
        return "STORE-13" if self.profile.store_mask is StoreMask.REGISTRATION else "STORE-12"

    def _compare_flushed(self, plan: ModelPlan, answer: target.Plan, seen: target.StepSeen) -> None:
        if self.profile.jobs_by_number:
            # Up to 0.22.1 jobs that are planned in the same step can be among them. The workers don't know those yet.
            planned = set() if self.profile.fences_whole_table else {store.job for store in answer.stores}
            idle = self.profile.flushes_when_idle and all(request.ended for request in self.model.tracked.values())
            clause = "FENCE-1" if seen.preempted else "FENCE-3" if idle else "FENCE-2"
            agree(clause, plan.flushed, answer.flushed - planned)

    def _reported(self, answer: Any, jobs: dict[int, list[bytes] | None], sent: set[str], received: set[str]) -> None:
        for number, order in jobs.items():
            known = self.model.jobs.get(number)
            agree("JOB-3", self.model.is_stale(number), order is None)
            if known is None or order is None:
                self.reached["stale"] += 1
                agree("JOB-2", known, order)
                self.model.reported(number)
            else:
                self._check_forgotten(known)
                by_name = {self._raw(key): key for key in known.keys}
                agree("JOB-2", by_name.keys(), set(order))
                self.model.reported(number, [by_name[raw] for raw in order])
        if not self.profile.jobs_by_number:
            self._check_sent(sent)
            for number, job in list(self.model.jobs.items()):
                if job.request.name in (sent if job.store else received):
                    self.model.reported(number)
        self._compare(index="JOB-2", tier="JOB-2", fences="JOB-2")

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
        self._compare(index="STORE-14", tier="STORE-14", fences="STORE-14")

    # Comparing

    def _compare(
        self,
        *,
        index: str,
        tier: str,
        lru: str = "",
        arc: str = "",
        fences: str = "FENCE-4",
        stored: Collection[Key] = (),
    ) -> None:
        """Compare all that can be seen; the names say which clause each part belongs to, ``tier`` in place of none."""
        state, tracked = self.real.state(), self._comparable()
        agree("JOB-5", tracked.keys(), state.next_stored.keys())
        agree(index, {name: request.next_stored for name, request in tracked.items()}, state.next_stored)
        agree("STORE-1", {n: [self._raws(row) for row in request.keys] for n, request in tracked.items()}, state.keys)
        if self.profile.jobs_by_number:
            agree("JOB-1", {name: request.jobs for name, request in tracked.items()}, state.open_jobs)
            agree(fences, self.model.fences, state.fences)
        agree("LOOKUP-5", set(self._raws(self.model.loading)), state.loading)
        actual = self.real.tier()
        compare_tiers(self.tier, self._raw, actual, lru=lru or tier, arc=arc or tier, chunks=tier, stored=stored)

    def _comparable(self) -> dict[str, OffloadRequest]:
        """Return the requests that both sides must know; up to 0.20 the implementation forgets one at its end."""
        known = self.model.tracked.items()
        return {name: request for name, request in known if self.profile.jobs_by_number or not request.ended}

    # Known issues

    def _explain(self, call: str, error: Exception, *told: Any) -> None:
        """Raise Known if a known issue is why the connector has raised."""
        aborted = call == "build_connector_meta" and any(self.requests[name].aborted for name in told[0].finished)
        if aborted and "offload-abort-never-scheduled" in self.avoid:
            raise Known("offload-abort-never-scheduled")
        loads = {job.request.name for job in self.model.jobs.values() if not job.store}
        asserted = isinstance(error, AssertionError)
        loads_at_once = call == "build_connector_meta" and not loads.isdisjoint(told[0].preempted)
        if loads_at_once and asserted and "offload-reset-then-load" in self.avoid:
            raise Known("offload-reset-then-load")
        if call == "update_state_after_alloc":
            self._check_hits(*told)
            if asserted:
                self._check_window(*told)
        sizes = call == "build_connector_meta" and "offload-group-sizes-null" in self.avoid
        if sizes and self._stores_nulls(*told):
            raise Known("offload-group-sizes-null")
        ends_job = call == "update_connector_output" and isinstance(error, KeyError)
        if ends_job and self._stores_one_twice() and "offload-window-after-reset" in self.avoid:
            raise Known("offload-window-after-reset")
        resets = call == "reset_cache" and asserted
        if resets and "offload-second-reset" in self.avoid and self.model.flushes():
            raise Known("offload-second-reset")

    def _follow_passed(self, state: target.ConnectorState) -> None:
        """Let the model pass what the release passes though it is held back: offload-draft-chunk-passed."""
        if "offload-draft-chunk-passed" not in self.avoid:
            return
        eagle = [group for group, some in enumerate(self.groups) if some.eagle]
        for name, request in self._comparable().items():
            for group in eagle if name in state.next_stored else ():
                if state.next_stored[name][group] == request.next_stored[group] + 1:
                    request.next_stored[group] += 1
                    self.reached["known:offload-draft-chunk-passed"] += 1

    def _check_last(self, seen: target.StepSeen) -> None:
        """Raise Known if the last chunks of a request that has ended can't be compared."""
        for name in seen.finished if self.profile.stores_at_end else ():
            request = self.requests[name]
            request.computed = self.real.seen(name).computed
            tokens, known = self.model.offloadable(request, 0), len(request.text.tokens)
            limit = min(known, self.model.limit(request))
            held = partial(self.model.is_held_back, request)
            differs = any(
                tokens // size - held(group, tokens) != limit // size - held(group, limit)
                for group, size in enumerate(self.model.chunk_tokens)
            )
            issue = "offload-abort-never-scheduled" if request.aborted else "offload-last-slot-stored"
            if differs and issue in self.avoid and name in self.model.tracked:
                raise Known(issue)

    def _check_stale(self) -> None:
        """Raise Known if a block was left out because it was given to somebody else."""
        self.reached["given-away"] += self.model.dropped
        if self.model.dropped and "offload-stale-window-block" in self.avoid:
            raise Known("offload-stale-window-block")

    def _check_hits(self, name: str, rows: Rows, found: Sequence[Sequence[bool]], external: int) -> None:
        """Raise Known if a block that was found on the GPU has been evicted for another group's external tokens."""
        local = self.requests[name].local
        blocks = [some[: local // group.block_tokens] for some, group in zip(found, self.setup.groups, strict=True)]
        if external and not all(map(all, blocks)) and "offload-external-evicts-hits" in self.avoid:
            raise Known("offload-external-evicts-hits")

    def _check_window(self, name: str, rows: Rows, found: Sequence[Sequence[bool]], external: int) -> None:
        """Raise Known if a hit ends inside a window's chunk: the window reaches into one more than it covers."""
        end = self.requests[name].local + external
        needed = [self.model.window_chunks(group, end) for group in range(len(self.setup.groups))]
        covered = [self.model.window_chunks(group, 0) for group in range(len(self.setup.groups))]
        if needed != covered and "offload-window-assert" in self.avoid:
            raise Known("offload-window-assert")

    def _stores_one_twice(self) -> bool:
        """Whether a job in flight since a reset of the tier has a window's block twice: once as another's."""
        jobs = [job for job in self.model.jobs.values() if job.store and job.window_blocks and self.tier.resets > 0]
        stored = [job.window_blocks + job.other_blocks for job in jobs]
        return any(len(set(blocks)) < len(blocks) for blocks in stored)

    def _stores_nulls(self, seen: target.StepSeen) -> bool:
        """Whether a chunk that is stored in a step has a block that has left the window."""
        self._step(seen)
        for offer in self.offers:
            for key in offer.taken or ():
                first = offer.request.keys[key.group].index(key) * self.setup.chunk_blocks
                if NULL in offer.request.table[key.group][first : first + self.setup.chunk_blocks]:
                    return True
        return False

    def _check_sent(self, sent: set[str]) -> None:
        """Raise Known if a request's stores are reported, and its blocks released, while it loads."""
        loading = {job.request.name for job in self.model.jobs.values() if not job.store}
        if "offload-abort-while-loading" in self.avoid and not loading.isdisjoint(sent):
            raise Known("offload-abort-while-loading")

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
_CALL_ARMS: dict[str, tuple[Callable[..., None], str]] = {
    "on_new_request": (IndexPair._arrived, "STORE-1"),
    "get_num_new_matched_tokens": (IndexPair._looked_up, "LOOKUP-2"),
    "update_state_after_alloc": (IndexPair._admitted, "ADMIT-1"),
    "build_connector_meta": (IndexPair._stepped, "STORE-7"),
    "update_connector_output": (IndexPair._reported, "JOB-2"),
    "request_finished": (IndexPair._finished, "JOB-5"),
    "reset_cache": (IndexPair._was_reset, "STORE-14"),
}
"""Call -> what it means to the model, and the clause that is broken if the model can't do the same."""
