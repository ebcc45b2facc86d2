"""The gate: search a target for findings with several workers, for a budget, and give a verdict.

The parent never imports the target. It makes sure that the release is there, starts the workers, hands on
their events, keeps what they find, and decides. What a person sees is made by handlers in ``kvspec.report``.
"""

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import msgspec
from msgspec.structs import replace
from packaging.version import Version

from kvspec import releases
from kvspec.errors import KvspecError
from kvspec.events import (
    Event,
    FindingFound,
    FindingReported,
    GateStarted,
    Interrupted,
    Job,
    Nondeterminism,
    Progress,
    Rechecked,
    Replayed,
    ReplayJob,
    Reported,
    SearchJob,
    Verdict,
    WorkerDone,
    WorkerEvent,
    WorkerFailed,
    WorkerReady,
    added,
)
from kvspec.findings import Finding, FindingStore, Key
from kvspec.history import AnyHistory
from kvspec.known import Issue, known_as

FINDINGS_DIR = Path(".kvspec/findings")
"""Where findings are kept, unless somebody says otherwise."""
TICK_S = 0.2
"""How often the parent looks up from the workers' pipes."""
EXIT_WAIT_S = 5.0
"""How long a worker may take to exit once it has said its last word."""
LOG_LINES = 60
"""Lines of a dead worker's log that are worth showing."""
DUMP_SIGNS = ("Timeout (", "Fatal Python error")
"""How faulthandler begins to tell where the worker was; the innermost frames come first."""


@dataclass(frozen=True)
class Prepared:
    """A target that is there, and the environment of the processes that run it."""

    target: str
    release_path: str | None
    environment: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """What a gate is asked to do. The budget is in seconds per worker, or in histories of all together."""

    seed: int
    jobs: int
    budget_s: float | None
    histories_max: int | None
    findings: Path
    known: list[Issue]
    fail_fast: bool = False


def seconds(text: str) -> float:
    """Read a duration such as 90, 60s, 2m or 1.5h, in seconds. KvspecError if it isn't one, or is nothing."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    value = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not value:
        raise KvspecError(f"{text!r} is no duration; write it as 60s, 2m or 1h.")
    return value


def split_target(name: str) -> tuple[str, str | None]:
    """Split a target's name from its release. KvspecError if there is no such target."""
    if ":" in name:  # one that plugs in, see kvspec.search
        base, _, release = name.partition("@")
        if not all(base.partition(":")[::2]):
            raise KvspecError(f"{name!r} is no target; one of your own is named package.module:suite.")
        return base, release or None
    from kvspec.targets import parse_target

    return parse_target(name)


def prepare(name: str, progress: Callable[[str], releases.Progress] | None = None) -> Prepared:
    """Make sure that the release of a target is installed; ``progress(version)`` is told how it goes."""
    base, release = split_target(name)
    if release is None:
        return Prepared(base, None, _environment(None))
    release = releases.canonical(release)
    if ":" not in base and Version(release) < Version(first := _first_release(base)):
        raise KvspecError(f"{base} runs on vLLM {first} and later, not on {release}.")
    path = str(releases.install(release, progress(release) if progress else None))
    return Prepared(f"{base}@{release}", path, _environment(path))


def _first_release(target: str) -> str:
    from kvspec.targets import FIRST_RELEASES

    return FIRST_RELEASES.get(target, releases.KNOWN_GOOD[0])


