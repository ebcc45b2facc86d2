"""Histories of vLLM's own block pool and KV cache manager, beside the model's."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvspec.equality.cache import CACHE_ARMS
from kvspec.equality.pool import POOL_ARMS
from kvspec.equality.steps import STEP_ARMS
from kvspec.equality.world import CACHE_REQUIRED, POOL_REQUIRED, STEPS_REQUIRED, EqualityWorld, pair_for
from kvspec.model import ops, step_ops
from kvspec.model.clauses import ClauseBroken
from kvspec.model.ops import CoreHistory, CoreOp
from kvspec.model.profile import Profile, profile_for
from kvspec.ops import history_to_json
from kvspec.targets.vllm import core as target
from kvspec.world import Outcome
from strategies.machine import hand_over
from strategies.traffic import SEEDS

BURST_OPS = 20
"""Ops of one rule."""


Mix = tuple[list[type[Any]], list[int]]
"""Kinds of ops, and how often each occurs."""


_ARMS: dict[str, dict[type[Any], Any]] = {"pool": POOL_ARMS, "cache": CACHE_ARMS, "scheduler": STEP_ARMS}
_REQUIRED = {"pool": POOL_REQUIRED, "cache": CACHE_REQUIRED, "scheduler": STEPS_REQUIRED}


def draw_setup(random: Random, level: str, profile: Profile, **fixed: int) -> ops.CoreSetup:
    """Draw a setup of a level, ``pool``, ``cache`` or ``scheduler``; ``fixed`` are coarse numbers that aren't drawn."""
    if level == "scheduler":
        return step_ops.draw_step_setup(random)
    if level == "pool":
        return ops.pool_setup(profile, **_drawn(random, ops.POOL_SETUP_RANGES) | fixed)
    return ops.cache_setup(profile, **_drawn(random, ops.CACHE_SETUP_RANGES) | fixed)


_NEVER_MISSING = (ops.Arrive, ops.Schedule, ops.NewStep, step_ops.Submit, step_ops.EngineStep)
"""Without requests, or steps, there is nothing to see."""


def draw_mix(random: Random, level: str) -> Mix:
    """Draw how often each op occurs. Some don't at all: so one history is all hits and another all evictions."""
    arms = _ARMS[level]
    weights = [ops.WEIGHTS[kind] * (random.choice((0, 1, 1, 3)) or kind in _NEVER_MISSING) for kind in arms]
    return list(arms), weights if any(weights) else [1] * len(weights)


def draw_ops(random: Random, mix: Mix, count: int) -> tuple[CoreOp, ...]:
    """Draw ops."""
    kinds, weights = mix
    return tuple(kind(**_drawn(random, ops.RANGES[kind])) for kind in random.choices(kinds, weights, k=count))


def _drawn(random: Random, ranges: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: random.randint(*limits) for name, limits in ranges.items()}


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
        level = random.choice(("pool", "cache", "cache", "cache", "scheduler", "scheduler"))
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
    required = {event for event, when in {**POOL_REQUIRED, **CACHE_REQUIRED, **STEPS_REQUIRED}.items() if when(profile)}
    values = {"target": name, "profile": profile, "REQUIRED": frozenset(required)}
    return type(EqualityMachine.__name__, (EqualityMachine,), values)


# Many ops, without Hypothesis -----------------------------------------------------------------------------------------

HISTORY_OPS = 100
"""Ops of a history: enough to fill a pool several times."""


FINDINGS_MAX = 20
"""After so many differences a run stops."""


@dataclass
class Finding:
    """A history that shows a difference, and the difference."""

    history: CoreHistory
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


def draw(random: Random, level: str, profile: Profile, family: str | None = None) -> CoreHistory:
    """Draw a history of a level that keeps out of the way of known issues; of the cache, with groups of one family
    only.
    """
    fixed = {"avoids_known": 1} | ({} if family is None else {"family": ops.FAMILIES.index(family)})
    setup = draw_setup(random, level, profile, **fixed)
    return CoreHistory("vllm-core", setup, draw_ops(random, draw_mix(random, level), HISTORY_OPS))


def run(level: str, ops_wanted: int, seed: int, family: str | None = None, budget_s: float = float("inf")) -> Tally:
    """Apply random histories until there were so many ops, or time is up."""
    random, tally = Random(seed), Tally()
    profile = profile_for(target.release())
    target.warm_up()
    start = time.process_time()
    while tally.ops < ops_wanted and tally.seconds < budget_s and len(tally.findings) < FINDINGS_MAX:
        history = draw(random, level, profile, family)
        pair, done = None, 0
        try:
            pair = pair_for(history)
            for op in history.ops:
                done += 1
                pair.apply(op)  # type: ignore[arg-type]
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
    return {event for event, when in _REQUIRED[level].items() if when(profile)} - (+tally.reached).keys()


def main() -> int:
    """Apply random histories to the model and to the vLLM that is importable; tell ops and differences."""
    parser = argparse.ArgumentParser(prog="python -m strategies.equality", description=main.__doc__)
    parser.add_argument("--level", choices=tuple(_ARMS), default="cache", help="what is compared [cache]")
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
