"""The benchmark: how surely, and how fast, does a target's machine find known bugs and planted defects?

The parent of a benchmark, like ``kvspec.gate``. A *case* is a real bug, with a release that has it and the release that
fixes it; a *defect* is planted into the newest release. Both are looked for by the machine that the gate
runs, the same for all of a target, with one seed after the other. The release that fixes a bug, and the newest release
without a defect, have to stay silent under the same seeds for the whole budget.

Each result is appended to ``results.jsonl`` as soon as it is there. A run that goes on from there leaves out what it
has.
"""

import hashlib
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec

import kvspec
from kvspec.defects import Defect
from kvspec.errors import KvspecError
from kvspec.events import (
    UNEVEN,
    Counts,
    Effort,
    Event,
    Nondeterminism,
    Seen,
    Sighted,
    Trial,
    TrialDone,
    TrialJob,
    TrialStarted,
    Unreachable,
    Wanted,
    WorkerDone,
    WorkerFailed,
)
from kvspec.findings import Key
from kvspec.gate import Prepared, Workers
from kvspec.history import AnyHistory
from kvspec.known import Issue
from kvspec.laws import LAWS
from kvspec.model import CLAUSES, RELEASES
from kvspec.ops import EQUALITIES, history_to_json
from kvspec.targets import TARGETS

CASES = Path("tests/bugs/cases.toml")
DEFECTS = Path("tests/defects")
"""Where a clone of kvspec keeps its cases and its planted defects."""
OUTPUT = Path(".kvspec/bench")
RESULTS = "results.jsonl"
TRIALS_PER_WORKER = 6
"""At least so many trials share a process if they can: an import of vLLM costs as much as a finding."""
MINIMISED_SEEDS = 3
"""Of so many seeds the whole machine's histories are minimised, which can cost more than to find them."""

_PARENTS = ("bench", "cli", "gate", "measure", "pytest_plugin", "report")
"""Modules that no worker runs."""

NOT_BUILT = "target not built"
NO_RELEASE = "no supported release has it"


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A real, public bug. ``tests/bugs/cases.toml`` says what the fields mean and how they were chosen."""

    id: Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]+$")]
    target: str
    refs: list[int]
    kind: str
    since: str
    bad: str
    """The release that is run; empty if no supported release has the bug."""
    fixed: str
    counts: Annotated[tuple[Counts, ...], msgspec.Meta(min_length=1)]
    events: tuple[str, ...]
    without: tuple[str, ...] = ()
    cause: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One result: a seed of a case or a defect on one release."""

    subject: str
    """Id of the case, or name of the defect."""
    side: str
    """``bad`` (must find it), ``fixed`` (must be silent); of a defect, planted or not, the same."""
    ablation: str
    release: str
    seed: int
    found: bool
    effort: Effort
    """Until it was found, else all that was done."""
    key: Key | None = None
    message: str = ""
    ops_first: int = 0
    ops: int = 0
    """Ops of the history in which it was seen first, and after minimisation; 0 if it wasn't minimised."""
    seen: dict[str, int] = {}
    """Laws that were broken until then, and the histories that broke them."""
    known: list[str] = []
    """Known issues that were seen, and didn't count."""
    failure: str = ""
    """Why nothing can be said: the worker died, the machine never makes the event."""
    died: bool = False
    """It was the worker."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the results: what they have in common."""

    kvspec: str
    code: str
    """Digest of what was run, cases and defects included: results of different code are not to be mixed."""
    budget_cpu_s: float
    silent_budget_cpu_s: float
    started: str


@dataclass(frozen=True)
class BenchPlan:
    """What a benchmark is asked to do. Budgets are in CPU seconds per seed: to find, and to be silent."""

    cases: Sequence[Case]
    defects: Mapping[str, Defect]
    seeds: int
    budget_cpu_s: float
    silent_budget_cpu_s: float
    jobs: int
    output: Path
    known: list[Issue]
    ablations: Sequence[str] = ()
    registry: Path = DEFECTS


class RowAdded(msgspec.Struct, frozen=True):
    """A result is there. ``done`` of ``total`` results are."""

    row: Row
    done: int
    total: int


@dataclass
class Bench:
    """All that a report needs."""

    plan: BenchPlan
    header: Header
    rows: list[Row]
    failures: list[WorkerFailed] = field(default_factory=list)
    nondeterminism: list[str] = field(default_factory=list)
    interrupted: bool = False


