"""The engine's scheduler with many steps in flight: what no op may make raise, with the model beside its KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from kvspec.equality.follow import Follower
from kvspec.model.step_ops import AbortOne, EngineStep, ResetAll, StepOp, StepSetup, Submit
from kvspec.ops import EngineSetup
from kvspec.targets.vllm.steps import StepEngine


class StepPair:
    """A scheduler in its engine's step function, and the model of its KV cache manager, which is called along."""

    def __init__(self, setup: StepSetup) -> None:
        self.setup = setup
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
        )
        self.real = StepEngine(engine, setup.stages, setup.drafts)
        self.follower = Follower(self.real.scheduler.kv_cache_manager, self.real.hash_tokens)

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""
        return self.real.state()

    def apply(self, op: StepOp) -> None:
        """Apply an op. ClauseBroken if the model differs; whatever the engine raises goes through."""
        _STEP_ARMS[type(op)](self, op)

    def submit(self, op: Submit) -> None:
        tokens = [*range(op.shared), *(1000 * (self.submitted + 1) + i for i in range(op.tail))]
        slots = (self.setup.blocks - 1) * self.setup.block_tokens
        if len(tokens) + op.says > slots - self.setup.drafts - 1:  # it would wait for blocks for ever
            return
        self.real.add(f"r{self.submitted}", tokens, op.says, op.priority, self.submitted)
        self.submitted += 1

    def step(self, op: EngineStep) -> None:
        self.real.random = Random(op.accepted)
        for _ in range(op.count):
            before = self.real.preempted()
            self.real.step()
            self.reached["preempted"] += self.real.preempted() > before
            self.reached["steps-overlap"] += self.real.steps_in_flight() > 1

    def abort(self, op: AbortOne) -> None:
        names = self.real.live()
        if names:
            self.real.abort(names[op.pick % len(names)])

    def reset(self, op: ResetAll) -> None:
        overlaps = bool(op.running and self.real.steps_in_flight() and self.real.live())
        self.reached["reset" if self.real.reset(bool(op.running)) else "reset-refused"] += 1
        self.reached["reset-in-flight"] += overlaps


_STEP_ARMS: dict[type, Callable[[StepPair, Any], None]] = {
    Submit: StepPair.submit,
    EngineStep: StepPair.step,
    AbortOne: StepPair.abort,
    ResetAll: StepPair.reset,
}
