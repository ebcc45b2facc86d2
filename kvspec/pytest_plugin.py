"""Machines under pytest: ``pytest --kvspec-target vllm-simple@0.33.0 -m machine -n 2``.

Without a target nothing changes. With one, pytest is executed anew with the target's release first on the
path and with PYTHONHASHSEED=0, before anything else happens; xdist's workers inherit that.

A machine's budget is shared by its shards, each a test, so that xdist's workers have one each. A finding,
or a history that doesn't repeat, fails its shard. Whether the run was hollow is judged once, at the end of
the session, over all shards that were run, and only if no test failed: then the session fails, and the
summary says why.
"""

import functools
import os
import secrets
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from kvspec import releases
from kvspec.cli_release import InstallProgress
from kvspec.errors import KvspecError
from kvspec.events import Event, Progress, Reported, SearchJob, Verdict, added
from kvspec.findings import FindingStore
from kvspec.gate import FINDINGS_DIR, Tally, prepare, seconds
from kvspec.known import load_known
from kvspec.report.terminal import finding_lines, verdict_lines

if TYPE_CHECKING:
    from kvspec.search import Suite

ENTERED_VARIABLE = "KVSPEC_PYTEST_TARGET"
"""Set in processes that have a target's environment already."""
SEED_VARIABLE = "KVSPEC_PYTEST_SEED"
"""The seed that the first process drew."""
SHARDS = 2
"""Shards of a machine without xdist."""
VERDICT_PROPERTY = "kvspec"
"""Property of a test report in which a shard's Verdict travels, as JSON, to the process that judges."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kvspec-…`` and the ini options for their defaults."""
    group = parser.getgroup("kvspec", "kvspec: machines that check a target")
    group.addoption(
        "--kvspec-target",
        metavar="TARGET",
        help="what is checked, such as vllm-simple@0.33.0 [ini: kvspec_target]",
    )
    group.addoption(
        "--kvspec-budget", metavar="TIME", help="how long each machine searches: 10s, 2m [ini: kvspec_budget]"
    )
    group.addoption("--kvspec-seed", metavar="N", type=int, help="where machines start [random]")
    group.addoption("--kvspec-shards", metavar="N", type=int, help="tests per machine [xdist's workers, else 2]")
    parser.addini("kvspec_target", "default of --kvspec-target", default="")
    parser.addini("kvspec_budget", "default of --kvspec-budget", default="10s")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Execute pytest anew in the target's environment, unless this process has it; before capture starts."""
    options = early_config.known_args_namespace
    target = options.kvspec_target or early_config.getini("kvspec_target")
    if target and os.environ.get(ENTERED_VARIABLE) != target:
        seed = secrets.randbelow(2**32) if options.kvspec_seed is None else options.kvspec_seed
        _enter(target, seed)
    return (yield)


