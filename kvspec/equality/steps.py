"""The engine's scheduler with many steps in flight: what it counts, and its KV cache, beside the model's.

The scheduler decides who is scheduled; each of its decisions is made to the model too, and then what follows from it is
compared. No op may make the engine raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from kvspec.equality.compare import EndsAtKnown, Known, avoided
from kvspec.equality.follow import Arguments, Follower, binding, same
from kvspec.model.clauses import agree
from kvspec.model.deferred import DeferredFrees
from kvspec.model.profile import Profile
from kvspec.model.requests import Request
from kvspec.model.step_ops import AbortOne, EngineStep, ResetAll, StepOp, StepSetup, Submit
from kvspec.model.steps import Steps
from kvspec.ops import EngineSetup
from kvspec.targets.vllm.steps import StepEngine


class StepFollower(Follower):
    """Follows a scheduler's KV cache manager, and what of the scheduler defers the release of blocks."""

    def __init__(self, real: StepEngine) -> None:
        super().__init__(real.scheduler.kv_cache_manager, real.hash_tokens)
        self.deferred = DeferredFrees(self.model)
        self._real = real
        for name, (arm, clause) in _DEFERRED.items() if real.defers else ():
            self.clauses[name] = same(clause)
            self._wrap(real.scheduler, name, arm)

    def _compare(self, name: str, expect: Any, result: Any, arguments: Arguments) -> None:
        if name in _DEFERRED:
            pending = [blocks for _, blocks in self.deferred.pending]
            actual = self._real.deferred_blocks()
            agree(_DEFERRED[name][1], len(pending), len(actual))
            agree("FREE-2", pending, actual)
        super()._compare(name, expect, result, arguments)

    def _free_or_defer(self, request: Request, arguments: Arguments) -> None:
        self.deferred.free(request)

    def _drain(self, request: Request | None, arguments: Arguments) -> None:
        self.deferred.step_processed()

    def note_step(self, names: list[str]) -> None:
        """Note that a step was scheduled in which these requests compute."""
        self.deferred.scheduled += 1
        for name in names:
            self._requests[name].last_step = self.deferred.scheduled


_DEFERRED: dict[str, tuple[Callable[[Any, Any, Arguments], Any], str]] = {
    "_free_request_blocks": (StepFollower._free_or_defer, "FREE-3"),
    "_drain_deferred_frees": (StepFollower._drain, "FREE-4"),
}
"""Method of a scheduler that defers the release of blocks -> what it means to the model, and its clause."""


_LATE_OUTPUT = "core-reset-in-flight-underflow"


