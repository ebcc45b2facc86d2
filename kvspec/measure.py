"""What a step of kvspec costs, beside a step of the target alone. For processes of the target.

Both are measured in one run, so that the ratio doesn't depend on the machine or on what else runs there: the
machine makes histories (Hypothesis, the simulated device, shadow attention, laws), then the same histories drive an
engine of the same setups whose transfers are complete at once and which nobody watches. CPU seconds, not wall
seconds.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvspec.errors import KvspecError
from kvspec.ops import History
from kvspec.search import SETTINGS, Suite, load_suite
from kvspec.targets import load_target
from kvspec.targets.vllm.instant import run_instantly
from kvspec.worker import freeze_imports
from kvspec.world import Outcome, World, run_history

WARM_UP_HISTORIES = 20
"""Histories before the clock starts: imports, caches and Hypothesis' own start are not what a step costs."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds and engine steps of one way of running the same histories."""

    name: str
    cpu_s: float
    steps: int

    @property
    def step_ms(self) -> float:
        """CPU milliseconds per engine step."""
        return 1000 * self.cpu_s / max(1, self.steps)


def measure(target_name: str, histories: int, number: int) -> list[Cost]:
    """Return the cost of the machine, of kvspec without Hypothesis, and of the target alone."""
    suite = load_suite(target_name)
    target = load_target(target_name)
    _machine(suite, WARM_UP_HISTORIES, number + 1)
    freeze_imports()
    made, cpu_s = _machine(suite, histories, number)
    costs = [Cost("machine: Hypothesis, device, shadow attention, laws", cpu_s, sum(o.steps for _, o in made))]
    started = time.process_time()
    steps = sum(run_history(target, history).steps for history, _ in made)
    costs.append(Cost("the same histories, without Hypothesis", time.process_time() - started, steps))
    started = time.process_time()
    steps = 0
    for history, _ in made:
        with target.activated():
            steps += run_instantly(history)
    costs.append(Cost("vLLM alone, transfers complete at once", time.process_time() - started, steps))
    return costs


def _machine(suite: Suite, histories: int, number: int) -> tuple[list[tuple[History, Outcome]], float]:
    """Let Hypothesis make histories; return them and the CPU seconds that it took."""
    made: list[tuple[History, Outcome]] = []

    def ended(world: World, outcome: Outcome) -> None:
        made.append((world.history(), outcome))

    machine = type(suite.machine.__name__, (suite.machine,), {"sink": staticmethod(ended)})
    profile = settings(SETTINGS, max_examples=histories, stateful_step_count=suite.rules_max)
    started = time.process_time()
    run_state_machine_as_test(seed(number)(machine), settings=profile)
    return made, time.process_time() - started


def main(target_name: str, histories: int, number: int) -> None:
    """Print what a step costs, and the ratios to the target alone."""
    costs = measure(target_name, histories, number)
    alone = costs[-1].step_ms
    print(f"{target_name}, {histories} histories, seed {number}; CPU time of this process")
    print(f"{'':52}{'steps':>8}{'steps/s':>9}{'ms/step':>9}{'ratio':>7}")
    for cost in costs:
        rate = cost.steps / cost.cpu_s
        print(f"{cost.name:52}{cost.steps:8}{rate:9.0f}{cost.step_ms:9.3f}{cost.step_ms / alone:7.2f}")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except KvspecError as error:
        sys.exit(f"Error: {error}")
    sys.stdout.flush()
    os._exit(0)
