"""The gate from end to end, with the toy target in real worker processes."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvspec.cli import main
from kvspec.events import Verdict
from kvspec.findings import load_finding, load_history
from kvspec.gate import Tally
from kvspec.ops import Add, Reset, Step

DOOR = (Add("A", tail=3), Reset(connector=True), Step())
KNOWN = """
[[issue]]
id = "toy-door"
title = "The door stays shut."
reference = "toy#1"
target = "toy:suite"
law = "DOOR-*"
"""


@pytest.fixture
def gate(toy: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the gate on the toy with some defects; return exit status and output."""

    def run(defects: str, *arguments: str) -> tuple[int, str]:
        toy(defects)
        defaults = ["--target", "toy:suite", "--seed", "1", "--jobs", "1"]
        limit = [] if {"--budget", "--histories"} & set(arguments) else ["--histories", "48"]
        with pytest.raises(SystemExit) as exit_:
            main(["gate", *defaults, *limit, *arguments])
        return int(exit_.value.code or 0), capsys.readouterr().out

    return run


def finding_directory() -> Path:
    [file] = Path(".kvspec/findings").glob("*/finding.json")
    return file.parent


def test_a_sound_target_passes_with_counts(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("")
    assert status == 0
    assert "PASS  toy:suite, seed 1" in output
    assert re.search(r"48 histories, \d+ steps, \d+ blocks stored, 0 loaded; 3 histories", output)
    assert re.search(r"events reached: door \d+", output)


def test_a_finding_is_told_with_law_history_and_replay_and_kept(
    gate: Callable[..., tuple[int, str]],
) -> None:
    status, output = gate("bug")
    assert status == 1
    directory = finding_directory()
    assert "FINDING DOOR-1 during step, in toy.py:pass_door" in output
    assert "shortest history, 3 ops (first seen with" in output
    assert "    2. reset the prefix cache with connector" in output
    assert f"replay: kvspec replay {directory}" in output
    assert re.search(r"finding DOOR-1 \(3 ops, seen in \d+ histor", output)
    assert load_finding(directory).history.ops == DOOR


def test_several_workers_minimise_a_finding_once_and_share_the_histories(
    gate: Callable[..., tuple[int, str]],
) -> None:
    status, output = gate("bug", "--jobs", "2", "--histories", "61")
    assert status == 1
    assert "61 histories" in output
    assert output.count("FINDING DOOR-1") == 1


def test_a_stored_finding_is_looked_at_first_and_is_fixed_once_it_is_gone(
    gate: Callable[..., tuple[int, str]],
) -> None:
    gate("bug")
    status, output = gate("bug", "--histories", "1")
    assert status == 1
    assert "(stored, still there)" in output
    assert "seen in its stored history" in output
    status, output = gate("")
    assert status == 0
    assert re.search(r"FIXED door-1-step-\w+: its history no longer shows DOOR-1", output)
    assert load_finding(finding_directory()).record.gone_since is not None
    status, output = gate("")
    assert "FIXED" not in output
    status, output = gate("bug", "--histories", "1")
    assert status == 1
    assert load_finding(finding_directory()).record.gone_since is None


def test_a_known_issue_is_listed_and_passes_unless_it_is_asked_for(
    gate: Callable[..., tuple[int, str]],
) -> None:
    Path("known.toml").write_text(KNOWN)
    status, output = gate("bug", "--known", "known.toml")
    assert status == 0
    assert re.search(r"known issue toy-door \(toy#1\), seen in \d+ histor\w+: The door stays shut", output)
    assert not list(Path(".kvspec/findings").glob("*/finding.json"))
    status, output = gate("bug", "--known", "known.toml", "--no-known")
    assert status == 1
    assert "known issue" not in output


def test_fail_fast_stops_at_the_first_finding(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("bug,slow", "--fail-fast", "--budget", "60s")
    assert status == 1
    assert "interrupted" not in output
    wall = re.search(r"^FINDING  toy:suite, seed 1, ([\d.]+) s$", output, re.MULTILINE)
    assert wall
    assert float(wall[1]) < 30


def test_a_run_that_never_reaches_what_it_must_is_hollow(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("hollow", "--budget", "1s")
    assert status == 3
    assert "HOLLOW RUN" in output
    assert "door: somebody passed the door" in output
    assert "longer --budget" in output


def test_a_trace_that_differs_is_told_and_its_history_kept(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("random")
    assert status == 4
    assert "NOT DETERMINISTIC" in output
    found = re.search(r"`kvspec replay (\S+)` runs it twice", output)
    assert found
    assert load_history(Path(found[1])).target == "toy:suite"


def test_a_violation_that_does_not_come_again_is_nondeterminism_and_no_finding(
    gate: Callable[..., tuple[int, str]],
) -> None:
    status, output = gate("vanish")
    assert status == 4
    assert "DOOR-1 was broken, but not when its history was run again" in output


def test_a_finding_outranks_nondeterminism(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("bug,random")
    assert status == 1
    assert "not deterministic: " in output


def test_a_worker_that_dies_is_told_with_the_end_of_its_log(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("crash")
    assert status == 2
    assert "ERROR  toy:suite" in output
    assert "Worker 0 was killed by SIGSEGV" in output
    assert "| the toy's last words" in output
    assert re.search(r"\d+ histories", output)


def test_a_broken_machine_is_told_with_its_traceback(gate: Callable[..., tuple[int, str]]) -> None:
    status, output = gate("raise")
    assert status == 2
    assert "in kvspec or in the target's adapter" in output
    assert "| ZeroDivisionError: the machine is broken" in output


def test_the_same_seed_gives_the_same_run(gate: Callable[..., tuple[int, str]]) -> None:
    first, second = (re.search(r".* steps, .*\n.*\n.*", gate("")[1]) for _ in range(2))
    assert first
    assert second
    assert first[0].splitlines()[::2] == second[0].splitlines()[::2]


def test_junit_has_the_run_the_findings_and_the_known_issues(gate: Callable[..., tuple[int, str]]) -> None:
    gate("bug", "--junit", "out/junit.xml")
    suite = ElementTree.parse("out/junit.xml").getroot()
    assert suite.attrib["tests"] == "2"
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("1", "0")
    [failure] = suite.iter("failure")
    assert "reset the prefix cache with connector" in (failure.text or "")
    gate("hollow", "--junit", "out/junit.xml")
    suite = ElementTree.parse("out/junit.xml").getroot()
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("0", "1")
    Path("known.toml").write_text(KNOWN)
    gate("bug", "--junit", "out/junit.xml", "--known", "known.toml")
    suite = ElementTree.parse("out/junit.xml").getroot()
    assert (suite.attrib["failures"], suite.attrib["skipped"]) == ("0", "1")


def test_github_gets_an_annotation_per_finding(
    gate: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, output = gate("bug")
    [line] = re.findall(r"^::error.*$", output, re.MULTILINE)
    assert line.startswith("::error title=kvspec%3A DOOR-1::FINDING DOOR-1")
    assert "%0A" in line


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--target", "toy:nothing"], "toy.nothing is missing"),
        (["--target", "toy:not_a_suite"], "toy.not_a_suite is a int"),
        (["--target", "nowhere:suite"], "needs the module 'nowhere'"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_told_in_one_sentence(
    gate: Callable[..., tuple[int, str]], arguments: list[str], problem: str
) -> None:
    status, output = gate("", *arguments)
    assert status == 2
    assert problem in output
    assert "Traceback" not in output


# Signals and terminals --------------------------------------------------------------------------------------


ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes stdout the controlling terminal, so that ^C is a SIGINT, and becomes the command."""


class Run:
    """A gate in a process of its own, on a pseudo-terminal or on a pipe."""

    def __init__(self, *arguments: str, terminal: bool) -> None:
        self._reader, writer = pty.openpty() if terminal else os.pipe()
        command = [
            sys.executable,
            "-m",
            "kvspec.cli",
            "gate",
            "--target",
            "toy:suite",
            "--seed",
            "1",
            *arguments,
        ]
        if terminal:
            command = [sys.executable, "-c", ON_TERMINAL, *command]
        self.process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, start_new_session=True)
        os.close(writer)
        self.output = ""

    def until(self, pattern: str) -> str:
        """Read on until the pattern is there."""
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.output):
            assert time.monotonic() < deadline, self.output
            assert self._read(), self.output
        return self.output

    def end(self) -> int:
        """Read to the end; return the exit status."""
        while self._read():
            pass
        os.close(self._reader)
        return self.process.wait(60)

    def type(self, keys: bytes) -> None:
        os.write(self._reader, keys)

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, 4096)
        except OSError:  # a pseudo-terminal's way to say that it is over
            return False
        self.output += data.decode(errors="replace")
        return bool(data)


def test_without_a_terminal_there_are_plain_lines(toy: Callable[[str], None]) -> None:
    toy("slow")
    run = Run("--budget", "4s", terminal=False)
    assert run.end() == 0
    assert "\x1b" not in run.output
    assert "\r" not in run.output
    assert run.output.splitlines()[0] == "kvspec gate: toy:suite, 4 s, 2 workers, seed 1"


def test_ctrl_c_on_a_terminal_gives_the_verdict_so_far(toy: Callable[[str], None]) -> None:
    toy("slow")
    run = Run("--budget", "10m", terminal=True)
    run.until(r"[1-9]\d* histories")
    run.type(b"\x03")
    assert run.end() == 130
    assert "Interrupted: the workers end their histories" in run.output
    assert re.search(r"INTERRUPTED.*toy:suite", run.output)
    assert re.search(r"[1-9]\d* histories, \d+ steps", run.output)


def test_after_ctrl_c_a_finding_still_decides(toy: Callable[[str], None]) -> None:
    toy("slow,bug")
    run = Run("--budget", "10m", terminal=True)
    run.until(r"replay: kvspec replay")
    run.type(b"\x03")
    assert run.end() == 1
    assert re.search(r"FINDING.*interrupted", run.output)


def test_a_second_ctrl_c_does_not_wait_for_workers(toy: Callable[[str], None]) -> None:
    toy("hang")
    run = Run("--budget", "10m", "--jobs", "1", terminal=True)
    run.until(r"[1-9]\d* histories")
    run.type(b"\x03")
    run.until("Interrupted")
    run.type(b"\x03")
    assert run.end() == 130
    assert "INTERRUPTED" in run.output


def test_ctrl_c_while_the_verdict_is_made_does_not_lose_it(
    gate: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = Tally.verdict

    def interrupted(self: Tally, **named: bool) -> Verdict:
        os.kill(os.getpid(), signal.SIGINT)
        return verdict(self, **named)

    monkeypatch.setattr(Tally, "verdict", interrupted)
    status, output = gate("", "--histories", "1")
    assert status == 3
    assert "HOLLOW" in output


def test_ctrl_c_while_workers_start_is_an_interrupt_too(toy: Callable[[str], None]) -> None:
    toy("slow")
    run = Run("--budget", "10m", terminal=True)
    run.until("kvspec gate")
    run.type(b"\x03")
    assert run.end() == 130


def test_sigterm_is_like_ctrl_c(toy: Callable[[str], None]) -> None:
    toy("slow,bug")
    run = Run("--budget", "10m", terminal=False)
    run.until(r"replay: kvspec replay")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 1
    assert "interrupted" in run.output


def test_no_worker_outlives_a_parent_that_is_killed(toy: Callable[[str], None]) -> None:
    toy("slow,bug")
    run = Run("--budget", "10m", "--jobs", "1", terminal=False)
    run.until(r"replay: kvspec replay")
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")
    [worker] = children.read_text().split()
    run.process.kill()
    run.end()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_reader_that_goes_away_stops_the_gate(toy: Callable[[str], None]) -> None:
    toy("slow,bug")
    command = f"{sys.executable} -m kvspec.cli gate --target toy:suite --budget 10m | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 141
    assert done.stderr.strip() == "kvspec: whoever read the output has gone, so it stopped."
