"""Run a target's machine, round after round, and tell in events what it sees. For processes of the target.

A suite is what there is to run: a Hypothesis machine, and how one recorded history runs again. Suites of
kvspec's own targets are found by name. Any other one plugs in as ``module:attribute``, optionally with
``@RELEASE`` of vLLM, where the attribute is a Suite or a function that returns one:

    suite = Suite(machine=MyMachine, run=lambda history: run_history(MyMachine.target, history))

A machine calls its class's ``sink(world, outcome)``, if that isn't None, once at the end of every history, and
names in ``REQUIRED`` the events without which a run is hollow; ``strategies.simple`` has an example.
"""

import hashlib
import importlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

import kvspec
from kvspec.choices import BACKEND
from kvspec.errors import KvspecError, SetupRefused
from kvspec.events import (
    Event,
    FindingFound,
    Minimising,
    Nondeterminism,
    Progress,
    Rechecked,
    SearchJob,
    WorkerReady,
    added,
)
from kvspec.findings import Finding, Key, Record, now
from kvspec.history import AnyHistory
from kvspec.history.minimise import minimise, pinned
from kvspec.known import known_as
from kvspec.model.profile import UNTAGGED
from kvspec.ops import EQUALITIES, History

if TYPE_CHECKING:
    from kvspec.world import Outcome, World

ROUND_HISTORIES = 100
"""Histories of one Hypothesis run. Its first is always the simplest; its bookkeeping grows with it."""
RERUN_EVERY = 16
"""One history in this many is run again, to see whether it repeats exactly."""
MINIMISE_CPU_S = 10.0
"""What the minimiser may use for one finding."""
OVERTIME_S = 10.0
"""How long after the end of the budget findings may still be minimised."""
PROGRESS_INTERVAL_S = 0.25
NONDETERMINISM_MAX = 3
"""A worker tells of this many histories that didn't repeat; more would say the same again."""

SETTINGS = settings(
    database=None,
    phases=[Phase.generate],
    max_examples=ROUND_HISTORIES,
    suppress_health_check=list(HealthCheck),
    deadline=None,
    print_blob=False,
    derandomize=False,
    backend=BACKEND,
)
"""Of a search, whatever Hypothesis' profile is."""


@dataclass(frozen=True)
class Suite:
    """What there is to run for a target. What a machine must have is said above."""

    machine: type[RuleBasedStateMachine]
    run: Callable[[Any], "Outcome"]
    events: Mapping[str, str] = field(default_factory=dict)
    """A sentence for each named event."""
    rules_max: int = 6
    """Rules of the machine that one history runs, at most."""
    note: str = ""
    """What a reader of the verdict must know of the target."""


def load_suite(target: str) -> Suite:
    """Return the suite of a target. KvspecError says what is missing."""
    try:
        return _plugged_in(target) if ":" in target else _own_suite(target)
    except ModuleNotFoundError as error:
        raise KvspecError(_missing_module(target, error.name or str(error))) from error


def implementation_version(target: str) -> str:
    """Return the release that was named, or what the vLLM that is imported says of itself, or nothing."""
    named = target.partition("@")[2]
    said = named or str(getattr(sys.modules.get("vllm"), "__version__", ""))
    if said.startswith(UNTAGGED):
        return ""
    try:
        return str(Version(said))
    except InvalidVersion:  # "dev": a checkout that was never built
        return ""


