"""Histories of vLLM's own objects beside the model's: of the core, and of OffloadingConnector."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol, get_args

from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvspec.equality.reached import required
from kvspec.equality.world import EqualityWorld, PairHistory, Setup, history_of, pair_for
from kvspec.model import offload_ops, ops, step_ops
from kvspec.model.clauses import ClauseBroken
from kvspec.model.coarse import CoarseOp
from kvspec.model.profile import Profile, profile_for
from kvspec.ops import history_to_json
from kvspec.targets import parse_target
from kvspec.targets.vllm import core as target
from kvspec.world import Outcome
from strategies.machine import hand_over
from strategies.traffic import SEEDS

BURST_OPS = 20
"""Ops of one rule."""


Mix = tuple[list[type[Any]], list[int]]
"""Kinds of ops, and how often each occurs."""


class Level(NamedTuple):
    """What histories of a level are drawn from."""

    target: str
    setup: Callable[..., Setup]
    setup_ranges: Mapping[str, tuple[int, int]]
    kinds: tuple[type[CoarseOp], ...]
    needed: tuple[type[CoarseOp], ...] = ()
    """Kinds that occur in every history: without requests, or steps, there is nothing to see."""


LEVELS = {
    "pool": Level("vllm-core", ops.pool_setup, ops.POOL_SETUP_RANGES, get_args(ops.PoolOp)),
    "cache": Level(
        "vllm-core",
        ops.cache_setup,
        ops.CACHE_SETUP_RANGES,
        get_args(ops.CacheOp),
        (ops.Arrive, ops.Schedule, ops.NewStep),
    ),
    "scheduler": Level(
        "vllm-core",
        step_ops.step_setup,
        step_ops.STEP_SETUP_RANGES,
        get_args(step_ops.StepOp),
        (step_ops.Submit, step_ops.EngineStep),
    ),
    "tier": Level(
        "vllm-offload-index",
        offload_ops.tier_setup,
        offload_ops.TIER_SETUP_RANGES,
        get_args(offload_ops.TierOp),
        (offload_ops.Come, offload_ops.Offer),
    ),
    "index": Level(
        "vllm-offload-index",
        offload_ops.index_setup,
        offload_ops.INDEX_SETUP_RANGES,
        get_args(offload_ops.IndexOp),
        (offload_ops.Begin, offload_ops.MakeSteps),
    ),
}

SHARES = {
    "vllm-core": ("pool", "cache", "cache", "cache", "scheduler", "scheduler"),
    "vllm-offload-index": ("tier", "index"),
}
"""Target -> levels of its histories; what is listed more often is drawn more often."""

_RANGES = ops.RANGES | offload_ops.RANGES
_WEIGHTS = ops.WEIGHTS | offload_ops.WEIGHTS


def draw_setup(random: Random, level: str, profile: Profile, **fixed: int) -> Setup:
    """Draw a setup of a level; ``fixed`` are coarse numbers that aren't drawn."""
    return LEVELS[level].setup(profile, **_drawn(random, LEVELS[level].setup_ranges) | fixed)


def draw_mix(random: Random, level: str) -> Mix:
    """Draw how often each op occurs. Some don't at all: so one history is all hits and another all evictions."""
    kinds, needed = LEVELS[level].kinds, LEVELS[level].needed
    weights = [_WEIGHTS[kind] * (random.choice((0, 1, 1, 3)) or kind in needed) for kind in kinds]
    return list(kinds), weights if any(weights) else [1] * len(weights)


def draw_ops(random: Random, mix: Mix, count: int) -> tuple[CoarseOp, ...]:
    """Draw ops."""
    kinds, weights = mix
    return tuple(kind(**_drawn(random, _RANGES[kind])) for kind in random.choices(kinds, weights, k=count))


