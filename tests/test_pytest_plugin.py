"""The plugin in pytest runs of their own, with the toy target."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MACHINES = Path(__file__).with_name("test_machines.py")
INSTALLED = any(entry.value == "kvspec.pytest_plugin" for entry in importlib.metadata.entry_points(group="pytest11"))

Toy = Callable[[str], None]


def run_pytest(*arguments: str) -> tuple[int, str]:
    """Run pytest on the machines, from the working directory, as somebody would by hand."""
    Path("pytest.ini").write_text("[pytest]\nmarkers = mine\n")
    plugin = [] if INSTALLED else ["-p", "kvspec.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "--rootdir=.", "-c", "pytest.ini", *plugin, *arguments]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "KVSPEC_PYTEST_")) and name != "PYTHONHASHSEED"
    }
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def machines(*arguments: str) -> tuple[int, str]:
    options = ["--kvspec-target", "toy:suite", "--kvspec-seed", "1", "-m", "machine"]
    budget = [] if "--kvspec-budget" in arguments else ["--kvspec-budget", "6s"]
    return run_pytest(str(MACHINES), *options, *budget, *arguments)


def test_without_a_target_machines_are_skipped_with_the_option_to_give(toy: Toy) -> None:
    toy("")
    status, output = run_pytest(str(MACHINES), "-rs")
    assert status == 0
    assert "1 skipped" in output
    assert "give a target, such as --kvspec-target vllm-simple@0.33.0" in output


def test_without_a_target_the_environment_of_other_tests_is_as_it_was(toy: Toy) -> None:
    toy("")
    Path("test_mine.py").write_text(
        "import os\ndef test_mine():\n    assert 'PYTHONHASHSEED' not in os.environ\n"
        "    assert 'KVSPEC_PYTEST_TARGET' not in os.environ\n"
    )
    assert run_pytest("test_mine.py")[0] == 0


def test_with_a_target_tests_run_in_its_environment_and_arguments_stay(toy: Toy) -> None:
    toy("")
    Path("test_mine.py").write_text(
        "import os, sys\ndef test_mine():\n    assert os.environ['PYTHONHASHSEED'] == '0'\n"
        "    assert sys.flags.hash_randomization == 0\n"
    )
    status, output = run_pytest("test_mine.py", "--kvspec-target", "toy:suite", "-k", "mine and not (a or b)")
    assert status == 0, output
    assert "kvspec: toy:suite, 10 s per machine, seed " in output


def test_shards_share_the_budget_and_the_summary_adds_them_up(toy: Toy) -> None:
    toy("")
    status, output = machines("-v")
    assert status == 0, output
    assert "[shard1of2] PASSED" in output
    assert "[shard2of2] PASSED" in output
    assert "PASS  toy:suite, seed 1" in output


def test_xdists_workers_have_a_shard_each(toy: Toy) -> None:
    toy("")
    status, output = machines("-n", "2", "-v")
    assert status == 0, output
    assert "[gw0]" in output
    assert "[gw1]" in output
    assert "kvspec: toy:suite, 6 s per machine, seed 1" in output
    assert "PASS  toy:suite, seed 1" in output


def test_a_finding_fails_its_shard_with_its_story(toy: Toy) -> None:
    toy("bug")
    status, output = machines("--kvspec-shards", "1")
    assert status == 1
    assert "FINDING DOOR-1 during step, in toy.py:pass_door" in output
    assert "2. reset the prefix cache with connector" in output
    assert "Traceback" not in output
    [finding] = Path(".kvspec/findings").glob("*/finding.json")
    assert f"kvspec replay {finding.parent.resolve()}" in output


def test_a_history_that_does_not_repeat_fails_its_shard(toy: Toy) -> None:
    toy("random")
    status, output = machines("--kvspec-shards", "1")
    assert status == 1
    assert "a history had another trace when it was run again" in output


def test_a_run_whose_shards_never_reach_what_they_must_fails_as_hollow(toy: Toy) -> None:
    toy("hollow")
    status, output = machines("--kvspec-budget", "1s")
    assert status == 1
    assert "HOLLOW RUN" in output
    assert "door: somebody passed the door" in output
    assert "2 passed" in output


def test_defaults_come_from_the_ini_file(toy: Toy) -> None:
    toy("")
    Path("other.ini").write_text("[pytest]\nkvspec_target = toy:suite\nkvspec_budget = 4s\n")
    status, output = run_pytest(str(MACHINES), "-c", "other.ini")
    assert status == 0, output
    assert "kvspec: toy:suite, 4 s per machine" in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--kvspec-target", "nothing"], "'nothing' is no target"),
        (["--kvspec-target", "toy:suite", "--kvspec-budget", "x"], "'x' is no duration"),
    ],
)
def test_a_wrong_option_is_a_usage_error(toy: Toy, arguments: list[str], problem: str) -> None:
    toy("")
    status, output = run_pytest(str(MACHINES), *arguments)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert problem in output
    assert "Traceback" not in output
