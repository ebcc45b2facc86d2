"""The machine: bursts of traffic on one engine of a target."""

from __future__ import annotations

from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvspec.ops import EngineSetup
from kvspec.targets import Target
from kvspec.world import Outcome, World
from strategies.traffic import SEEDS, Mix, Traffic, mixes

ADVERSARIES = st.sampled_from(["random", "random", "pct:1", "pct:3", "fair"])


class Sink(Protocol):
    """Gets every history that has ended. A machine without one fails with the first violation instead."""

    def __call__(self, world: World, outcome: Outcome) -> None: ...


class OffloadMachine(RuleBasedStateMachine):
    """Bursts of traffic on one engine. A machine of a connector says which engines, and what must be reached."""

    REQUIRED: ClassVar[frozenset[str]] = frozenset()
    setups: ClassVar[st.SearchStrategy[EngineSetup]]
    target: ClassVar[Target]
    sink: ClassVar[Sink | None] = None

    world: World | None = None

    @initialize(data=st.data(), mix=mixes(), adversary=ADVERSARIES, seed=SEEDS)
    def start(self, data: st.DataObject, mix: Mix, adversary: str, seed: int) -> None:
        setup = data.draw(self.setups)
        self.world = World(self.target, setup, adversary, seed)
        self.traffic = Traffic(setup, mix, self.world)

    @rule(seed=SEEDS)
    def burst(self, seed: int) -> None:
        assert self.world is not None
        for op in self.traffic.burst(seed):
            self.world.apply(op)

    def teardown(self) -> None:
        if self.world is None:
            return
        outcome = self.world.finish()
        if self.sink is not None:
            self.sink(self.world, outcome)
        elif outcome.violations:
            raise AssertionError("\n".join(f"{v.law}: {v.message}" for v in outcome.violations))