class StepPair(EndsAtKnown):
    """A scheduler in its engine's step function; and the model of what it counts and of its KV cache manager, which
    are called along.
    """

    def __init__(self, setup: StepSetup, profile: Profile, avoid: frozenset[str] | None = None) -> None:
        self.setup = setup
        self.avoid = avoided(setup, profile) if avoid is None else avoid
        self.reached: Counter[str] = Counter()
        self.submitted = 0
        engine = EngineSetup(
            gpu_blocks=setup.blocks,
            block_size=setup.block_tokens,
            step_tokens=setup.step_tokens,
            running_max=setup.running_max,
            async_scheduling=setup.asynchronous,
            runner_v2=setup.asynchronous and setup.stages > 1,  # runner V1 doesn't schedule ahead with several stages
            priority=setup.priority,
            events=True,
        )
        self.real = StepEngine(engine, setup.stages, setup.drafts, setup.draft_model, setup.defers)
        self.follower = StepFollower(self.real)
        self.steps = Steps(profile, drafts=setup.drafts, draft_model=setup.draft_model)
        self._resets = False
        scheduler = self.real.scheduler
        for owner, name, note in (
            (scheduler.kv_cache_manager, "allocate_slots", self._asked_for_slots),
            (scheduler, "schedule", self._scheduled),
            (scheduler, "_preempt_request", self._preempted),
            (scheduler, "update_from_output", self._processed),
        ):
            self._wrap(owner, name, note)

    def _wrap(self, owner: Any, name: str, note: Callable[[Arguments, Any], None]) -> None:
        method = getattr(owner, name)
        bind = binding(method)

        def noted(*positional: Any, **named: Any) -> Any:
            result = method(*positional, **named)
            note(bind(*positional, **named).arguments, result)
            return result

        setattr(owner, name, noted)

    def _asked_for_slots(self, arguments: Arguments, granted: Any) -> None:
        name = arguments["request"].request_id
        agree("STEP-5", self.steps.lookahead(name), arguments["num_lookahead_tokens"])
        if granted is not None:
            self.steps.grant(name, arguments["num_new_tokens"])

    def _scheduled(self, arguments: Arguments, plan: Any) -> None:
        tokens, begins = plan.num_scheduled_tokens, self.real.begins(plan)
        for name in tokens:
            progress, clause = self.steps.requests[name], "STEP-1"
            if progress.waiting:
                self.steps.admit(name, self.follower.hits[name])
                clause = "STEP-3"
            agree(clause, progress.computed, begins[name])
            agree("STEP-1", progress.granted, tokens[name])
            self.steps.schedule(name, len(plan.scheduled_spec_decode_tokens.get(name, ())))
        if tokens:
            self.follower.note_step(list(tokens))
        self._compare("STEP-1", "STEP-1")

    def _preempted(self, arguments: Arguments, result: None) -> None:
        name = arguments["request"].request_id
        in_flight = bool(self.steps.requests[name].works)
        self.reached["reset-in-flight"] += self._resets and in_flight
        if in_flight and _LATE_OUTPUT in self.avoid:
            raise Known(_LATE_OUTPUT)
        self.steps.preempt(name, drop=self._resets)

    def _processed(self, arguments: Arguments, result: Any) -> None:
        output = arguments["model_runner_output"]
        self._forget_ended()
        for name, said in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if name in self.steps.requests:
                work = self.steps.requests[name].works[0]
                self.reached["rejected"] += 0 < len(said) <= work.drafts
                self.reached["stale"] += work.stale and bool(said)
                self.steps.process(name, len(said))
        self._compare("STEP-2", "STEP-4")

    def _forget_ended(self) -> None:
        self.steps.keep(set(self.real.live()))

    def _compare(self, computed: str, length: str) -> None:
        for name, progress in self.steps.requests.items():
            agree("STEP-3" if progress.waiting else computed, progress.computed, self.real.computed(name))
            agree(length, progress.length, self.real.length(name))
            if (in_flight := self.real.in_flight(name)) is not None:
                agree(computed, progress.in_flight, in_flight)

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""
        return self.real.state()

    def _apply(self, op: StepOp) -> None:
        _STEP_ARMS[type(op)](self, op)

    def submit(self, op: Submit) -> None:
        tokens = [*range(op.shared), *(1000 * (self.submitted + 1) + i for i in range(op.tail))]
        slots = (self.setup.blocks - 1) * self.setup.block_tokens
        if len(tokens) + op.says > slots - 2 * self.setup.drafts - 1:  # it would wait for blocks for ever
            return
        name = f"r{self.submitted}"
        self.steps.arrive(name, len(tokens))
        self.real.add(name, tokens, op.says, op.priority, self.submitted)
        self.submitted += 1

    def step(self, op: EngineStep) -> None:
        self.real.answers.random = Random(op.accepted)
        for _ in range(op.count):
            before = self.real.preempted()
            self.real.step()
            self.reached["preempted"] += self.real.preempted() > before
            self.reached["steps-overlap"] += self.real.steps_in_flight() > 1
            self.reached["deferred"] += len(self.follower.deferred.pending) > 0

    def abort(self, op: AbortOne) -> None:
        names = self.real.live()
        if names:
            self.real.abort(names[op.pick % len(names)])
            self._forget_ended()

    def reset(self, op: ResetAll) -> None:
        in_flight = any(progress.works for progress in self.steps.requests.values())
        if op.running and in_flight and _LATE_OUTPUT in self.avoid:
            self.reached[f"known:{_LATE_OUTPUT}"] += 1
            return
        self._resets = True
        try:
            done = self.real.reset(bool(op.running))
        except RuntimeError:  # how vLLM refuses it while blocks are in use although nothing runs
            if not self.follower.deferred.pending:
                raise
            done = False
        finally:
            self._resets = False
        self.reached["reset" if done else "reset-refused"] += 1
        self._compare("STEP-3", "STEP-4")


_STEP_ARMS: dict[type, Callable[[StepPair, Any], None]] = {
    Submit: StepPair.submit,
    EngineStep: StepPair.step,
    AbortOne: StepPair.abort,
    ResetAll: StepPair.reset,
}
