"""Histories of one engine with SimpleCPUOffloadConnector."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvspec.ops import EngineSetup
from kvspec.targets import Target
from kvspec.world import Outcome, World
from strategies.traffic import MIXES, SEEDS, Mix, Traffic, chosen, drawn, mixes

ADVERSARY_NAMES = ("random", "random", "pct:1", "pct:3", "fair")
ADVERSARIES = st.sampled_from(ADVERSARY_NAMES)

SETUPS: dict[str, tuple[Any, ...]] = {
    "gpu_blocks": (7, 9, 12),
    "cpu_blocks": (4, 7, 12, 20),
    "step_tokens": (6, 16, 48),
    "running_max": (2, 4),
    "async_scheduling": (False, True),
    "runner_v2": (False, True),
    "ranks": (1, 1, 1, 2),
    "lazy": (False, False, False, True),
    "events": (False, True),
    "priority": (False, False, True),
}
"""Small engines: pools that a handful of requests can fill. Values that are listed twice are drawn twice as often."""


def setups() -> st.SearchStrategy[EngineSetup]:
    """Draw a small engine."""
    return drawn(EngineSetup, SETUPS)


class Sink(Protocol):
    """Gets every history that has ended. A machine without one fails with the first violation instead."""

    def __call__(self, world: World, outcome: Outcome) -> None: ...


class SimpleOffloadMachine(RuleBasedStateMachine):
    """Bursts of traffic on one engine."""

    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {
            "store",
            "load",
            "load finished",
            "partial hit",
            "CPU eviction",
            "preemption",
            "resumption",
            "same-step reuse",
            "lookup without allocation",
            "abort while waiting",
            "abort while loading",
            "abort while running",
            "abort in step",
            "stop token",
            "reset",
            "reset refused",
            "reset with transfers in flight",
            "idle",
            "rank skew",
            "step without a forward",
        }
    )
    target: ClassVar[Target]
    sink: ClassVar[Sink | None] = None
    fair: ClassVar[bool] = False
    """Ablation: a device that always makes progress, instead of the adversary that was drawn."""
    live_prefixes: ClassVar[bool] = True
    """Ablation if false: no prompt is repeated or continued on purpose."""

    world: World | None = None

    @initialize(setup=setups(), mix=mixes(), adversary=ADVERSARIES, seed=SEEDS)
    def start(self, setup: EngineSetup, mix: Mix, adversary: str, seed: int) -> None:
        self.world = World(self.target, setup, "fair" if self.fair else adversary, seed)
        self.traffic = Traffic(setup, mix if self.live_prefixes else replace(mix, again=0, onward=0), self.world)

    @rule(seed=SEEDS)
    def burst(self, seed: int) -> None:
        assert self.world is not None
        for op in self.traffic.burst(seed):
            self.world.apply(op)

    @classmethod
    def raw(cls, rng: random.Random, rules: int) -> None:
        """Make one history without Hypothesis: the same choices, each drawn evenly, and so many bursts."""
        machine = cls()
        machine.start(
            setup=chosen(EngineSetup, SETUPS, rng),
            mix=chosen(Mix, MIXES, rng),
            adversary=rng.choice(ADVERSARY_NAMES),
            seed=rng.getrandbits(32),
        )
        for _ in range(rules):
            machine.burst(seed=rng.getrandbits(32))
        machine.teardown()

    def teardown(self) -> None:
        if self.world is None:
            return
        outcome = self.world.finish()
        if self.sink is not None:
            self.sink(self.world, outcome)
        elif outcome.violations:
            raise AssertionError("\n".join(f"{v.law}: {v.message}" for v in outcome.violations))


MACHINES: dict[str, type[SimpleOffloadMachine]] = {"vllm-simple": SimpleOffloadMachine}