def _enter(target: str, seed: int) -> None:
    with ExitStack() as stack:

        def progress(version: str) -> releases.Progress:
            return stack.enter_context(InstallProgress(version, Console(stderr=True)))

        try:
            environment = prepare(target, progress).environment
        except KvspecError as error:
            raise pytest.UsageError(str(error)) from error
    environment |= {ENTERED_VARIABLE: target, SEED_VARIABLE: str(seed)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and what judges the run."""
    config.addinivalue_line("markers", "machine: runs a stateful machine against a target")
    if _target(config):
        config.pluginmanager.register(_Judge(config), "kvspec-judge")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is checked, and the seed."""
    target = _target(config)
    return f"kvspec: {target}, {_budget_s(config):g} s per machine, seed {_seed()}" if target else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per shard of a machine."""
    if "kvspec_shard" not in metafunc.fixturenames:
        return
    if not _target(metafunc.config):
        skip = pytest.mark.skip(reason="give a target, such as --kvspec-target vllm-simple@0.33.0")
        metafunc.parametrize("kvspec_shard", [pytest.param(0, marks=skip, id="no-target")], indirect=True)
        return
    shards = _shards(metafunc.config)
    metafunc.parametrize(
        "kvspec_shard", range(shards), ids=[f"shard{n + 1}of{shards}" for n in range(shards)], indirect=True
    )


@pytest.fixture
def kvspec_shard(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[[], None]:
    """Return a function that searches for one shard's share of the budget, and fails if it finds anything."""

    def search() -> None:
        verdict = _search(request.config, request.param)
        record_property(VERDICT_PROPERTY, msgspec.json.encode(verdict).decode())
        lines = [line.plain for reported in verdict.findings for line in finding_lines(reported)]
        if lines or verdict.nondeterminism:
            pytest.fail("\n".join([*lines, *verdict.nondeterminism]), pytrace=False)

    return search


def _search(config: pytest.Config, shard: int) -> Verdict:
    from kvspec.search import Search
    from kvspec.worker import check_import

    prepared = prepare(_target(config))
    check_import(prepared.target, prepared.release_path)
    suite = _suite(prepared.target)
    known = load_known()
    tally = Tally(prepared.target, _seed(), FindingStore(config.rootpath / FINDINGS_DIR), known)
    job = SearchJob(
        job=shard,
        target=prepared.target,
        release_path=prepared.release_path,
        seed=_seed(),
        budget_s=_budget_s(config) / _shards(config),
        histories_max=None,
        stored=tally.stored,
        known=known,
    )

    def take(event: Event) -> None:
        for _ in tally.take(event):
            pass

    Search(suite, job, take, lambda: False).run()
    return tally.verdict(interrupted=False)


@functools.cache
def _suite(target: str) -> "Suite":
    from kvspec.search import load_suite

    return load_suite(target)


def _target(config: pytest.Config) -> str:
    return str(config.getoption("kvspec_target") or config.getini("kvspec_target"))


def _budget_s(config: pytest.Config) -> float:
    try:
        return seconds(config.getoption("kvspec_budget") or config.getini("kvspec_budget"))
    except KvspecError as error:
        raise pytest.UsageError(f"--kvspec-budget: {error}") from error


def _seed() -> int:
    return int(os.environ[SEED_VARIABLE])


def _shards(config: pytest.Config) -> int:
    asked = config.getoption("kvspec_shards")
    return int(asked or os.environ.get("PYTEST_XDIST_WORKER_COUNT", SHARDS))


class _Judge:
    """In the process that reports: adds up the shards, and judges whether the run was hollow."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._verdicts: list[Verdict] = []
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == VERDICT_PROPERTY and report.when == "call":
                self._verdicts.append(msgspec.json.decode(str(value), type=Verdict))
        self._failed = self._failed or report.failed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        hollow = bool(self._verdicts) and bool(self._merged().missing)
        if hollow and session.exitstatus == pytest.ExitCode.OK and not self._is_worker:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._verdicts:
            return
        terminalreporter.section("kvspec")
        for line in verdict_lines(self._merged()):
            terminalreporter.line(line.plain)

    def _merged(self) -> Verdict:
        """All shards as one run. Hollow is what no shard has reached, unless something has failed."""
        total = functools.reduce(added, [verdict.total for verdict in self._verdicts])
        missing = {name: text for verdict in self._verdicts for name, text in verdict.missing.items()}
        unreached = {name: text for name, text in missing.items() if name not in total.reached}
        return replace(
            self._verdicts[0],
            wall_s=max(verdict.wall_s for verdict in self._verdicts),
            total=total,
            findings=_by_key(total, [one for verdict in self._verdicts for one in verdict.findings]),
            known=_by_key(total, [one for verdict in self._verdicts for one in verdict.known]),
            gone=list({one.key: one for verdict in self._verdicts for one in verdict.gone}.values()),
            missing={} if self._failed else unreached,
            nondeterminism=[sentence for verdict in self._verdicts for sentence in verdict.nondeterminism],
        )


def _by_key(total: Progress, reported: list[Reported]) -> list[Reported]:
    """Each finding once, with the histories of all shards."""
    shortest = {
        one.finding.key: replace(one, histories=total.seen.get(one.finding.key.slug, 0))
        for one in sorted(reported, key=lambda one: -len(one.finding.history.ops))
    }
    return list(shortest.values())
