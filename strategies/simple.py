"""Histories of one engine with SimpleCPUOffloadConnector."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec.structs import replace

from kvspec.ops import AttentionGroup, EngineSetup
from kvspec.targets import Target
from kvspec.world import Outcome, World
from strategies.traffic import SEEDS, Mix, Traffic, mixes

FULL = AttentionGroup()
SHAPES: tuple[dict[str, Any], ...] = (
    *[{}] * 10,
    *[{"ranks": 2}] * 3,
    {"decode_ranks": 2, "interleave": 2},
    {"decode_ranks": 2, "block_size": 2},
    {"decode_ranks": 4, "block_size": 2},
    {"prefill_ranks": 2},
    {"prefill_ranks": 2, "decode_ranks": 2, "block_size": 2, "interleave": 2},
    {"groups": (FULL, AttentionGroup("sliding-window", reach=6))},
    {"groups": (AttentionGroup("sliding-window", reach=5), FULL)},
    {"groups": (AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=5))},
    {"groups": (FULL, FULL, AttentionGroup("sliding-window", reach=9))},
)
"""Worlds of one rank, of tensor-parallel ranks, of context-parallel ones, and layers in several groups.

Small blocks keep traffic comparable where ranks share them.
"""
ADVERSARIES = st.sampled_from(["random", "random", "pct:1", "pct:3", "fair"])


def setups() -> st.SearchStrategy[EngineSetup]:
    """Draw a small engine: pools that a handful of requests can fill."""
    return st.builds(
        _setup,
        shape=st.sampled_from(SHAPES),
        gpu_blocks=st.sampled_from([7, 9, 12]),
        cpu_blocks=st.sampled_from([4, 7, 12, 20]),
        step_tokens=st.sampled_from([6, 16, 48]),
        running_max=st.sampled_from([2, 4]),
        async_scheduling=st.booleans(),
        runner_v2=st.booleans(),
        lazy=st.sampled_from([False, False, False, True]),
        events=st.booleans(),
        priority=st.sampled_from([False, False, True]),
    )


def _setup(shape: dict[str, Any], gpu_blocks: int, cpu_blocks: int, **more: Any) -> EngineSetup:
    groups = len(shape.get("groups", (FULL,)))
    return EngineSetup(gpu_blocks=gpu_blocks * groups, cpu_blocks=cpu_blocks * groups, **shape, **more)


def supported(setup: EngineSetup, target: Target) -> EngineSetup:
    """Return the setup; if the target refuses it, with the other runner, or else with one rank and group."""
    alone = replace(setup, decode_ranks=1, prefill_ranks=1, interleave=1, groups=(FULL,))
    for candidate in (setup, replace(setup, runner_v2=not setup.runner_v2)):
        if not target.refusal(candidate):
            return candidate
    return alone


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

    world: World | None = None

    @initialize(setup=setups(), mix=mixes(), adversary=ADVERSARIES, seed=SEEDS)
    def start(self, setup: EngineSetup, mix: Mix, adversary: str, seed: int) -> None:
        self.world = World(self.target, supported(setup, self.target), adversary, seed)
        self.traffic = Traffic(mix, self.world)

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


MACHINES: dict[str, type[SimpleOffloadMachine]] = {"vllm-simple": SimpleOffloadMachine}
