"""One seed of a target's machine, until it has found what is wanted: what a benchmark is made of.

The histories of a seed don't depend on what is wanted, nor on what is found. So a trial can look for several bugs
at once, and tells of each what a trial for it alone would have told.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis.errors import Flaky, FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine
from msgspec.structs import replace

from kvspec.choices import BACKEND
from kvspec.defects import load_defects, planted
from kvspec.errors import KvspecError, SetupRefused
from kvspec.events import (
    FAIR,
    NO_LIVE_PREFIXES,
    UNEVEN,
    Effort,
    Event,
    Nondeterminism,
    Progress,
    Seen,
    Sighted,
    Trial,
    TrialDone,
    TrialJob,
    TrialStarted,
    Unreachable,
    Wanted,
    added,
)
from kvspec.findings import Key
from kvspec.history import AnyHistory
from kvspec.known import known_as
from kvspec.search import (
    MINIMISE_CPU_S,
    PROGRESS_INTERVAL_S,
    Suite,
    implementation_version,
    round_seed,
    run_machine,
    shortest,
    violation_key,
)

if TYPE_CHECKING:
    from kvspec.world import Outcome, World

WARM_UP_HISTORIES = 5

_LAW = re.compile(r"[A-Z]+-\d+")
"""Of what ``without`` names; all else must be an event."""

_CHANGES: dict[str, Mapping[str, Any]] = {FAIR: {"fair": True}, UNEVEN: {}, NO_LIVE_PREFIXES: {"live_prefixes": False}}
"""Class attributes of a machine that make it do without something."""


def run_trials(suite: Suite, job: TrialJob, emit: Callable[[Event], None], stopping: Callable[[], bool]) -> None:
    """Run the trials of a job one after the other, until ``stopping`` is true."""
    _warm_up(suite)
    for number, trial in enumerate(job.trials):
        if stopping():
            return
        emit(TrialStarted(job=job.job, trial=number))
        run = _Run(suite, job, number, emit, stopping)
        if trial.defect:
            with planted(load_defects(Path(job.defects))[trial.defect]):
                run.run()
        else:
            run.run()


def _warm_up(suite: Suite) -> None:
    """Make a few histories that don't count: what is imported late, and Hypothesis' own start, are no search."""
    left = iter(range(WARM_UP_HISTORIES))

    def ended(_world: "World", _outcome: "Outcome") -> None:
        if next(left, None) is None:
            raise _TrialOver

    with suppress(_TrialOver):
        run_machine(_without(suite.machine, "", ended), 0, suite.rules_max)


class _Sighting(NamedTuple):
    """What was wanted, as it was seen first."""

    effort: Effort
    key: Key
    history: AnyHistory
    seen: list[Seen]


class _Run:
    """One trial."""

    def __init__(
        self, suite: Suite, job: TrialJob, number: int, emit: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> None:
        self._suite = suite
        self._job = job
        self._number = number
        self._trial: Trial = job.trials[number]
        self._emit = emit
        self._stopping = stopping
        self._release = implementation_version(job.target)
        self._machine = _without(suite.machine, self._trial.ablation, self._ended)
        self._backend = "hypothesis" if self._trial.ablation == UNEVEN else BACKEND
        self._open = {wanted.name: wanted for wanted in self._trial.wanted}
        self._sighted: dict[str, _Sighting] = {}
        self._effort = Effort()
        self._reached: Counter[str] = Counter()
        self._seen: Counter[Key] = Counter()
        self._issues: dict[Key, str] = {}
        self._clock_s = 0.0
        self._to_the_end = self._trial.to_the_end
        self._since, self._since_s = Progress(job=job.job), time.monotonic()

    def run(self) -> None:
        """Make histories until all that is wanted was found, the budget is used up, or ``stopping`` is true."""
        for wanted in self._trial.wanted:
            events = {*wanted.events, *(word for word in wanted.without if not _LAW.fullmatch(word))}
            if missing := sorted(events - self._suite.events.keys()):
                del self._open[wanted.name]
                self._emit(Unreachable(job=self._job.job, trial=self._number, wanted=wanted.name, events=missing))
        self._to_the_end &= bool(self._open)
        number = 0
        while self._is_wanted(self._open) and not self._is_over():
            before = self._effort.histories
            self._clock_s = time.process_time() - self._effort.cpu_s
            self._round(round_seed(self._trial.seed, 0, number))
            if self._effort.histories == before:
                raise KvspecError(f"The machine of {self._job.target} makes no history.")
            for name in list(self._sighted):
                self._settle(self._open[name], self._sighted.pop(name))
            number += 1
        if not self._stopping():
            done = TrialDone(job=self._job.job, trial=self._number, effort=self._so_far(), seen=self._all_seen())
            self._emit(done)

    def _round(self, seed: int) -> None:
        """Let Hypothesis make histories until it has made a round, or the trial is over."""
        try:
            run_machine(self._machine, seed, self._suite.rules_max, self._backend)
        except _TrialOver:
            pass
        except (Flaky, FlakyStrategyDefinition) as error:  # only Hypothesis' own choices show it
            raise KvspecError(f"The machine draws differently after the same start: {error}") from error

    def _ended(self, world: "World", outcome: "Outcome") -> None:
        """Take one history; the machine calls this at its end."""
        self._reached += outcome.reached
        self._effort = replace(
            self._effort,
            cpu_s=time.process_time() - self._clock_s,
            histories=self._effort.histories + 1,
            steps=self._effort.steps + outcome.steps,
        )
        keys = dict.fromkeys(violation_key(self._job.target, violation) for violation in outcome.violations)
        self._note(keys, world, _met(outcome))
        self._tell_progress(outcome.steps)
        if self._is_over() or not self._is_wanted(self._open.keys() - self._sighted.keys()):
            raise _TrialOver

    def _tell_progress(self, steps: int) -> None:
        one = Progress(job=self._job.job, histories=1, steps=steps)
        self._since = added(self._since, one)
        if time.monotonic() - self._since_s > PROGRESS_INTERVAL_S:
            self._emit(self._since)
            self._since, self._since_s = Progress(job=self._job.job), time.monotonic()

    def _note(self, keys: Iterable[Key], world: "World", met: Set[str]) -> None:
        for key in keys:
            self._seen[key] += 1
            if key not in self._issues:
                issue = known_as(self._job.known, key, self._release)
                self._issues[key] = issue.id if issue else ""
            for name, wanted in self._open.items():
                if name not in self._sighted and self._is_counted(wanted, key, met):
                    history = replace(world.history(), target=self._job.target)
                    self._sighted[name] = _Sighting(self._so_far(), key, history, self._all_seen())

    def _is_counted(self, wanted: Wanted, key: Key, met: Set[str]) -> bool:
        if not met >= set(wanted.events) or met & set(wanted.without):
            return False
        return self._issues[key] in ("", wanted.name) and any(counts.matches(key) for counts in wanted.counts)

    def _is_wanted(self, names: Collection[str]) -> bool:
        """Whether the trial goes on while these haven't been found."""
        return bool(names) or self._to_the_end

    def _all_seen(self) -> list[Seen]:
        return [Seen(key, count, self._issues[key]) for key, count in self._seen.items()]

    def _so_far(self) -> Effort:
        return replace(self._effort, reached=dict(+self._reached))

    def _is_over(self) -> bool:
        return self._stopping() or self._effort.cpu_s >= self._trial.budget_cpu_s

    def _settle(self, wanted: Wanted, sighting: _Sighting) -> None:
        """Run what was sighted again, make it short and tell it."""
        key, original = sighting.key, sighting.history

        def messages(history: AnyHistory) -> list[str]:
            try:
                outcome = self._suite.run(history)
            except SetupRefused:  # a simpler setup that the release doesn't run
                return []
            if not self._is_counted(wanted, key, _met(outcome)):
                return []
            return [v.message for v in outcome.violations if violation_key(self._job.target, v) == key]

        if not messages(original):
            message = f"{key.law} was broken, but not when its history was run again"
            self._emit(Nondeterminism(job=self._job.job, message=message, history=original))
            return
        short = original
        if self._trial.minimises:
            cpu_max_s = time.process_time() + MINIMISE_CPU_S
            short = shortest(
                self._suite,
                original,
                lambda history: bool(messages(history)),
                lambda: time.process_time() > cpu_max_s or self._stopping(),
            )
        if self._stopping():  # not short yet; the next run finds it again
            return
        del self._open[wanted.name]
        self._emit(
            Sighted(
                job=self._job.job,
                trial=self._number,
                wanted=wanted.name,
                effort=sighting.effort,
                key=key,
                message=messages(short)[0],
                ops_first=len(original.ops),
                history=short,
                seen=sighting.seen,
            )
        )


def _met(outcome: "Outcome") -> Set[str]:
    """Return the events that a history has reached, and the laws that it has broken."""
    return outcome.reached.keys() | {violation.law for violation in outcome.violations}


class _TrialOver(BaseException):
    """Leaves a round. An Exception would be a failure to Hypothesis."""


def _without(
    machine: type[RuleBasedStateMachine], ablation: str, sink: Callable[..., None]
) -> type[RuleBasedStateMachine]:
    """Return the machine with a sink, and without what an ablation takes away. KvspecError if it can't be taken."""
    changes = _CHANGES[ablation] if ablation else {}
    if missing := sorted(name for name in changes if not hasattr(machine, name)):
        raise KvspecError(f"{machine.__name__} has no {', '.join(missing)}, so it can't do the ablation {ablation}.")
    return type(machine.__name__, (machine,), {**changes, "sink": staticmethod(sink)})
