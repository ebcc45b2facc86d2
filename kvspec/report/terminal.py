"""What a person sees: progress on a terminal, plain lines elsewhere, then the verdict."""

import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from kvspec.events import (
    Event,
    FindingReported,
    GateStarted,
    Interrupted,
    Minimising,
    Progress,
    Reported,
    Verdict,
    WorkerReady,
)
from kvspec.findings import Finding
from kvspec.known import Issue
from kvspec.laws import LAWS
from kvspec.model import CLAUSES

PLAIN_INTERVAL_S = 10.0
"""Without a terminal, a run says how far it is as often as this."""

VERDICTS = {
    0: ("PASS", "bold green"),
    1: ("FINDING", "bold red"),
    2: ("ERROR", "bold red"),
    3: ("HOLLOW RUN", "bold yellow"),
    4: ("NOT DETERMINISTIC", "bold red"),
    130: ("INTERRUPTED", "bold yellow"),
}


class PipeConsole(Console):
    """A console to whose caller a reader that has gone is an error."""

    def on_broken_pipe(self) -> None:
        """Let the BrokenPipeError out; rich would exit with status 1, which means a finding."""
        raise BrokenPipeError


class StdoutConsole(PipeConsole):
    """stdout as it is: long lines aren't broken."""

    def __init__(self) -> None:
        super().__init__(soft_wrap=True, highlight=False, markup=False, emoji=False)