class Search:
    """One worker's search."""

    def __init__(
        self, suite: Suite, job: SearchJob, emit: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> None:
        self._suite = suite
        self._job = job
        self._emit = emit
        self._stopping = stopping
        self._release = implementation_version(job.target)
        self._count = 0
        self._done_keys: set[Key] = set()
        self._new: dict[Key, AnyHistory] = {}
        self._reruns: list[tuple[AnyHistory, str]] = []
        self._nondeterminism_count = 0
        self._since = Progress(job=job.job)
        self._since_s = time.monotonic()
        self._deadline_s = time.monotonic() + (math.inf if job.budget_s is None else job.budget_s)

    def run(self) -> None:
        """Look at the stored findings, then search until the budget is used up or ``stopping`` is true."""
        required = {name: self._suite.events.get(name, "") for name in sorted(self._required())}
        ready = WorkerReady(job=self._job.job, release=self._release, required=required, note=self._suite.note)
        self._emit(ready)
        self._recheck()
        number = 0
        while not self._enough():
            before = self._count
            self._round(number)
            if self._count == before:
                raise KvspecError(f"The machine of {self._job.target} makes no history.")
            self._settle()
            number += 1
        self._flush()

    def _required(self) -> frozenset[str]:
        return getattr(self._suite.machine, "REQUIRED", frozenset())

    def _recheck(self) -> None:
        for finding in self._job.stored:
            if self._stopping():
                return
            key = finding.key
            seen = self._shows(key, finding.history)
            self._emit(Rechecked(job=self._job.job, key=key, seen=seen))
            if seen:
                self._done_keys.add(key)
                if not finding.record.shortened and self._claims(key):
                    self._tell_finding(key, finding.history, finding.original)

    def _round(self, number: int) -> None:
        """Let Hypothesis make histories until it has made a round, or one of them needs a closer look."""
        machine = type(self._suite.machine.__name__, (self._suite.machine,), {"sink": staticmethod(self._ended)})
        with suppress(_RoundOver):
            run_machine(machine, round_seed(self._job.seed, self._job.job, number), self._suite.rules_max)

    def _ended(self, world: "World", outcome: "Outcome") -> None:
        """Take one history; the machine calls this at its end."""
        self._count += 1
        keys = dict.fromkeys(map(self._key, outcome.violations))
        self._new |= {key: self._history(world) for key in keys if key not in self._done_keys}
        if self._count % RERUN_EVERY == 0:
            self._reruns.append((self._history(world), outcome.trace))
        self._tell_progress(outcome, keys)
        if self._new or self._enough():
            raise _RoundOver

    def _history(self, world: "World") -> History:
        """Return a history under the name that it was asked for by, which is what replays it."""
        return replace(world.history(), target=self._job.target)

    def _enough(self) -> bool:
        maximum = self._job.histories_max
        return (
            self._stopping() or (maximum is not None and self._count >= maximum) or time.monotonic() >= self._deadline_s
        )

    def _settle(self) -> None:
        """Do what must wait until Hypothesis and its world are out of the way."""
        for history, trace in self._reruns:
            self._since = added(self._since, Progress(job=self._job.job, reruns=1))
            if self._suite.run(history).trace != trace:
                self._tell_nondeterminism("a history had another trace when it was run again", history)
        for key, history in self._new.items():
            self._done_keys.add(key)
            if self._claims(key):
                self._tell_finding(key, history, history)
        self._reruns.clear()
        self._new.clear()
        self._flush()

    def _claims(self, key: Key) -> bool:
        """Whether no other worker has this finding in hand."""
        if self._job.claims is None:
            return True
        try:
            Path(self._job.claims, key.slug).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _tell_finding(self, key: Key, history: AnyHistory, original: AnyHistory) -> None:
        outcome = self._suite.run(history)
        if key not in map(self._key, outcome.violations):
            self._tell_nondeterminism(f"{key.law} was broken, but not when its history was run again", history)
            return
        shortened = True
        if known_as(self._job.known, key, self._release) is None:
            self._emit(Minimising(job=self._job.job, key=key))
            history, shortened = self._minimised(key, history)
            outcome = self._suite.run(history)
        record = Record(
            key=key,
            message=next((v.message for v in outcome.violations if self._key(v) == key), ""),
            release=self._release,
            kvspec=kvspec.__version__,
            seed=self._job.seed,
            first_seen=now(),
            shortened=shortened,
        )
        finding = Finding(record=record, history=history, original=original)
        self._emit(FindingFound(job=self._job.job, finding=finding))

    def _minimised(self, key: Key, original: AnyHistory) -> tuple[AnyHistory, bool]:
        """Return the shortest history found, and whether there was time enough to look for it."""
        cpu_max_s = time.process_time() + MINIMISE_CPU_S
        out_of_time = False

        def spent() -> bool:
            nonlocal out_of_time
            overtime = time.monotonic() > self._deadline_s + OVERTIME_S
            out_of_time = out_of_time or overtime or time.process_time() > cpu_max_s or self._stopping()
            return out_of_time

        def shows(history: AnyHistory) -> bool:
            return self._shows(key, history)

        return shortest(self._suite, original, shows, spent), not out_of_time

    def _shows(self, key: Key, history: AnyHistory) -> bool:
        try:
            return key in map(self._key, self._suite.run(history).violations)
        except SetupRefused:
            return False

    def _key(self, violation: Any) -> Key:
        return violation_key(self._job.target, violation)

    def _tell_nondeterminism(self, message: str, history: AnyHistory) -> None:
        self._nondeterminism_count += 1
        if self._nondeterminism_count <= NONDETERMINISM_MAX:
            self._emit(Nondeterminism(job=self._job.job, message=message, history=history))

    def _tell_progress(self, outcome: "Outcome", keys: Iterable[Key]) -> None:
        """Count a history, and tell what has been counted if that is due."""
        one = Progress(
            job=self._job.job,
            histories=1,
            steps=outcome.steps,
            stores=outcome.stores,
            loads=outcome.loads,
            engine_wall_s=outcome.engine_seconds,
            reached=dict(outcome.reached),
            seen={key.slug: 1 for key in keys},
        )
        self._since = added(self._since, one)
        if time.monotonic() - self._since_s > PROGRESS_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        self._emit(self._since)
        self._since = Progress(job=self._job.job)
        self._since_s = time.monotonic()


def round_seed(seed: int, job: int, number: int) -> int:
    """Return the seed of a round of a worker: the same in every run, and unlike that of any other."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{job}:{number}".encode()).digest()[:8])


def run_machine(machine: type[RuleBasedStateMachine], number: int, rules_max: int, backend: str = BACKEND) -> None:
    """Let Hypothesis make a round of histories from a seed; the machine's sink may leave it by a BaseException."""
    profile = settings(SETTINGS, stateful_step_count=rules_max, backend=backend)
    run_state_machine_as_test(seed(number)(machine), settings=profile)


def shortest(
    suite: Suite, original: AnyHistory, shows: Callable[[AnyHistory], bool], spent: Callable[[], bool]
) -> AnyHistory:
    """Minimise ops; then write the adversary's moves into them and minimise these, if that works."""
    short = minimise(original, shows, spent)
    if not isinstance(short, History) or short.adversary == "fair":
        return short
    with_moves = pinned(short, suite.run(short).schedules)
    if spent() or not shows(with_moves):
        return short
    return minimise(with_moves, shows, spent)


def violation_key(target: str, violation: Any) -> Key:
    """Return what a violation is deduplicated by."""
    return Key(target=target, law=violation.law, op=violation.op, frame=violation.frame)


class _RoundOver(BaseException):
    """Leaves a Hypothesis run at the end of a history. An Exception would be a failure to Hypothesis."""


def _own_suite(name: str) -> Suite:
    from kvspec.targets import parse_target

    return _equality_suite(name) if parse_target(name)[0] in EQUALITIES else _engine_suite(name)


def _equality_suite(name: str) -> Suite:
    from kvspec.equality.reached import EVENTS
    from kvspec.equality.world import run_history
    from kvspec.model.profile import AssumedProfileWarning
    from kvspec.targets import parse_target
    from strategies.equality import machine_of

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AssumedProfileWarning)
        machine = machine_of(name)
    note = next((str(one.message) for one in caught if one.category is AssumedProfileWarning), "")
    return Suite(machine=machine, run=run_history, events=EVENTS[parse_target(name)[0]], note=note)


