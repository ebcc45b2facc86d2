"""A KV cache manager of the model beside a ``KVCacheManager``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from kvspec.equality.compare import Names, Refused, attempt, avoided, compare_events, compare_pools, described
from kvspec.equality.contents import content_of
from kvspec.model import ops
from kvspec.model.cache import CacheManager
from kvspec.model.checkpoints import Checkpoint, checkpoint_end
from kvspec.model.clauses import agree
from kvspec.model.deferred import DeferredFrees
from kvspec.model.groups import Kind, blocks_for, skipped_tokens
from kvspec.model.keys import PLAIN, Content, Text
from kvspec.model.pool import NULL
from kvspec.model.profile import Profile
from kvspec.model.requests import Hit, Request
from kvspec.model.scaling import ContextParallel, alignment_tokens
from kvspec.targets.vllm import core as target

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
        self.prompts: list[tuple[list[int], Content]] = []
        self._kept: list[Checkpoint | None] = []
        """The checkpoint of the last step that was asked for, per group."""
        self.has_align = any(group.align for group in setup.groups)
        """Whether a Mamba group is in align mode."""
        self.has_checkpoints = any(group.checkpoint_unit for group in setup.groups)
        """Whether one can keep states in the middle of a chunk: then chunks end where vLLM's scheduler ends them."""
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
            unit=setup.unit,
            junctions=setup.junctions,
            events=True,
        )
        self.model.registrar.proves = "core-eagle-window-unregistered" not in self.avoid
        self.calls: list[target.Call] = []
        self._record(self.model, "blocks_needed", _needed_call)
        self._record(self.model.pool, "register", _register_call)
        self._record(
            self.model.pool,
            "register_tail",
            lambda result, text, block, tokens, group, replace=False: ("tail", group, tokens),
        )
        self.deferred = DeferredFrees(self.model)
        self.real = target.RealCache(
            described(setup.groups),
            setup.blocks,
            caching=setup.caching,
            prefill=setup.prefill,
            decode=setup.decode,
            eagle=any(group.eagle for group in groups),
            max_tokens=setup.max_tokens,
            in_flight_tokens=setup.in_flight_tokens,
            watermark=setup.watermark_percent / 100,
            interval=interval,
            unit=setup.unit,
            junctions=setup.junctions,
        )
        agree("SCALE-1", self.model.spans, self.real.sizes.spans)
        agree("SCALE-3", self.model.layout.alignment, self.real.sizes.alignment)
        if setup.caching:
            agree("SCALE-4", self.model.layout.hash_tokens, self.real.sizes.hash_tokens)
            agree("SCALE-9", self.model.layout.hit_tokens, self.real.sizes.hit_tokens)
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
        again = op.again > 0 and self.prompts
        begin, content = self.prompts[-op.again :][0] if again else (list(range(4 * op.shared)), PLAIN)
        content = content_of(op.content, self.avoid) or content
        tokens = begin + [1000 * (op.branch + 1) + i for i in range(op.tail)]
        tokens = tokens[: self.setup.max_tokens - 8] or [0]
        self.prompts.append((tokens, content))
        self.reached["content"] += content != PLAIN
        name = f"r{len(self.prompts)}"
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
        request = live.model
        holds = request.name in self.model.tables
        self._agree_on_windows(request)
        hit = None
        if not holds and (hit := self._lookup(live)) is None:
            return
        local = request.computed + (hit.tokens if hit else 0)
        known = len(request.text.tokens)
        external = 0 if hit is None else max(0, min(op.external, known - local))
        delay = bool(op.delay and external)
        left = known - local - external
        new = 0 if delay else min(op.tokens, left) if left > 0 else min(op.tokens, 1)
        if self.has_checkpoints and new:
            new = self.real.chunk(live.real, new, hit.tokens if hit else 0, external)
            if not new:
                return
        else:
            new = self._cut(request, local + external, new, op.stop)
        drafts = max(0, op.drafts)
        if self.has_checkpoints:
            # As in engines: nothing is drafted in a prompt, nor for who holds nothing; and less than a block has.
            decodes = holds and left == 1 and known > request.prompt_tokens
            drafts = min(drafts, min(self.model.spans) - 1) if decodes else 0
        new += drafts if 0 < new == left else 0
        computed = local + external + new
        too_far = left < (-3 if holds else 0) or computed > self.setup.max_tokens
        if too_far or self._is_left_out(request, hit, external, delay, computed):
            return
        checkpoints = self.model.checkpoints(request, local + external, computed)
        if self._shows_at_checkpoint(request, checkpoints):
            return
        in_flight = min(max(0, op.in_flight), request.computed)
        request.in_flight = 0 if "core-window-freed-too-early" in self.avoid else in_flight
        live.real.num_in_flight_tokens = request.in_flight
        settings: dict[str, Any] = {
            "lookahead": max(0, op.lookahead),
            "external": external,
            "must_fit": bool(op.must_fit and (new or external)) and not holds,
            "reserved": max(0, op.reserved),
            "others_run": bool(op.others_run),
        }
        self._kept = checkpoints
        if self._allocate(live, new, hit, delay, settings):
            self._scheduled(live, computed, delay)

    def _agree_on_windows(self, request: Request) -> None:
        """Compare how many tokens the next one doesn't read, in each group."""
        for index, group in enumerate(self.model.groups):
            skipped = skipped_tokens(group, request.computed)
            agree("WINDOW-1", skipped, self.real.skipped_tokens(index, request.computed))

    def _is_left_out(self, request: Request, hit: Hit | None, external: int, delay: bool, computed: int) -> bool:
        """Whether a step up to so many computed tokens isn't compared: no engine makes it, or a known issue shows."""
        if hit and hit.tokens % self.model.layout.alignment and external:
            return True  # Connectors bring whole blocks.
        if self.has_align and external and not delay:
            return True  # Offload connectors load states asynchronously; the count of needed blocks is made for that.
        shows = {
            "core-passed-state-registered": self.has_align and computed > len(request.text.tokens),
            "core-states-over-allocated": self._over_allocated(request, computed),
            "core-external-evicts-local-hit": len(self.setup.groups) > 1 and hit and hit.tokens > 0 and external > 0,
        }
        return any(shows[issue] for issue in self.avoid & shows.keys())

    def _shows_at_checkpoint(self, request: Request, checkpoints: list[Checkpoint | None]) -> bool:
        """Whether a known issue that is kept out of the way can show in a step with checkpoints."""
        shows = [_CHECKPOINT_ISSUES[issue] for issue in self.avoid & _CHECKPOINT_ISSUES.keys()]
        return any(one and show(self, request, index, one) for show in shows for index, one in enumerate(checkpoints))

    def starts_inside(self, request: Request, index: int, checkpoint: Checkpoint) -> bool:
        """Whether core-started-state-registered can show."""
        return checkpoint.begin % self.model.spans[index] > 0

    def leaves_spares(self, request: Request, index: int, checkpoint: Checkpoint) -> bool:
        """Whether core-spares-registered can show: the step leaves a spare behind."""
        held, spares = self.model.held.get(request.name), self.model.groups[index].spares
        if held is None or not (held.running[index].allocated and spares):
            return False
        return len(held.rows[index]) - spares < checkpoint.place

    def counts_nulls(self, request: Request, index: int, checkpoint: Checkpoint) -> bool:
        """Whether core-checkpoint-counts-nulls can show: the step jumps over a place, and there are no spares."""
        held, spares = self.model.held.get(request.name), self.model.groups[index].spares
        return held is not None and not spares and checkpoint.place > len(held.rows[index])

    def forgets(self, request: Request, index: int, checkpoint: Checkpoint) -> bool:
        """Whether core-prompt-checkpoint-forgotten can show."""
        end = checkpoint_end(self.model.layout, index, request.prompt_tokens)
        return self.setup.interval == 0 and checkpoint.end == end

    def _over_allocated(self, request: Request, tokens: int) -> bool:
        rows = zip(self.model.groups, self.model.spans, self.model.tables.get(request.name, []), strict=False)
        return any(group.align and blocks_for(tokens, span) + group.spares < len(row) for group, span, row in rows)

    def _allocate(self, live: Live, new: int, hit: Hit | None, delay: bool, settings: dict[str, Any]) -> bool:
        """Ask both sides for the blocks of a step, and compare. Return whether it was granted."""
        request, real = live
        holds, external = request.name in self.model.tables, settings["external"]
        local = request.computed + (hit.tokens if hit else 0)
        self._look(request)
        expect = attempt(lambda: self.model.allocate(request, new, hit, delay_registration=delay, **settings))
        actual = attempt(
            lambda: self.real.allocate(
                real, new, hit.tokens if hit else 0, hit=hit is not None, delay=delay, **settings
            )
        )
        self._count(request, hit, external, expect)
        self._agree_on_refusal(live, settings, hit, expect, actual)
        if self.profile.hits_inside:
            self._agree_on_copies(hit)
        self._agree_on_rows(live, local + external, external, holds)
        agree("STATE-2" if self.has_align else "ALLOC-7", expect, actual)
        self._agree_on_registration(live)
        self._compare(queue="ALLOC-7", references="ALLOC-5", hashes="PREFIX-4", rows="ALLOC-7")
        return not (expect is None or isinstance(expect, Refused))

    def _scheduled(self, live: Live, computed: int, delay: bool) -> None:
        """Note that a step was scheduled. Delayed registration follows at once."""
        request, real = live
        request.computed = real.num_computed_tokens = computed
        request.waiting = False
        target.set_status(real, "RUNNING")
        self.deferred.scheduled += 1
        self.real.fence.sched_step_seq = self.deferred.scheduled
        request.last_step = real.last_sched_seq = self.deferred.scheduled
        if delay:
            self.model.register(request, request.computed)
            self.real.register(real, request.computed)
            self._agree_on_registration(live)
            self._compare(queue="REG-1", references="REG-1", hashes="REG-1", rows="REG-1")

    def _cut(self, request: Request, computed: int, new: int, stop: int) -> int:
        """Return the new tokens of a chunk that ends where the scheduler of align mode, or another one, ends it."""
        spans = [span for group, span in zip(self.model.groups, self.model.spans, strict=True) if group.align]
        if not (spans and stop):
            return new
        if stop == 4:
            return request.shared_prefix - computed if computed < request.shared_prefix < computed + new else new
        unit = spans[0] if stop == 1 else self.model.layout.hash_tokens
        end = min(computed + new, request.prompt_tokens - 1 if stop == 3 else computed + new) // unit * unit
        return end - computed if end > computed else new

    def _agree_on_refusal(
        self, live: Live, settings: dict[str, Any], hit: Hit | None, expect: Any, actual: Any
    ) -> None:
        """Compare whether a step was refused, and what was counted for that."""
        request, real = live
        in_growth = Refused("AssertionError") in (expect, actual)
        agree("STATE-2" if in_growth else "ALLOC-1", isinstance(expect, Refused), isinstance(actual, Refused))
        counts = [[call for call in calls if call[0] == "needed"] for calls in (self.calls, self.real.calls)]
        fresh = hit is not None and any(
            row and group.kind is Kind.MAMBA and self.model.pool.blocks[row[-1]].hash in self.model.registrar.fresh
            for group, row in zip(self.model.groups, hit.blocks, strict=True)
        )
        spans = self.model.spans
        inside = hit is not None and any(row and hit.tokens % span for row, span in zip(hit.blocks, spans, strict=True))
        clauses = ["NEED-2" if fresh else "NEED-5" if inside else "STATE-1" if self.has_align else "NEED-1"] * 2
        if settings["must_fit"] and not fresh:
            clauses[0] = "NEED-3"
        asked = [bool(calls) and not calls[-1][1] for calls in counts]  # for the step, not only for admission
        if self.has_checkpoints and all(asked) and not fresh:
            only_ends = self.setup.interval == 0 and self.profile.checkpoints_only_at_prompt_end
            clause = "NEED-6" if only_ends else "STATE-6"
            agree(clause, [one is not None for one in self._kept], self.real.keeps_checkpoint(real))
        for clause, expected, seen in zip(clauses, *counts, strict=False):
            agree("ALLOC-3", expected[1], seen[1])
            agree("ALLOC-4", expected[2], seen[2])
            agree(clause, expected[3], seen[3])
        agree("ALLOC-3", len(counts[0]), len(counts[1]))
        watermark = self.setup.watermark_percent and request.waiting and not settings["reserved"]
        agree("ALLOC-2" if watermark else "ALLOC-8", expect is None, actual is None)

    def _agree_on_rows(self, live: Live, computed: int, external: int, held: bool) -> None:
        """Compare a request's rows: what it has given up, taken over, and got for external tokens."""
        rows = self.model.tables.get(live.model.name, [[] for _ in self.model.groups])
        sides = zip(self.model.groups, self.model.spans, rows, self.real.rows(live.real), strict=True)
        for group, span, row, actual in sides:
            covered = blocks_for(computed, span)
            nulls = [[index for index, block in enumerate(some[:covered]) if block == NULL] for some in (row, actual)]
            agree(("STATE-3" if group.align else "WINDOW-2") if held else "ALLOC-5", *nulls)
            agree("ALLOC-6" if external else "ALLOC-5", row[:covered], actual[:covered])

    def _agree_on_copies(self, hit: Hit | None) -> None:
        """Compare what must be copied before the step runs."""
        for group, copies, actual in zip(self.model.groups, self.model.copies, self.real.copies(), strict=True):
            clause = "STATE-4" if group.align and hit is None else "ALLOC-9"
            agree(clause, [tuple(copy) for copy in copies], actual)

    def _agree_on_registration(self, live: Live) -> None:
        """Compare which blocks were registered."""
        if "core-state-registered-again" in self.avoid:
            self._excuse_states_registered_again(live.model)
        full = [[call for call in calls if call[0] == "register"] for calls in (self.calls, self.real.calls)]
        ends = [[call[:4] for call in calls] for calls in full]
        agree("REG-1" if len(self.model.groups) == 1 else "REG-3", *ends)
        passes_over = any(one and one.begin % span for one, span in zip(self._kept, self.model.spans, strict=True))
        agree("REG-8" if passes_over else "REG-2" if self.setup.interval < 0 else "REG-4", *full)
        tails = [[call[1:] for call in calls if call[0] == "tail"] for calls in (self.calls, self.real.calls)]
        for index, group in enumerate(self.model.groups):
            own = [[call for call in some if call[0] == index] for some in tails]
            agree(self._clause_of_tails(live.model, index, own) if group.align else "REG-5", *own)
        self.calls.clear()
        self.real.calls.clear()
        if self.setup.caching:
            agree("NEED-2", set(map(self.names.of, self.model.registrar.fresh)), self.real.fresh())

    def _clause_of_tails(self, request: Request, index: int, tails: list[list[target.Call]]) -> str:
        """Return the clause that says where states are registered inside a prompt."""
        if (kept := self._kept[index]) is not None:
            ends = [call[1] for call in tails[1]]
            return "REG-9" if not ends else "REG-8" if ends == [kept.end] else "STATE-5"
        parts = any(call[1] == request.shared_prefix for some in tails for call in some)
        same = request.shared_prefix == self.model.registrar.prompt_state_end(request, index)
        return "REG-7" if self.setup.junctions and parts and not same else "REG-6"

    def _excuse_states_registered_again(self, request: Request) -> None:
        """Take out of the implementation's calls what registers a state under the key that it has; the state counts as
        fresh again.
        """
        for call in [call for call in self.real.calls if call[0] == "tail" and call not in self.calls]:
            _, group, tokens = call
            place = blocks_for(tokens, self.model.spans[group]) - 1
            key = self.model.pool.blocks[self.model.tables[request.name][group][place]].hash
            if (
                self.model.groups[group].align
                and key is not None
                and key.hash == request.text.hashes[tokens // self.model.layout.hash_tokens - 1]
            ):
                self.real.calls.remove(call)
                self.model.registrar.fresh.add(key)
                self.reached["known:core-state-registered-again"] += 1

    def _lookup(self, live: Live) -> Hit | None:
        """Look a request up on both sides. None if they differ as a known issue makes them differ."""
        hit = self.model.lookup(live.model)
        actual = Hit(*self.real.lookup(live.real))
        self.reached["hit"] += max(hit.tokens, actual.tokens) > 0
        if self.setup.caching and self._groups_differ(live):
            return None
        text, limit = live.model.text, len(live.model.text.tokens) - 1
        if actual != hit and self._is_known(hit, actual):
            return None
        if not live.model.reads_cache or actual.tokens > limit:
            agree("HIT-3", hit.tokens, actual.tokens)
        for other in (limit, len(text.tokens)):
            if (
                any(self.model.layout.drops)
                and hit.tokens != actual.tokens
                and self.model.finder.longest(text, limit, range(len(self.model.groups)), other) == actual.tokens
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
        for index, mates in enumerate(self.model.layout.mates):
            inside = self.model.layout.hit_inside(index)
            agree(
                "HIT-8" if inside else "HIT-1",
                self.model.finder.longest(text, limit, mates, None),
                self.real.group_hit(live.real, limit, mates, False),
            )
            if not self.model.layout.drops[index] or self.model.groups[index].kind is Kind.MAMBA:
                continue
            proof_limit = self.model.finder.proof_limit_of(text, limit)
            margin = self.model.layout.hit_tokens if inside else self.model.spans[index]
            reach = limit if proof_limit == limit else min(limit + margin, proof_limit)
            expect = self.model.finder.longest(text, limit, mates, proof_limit)
            actual = self.real.group_hit(live.real, reach, mates, True)
            if expect > actual and self._is_cut_twice(index):
                self.reached["known:core-eagle-first-window"] += 1
                return True
            agree("HIT-8" if inside else "HIT-2", expect, actual)
        return False

    def _is_cut_twice(self, index: int) -> bool:
        return (
            "core-eagle-first-window" in self.avoid
            and self.setup.groups[index].kind is Kind.SLIDING_WINDOW
            and self.model.spans[index] != self.model.layout.alignment
        )

    def _is_known(self, expect: Hit, actual: Hit) -> bool:
        for issue, causes in sorted(_LOOKUP_ISSUES.items()):
            if issue in self.avoid and causes(self, expect, actual):
                self.reached[f"known:{issue}"] += 1
                return True
        return False

    def cuts_twice(self, expect: Hit, actual: Hit) -> bool:
        """Whether core-eagle-first-window can be why a hit is shorter than expected."""
        if not any(drops and self._is_cut_twice(index) for index, drops in enumerate(self.model.layout.drops)):
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
        sides = zip(self.model.groups, self.model.layout.drops, strict=True)
        layouts = {group.layout() for group, drops in sides if drops and group.kind is not Kind.MAMBA}
        return actual.tokens > expect.tokens and len(layouts) > 1

    def reaches_too_far(self, expect: Hit, actual: Hit) -> bool:
        """Whether core-mamba-hit-disagrees can be why a hit is longer than expected."""
        kinds = zip(self.model.groups, self.model.layout.drops, strict=True)
        return actual.tokens > expect.tokens and any(drops and group.kind is Kind.MAMBA for group, drops in kinds)

    def _look(self, request: Request) -> None:
        """Remember what a schedule can change."""
        self.calls.clear()
        self.real.calls.clear()
        self._queue = list(self.model.pool.queue)
        self._hashes = [block.hash for block in self.model.pool.blocks]
        self._nulls = sum(row.count(NULL) for row in self.model.tables.get(request.name, []))

    def _count(self, request: Request, hit: Hit | None, external: int, new: Any) -> None:
        """Count the named events that a schedule reached, before anything is compared."""
        if isinstance(new, Refused):
            self.reached["refused"] += 1
        elif new is None:
            needed = [call[-1] for call in self.calls if call[0] == "needed"]
            self.reached["refused"] += 1
            self.reached["refused-by-reserve"] += any(count <= len(self.model.pool.queue) for count in needed[-1:])
        else:
            taken = [block for row in new for block in row]
            self.reached["evicted"] += sum(self._hashes[block] is not None for block in taken)
            self.reached["hit-inside"] += hit is not None and hit.tokens % self.model.layout.alignment > 0
            self.reached["external"] += external > 0
            self.reached["checkpoint"] += any(self._kept)
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
        if self.profile.hits_inside:
            copies = self.model.take_copies()
            agree("ALLOC-10", [tuple(copy) for copy in copies], self.real.take_copies(self.deferred.scheduled + 1))
            self.deferred.release_copies(copies)
            self.reached["copied"] += len(copies)
            agree("FREE-5", [blocks for _, blocks in self.deferred.pending], self.real.deferred_blocks())
        self.model.new_step()
        self.real.manager.new_step_starts()
        if self.setup.caching:
            agree("NEED-4", set(map(self.names.of, self.model.registrar.fresh)), self.real.fresh())

    def evict(self, op: ops.Evict) -> None:
        blocks = [op.first + i for i in range(op.count)]
        expect = attempt(lambda: self.model.evict(blocks))
        agree("PREFIX-5", expect, attempt(lambda: self.real.manager.evict_blocks(blocks)))
        self._compare(queue="PREFIX-5", references="PREFIX-5", hashes="PREFIX-5", rows="PREFIX-5")

    def reset(self, op: ops.Reset) -> None:
        if op.empty:
            for pick in range(len(self.live)):
                self.preempt(ops.Preempt(pick))
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


_CHECKPOINT_ISSUES: dict[str, Callable[[CachePair, Request, int, Checkpoint], bool]] = {
    "core-started-state-registered": CachePair.starts_inside,
    "core-spares-registered": CachePair.leaves_spares,
    "core-checkpoint-counts-nulls": CachePair.counts_nulls,
    "core-prompt-checkpoint-forgotten": CachePair.forgets,
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