def _environment(release_path: str | None) -> dict[str, str]:
    """Return the environment in which runs repeat exactly, with the release before everything else."""
    inherited = os.environ.get("PYTHONPATH", "")
    here = os.getcwd()
    path = [release_path, inherited, here] if release_path else [here, inherited]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONSAFEPATH": "1",  # a checkout in the working directory doesn't hide the release
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(releases.cache_dir() / "hypothesis"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(releases.cache_dir() / "vllm"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def run_gate(prepared: Prepared, plan: Plan, emit: Callable[[Event], None]) -> Verdict:
    """Run a gate to its end, or until it is interrupted, and return the verdict.

    SIGINT, SIGTERM and SIGHUP ask the workers to stop; a second one kills them. Both still give a verdict.
    """
    store = FindingStore(plan.findings)
    store.check_writable()
    tally = Tally(prepared.target, plan.seed, store, plan.known)
    emit(
        GateStarted(
            target=prepared.target,
            seed=plan.seed,
            jobs=_jobs(plan),
            budget_s=plan.budget_s,
            histories_max=plan.histories_max,
        )
    )
    with Workers() as workers:
        for job in _search_jobs(prepared, plan, tally.stored, workers.directory):
            workers.start(job, prepared.environment)
        for event in workers.events():
            emit(event)
            for reported in tally.take(event):
                emit(reported)
            if plan.fail_fast and tally.has_findings():
                workers.stop()
        # Still within: whoever is impatient while it is told would lose it.
        verdict = tally.verdict(interrupted=workers.interrupts > 0)
        emit(verdict)
    return verdict


def _jobs(plan: Plan) -> int:
    return min(plan.jobs, plan.histories_max or plan.jobs)


def _search_jobs(prepared: Prepared, plan: Plan, stored: list[Finding], claims: str) -> list[Job]:
    jobs = _jobs(plan)
    return [
        SearchJob(
            job=job,
            target=prepared.target,
            release_path=prepared.release_path,
            seed=plan.seed,
            budget_s=plan.budget_s,
            histories_max=share(plan.histories_max, job, jobs),
            stored=stored,
            known=plan.known,
            claims=claims,
        )
        for job in range(jobs)
    ]


def share(total: int | None, job: int, jobs: int) -> int | None:
    """Return one job's share of a total, as even as can be."""
    return None if total is None else total // jobs + (job < total % jobs)


def replay_history(prepared: Prepared, history: AnyHistory) -> Replayed:
    """Run one history in a process of its own. KvspecError if that fails."""
    job = ReplayJob(job=0, target=prepared.target, release_path=prepared.release_path, history=history)
    answer = None
    with Workers() as workers:
        workers.start(job, prepared.environment)
        for event in workers.events():
            if isinstance(event, WorkerFailed):
                raise KvspecError("\n".join(filter(None, (event.message, event.details))))
            answer = event if isinstance(event, Replayed) else answer
    if answer is None:
        raise KeyboardInterrupt
    return answer


class Tally:
    """What a run has counted and found so far. Keeps findings in the store as soon as they come."""

    def __init__(self, target: str, seed: int, store: FindingStore, known: list[Issue]) -> None:
        self.stored, self._ignored = store.of_target(target)
        self._target = target
        self._seed = seed
        self._store = store
        self._known = known
        self._started = time.monotonic()
        self._release = ""
        self._required: dict[str, str] = {}
        self._total = Progress(job=-1)
        self._reported: dict[Key, Reported] = {}
        self._not_seen: set[Key] = set()
        self._nondeterminism: list[str] = []
        self._failures: list[WorkerFailed] = []

    def take(self, event: Event) -> Iterator[Event]:
        """Count an event; yield those that follow from it."""
        match event:
            case WorkerReady():
                self._release, self._required = event.release, event.required
            case Progress():
                self._total = added(self._total, event)
            case Rechecked(seen=False):
                self._not_seen.add(event.key)
            case Rechecked():
                finding = next(finding for finding in self.stored if finding.key == event.key)
                record = replace(finding.record, gone_since=None)
                yield from self._report(replace(finding, record=record), stored=True)
            case FindingFound():
                yield from self._report(event.finding, stored=False)
            case Nondeterminism():
                file = self._store.save_nondeterminism(event.history)
                self._nondeterminism.append(f"{event.message}; `kvspec replay {file}` runs it twice")
            case WorkerFailed():
                # What is wrong with the set-up is wrong for every worker.
                if event.message not in [failure.message for failure in self._failures]:
                    self._failures.append(event)

    def _report(self, finding: Finding, stored: bool) -> Iterator[Event]:
        key = finding.key
        first = self._reported.get(key)
        if first and len(first.finding.history.ops) <= len(finding.history.ops):
            if finding.record.shortened and not first.finding.record.shortened:
                self._store.save(finding)
            return
        issue = known_as(self._known, key, self._release)
        path = str(self._store.save(finding)) if issue is None else None
        self._reported[key] = Reported(
            finding=finding, path=path, issue=issue, stored=first.stored if first else stored
        )
        if first is None:
            yield FindingReported(reported=self._reported[key])

    def has_findings(self) -> bool:
        """Whether there is a finding that isn't a known issue."""
        return any(reported.issue is None for reported in self._reported.values())

    def verdict(self, interrupted: bool) -> Verdict:
        """Return what was counted and found, and mark the stored findings that are gone."""
        gone = []
        for finding in self.stored:
            if finding.key in self._not_seen - self._reported.keys() and finding.record.gone_since is None:
                self._store.mark_gone(finding.record)
                gone.append(finding)
        reported = [replace(one, histories=self._total.seen.get(key.slug, 0)) for key, one in self._reported.items()]
        judged = not (interrupted or self._failures or self.has_findings())
        missing = {name: text for name, text in self._required.items() if name not in self._total.reached}
        return Verdict(
            target=self._target,
            release=self._release,
            seed=self._seed,
            wall_s=time.monotonic() - self._started,
            total=self._total,
            findings=[one for one in reported if one.issue is None],
            known=[one for one in reported if one.issue is not None],
            gone=gone,
            missing=missing if judged else {},
            nondeterminism=list(dict.fromkeys(self._nondeterminism)),
            failures=self._failures,
            interrupted=interrupted,
            ignored=self._ignored,
        )


class Workers:
    """The child processes of a run, and what they say. Leaving the context leaves no process behind."""

    def __init__(self) -> None:
        self.interrupts = 0
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, signal._HANDLER] = {}
        self._stopping = False

    def __enter__(self) -> "Workers":
        self._temporary = tempfile.TemporaryDirectory(prefix="kvspec-")
        self.directory = self._temporary.name
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup it goes on
                self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._selector.close()
        for worker in self._workers:
            worker.kill()
            os.close(worker.pipe)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._temporary.cleanup()

    def stop(self) -> None:
        """Ask the workers to stop after their histories."""
        self._stopping = True
        for worker in self._workers:
            worker.process.terminate()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self.stop()
        else:
            for worker in self._workers:
                worker.kill()

    def start(self, job: Job, environment: dict[str, str]) -> None:
        """Start a worker; that may also be done while its siblings' events are taken."""
        worker = _Worker(job, environment, Path(self.directory) / f"{job.job}.log")
        self._workers.append(worker)
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)
        if self._stopping:  # a signal came while it was starting, when it wasn't in the list
            worker.process.terminate()

    def events(self) -> Iterator[WorkerEvent | Interrupted]:
        """Yield what the workers say, and if there was an interrupt, until all have ended."""
        said = False
        while self._selector.get_map():
            for ready, _ in self._selector.select(TICK_S):
                yield from self._read(ready.data)
            if self.interrupts and not said:
                said = True
                yield Interrupted()

    def _read(self, worker: "_Worker") -> Iterator[WorkerEvent]:
        data = os.read(worker.pipe, 1 << 16)
        if data:
            yield from worker.received(data)
            return
        self._selector.unregister(worker.pipe)
        failure = worker.ended()
        if failure and not self._stopping:
            yield failure


