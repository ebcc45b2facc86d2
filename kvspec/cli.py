"""The command line: gate, replay, measure, known, spec; bench and release have files of their own."""

import contextlib
import os
import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import click
from msgspec.structs import replace
from rich.text import Text

from kvspec import __version__
from kvspec.cli_bench import bench
from kvspec.cli_release import prepared_target, release
from kvspec.cli_types import Duration, known_option
from kvspec.errors import KvspecError
from kvspec.events import Event, Replayed
from kvspec.findings import load_finding, load_history
from kvspec.gate import FINDINGS_DIR, Plan, replay_history, run_gate, split_target
from kvspec.history import AnyHistory, story
from kvspec.known import load_known
from kvspec.ops import EQUALITIES
from kvspec.report.github import annotations
from kvspec.report.junit import JUnit
from kvspec.report.terminal import StdoutConsole, Terminal
from kvspec.spec import FORMATS, collect, render

DEFAULT_TARGET = "vllm-simple"


class ReaderGone(Exception):
    """Whoever read stdout or stderr has gone."""


@contextlib.contextmanager
def _reader_may_go() -> Iterator[None]:
    """Hide a broken pipe from click, which would exit with status 1, and that means a finding."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Commands(click.Group):
    """A group whose commands, and their help, may lose their reader."""

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        with _reader_may_go():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_go():
            return super().invoke(ctx)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvspec")
def cli() -> None:
    """Check KV-cache offload of real engines against laws and an executable model, without a GPU.

    \b
    Examples:
      kvspec gate --target vllm-simple@0.33.0     search a release of vLLM for 60 s
      kvspec gate                                 search the vLLM that is importable (a checkout, a fork)
      kvspec replay .kvspec/findings/FINDING      run the history of a finding again
      kvspec measure                              what an engine step costs, beside vLLM alone
      kvspec bench --seeds 3 --budget 60s         how surely known bugs and planted defects are found
      kvspec known                                confirmed bugs that the gate doesn't fail on
      kvspec spec --clause POOL-2                 what a clause or a law says, and what checks it
      kvspec release install 0.33.0               fetch a release ahead of time

    `kvspec COMMAND --help` says more.
    """


@cli.command()
@click.option("--target", default=DEFAULT_TARGET, show_default=True, help="What is checked; see below.")
@click.option("--budget", type=Duration(), metavar="TIME", help="How long to search: 60s, 2m, 1h.  [default: 60s]")
@click.option("--histories", type=click.IntRange(min=1), metavar="N", help="Make N histories instead.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Where to start.  [default: random]")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=min(2, os.cpu_count() or 1),
    show_default=True,
    metavar="N",
    help="Worker processes.",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first finding that isn't known.")
@click.option(
    "--findings",
    type=click.Path(path_type=Path),
    default=FINDINGS_DIR,
    show_default=True,
    metavar="DIR",
    help="Where findings and their histories are kept.",
)
@known_option
@click.option("--no-known", is_flag=True, help="Fail on known issues too.")
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Also write JUnit XML.")
def gate(
    target: str,
    budget: float | None,
    histories: int | None,
    seed: int | None,
    jobs: int,
    fail_fast: bool,
    findings: Path,
    known_file: Path | None,
    no_known: bool,
    junit: Path | None,
) -> int:
    """Search a target for histories that break a law, and give a verdict.

    Findings of earlier runs on the same target are looked at first. Each new finding is made short, shown
    with the command that replays it, and kept in the findings directory; the search goes on until the
    budget is used up.

    \b
    Targets:
      vllm-simple            SimpleCPUOffloadConnector of the vLLM that `import vllm` finds from here
      vllm-offloading        OffloadingConnector, likewise
      vllm-multi             MultiConnector of two of these connectors
      vllm-core              its block pool, KV cache manager and scheduler, held to equality with the model
      vllm-offload-index     the store index and CPU tier of OffloadingConnector, likewise
      vllm-simple@0.33.0     a published release, which is fetched if need be
      package.module:suite   one of your own: a kvspec.search.Suite (with @0.33.0 if it needs a release)

    \b
    Examples:
      kvspec gate --target vllm-simple@0.33.0 --budget 5m
      kvspec gate --budget 30s --fail-fast --junit build/kvspec.xml
      kvspec gate --seed 7 --jobs 2 --histories 500     the same 500 histories every time

    Ctrl-C stops the search and gives the verdict so far; a second one doesn't wait for the workers.

    \b
    Exit status, the first that applies:
      1    a finding that isn't a known issue
      2    usage or set-up error, or a worker that died
      4    a history ran differently the second time
      130  interrupted
      3    hollow: the search never reached what it must (give it a longer budget)
      0    none of these
    """
    if budget is not None and histories is not None:
        raise click.UsageError("--budget and --histories exclude each other; leave one out.")
    plan = Plan(
        seed=secrets.randbelow(2**32) if seed is None else seed,
        jobs=jobs,
        budget_s=None if histories else budget or 60.0,
        histories_max=histories,
        findings=findings,
        known=[] if no_known else load_known(known_file),
        fail_fast=fail_fast,
    )
    prepared = prepared_target(target)
    with ExitStack() as stack:
        handlers: list[Callable[[Event], None]] = [stack.enter_context(Terminal(StdoutConsole()))]
        if junit:
            handlers.append(JUnit(junit))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            handlers.append(annotations(click.echo))

        def emit(event: Event) -> None:
            for handle in handlers:
                handle(event)

        return run_gate(prepared, plan, emit).exit_code


@cli.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--target", help="Run it on this target instead of the one that it was found on.")
@click.option("--trace", is_flag=True, help="Show the adversary's moves under each op, and the trace's hash.")
def replay(file: Path, target: str | None, trace: bool) -> int:
    """Run a recorded history again, and say whether a law is still broken.

    FILE is a finding's directory, or a file with a history. The history is run twice, to see that it repeats.

    \b
    Examples:
      kvspec replay .kvspec/findings/shadow-1-step-0123abcd
      kvspec replay .kvspec/findings/shadow-1-step-0123abcd/original.json --trace
      kvspec replay history.json --target vllm-simple@0.33.0

    \b
    Exit status:
      1    a law is broken
      2    usage or set-up error
      4    no law is broken, but the second run differed from the first
      0    no law is broken
    """
    history = load_finding(file).history if file.is_dir() else load_history(file)
    replayed_on = split_target(target or history.target)[0]
    level = str(history.__struct_config__.tag)
    if level != EQUALITIES.get(replayed_on, "engine"):
        runs = next((target for target, wanted in EQUALITIES.items() if wanted == level), "a target with an engine")
        raise click.UsageError(f"{file} is a history of level {level}, and {replayed_on} can't run one; {runs} can.")
    prepared = prepared_target(target or history.target)
    history = replace(history, target=prepared.target)
    replayed = replay_history(prepared, history)
    console = StdoutConsole()
    for line in _replay_lines(history, replayed, trace):
        console.print(line)
    if replayed.violations:
        return 1
    return 0 if replayed.repeats else 4


def _replay_lines(history: AnyHistory, replayed: Replayed, trace: bool) -> Iterator[Text]:
    yield Text(history.target, "bold")
    yield from (Text(f"  {line}") for line in story(history, replayed.schedules if trace else ()))
    if trace:
        yield Text(f"  trace: {replayed.traces[0]}")
    for key, message, op_index in replayed.violations:
        where = f"op {op_index + 1} ({key.op})" if op_index < len(history.ops) else "the drain after the last op"
        where = "the start" if op_index < 0 else where
        yield Text(f"{key.law} is broken at {where}" + (f", in {key.frame}" if key.frame else ""), "bold red")
        yield Text(f"  seen: {message}")
    if not replayed.violations:
        yield Text("No law is broken: the history runs clean.", "bold green")
    if not replayed.repeats:
        yield Text("The second run differed from the first: the target isn't deterministic.", "bold red")


@cli.command()
@click.option("--target", default=DEFAULT_TARGET, show_default=True, help="What is measured.")
@click.option("--histories", type=click.IntRange(min=1), default=300, show_default=True, metavar="N", help="How many.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Where to start.")
def measure(target: str, histories: int, seed: int) -> int:
    """Measure what an engine step costs: with all of kvspec, without Hypothesis, and vLLM alone.

    The same histories run all three ways in one process, so the ratios mean something on a busy machine too.

    \b
    Examples:
      kvspec measure --target vllm-simple@0.33.0
    """
    if (name := split_target(target)[0]) in EQUALITIES:
        raise click.UsageError(f"{name} is called directly: it has no engine, and so no engine step.")
    if name == "vllm-multi":
        raise click.UsageError("vllm-multi isn't measured; its backends are: vllm-simple and vllm-offloading.")
    prepared = prepared_target(target)
    command = [sys.executable, "-P", "-m", "kvspec.measure", prepared.target, str(histories), str(seed)]
    done = subprocess.run(command, env=prepared.environment, stdout=subprocess.PIPE, text=True)
    click.echo(done.stdout, nl=False)
    return 2 if done.returncode else 0


@cli.command()
@known_option
def known(known_file: Path | None) -> None:
    """List the known issues: confirmed bugs of targets, on which the gate doesn't fail.

    An issue of your own is an entry in a TOML file:

    \b
      [[issue]]
      id = "simple-example"
      title = "One sentence: what goes wrong."
      reference = "vllm#12345"             or the path of a script
      target = "vllm-simple"               or several: ["vllm-simple", "vllm-multi"]
      law = "SHADOW-1"                     as the finding says; patterns such as "SHADOW-*" work
      op = "step"                          optional, like the lines below
      frame = "v1/core/block_pool.py:*"
      releases = ">=0.24,<0.31"            or a list: ["0.24.0", "0.25.1"]

    \b
    Examples:
      kvspec known
      kvspec known --known known.toml      also checks that the file can be read
    """
    issues = load_known(known_file)
    if not issues:
        click.echo("No known issues.")
    for issue in issues:
        covered = issue.releases if isinstance(issue.releases, str) else ", ".join(issue.releases)
        click.echo(f"{issue.id}  ({issue.reference})  {issue.title}")
        where = f"{', '.join(issue.targets)} {covered or 'all releases'}"
        click.echo(f"    {where}: {issue.law}, op {issue.op}, frame {issue.frame}")


@cli.command()
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="How to write it.  [default: html if FILE ends in .html, else markdown]",
)
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write it to a file.  [default: stdout]"
)
@click.option("--clause", metavar="ID", help="Only this clause or law, such as POOL-2.")
def spec(format_: str | None, output: Path | None, clause: str | None) -> None:
    """Write the specification: the clauses of the model and the laws, release by release.

    It is made from the code: the sentences are the model's docstrings, and the tests that check a clause are
    found in the source, where kvspec runs from a clone. The page needs nothing else, and works offline.

    \b
    Examples:
      kvspec spec --clause POOL-2
      kvspec spec --output specification.html
      kvspec spec --format markdown | less
    """
    format_ = format_ or ("html" if output and output.suffix in (".html", ".htm") else "markdown")
    page = collect()
    text = render(page if clause is None else page.only(clause), format_)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvspecError(f"{output} can't be written: {error.strerror or error}.") from error


cli.add_command(bench)
cli.add_command(release)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit with its status. Errors that a person can mend are one sentence."""
    _open_missing_streams()
    try:
        status = _status(arguments)
        sys.stdout.flush()
    except (ReaderGone, BrokenPipeError):
        status = _without_reader()
    sys.exit(status)


def _status(arguments: Sequence[str] | None) -> int:
    try:
        return cli.main(arguments, prog_name="kvspec", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KvspecError as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return 130
    except ReaderGone:
        raise
    except Exception:
        traceback.print_exc()
        click.echo(
            f"This is a bug of kvspec {__version__}. Please report it with the traceback and your command.",
            err=True,
        )
        return 2


def _without_reader() -> int:
    """Say on stderr, if that is still read, why it ends, and leave nothing to flush at exit. Returns the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    try:
        click.echo("kvspec: whoever read the output has gone, so it stopped.", err=True)
    except BrokenPipeError:
        os.dup2(nowhere, sys.stderr.fileno())
    return 141


def _open_missing_streams() -> None:
    """Give a process that was started with stdout or stderr closed the null device there.

    Else the next file that is opened would get the stream's number, and what is printed would end up in it.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


if __name__ == "__main__":
    main()
