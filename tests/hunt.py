"""Runs a machine for a while and tells what it saw, without minimising, saving or reporting."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvspec.defects import Defect, load_defects
from kvspec.known import known_as, load_known
from kvspec.laws import Violation
from kvspec.ops import EngineSetup
from kvspec.search import SETTINGS, implementation_version, violation_key
from kvspec.targets import Target, load_target, parse_target
from strategies.machines import MACHINES


def defects_of(target: str) -> dict[str, Defect]:
    """Return the planted defects of a target, by name."""
    registry = load_defects(Path(__file__).parent / "defects")
    return {name: defect for name, defect in registry.items() if defect.target == target}


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


def hunt(
    target: Target,
    number: int,
    histories: int,
    until: str | None = None,
    frame: str = "*",
    where: str = "anywhere",
    but_known: bool = False,
) -> Catch:
    """Run up to ``histories`` histories of seed ``number``; stop early once the law ``until`` was broken.

    ``frame`` is a pattern for the place of that violation, ``where`` says in which engines they count;
    ``but_known``: other than by a known issue of the target.
    """
    catch = Catch()
    known = load_known() if but_known else []
    version = implementation_version(target.name)

    def ended(world: Any, outcome: Any) -> None:
        catch.histories += 1
        catch.reached.update(outcome.reached)
        for violation in outcome.violations if WHERE[where](world.history().setup) else ():
            is_known = known_as(known, violation_key(target.name, violation), version)
            if not is_known and (violation.law != until or fnmatchcase(violation.frame, frame)):
                catch.violations.setdefault(violation.law, violation)
        if until in catch.violations or catch.histories >= histories:
            raise _Enough

    base = MACHINES[parse_target(target.name)[0]]
    machine = type("Machine", (base,), {"target": target, "sink": staticmethod(ended)})
    profile = settings(SETTINGS, max_examples=histories, stateful_step_count=8)
    with suppress(_Enough):
        run_state_machine_as_test(seed(number)(machine), settings=profile)
    return catch


def main(name: str, law: str, seeds: int, frame: str = "*", where: str = "anywhere") -> None:
    """Print the CPU seconds and histories that each seed takes to break a law; the release must be on the path."""
    target = load_target(name)
    hunt(target, number=999, histories=3)  # what is imported late isn't part of a search
    for number in range(seeds):
        started = time.process_time()
        catch = hunt(target, number, histories=2000, until=law, frame=frame, where=where, but_known=True)
        found = "found" if law in catch.violations else "not found"
        cpu_s = time.process_time() - started
        print(f"seed {number}: {law} {found} in {cpu_s:.1f} CPU-s, {catch.histories} histories", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
