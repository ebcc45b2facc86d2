"""``kvspec bench``: how surely a target's machine finds known bugs and planted defects."""

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

import kvspec
from kvspec.bench import (
    CASES,
    DEFECTS,
    OUTPUT,
    Bench,
    BenchPlan,
    Case,
    Header,
    Row,
    RowAdded,
    load_cases,
    run_bench,
    source_digest,
)
from kvspec.cli_release import prepared_target
from kvspec.cli_types import Duration, known_option
from kvspec.defects import Defect, load_defects
from kvspec.events import ABLATIONS, Event, Interrupted, TrialStarted, WorkerFailed, WorkerReady
from kvspec.events import Progress as Counted
from kvspec.findings import now
from kvspec.known import load_known
from kvspec.report.bench import Report, write_reports
from kvspec.report.terminal import PLAIN_INTERVAL_S, StdoutConsole


class BenchTerminal:
    """Shows how a benchmark goes: each result as a line, and on a terminal a bar. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._histories = self._steps = 0
        self._said_s = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("importing vLLM takes about 10 s", total=None)

    def __enter__(self) -> "BenchTerminal":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event | RowAdded) -> None:
        """Show one event."""
        match event:
            case RowAdded():
                self._bar.update(self._task, completed=event.done, total=event.total)
                self._console.print(row_line(event))
                self._said_s = time.monotonic()
            case Counted():
                self._histories += event.histories
                self._steps += event.steps
                self._tell()
            case Interrupted():
                self._console.print(
                    Text("Interrupted: the workers end their histories. Once more kills them.", "yellow")
                )
            case WorkerFailed():
                self._console.print(Text(f"error: {event.message}\n{event.details}".rstrip(), "red"))
            case WorkerReady() | TrialStarted():
                self._tell()

    def _tell(self) -> None:
        said = f"{self._histories} histories, {self._steps} engine steps"
        self._bar.update(self._task, description=said)
        if not self._console.is_terminal and time.monotonic() - self._said_s >= PLAIN_INTERVAL_S:
            self._said_s = time.monotonic()
            self._console.print(said)


def row_line(added: RowAdded) -> Text:
    """Tell a result in one line."""
    row = added.row
    where = f"[{added.done}/{added.total}] {row.subject}, {row.release or 'as it is'}"
    where += f", with {row.ablation}" if row.ablation else ""
    where += f", seed {row.seed}: "
    said, style = _outcome(row)
    return Text.assemble(where, (said, style))


def _outcome(row: Row) -> tuple[str, str]:
    effort = f"{row.effort.cpu_s:.1f} CPU-s, {row.effort.steps} steps"
    if row.failure:
        return row.failure, "yellow"
    if row.side == "fixed":
        assert row.key or not row.found
        return (
            (f"NOT SILENT, {row.key.law}", "bold red") if row.found and row.key else (f"silent for {effort}", "green")
        )
    if row.found and row.key:
        ops = f", {row.ops} ops" if row.ops else ""
        return f"found after {effort}{ops} ({row.key.law})", "green"
    return f"not found in {effort}", "bold red"


@click.command()
@click.option(
    "--case", "names", multiple=True, metavar="ID", help="Only this case or defect; repeat it, or use a pattern."
)
@click.option("--target", "targets", multiple=True, metavar="T", help="Only what this target has to show; repeatable.")
@click.option("--only", type=click.Choice(["bugs", "defects"]), help="Only real bugs, or only planted defects.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Seeds 0 to N - 1."
)
@click.option(
    "--budget",
    type=Duration(),
    default="600s",
    show_default=True,
    metavar="TIME",
    help="CPU time of each seed: 30s, 10m, 1h.",
)
@click.option(
    "--silent-budget",
    type=Duration(),
    show_default="as --budget",
    metavar="TIME",
    help="CPU time of each seed where the bug isn't.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default="one per CPU",
    metavar="N",
    help="Worker processes.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=OUTPUT,
    show_default=True,
    metavar="DIR",
    help="Where results and reports go.",
)
@click.option("--resume", is_flag=True, help="Go on from the results that are there.")
@click.option("--ablate", is_flag=True, help="Also measure the machine made weaker.")
@click.option(
    "--cases", type=click.Path(path_type=Path), default=CASES, show_default=True, metavar="FILE", help="The real bugs."
)
@click.option(
    "--defects",
    "registry",
    type=click.Path(path_type=Path),
    default=DEFECTS,
    show_default=True,
    metavar="DIR",
    help="The package of planted defects.",
)
@known_option
def bench(
    names: tuple[str, ...],
    targets: tuple[str, ...],
    only: str | None,
    seeds: int,
    budget: float,
    silent_budget: float | None,
    jobs: int,
    output: Path,
    resume: bool,
    ablate: bool,
    cases: Path,
    registry: Path,
    known_file: Path | None,
) -> int:
    """Measure how surely, and how fast, known bugs and planted defects are found.

    Run it in a clone of kvspec. Every real bug of tests/bugs/cases.toml is looked for in a release of vLLM
    that has it, every defect of tests/defects in the newest one, with one seed after the other, by the same
    machine that `kvspec gate` runs. The release that fixes the bug, or has no defect planted, must stay
    silent under the same seeds. Releases are fetched if need be.

    DIR gets bench.html and bench.md (tables, curves, which law notices which defect), the histories that
    were found, and results.jsonl, which has every result as soon as it is there: after Ctrl-C, --resume
    goes on. Engine steps repeat exactly; CPU seconds depend on the machine.

    A case whose target this version doesn't have is listed as "target not built".

    \b
    Examples:
      kvspec bench --case simple-store-before-compute --seeds 3 --budget 60s
      kvspec bench --only defects --seeds 5 --budget 2m --jobs 8
      kvspec bench --ablate --output build/bench             the full table; hours
      kvspec bench --ablate --output build/bench --resume    go on after Ctrl-C

    \b
    Exit status, the first that applies:
      1    a seed didn't find its bug or defect, or wasn't silent where there is none
      2    usage or set-up error, a worker that died, or a case with an event that no machine makes
      4    a finding wasn't there when its history was run again
      130  interrupted
      0    none of these; what isn't built doesn't count
    """
    plan = BenchPlan(
        cases=[] if only == "defects" else load_cases(cases),
        defects={} if only == "bugs" else load_defects(registry),
        seeds=seeds,
        budget_cpu_s=budget,
        silent_budget_cpu_s=budget if silent_budget is None else silent_budget,
        jobs=jobs,
        output=output,
        known=load_known(known_file),
        ablations=tuple(ABLATIONS) if ablate else (),
        registry=registry,
    )
    plan = _chosen(plan, names, targets, only)
    header = Header(
        kvspec=kvspec.__version__,
        code=source_digest(cases, registry),
        budget_cpu_s=plan.budget_cpu_s,
        silent_budget_cpu_s=plan.silent_budget_cpu_s,
        started=now(),
    )
    console = StdoutConsole()
    with ExitStack() as stack:
        terminal = stack.enter_context(BenchTerminal(console))
        done = run_bench(plan, header, resume, prepared_target, terminal)
    files = write_reports(done, _command(plan, names, targets, only, cases))
    for line in summary(done):
        console.print(line)
    for file in files:
        console.print(f"report: {file}")
    return exit_code(done)


def _chosen(plan: BenchPlan, names: Sequence[str], targets: Sequence[str], only: str | None) -> BenchPlan:
    """Leave out what wasn't asked for. UsageError for a name that fits nothing."""
    kind = {"bugs": "case", "defects": "defect", None: "case or defect"}[only]
    everything: dict[str, Case | Defect] = {**{case.id: case for case in plan.cases}, **plan.defects}
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in everything):
            near = [name for name in everything if pattern.partition("-")[0].partition("_")[0] in name] or everything
            raise click.UsageError(
                f"--case {pattern!r} is no {kind}; there are {', '.join(sorted(near)[:12])}, …"
                + (f" (--only {only} leaves out the others)" if only else "")
            )
    for target in targets:
        if "@" in target:
            raise click.UsageError(f"--target {target!r} has a release; each case says by itself which ones it needs.")
        if target not in {one.target for one in everything.values()}:
            there = ", ".join(sorted({one.target for one in everything.values()}))
            raise click.UsageError(f"--target {target!r} has neither cases nor defects; there are {there}.")

    def wanted(name: str, one: Case | Defect) -> bool:
        fits = not names or any(fnmatchcase(name, pattern) for pattern in names)
        return fits and (not targets or one.target in targets)

    cases = [case for case in plan.cases if wanted(case.id, case)]
    defects = {name: defect for name, defect in plan.defects.items() if wanted(name, defect)}
    if not cases and not defects:
        raise click.UsageError("--case, --target and --only leave nothing to run.")
    return replace(
        plan,
        cases=cases,
        defects=defects,
    )