def load_cases(file: Path) -> list[Case]:
    """Read cases. KvspecError names the file and what is wrong with it."""
    try:
        cases = msgspec.convert(tomllib.loads(file.read_text()).get("case", []), list[Case])
    except FileNotFoundError as error:
        raise KvspecError(f"There are no cases at {file}; run this in a clone of kvspec.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise KvspecError(f"{file} can't be read as cases: {error}.") from error
    if not cases:
        raise KvspecError(f"{file} has no cases; each begins with [[case]].")
    twice = [id for id, count in Counter(case.id for case in cases).items() if count > 1]
    if twice:
        raise KvspecError(f"{file} has two cases with the id {twice[0]!r}; give each one of its own.")
    for case in cases:
        for counts in case.counts:
            if case.target in TARGETS and not any(fnmatchcase(law, counts.law) for law in (*LAWS, *CLAUSES)):
                raise KvspecError(f"{file}: {case.id} counts {counts.law!r}, which no law or clause is called.")
    return cases


def is_built(target: str) -> bool:
    """Whether this version of kvspec has a target, or it is one that plugs in."""
    return target in TARGETS or ":" in target


def why_not(case: Case) -> str:
    """Say why a case can't run at all, or nothing."""
    if not is_built(case.target):
        return NOT_BUILT
    return "" if case.bad else NO_RELEASE


def source_digest(*more: Path) -> str:
    """Return a digest of all that runs in a worker, and of some files more: with the seeds, it makes a run repeat."""
    package = Path(kvspec.__file__).parent
    files = [*(package.parent / "strategies").rglob("*.py"), *package.rglob("*.py"), *package.rglob("*.toml")]
    run = [
        file for file in files if not any(part.startswith(_PARENTS) for part in file.relative_to(package.parent).parts)
    ]
    for place in more:
        run += place.rglob("*.py") if place.is_dir() else [place] * place.is_file()
    digest = hashlib.sha256()
    for file in sorted(run):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


# What is to be done ---------------------------------------------------------------------------------------------------


class _Slot(msgspec.Struct, frozen=True):
    """Where a result belongs."""

    subject: str
    side: str
    ablation: str
    seed: int


def _slot_of(row: Row) -> _Slot:
    return _Slot(row.subject, row.side, row.ablation, row.seed)


@dataclass(frozen=True)
class _Work:
    """A trial, the release that it runs on, and the results that it makes."""

    target: str
    side: str
    trial: Trial

    def slot(self, subject: str) -> _Slot:
        return _Slot(subject, self.side, self.trial.ablation, self.trial.seed)

    def group(self) -> tuple[str, str, int, str, str]:
        """What works must have in common to be one: the histories are the same then."""
        return (self.target, self.side, self.trial.seed, self.trial.ablation, self.trial.defect)


def _works(plan: BenchPlan, done: set[_Slot]) -> list[_Work]:
    """Return the trials that are missing. Bugs that the same histories may show share a trial."""
    merged: dict[tuple[str, str, int, str, str], _Work] = {}
    for work in _single_works(plan):
        if work.slot(work.trial.wanted[0].name) in done:
            continue
        before = merged.get(work.group())
        wanted = (*before.trial.wanted, *work.trial.wanted) if before else work.trial.wanted
        trial = msgspec.structs.replace(work.trial, wanted=wanted)
        merged[work.group()] = _Work(work.target, work.side, trial)
    return list(merged.values())


def _single_works(plan: BenchPlan) -> Iterator[_Work]:
    for seed in range(plan.seeds):
        for ablation in ("", *plan.ablations):
            for case in plan.cases:
                if not why_not(case) and _can_do(case.target, ablation):
                    wanted = Wanted(case.id, case.counts, case.events, case.without)
                    yield _work(plan, _at(case.target, case.bad), "bad", seed, ablation, wanted)
                    if not ablation:
                        yield _work(plan, _at(case.target, case.fixed), "fixed", seed, ablation, wanted)
            for name, defect in plan.defects.items():
                if is_built(defect.target) and _can_do(defect.target, ablation):
                    wanted = Wanted(name, (Counts(defect.law),))
                    target = _at(defect.target, RELEASES[-1])
                    yield _work(plan, target, "bad", seed, ablation, wanted, name)
                    if not ablation:
                        yield _work(plan, target, "fixed", seed, ablation, wanted)


def _can_do(target: str, ablation: str) -> bool:
    """Whether the machine of a target can be made weaker so: an equality has no device and repeats no prompt."""
    return ablation in ("", UNEVEN) or target not in EQUALITIES


def _at(target: str, release: str) -> str:
    return target if ":" in target else f"{target}@{release}"


def _work(plan: BenchPlan, target: str, side: str, seed: int, ablation: str, wanted: Wanted, defect: str = "") -> _Work:
    trial = Trial(
        seed=seed,
        budget_cpu_s=plan.silent_budget_cpu_s if side == "fixed" else plan.budget_cpu_s,
        wanted=(wanted,),
        ablation=ablation,
        defect=defect,
        to_the_end=side == "fixed",
        minimises=seed < MINIMISED_SEEDS and not ablation,
    )
    return _Work(target, side, trial)


def _portions(works: list[_Work], jobs: int) -> list[list[_Work]]:
    """Share the trials out: those of a process have one target and release, and the largest shares come first."""
    by_target: dict[str, list[_Work]] = defaultdict(list)
    for work in works:
        by_target[work.target].append(work)
    portions = []
    for group in by_target.values():
        count = max(1, min(2 * jobs, len(group) // TRIALS_PER_WORKER))
        portions += [group[start::count] for start in range(count)]
    return sorted(portions, key=len, reverse=True)


# Results --------------------------------------------------------------------------------------------------------------


class _Journal:
    """The file of results: a header, then one line for each."""

    def __init__(self, directory: Path, header: Header, resume: bool) -> None:
        self.rows: list[Row] = []
        self.header = header
        self._file = directory / RESULTS
        self._histories = directory / "histories"
        try:
            self._histories.mkdir(parents=True, exist_ok=True)
            if self._file.exists() and self._file.stat().st_size:
                if not resume:
                    raise KvspecError(f"{self._file} has results; go on with --resume, or choose another --output.")
                self._read()
            else:
                self._file.write_bytes(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise KvspecError(f"{directory} can't be written to: {error.strerror}; choose another --output.") from error

    def _read(self) -> None:
        data = self._file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a line that was cut short by a crash is done again
        try:
            first, *lines = whole.splitlines()
            before = msgspec.json.decode(first, type=Header)
            self.rows = [msgspec.json.decode(line, type=Row) for line in lines]
        except (ValueError, msgspec.MsgspecError) as error:
            raise KvspecError(f"{self._file} can't be read as results: {error}.") from error
        fields = (
            ("budget_cpu_s", "had a budget of {} CPU-s"),
            ("silent_budget_cpu_s", "had a budget of {} CPU-s to be silent"),
            ("code", "ran other code ({})"),
        )
        for name, text in fields:
            if getattr(before, name) != getattr(self.header, name):
                told = text.format(getattr(before, name))
                raise KvspecError(f"The results in {self._file} {told}, so they can't be gone on with.")
        self.header = before
        self._file.write_bytes(whole)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def keep(self, row: Row, sighted: Sighted) -> None:
        """Keep the history of a finding; ``kvspec replay`` takes it unless the defect was planted."""
        name = "-".join(filter(None, (row.subject, row.side, row.ablation, str(row.seed))))
        (self._histories / f"{name}.json").write_bytes(history_to_json(sighted.history))

    def keep_unrepeated(self, work: _Work, history: AnyHistory) -> Path:
        """Keep a history that didn't repeat; return where."""
        target = work.target.replace(":", ".")
        file = self._histories / f"unrepeated-{target}-{work.side}-{work.trial.seed}.json"
        file.write_bytes(history_to_json(history))
        return file


def run_bench(
    plan: BenchPlan,
    header: Header,
    resume: bool,
    prepare: Callable[[str], Prepared],
    emit: Callable[[Event | RowAdded], None],
) -> Bench:
    """Run all trials that have no result yet, and return all results. SIGINT and SIGTERM end it early, in order."""
    journal = _Journal(plan.output, header, resume)
    done = {_slot_of(row) for row in journal.rows}
    works = _works(plan, done)
    asked = {work.slot(work.trial.wanted[0].name) for work in _single_works(plan)}
    bench = Bench(plan, journal.header, journal.rows)
    run = _Run(plan, journal, bench, len(asked), len(done & asked), emit)
    prepared = {target: prepare(target) for target in dict.fromkeys(work.target for work in works)}
    run.run(_portions(works, plan.jobs), prepared)
    bench.rows = [row for row in journal.rows if _slot_of(row) in asked]
    return bench


class _Run:
    """The workers of a benchmark, and what becomes of their events."""

    def __init__(
        self,
        plan: BenchPlan,
        journal: _Journal,
        bench: Bench,
        total: int,
        done: int,
        emit: Callable[[Event | RowAdded], None],
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._bench = bench
        self._total = total
        self._done = done
        self._emit = emit
        self._jobs: dict[int, list[_Work]] = {}
        self._ended: set[int] = set()
        self._current: dict[int, int] = {}
        self._open: dict[tuple[int, int], set[str]] = {}

    def run(self, portions: list[list[_Work]], prepared: Mapping[str, Prepared]) -> None:
        waiting = portions[::-1]
        with Workers() as workers:
            for _ in range(min(self._plan.jobs, len(waiting))):
                self._start(workers, waiting.pop(), prepared)
            for event in workers.events():
                self._emit(event)
                left = self._take(event)
                if left is not None and not workers.interrupts:
                    if left:
                        waiting.append(left)
                    if waiting:
                        self._start(workers, waiting.pop(), prepared)
            self._bench.interrupted = workers.interrupts > 0

    def _start(self, workers: Workers, works: list[_Work], prepared: Mapping[str, Prepared]) -> None:
        number = len(self._jobs)
        self._jobs[number] = works
        one = prepared[works[0].target]
        for index, work in enumerate(works):
            self._open[number, index] = {wanted.name for wanted in work.trial.wanted}
        workers.start(
            TrialJob(
                job=number,
                target=one.target,
                release_path=one.release_path,
                trials=[work.trial for work in works],
                known=self._plan.known,
                defects=str(self._plan.registry.absolute()),
            ),
            one.environment,
        )

    def _take(self, event: Event) -> list[_Work] | None:
        """Take an event; if it was a worker's last, return what the worker has left undone."""
        match event:
            case TrialStarted():
                self._current[event.job] = event.trial
            case Sighted():
                self._sighted(event)
            case Unreachable():
                sentence = f"the machine never makes the event {', '.join(map(repr, event.events))}"
                self._add(event.job, event.trial, event.wanted, Effort(), failure=sentence)
            case TrialDone():
                self._trial_done(event)
            case Nondeterminism():
                work = self._jobs[event.job][self._current[event.job]]
                kept = self._journal.keep_unrepeated(work, event.history)
                self._bench.nondeterminism.append(f"{work.target}, seed {work.trial.seed}: {event.message} ({kept})")
            case WorkerFailed() if event.job not in self._ended:
                self._ended.add(event.job)
                return self._failed(event)
            case WorkerDone() if event.job not in self._ended:
                self._ended.add(event.job)
                return []
        return None

    def _failed(self, event: WorkerFailed) -> list[_Work]:
        """A worker that died in a trial takes that one with it; the others are done by another worker."""
        number = self._current.get(event.job)
        if number is None:
            self._bench.failures.append(event)
            return []
        for name in sorted(self._open[event.job, number]):
            self._add(event.job, number, name, Effort(), failure=event.message, died=True)
        return self._jobs[event.job][number + 1 :]

    def _sighted(self, event: Sighted) -> None:
        row = self._add(
            event.job,
            event.trial,
            event.wanted,
            event.effort,
            found=True,
            key=event.key,
            message=event.message,
            ops_first=event.ops_first,
            ops=len(event.history.ops) if self._jobs[event.job][event.trial].trial.minimises else 0,
            **_laws(event.seen),
        )
        self._journal.keep(row, event)

    def _trial_done(self, event: TrialDone) -> None:
        for name in sorted(self._open[event.job, event.trial]):
            self._add(event.job, event.trial, name, event.effort, **_laws(event.seen))

    def _add(self, job: int, trial: int, subject: str, effort: Effort, found: bool = False, **more: Any) -> Row:
        work = self._jobs[job][trial]
        self._open[job, trial].discard(subject)
        row = Row(
            subject=subject,
            side=work.side,
            ablation=work.trial.ablation,
            release=work.target.partition("@")[2],
            seed=work.trial.seed,
            found=found,
            effort=effort,
            **more,
        )
        self._journal.add(row)
        self._done += 1
        self._emit(RowAdded(row, self._done, self._total))
        return row


def _laws(seen: list[Seen]) -> dict[str, Any]:
    """Return what a row says of all that was seen: laws, each with its histories, and known issues."""
    laws: Counter[str] = Counter()
    for one in seen:
        if not one.issue:
            laws[one.key.law] += one.histories
    return {"seen": dict(laws), "known": sorted({one.issue for one in seen if one.issue})}