def _engine_suite(name: str) -> Suite:
    from kvspec.targets import load_target, parse_target
    from kvspec.world import EVENTS, run_history
    from strategies.machine import first_setup
    from strategies.machines import MACHINES

    target = load_target(name)
    base = MACHINES[parse_target(name)[0]]
    # The first engine imports as much as the target; the budget is for histories.
    run_history(target, History(target=name, setup=first_setup(base.SETUPS), ops=()))
    release = implementation_version(name)
    values = {"target": target, "release": release, "REQUIRED": base.required(release)}
    machine = type(base.__name__, (base,), values)
    return Suite(machine=machine, run=lambda history: run_history(target, history), events=EVENTS)


def _plugged_in(name: str) -> Suite:
    module_name, _, attribute = name.partition("@")[0].partition(":")
    found = getattr(importlib.import_module(module_name), attribute, None)
    suite = found() if callable(found) else found
    if not isinstance(suite, Suite):
        raise KvspecError(
            f"{name!r} must name a kvspec.search.Suite, or a function that returns one; "
            f"{module_name}.{attribute} is {'missing' if found is None else f'a {type(suite).__name__}'}."
        )
    return suite


def _missing_module(target: str, module: str) -> str:
    top = module.partition(".")[0]
    if top == target.partition(":")[0].partition(".")[0]:
        return f"The target {target} needs the module {module!r}, which can't be imported from here."
    return (
        f"The target {target} needs the Python package {module!r}, which isn't installed; "
        "run `pip install 'kvspec[vllm]'`."
    )