class Terminal:
    """Prints a run. A context manager, for the sake of the progress bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = self._said_s = time.monotonic()
        self._counts: dict[str, int] = {"histories": 0, "steps": 0, "stores": 0, "loads": 0}
        self._findings = 0
        self._in_seconds = True
        self._total: float | None = None
        self._search_since_s: float | None = None
        self._bar = Bar(
            SpinnerColumn(),
            TimeElapsedColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> "Terminal":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case GateStarted():
                self._start(event)
            case WorkerReady():
                self._search_since_s = self._search_since_s or time.monotonic()
                self._bar.update(self._task, description="searching", total=self._total)
                if event.note and event.job == 0:
                    self._say(Text(f"note: {event.note}", "yellow"))
            case Progress():
                self._progress(event)
            case Minimising():
                told = f"{self._so_far()}; making the history of {event.key.law} short"
                self._bar.update(self._task, description=told)
            case FindingReported():
                self._findings += event.reported.issue is None
                self._say(*finding_lines(event.reported))
            case Interrupted():
                self._say(Text("Interrupted: the workers end their histories. Once more kills them.", "yellow"))
            case Verdict():
                self._bar.stop()
                self._say(*verdict_lines(event))

    def _start(self, event: GateStarted) -> None:
        self._in_seconds = event.budget_s is not None
        self._total = event.budget_s or event.histories_max
        budget = f"{event.budget_s:g} s" if event.budget_s else f"{event.histories_max} histories"
        workers = f"{event.jobs} worker" + "s" * (event.jobs > 1)
        self._say(Text(f"kvspec gate: {event.target}, {budget}, {workers}, seed {event.seed}", "bold"))
        self._bar.update(self._task, description=f"starting {workers}; importing vLLM takes about 10 s")

    def _progress(self, event: Progress) -> None:
        for name in self._counts:
            self._counts[name] += getattr(event, name)
        now_s = time.monotonic()
        searched_s = now_s - (self._search_since_s or now_s)
        done = searched_s if self._in_seconds else self._counts["histories"]
        self._bar.update(self._task, description=self._so_far(), completed=done)
        if not self._console.is_terminal and now_s - self._said_s >= PLAIN_INTERVAL_S:
            self._said_s = now_s
            self._say(Text(f"{now_s - self._started_s:.0f} s: {self._so_far()}"))

    def _so_far(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self._counts.items() if count or name == "histories")
        return counts + f", {self._findings} finding{'s' * (self._findings != 1)}"

    def _say(self, *lines: Text) -> None:
        self._console.print(Text("\n").join(lines))


def finding_lines(reported: Reported) -> Iterator[Text]:
    """Tell a finding: law, shortest history in words, how to replay it. A known issue is one line."""
    finding, key = reported.finding, reported.finding.key
    if reported.issue:
        yield Text(f"known issue {reported.issue.id} ({reported.issue.reference}): {key.law}", "yellow")
        return
    yield Text()
    yield Text(
        f"FINDING {key.law} during {key.op}"
        + (f", in {key.frame}" if key.frame else "")
        + (" (stored, still there)" if reported.stored else ""),
        "bold red",
    )
    if law := LAWS.get(key.law):
        yield Text(f"  law: {law.sentence}", "italic")
    elif clause := CLAUSES.get(key.law):
        yield Text(f"  clause: {clause.sentence}", "italic")
        yield Text(f"  source: {clause.source}", "italic")
    yield Text(f"  seen: {finding.record.message}")
    yield from (Text(f"  {line}") for line in _history_lines(finding))
    yield Text(f"  replay: kvspec replay {reported.path}", "cyan")
    yield Text()


def _history_lines(finding: Finding) -> Iterator[str]:
    ops, ops_original = len(finding.history.ops), len(finding.original.ops)
    how = "shortest history" if finding.record.shortened else "history, to be shortened further by the next run"
    yield f"{how}, {ops} op{'s' * (ops != 1)} (first seen with {ops_original}):"
    yield from (f"  {line}" for line in finding.story())


def verdict_lines(verdict: Verdict) -> Iterator[Text]:
    """Tell a verdict, what it rests on, and what to do about it."""
    name, style = VERDICTS[verdict.exit_code]
    release = f" (vLLM {verdict.release})" if verdict.release and "@" not in verdict.target else ""
    stopped = ", interrupted" if verdict.interrupted and verdict.exit_code != 130 else ""
    yield Text.assemble(
        (name, style), f"  {verdict.target}{release}, seed {verdict.seed}, {verdict.wall_s:.1f} s{stopped}"
    )
    if verdict.total.histories or not verdict.failures:
        yield from (Text(f"  {line}") for line in _count_lines(verdict))
    for failure in verdict.failures:
        yield Text(f"  error: {failure.message}", "red")
        yield from (Text(f"    | {line}") for line in failure.details.splitlines())
    yield from (Text(f"  not deterministic: {sentence}", "red") for sentence in verdict.nondeterminism)
    yield from _missing_lines(verdict.missing)
    for reported in verdict.findings:
        yield Text(f"  finding {_summary(reported)}: kvspec replay {reported.path}", "red")
    for issue, seen in known_issues(verdict).values():
        yield Text(f"  known issue {issue.id} ({issue.reference}), {_seen(seen)}: {issue.title}", "yellow")
    for sentence in verdict.ignored:
        yield Text(f"  ignored: {sentence}", "yellow")
    for finding in verdict.gone:
        yield Text(f"  FIXED {finding.key.slug}: its history no longer shows {finding.key.law}", "green")


def _count_lines(verdict: Verdict) -> Iterator[str]:
    total = verdict.total
    blocks = f", {total.stores} blocks stored, {total.loads} loaded" if total.stores or total.loads else ""
    yield f"{total.histories} histories, {total.steps} steps{blocks}; {total.reruns} histories run twice"
    if total.steps and total.engine_wall_s:
        yield f"{1000 * total.engine_wall_s / total.steps:.2f} ms per engine step, the simulated device included"
    reached = sorted(total.reached.items(), key=lambda item: -item[1])
    yield "events reached: " + (", ".join(f"{name} {count}" for name, count in reached) or "none")


def _missing_lines(missing: dict[str, str]) -> Iterator[Text]:
    if not missing:
        return
    yield Text("  never reached, so this run proves little:", "yellow")
    for name, sentence in missing.items():
        yield Text(f"    {name}" + (f": {sentence}" if sentence else ""), "yellow")
    yield Text("  give it a longer --budget (or more --histories)", "yellow")


def known_issues(verdict: Verdict) -> dict[str, tuple[Issue, int]]:
    """Return each known issue once, with the histories that showed it; it may break more than one law."""
    known: dict[str, tuple[Issue, int]] = {}
    for reported in verdict.known:
        assert reported.issue is not None
        before = known.get(reported.issue.id, (reported.issue, 0))[1]
        known[reported.issue.id] = reported.issue, before + reported.histories
    return known


def _summary(reported: Reported) -> str:
    return f"{reported.finding.key.law} ({len(reported.finding.history.ops)} ops, {_seen(reported.histories)})"


def _seen(histories: int) -> str:
    if not histories:
        return "seen in its stored history"
    return f"seen in {histories} histor{'y' if histories == 1 else 'ies'}"