def _drawn(random: Random, ranges: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    return {name: random.randint(*limits) for name, limits in ranges.items()}


class Sink(Protocol):
    """Gets every history that has ended. A machine without one fails with the first difference instead."""

    def __call__(self, world: EqualityWorld, outcome: Outcome) -> None: ...


class EqualityMachine(RuleBasedStateMachine):
    """Bursts of ops on one pair: a block pool, a KV cache manager, a scheduler, a CPU tier, or a connector."""

    REQUIRED: ClassVar[frozenset[str]]
    target: ClassVar[str]
    profile: ClassVar[Profile]
    sink: ClassVar[Sink | None] = None

    world: EqualityWorld | None = None
    mix: Mix

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        """Begin with a pair of one of the target's levels."""
        random = Random(seed)
        level = random.choice(SHARES[parse_target(self.target)[0]])
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
        hand_over(self.world, self.sink)


def machine_of(name: str) -> type[EqualityMachine]:
    """Return the machine for a target, with what its release can and so must reach."""
    target.warm_up()
    profile = profile_for(target.release())
    wanted = frozenset().union(*(required(level, profile) for level in SHARES[parse_target(name)[0]]))
    values = {"target": name, "profile": profile, "REQUIRED": wanted}
    return type(EqualityMachine.__name__, (EqualityMachine,), values)


# Many ops, without Hypothesis -----------------------------------------------------------------------------------------

HISTORY_OPS = 100
"""Ops of a history: enough to fill a pool, or a tier, several times."""


FINDINGS_MAX = 20
"""After so many differences a run stops."""


@dataclass
class Finding:
    """A history that shows a difference, and the difference."""

    history: PairHistory
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


def draw(random: Random, level: str, profile: Profile) -> PairHistory:
    """Draw a history of a level that keeps out of the way of known issues."""
    setup = draw_setup(random, level, profile, shows=0)
    return history_of(LEVELS[level].target, setup, draw_ops(random, draw_mix(random, level), HISTORY_OPS))


def run(level: str, ops_wanted: int, seed: int, budget_s: float = float("inf")) -> Tally:
    """Apply random histories until there were so many ops, or time is up."""
    random, tally = Random(seed), Tally()
    profile = profile_for(target.release())
    target.warm_up()
    start = time.process_time()
    while tally.ops < ops_wanted and tally.seconds < budget_s and len(tally.findings) < FINDINGS_MAX:
        history = draw(random, level, profile)
        pair, done = None, 0
        try:
            pair = pair_for(history)
            for op in history.ops:
                done += 1
                pair.apply(op)
        except ClauseBroken as broken:
            tally.findings.append(Finding(history, broken.clause.id, str(broken)))
        except Exception as error:  # whatever the implementation raises is a finding
            message = "".join(traceback.format_exception(error))
            tally.findings.append(Finding(history, type(error).__name__, message))
        tally.ops += done
        tally.reached += pair.reached if pair else Counter()
        tally.seconds = time.process_time() - start
    return tally


def hollow(tally: Tally, level: str, profile: Profile) -> set[str]:
    """Return the required events that a run has missed."""
    return set(required(level, profile) - (+tally.reached).keys())


def main() -> int:
    """Apply random histories to the model and to the vLLM that is importable; tell ops and differences."""
    parser = argparse.ArgumentParser(prog="python -m strategies.equality", description=main.__doc__)
    parser.add_argument("--level", choices=LEVELS, default="cache", help="what is compared [cache]")
    parser.add_argument("--ops", type=int, default=20_000, help="how many [20000]")
    parser.add_argument("--seed", type=int, default=0, help="where to start [0]")
    arguments = parser.parse_args()
    tally = run(arguments.level, arguments.ops, arguments.seed)
    profile = profile_for(target.release())
    known = {event: count for event, count in sorted(tally.reached.items()) if event.startswith("known:")}
    print(
        f"{arguments.level} {profile.release}: {tally.ops} ops, {tally.ops / tally.seconds:.0f} per CPU-s, "
        f"{len(tally.findings)} differences, {known}"
    )
    for finding in tally.findings:
        print(finding.message, history_to_json(finding.history).decode(), sep="\n")
    if missed := hollow(tally, arguments.level, profile):
        print(f"hollow: never reached {', '.join(sorted(missed))}")
    return int(bool(tally.findings or missed))


if __name__ == "__main__":
    sys.exit(main())
