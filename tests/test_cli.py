import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvspec import __version__, cli
from kvspec.findings import Finding, FindingStore, Key, Record
from kvspec.gate import Tally, seconds, share
from kvspec.laws import LAWS
from kvspec.model.ops import Allocate, CoreHistory, PoolSetup
from kvspec.ops import Add, EngineSetup, History, Reset, Step, history_to_json

HISTORY = History(
    target="toy:suite",
    setup=EngineSetup(),
    ops=(Add("A", tail=3), Reset(connector=True), Step(schedule="c0.")),
    adversary="fair",
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvspec(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; return exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        return int(exit_.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "command", [[], ["gate"], ["replay"], ["measure"], ["bench"], ["known"], ["spec"], ["release"]]
)
def test_help_teaches_with_examples(kvspec: Run, command: list[str]) -> None:
    status, output, _ = kvspec(*command, "--help")
    assert status == 0
    assert "Examples:" in output


def test_help_of_what_has_exit_codes_tells_them(kvspec: Run) -> None:
    assert all("Exit status" in kvspec(command, "--help")[1] for command in ("gate", "replay", "bench"))


def test_the_version_is_told(kvspec: Run) -> None:
    assert kvspec("--version")[1].strip().endswith(__version__)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["gate", "--budget", "soon"], "'soon' is no duration; write it as 60s, 2m or 1h."),
        (["gate", "--budget", "0s"], "'0s' is no duration"),
        (["gate", "--budget", "1s", "--histories", "1"], "exclude each other"),
        (["gate", "--target", "vllm-nothing"], "'vllm-nothing' is no target"),
        (["gate", "--target", "vllm-simple@new"], "'new' is not a version of vLLM"),
        (["gate", "--known", "missing.toml"], "missing.toml can't be read"),
        (["gate", "--target", "toy:suite", "--findings", "/dev/null/x"], "--findings DIR"),
        (["gate", "--target", "toy:suite", "--junit", "/dev/null/x"], "can't be written"),
        (["gate", "--target", ":"], "one of your own is named package.module:suite"),
        (["gate", "--target", "toy:"], "one of your own is named package.module:suite"),
        (["measure", "--target", "vllm-core"], "has no engine"),
        (["measure", "--target", "vllm-offload-index"], "has no engine"),
        (["measure", "--target", "vllm-multi"], "vllm-multi isn't measured"),
        (
            ["replay", "core.json", "--target", "vllm-simple"],
            "and vllm-simple can't run one; vllm-core can",
        ),
        (["replay", "core.json", "--target", "vllm-offload-index"], "core.json is a history of level core"),
        (["replay", "core.json", "--target", "toy:suite"], "core.json is a history of level core"),
        (["gate", "--target", "vllm-simple@0.19.1"], "runs on vLLM 0.20.2 and later, not on 0.19.1"),
        (["gate", "--target", "vllm-multi@0.20.2"], "vllm-multi runs on vLLM 0.22.1 and later, not on 0.20.2"),
        (["replay", "missing.json"], "'missing.json' does not exist"),
        (["replay", "."], "can't be read as a finding"),
        (["replay", "bad.json"], "bad.json can't be read: not a history"),
        (["spec", "--clause", "POOL-22"], "There is no clause or law 'POOL-22'; there are POOL-"),
        (["spec", "--format", "pdf"], "'pdf' is not one of 'html', 'markdown'"),
        (["spec", "--output", "/dev/null/page.html"], "/dev/null/page.html can't be written: Not a directory."),
        (["nothing"], "No such command 'nothing'"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_a_wrong_call_is_status_2_and_one_sentence(kvspec: Run, arguments: list[str], problem: str) -> None:
    Path("bad.json").write_text("[]")
    Path("core.json").write_bytes(history_to_json(CoreHistory("vllm-core", PoolSetup(), (Allocate(2),))))
    status, _, error = kvspec(*arguments)
    assert status == 2
    assert problem in error
    assert "Traceback" not in error


def test_a_replay_that_shows_the_violation_is_status_1(toy: Callable[[str], None], kvspec: Run) -> None:
    toy("bug")
    Path("h.json").write_bytes(history_to_json(HISTORY))
    status, output, _ = kvspec("replay", "h.json")
    assert status == 1
    assert "  1. add request A" in output
    assert "DOOR-1 is broken at op 3 (step), in toy.py:pass_door" in output
    assert "seen: the door was never opened" in output
    assert "trace:" not in output


def test_a_replay_that_shows_nothing_says_so(toy: Callable[[str], None], kvspec: Run) -> None:
    toy("")
    Path("h.json").write_bytes(history_to_json(HISTORY))
    status, output, _ = kvspec("replay", "h.json", "--trace")
    assert status == 0
    assert "No law is broken" in output
    assert "moves: c0." in output
    assert "trace: " in output


def test_a_replay_that_does_not_repeat_is_status_4(toy: Callable[[str], None], kvspec: Run) -> None:
    toy("random")
    Path("h.json").write_bytes(history_to_json(HISTORY))
    status, output, _ = kvspec("replay", "h.json")
    assert status == 4
    assert "The second run differed from the first" in output


def test_a_findings_directory_is_replayed_on_another_target(toy: Callable[[str], None], kvspec: Run) -> None:
    toy("bug")
    directory = store_finding()
    assert kvspec("replay", str(directory), "--target", "toy:suite")[0] == 1
    status, _, error = kvspec("replay", str(directory), "--target", "toy:nothing")
    assert status == 2
    assert "toy.nothing is missing" in error


def store_finding() -> Path:
    key = Key(target="toy:suite", law="DOOR-1", op="step", frame="toy.py:pass_door")
    record = Record(key=key, message="m", release="", kvspec="0.1.0", seed=1, first_seen="2026-01-01T00:00:00Z")
    return FindingStore(Path("findings")).save(Finding(record=record, history=HISTORY, original=HISTORY))


def test_known_lists_what_is_known(kvspec: Run, tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(
        '[[issue]]\nid = "a"\ntitle = "T"\nreference = "vllm#1"\ntarget = "vllm-simple"\nlaw = "X"\n'
        'releases = ["0.24.0", "0.25.1"]\n'
    )
    status, output, _ = kvspec("known", "--known", str(file))
    assert status == 0
    assert "a  (vllm#1)  T\n    vllm-simple 0.24.0, 0.25.1: X, op *, frame *\n" in output


def test_spec_writes_one_clause_or_law(kvspec: Run) -> None:
    status, output, _ = kvspec("spec", "--clause", "pool-2")
    assert status == 0
    assert "### POOL-2. New blocks come from the head" in output
    assert "POOL-3" not in output
    law = next(iter(LAWS.values()))
    assert f"### {law.id}. {law.sentence}" in kvspec("spec", "--clause", law.id)[1]


@pytest.mark.parametrize(
    ("file", "options", "start"),
    [("a.html", [], "<!doctype html>"), ("a.md", [], "<!--"), ("a.html", ["--format", "markdown"], "<!--")],
)
def test_spec_writes_a_file_in_the_format_of_its_name_or_that_was_asked_for(
    kvspec: Run, tmp_path: Path, file: str, options: list[str], start: str
) -> None:
    status, output, _ = kvspec("spec", "--clause", "POOL-2", "--output", str(tmp_path / file), *options)
    assert (status, output) == (0, "")
    assert (tmp_path / file).read_text(encoding="utf-8").startswith(start)


def run_in_shell(script: str) -> tuple[int, str]:
    """Run a line of shell in which ``kvspec`` is this one; return its status and stderr."""
    script = f'set -o pipefail; kvspec() {{ "{sys.executable}" -m kvspec.cli "$@"; }}; {script}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr


GONE = "kvspec: whoever read the output has gone, so it stopped.\n"


@pytest.mark.parametrize("command", ["spec", "known", "--help", "gate --help"])
def test_a_reader_that_has_gone_is_status_141_and_no_traceback(command: str) -> None:
    assert run_in_shell(f"kvspec {command} | true") == (141, GONE)


def test_a_reader_of_stderr_that_has_gone_is_no_traceback_either() -> None:
    assert run_in_shell("kvspec nothing 2>&1 | true") == (141, "")


@pytest.mark.parametrize(("command", "status"), [("known", 0), ("--help", 0), ("no", 2)])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_without_stdout_and_stderr_the_status_is_what_it_would_be(command: str, status: int, closed: str) -> None:
    code, error = run_in_shell(f"kvspec {command} {closed}")
    assert code == status
    assert "Traceback" not in error


def test_a_gate_whose_reader_has_gone_stops_its_workers(toy: Callable[[str], None]) -> None:
    toy("slow,hollow")
    started = time.monotonic()
    assert run_in_shell("kvspec gate --target toy:suite --budget 150s --jobs 1 | head -n 1 > /dev/null") == (141, GONE)
    assert time.monotonic() - started < 120
    code, error = run_in_shell("kvspec gate --target toy:suite --histories 5 --jobs 1 >&-")
    assert (code, error) == (3, "")


def test_a_replay_whose_reader_has_gone_is_no_finding(toy: Callable[[str], None]) -> None:
    toy("bug")
    Path("h.json").write_bytes(history_to_json(HISTORY))
    assert run_in_shell("kvspec replay h.json | true") == (141, GONE)
    assert run_in_shell("kvspec replay h.json >&-")[0] == 1


def test_a_bug_of_kvspec_says_that_it_is_one(kvspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_added: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(cli, "load_known", broken)
    status, _, error = kvspec("known")
    assert status == 2
    assert "ZeroDivisionError: oh" in error
    assert f"This is a bug of kvspec {__version__}. Please report it" in error


@pytest.mark.parametrize("module", ["kvspec.cli", "kvspec.gate", "kvspec.pytest_plugin"])
def test_the_parent_imports_nothing_heavy(module: str) -> None:
    heavy = {"torch", "hypothesis", "vllm"}
    code = (
        f"import sys, {module}; from kvspec.gate import split_target; split_target('vllm-simple@0.33.0'); "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("60s", 60), ("2m", 120), ("1.5h", 5400), (" 5 s ", 5)])
def test_a_duration_is_read(text: str, value: float) -> None:
    assert seconds(text) == value


def test_histories_are_shared_evenly() -> None:
    assert [share(10, job, 3) for job in range(3)] == [4, 3, 3]
    assert share(None, 0, 3) is None


def test_a_verdict_over_nothing_is_hollow(tmp_path: Path) -> None:
    tally = Tally("toy:suite", 1, FindingStore(tmp_path), [])
    assert tally.verdict(interrupted=False).exit_code == 3
    assert tally.verdict(interrupted=True).exit_code == 130