def _command(plan: BenchPlan, names: Sequence[str], targets: Sequence[str], only: str | None, cases: Path) -> str:
    """Return the command that repeats a benchmark."""
    words = ["kvspec", "bench", "--seeds", str(plan.seeds), "--budget", f"{plan.budget_cpu_s:g}s"]
    if plan.silent_budget_cpu_s != plan.budget_cpu_s:
        words += ["--silent-budget", f"{plan.silent_budget_cpu_s:g}s"]
    words += [word for name in names for word in ("--case", name)]
    words += [word for target in targets for word in ("--target", target)]
    words += ["--only", only] if only else []
    words += ["--cases", str(cases)] if cases != CASES else []
    words += ["--defects", str(plan.registry)] if plan.registry != DEFECTS else []
    return shlex.join(words + ["--ablate"] * bool(plan.ablations))


def summary(bench: Bench) -> list[Text]:
    """Tell what came out, in a line or two each."""
    report = Report(bench)
    lines = []
    for what, figures in (("bugs", report.cases), ("planted defects", report.defects)):
        ran = report.runnable(figures)
        proved = sum(one.is_proved for one in ran)
        if figures:
            left = f"; {len(figures) - len(ran)} not run" if len(figures) > len(ran) else ""
            style = "bold green" if proved == len(ran) else "bold red"
            lines.append(Text(f"{what}: {proved} of {len(ran)} found by every seed and silent elsewhere{left}", style))
        lines += [Text(f"  {id}: {note}", "yellow") for id, note in report.noted(figures)]
        for why, target, ids in report.left_out(figures):
            lines.append(Text(f"  {why} ({target}): {', '.join(ids[:5])}{', …' if len(ids) > 5 else ''}", "dim"))
    return lines


def exit_code(bench: Bench) -> int:
    """Return the strongest fact, as the help says."""
    ran = [row for row in bench.rows if not row.failure]
    missed = any(row.found == (row.side == "fixed") for row in ran if not row.ablation)
    failed = bench.failures or any(row.failure for row in bench.rows)
    facts = ((1, missed), (2, failed), (4, bench.nondeterminism), (130, bench.interrupted))
    return next((code for code, fact in facts if fact), 0)
