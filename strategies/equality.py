"""Histories of vLLM's own block pool and KV cache manager, beside the model's."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any, ClassVar, Protocol

from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvspec import laws
from kvspec.laws import Violation
from kvspec.model import ops
from kvspec.model.clauses import ClauseBroken
from kvspec.model.ops import CoreHistory, CoreOp
from kvspec.model.profile import Profile, known_issues, profile_for
from kvspec.targets.vllm import core as target
from kvspec.world import Outcome, innermost_frame
from strategies.core import (
    CACHE_REQUIRED,
    POOL_REQUIRED,
    CachePair,
    Mix,
    PoolPair,
    difference,
    draw_mix,
    draw_ops,
    draw_setup,
    pair_for,
)
from strategies.traffic import SEEDS

BURST_OPS = 20
"""Ops of one rule."""


class EqualityWorld:
    """One block pool or KV cache manager, real and modelled, from its start to the first difference."""

    def __init__(self, name: str, setup: ops.PoolSetup | ops.CacheSetup) -> None:
        self.alive = True
        self._name = name
        self._setup = setup
        self._ops: list[CoreOp] = []
        self._outcome = Outcome()
        self._trace = hashlib.blake2b(digest_size=16)
        self._pair: PoolPair | CachePair | None = None
        self._guard("start", self._start)

    def _start(self) -> None:
        self._pair = pair_for(CoreHistory(self._name, self._setup, ()))

    def apply(self, op: CoreOp) -> None:
        """Apply an op to both sides and compare. Does nothing after the first difference."""
        if not self.alive or self._pair is None:
            return
        self._ops.append(op)
        self._outcome.steps += 1
        pair: Any = self._pair
        self._guard(str(op.__struct_config__.tag), lambda: pair.apply(op))
        self._trace.update(repr(pair.state()).encode())

    def finish(self) -> Outcome:
        """Return what was seen."""
        if self._pair is not None:
            self._outcome.reached = +self._pair.reached
        self._outcome.trace = self._trace.hexdigest()
        return self._outcome

    def history(self) -> CoreHistory:
        """Return what has happened, as data."""
        return CoreHistory(self._name, self._setup, tuple(self._ops))

    def _guard(self, kind: str, run: Any) -> None:
        try:
            run()
        except ClauseBroken as broken:
            self._end(broken.clause.id, broken.difference(), kind, self._cause())
        except Exception as error:
            frame = innermost_frame(error, target.own_files())
            if frame is None:
                raise
            self._end(laws.CRASH, f"{type(error).__name__}: {error}", kind, frame)

    def _cause(self) -> str:
        """Return the known issue without which there is no difference, or nothing if there is one anyway."""
        if self._setup.avoids_known:
            return ""
        issues = sorted(known_issues(profile_for(target.release()).release))
        for count in range(1, len(issues) + 1):
            if difference(self.history(), frozenset(issues[:count])) is None:
                return issues[count - 1]
        return ""

    def _end(self, law: str, message: str, kind: str, place: str) -> None:
        self.alive = False
        self._outcome.violations.append(Violation(law, message, kind, place, max(0, len(self._ops) - 1)))


def run_history(history: CoreHistory) -> Outcome:
    """Let a recorded history happen again, up to its first difference."""
    world = EqualityWorld(history.target, history.setup)
    for op in history.ops:
        world.apply(op)
    return world.finish()


class Sink(Protocol):
    """Gets every history that has ended. A machine without one fails with the first difference instead."""

    def __call__(self, world: EqualityWorld, outcome: Outcome) -> None: ...


class EqualityMachine(RuleBasedStateMachine):
    """Bursts of ops on one block pool or KV cache manager."""

    REQUIRED: ClassVar[frozenset[str]]
    target: ClassVar[str]
    profile: ClassVar[Profile]
    sink: ClassVar[Sink | None] = None

    world: EqualityWorld | None = None
    mix: Mix

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        """Begin with a pool or, more often, a cache."""
        random = Random(seed)
        level = random.choice(("pool", "cache", "cache", "cache"))
        self.mix = draw_mix(random, level)
        self.world = EqualityWorld(self.target, draw_setup(random, level, self.profile))

    @rule(seed=SEEDS)
    def burst(self, seed: int) -> None:
        assert self.world is not None
        for op in draw_ops(Random(seed), self.mix, BURST_OPS):
            self.world.apply(op)

    def teardown(self) -> None:
        if self.world is None:
            return
        outcome = self.world.finish()
        if self.sink is not None:
            self.sink(self.world, outcome)
        elif outcome.violations:
            raise AssertionError("\n".join(f"{v.law}: {v.message}" for v in outcome.violations))


def machine_of(name: str) -> type[EqualityMachine]:
    """Return the machine for a target, with what its release can and so must reach."""
    target.warm_up()
    profile = profile_for(target.release())
    required = {event for event, when in {**POOL_REQUIRED, **CACHE_REQUIRED}.items() if when(profile)}
    values = {"target": name, "profile": profile, "REQUIRED": frozenset(required)}
    return type(EqualityMachine.__name__, (EqualityMachine,), values)