class _Worker:
    """One child process in a session of its own: Ctrl-C reaches only the parent."""

    def __init__(self, job: Job, environment: dict[str, str], log: Path) -> None:
        self._job = job.job
        self._log = log
        self._rest = b""
        self._done = False
        self._decoder = msgspec.json.Decoder(WorkerEvent)
        self.pipe, events_fd = os.pipe()
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvspec.worker"],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=(events_fd,),
                start_new_session=True,
                env=environment,
            )
        os.close(events_fd)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # if it has died, its log will tell
            stdin.write(msgspec.json.encode(replace(job, events_fd=events_fd)))

    def received(self, data: bytes) -> Iterator[WorkerEvent]:
        """Yield the events that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = self._decoder.decode(line)
            self._done = self._done or isinstance(event, WorkerDone)
            yield event

    def ended(self) -> WorkerFailed | None:
        """Wait for the process, whose pipe is closed. Return what is to be said if it died."""
        try:
            self.process.wait(EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._done:
            return None
        lines = self._log.read_text(errors="replace").splitlines()
        dump = next((index for index, line in enumerate(lines) if line.startswith(DUMP_SIGNS)), len(lines))
        first = max(0, min(dump - 5, len(lines) - LOG_LINES))
        stuck = lines[dump : dump + 1] and lines[dump].startswith(DUMP_SIGNS[0])
        end = "was stuck in one history" if stuck else _end_in_words(self.process.returncode)
        return WorkerFailed(
            job=self._job,
            message=f"Worker {self._job} {end}; its log says where:",
            details="\n".join(lines[first : first + LOG_LINES]),
        )

    def kill(self) -> None:
        """End the process and its children at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")
