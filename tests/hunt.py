"""Runs a machine for a while and tells what it saw, without minimising, saving or reporting."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvspec.laws import Violation
from kvspec.ops import EngineSetup
from kvspec.search import SETTINGS
from kvspec.targets import Target, load_target
from strategies.simple import SimpleOffloadMachine


@dataclass
class Catch:
    """What a hunt has seen: the first violation of each law, and how often each event was reached."""

    violations: dict[str, Violation] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)
    histories: int = 0


class _Enough(BaseException):
    """Leaves a Hypothesis run."""


WHERE: dict[str, Callable[[EngineSetup], bool]] = {
    "anywhere": lambda setup: True,
    "context-parallel": lambda setup: setup.context_ranks > 1,
    "groups": lambda setup: len(setup.groups) > 1,
}
"""Which engines' violations count."""


def hunt(target: Target, number: int, histories: int, until: str | None = None, where: str = "anywhere") -> Catch:
    """Run up to ``histories`` histories of seed ``number``; stop early once the law ``until`` was broken."""
    catch = Catch()

    def ended(world: Any, outcome: Any) -> None:
        catch.histories += 1
        catch.reached.update(outcome.reached)
        for violation in outcome.violations if WHERE[where](world.history().setup) else ():
            catch.violations.setdefault(violation.law, violation)
        if until in catch.violations or catch.histories >= histories:
            raise _Enough

    machine = type("Machine", (SimpleOffloadMachine,), {"target": target, "sink": staticmethod(ended)})
    profile = settings(SETTINGS, max_examples=histories, stateful_step_count=8)
    with suppress(_Enough):
        run_state_machine_as_test(seed(number)(machine), settings=profile)
    return catch


def main(name: str, law: str, seeds: int, where: str = "anywhere") -> None:
    """Print the CPU seconds and histories that each seed takes to break a law; the release must be on the path."""
    target = load_target(name)
    hunt(target, number=999, histories=3)  # what is imported late isn't part of a search
    for number in range(seeds):
        started = time.process_time()
        catch = hunt(target, number, histories=2000, until=law, where=where)
        found = "found" if law in catch.violations else "not found"
        print(f"seed {number}: {law} {found} in {time.process_time() - started:.1f} CPU-s, {catch.histories} histories")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
