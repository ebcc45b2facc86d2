"""The benchmark: with the toy target in real worker processes, its statistics, and two cases on real releases."""

from __future__ import annotations

import fnmatch
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvspec import world
from kvspec.bench import MINIMISED_SEEDS, NO_RELEASE, NOT_BUILT, Case, Row, load_cases, why_not
from kvspec.cli import main
from kvspec.equality import reached
from kvspec.errors import KvspecError
from kvspec.events import ABLATIONS, UNEVEN, Counts, Effort
from kvspec.findings import Key, load_history
from kvspec.laws import LAWS
from kvspec.model.clauses import CLAUSES
from kvspec.model.profile import RELEASES
from kvspec.ops import EQUALITIES
from kvspec.report.bench import Figures, chart, median_interval, share_interval
from kvspec.targets import TARGETS
from strategies.machines import MACHINES

ROOT = Path(__file__).parents[1]
REGISTRY = """
from kvspec.defects import Defect

def plant(patch):
    import toy
    real = toy.World.apply

    def apply(self, op):
        real(self, op)
        if isinstance(op, toy.Reset):
            self._break("left shut")

    patch.setattr(toy.World, "apply", apply)

DEFECTS = {
    "the_door_is_left_shut": Defect("toy:suite", "index", "DOOR-1", "The door is left shut.", plant),
    "nothing_is_wrong": Defect("toy:suite", "index", "DOOR-1", "Nothing is wrong.", lambda patch: None),
}
"""
CASES_FILE = ROOT / "tests" / "bugs" / "cases.toml"
CASE = """
[[case]]
id = "toy-{id}"
target = "{target}"
refs = [1]
kind = "crash"
since = "1"
bad = "0.33.0"
fixed = "0.33.0"
counts = [{{ law = "DOOR-*", op = "step" }}]
events = ["{event}"]
cause = "It is a toy."
"""

Bench = Callable[..., tuple[int, str]]


@pytest.fixture
def bench(toy: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the benchmark of two planted defects of the toy, with 2 seeds of 0.2 CPU-s; return exit status and output."""
    Path("planted").mkdir()
    Path("planted/__init__.py").write_text(REGISTRY)
    toy("")

    def run(*arguments: str) -> tuple[int, str]:
        defaults = ["--defects", "planted", "--seeds", "2", "--budget", "0.2s", "--jobs", "2", "--output", "out"]
        only = [] if "--cases" in arguments else ["--only", "defects"]
        with pytest.raises(SystemExit) as exit_:
            main(["bench", *defaults, *only, *arguments])
        said = capsys.readouterr()
        return int(exit_.value.code or 0), said.out + said.err

    return run


def rows() -> list[Row]:
    return [msgspec.json.decode(line, type=Row) for line in Path("out/results.jsonl").read_bytes().splitlines()[1:]]


def outcomes() -> list[tuple[str, str, int, bool, int, int, int]]:
    """All that repeats: which seed found what, in which step; silence is as long as the CPU lets it be."""
    return sorted(
        (r.subject, r.side, r.seed, r.found, r.effort.steps * r.found, r.ops, r.effort.histories * r.found)
        for r in rows()
    )


def test_a_planted_defect_is_found_by_every_seed_and_without_it_there_is_silence(bench: Bench) -> None:
    status, output = bench("--case", "the_door_is_left_shut")
    assert status == 0
    assert len(re.findall(r"seed [01]: found after [\d.]+ CPU-s, \d+ steps, 1 ops \(DOOR-1\)", output)) == 2
    assert len(re.findall(r"seed [01]: silent for 0\.\d CPU-s", output)) == 2
    assert "planted defects: 1 of 1 found by every seed and silent elsewhere" in output
    assert {(row.side, row.found, row.ops) for row in rows()} == {("bad", True, 1), ("fixed", False, 0)}
    assert all(row.seen.get("DOOR-1") for row in rows() if row.found)


def test_what_is_not_found_fails_and_says_how_far_it_got(bench: Bench) -> None:
    status, output = bench()
    assert status == 1
    assert "nothing_is_wrong, as it is, seed 0: not found in 0." in output
    assert re.search(
        r"nothing_is_wrong: \d+ histories of 2 seeds, what is required reached, and DOOR-1 unbroken", output
    )


def test_silence_has_a_budget_of_its_own(bench: Bench) -> None:
    status, output = bench("--case", "the_door_is_left_shut", "--budget", "30s", "--silent-budget", "0.2s")
    assert status == 0
    assert len(re.findall(r"silent for 0\.\d CPU-s", output)) == 2
    text = Path("out/bench.md").read_text()
    assert "30 CPU-s per seed to find, 0.2 to be silent" in text
    assert "kvspec bench --seeds 2 --budget 30s --silent-budget 0.2s" in text
    status, output = bench("--resume", "--budget", "30s")
    assert status == 2
    assert "had a budget of 0.2 CPU-s to be silent" in output


def test_an_ablation_says_what_it_finds_and_minimises_nothing(bench: Bench) -> None:
    status, _ = bench("--case", "the_door_is_left_shut", "--ablate", "--seeds", "1")
    assert status == 0
    found = {row.ablation: row.ops for row in rows() if row.found}
    assert found == {"": 1, **dict.fromkeys(ABLATIONS, 0)}
    text = Path("out/bench.md").read_text()
    for name, meaning in ABLATIONS.items():
        columns = r"– \| – \| – \| – \| 1 of 1 \| 1 of 1 \| [\d.]+ \| [\d.]+ \|"
        assert re.search(rf"^\| {name} \| {meaning} \| {columns}$", text, re.MULTILINE)
        assert f"Whole and weaker: {name}" in Path("out/bench.html").read_text()


def test_an_equality_is_made_weaker_in_its_choices_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspec.bench.EQUALITIES", {"toy:suite": "core"})
    status, _ = bench("--case", "the_door_is_left_shut", "--ablate", "--seeds", "1")
    assert status == 0
    assert {row.ablation for row in rows()} == {"", UNEVEN}
    assert (
        "| no-live-prefixes | no prompt is repeated or continued on purpose | – |" in Path("out/bench.md").read_text()
    )


def test_every_machine_of_an_engine_can_be_made_weaker() -> None:
    assert MACHINES.keys() == set(TARGETS) - EQUALITIES.keys()
    assert all(hasattr(machine, "fair") and hasattr(machine, "live_prefixes") for machine in MACHINES.values())


def test_only_the_first_seeds_are_minimised(bench: Bench) -> None:
    bench("--case", "the_door_is_left_shut", "--seeds", str(MINIMISED_SEEDS + 1))
    found = {row.seed: row for row in rows() if row.side == "bad"}
    assert [found[seed].ops for seed in range(MINIMISED_SEEDS)] == [1] * MINIMISED_SEEDS
    assert found[MINIMISED_SEEDS].ops == 0
    assert found[MINIMISED_SEEDS].ops_first > 0
    (figures,) = re.findall(r"\| the_door_is_left_shut \|.*", Path("out/bench.md").read_text())
    assert figures.split(" | ")[10] == "1"


def test_both_reports_have_every_case_and_nothing_from_elsewhere(bench: Bench) -> None:
    bench()
    page, text = Path("out/bench.html").read_text(), Path("out/bench.md").read_text()
    for name in ("the_door_is_left_shut", "nothing_is_wrong"):
        assert name in page
        assert f"| {name} |" in text
    assert "<polyline" in page
    assert not re.search(r"<script|<link|(?:src|href)=", page)
    assert "| 2 of 2 | 2 of 2 |" in text
    assert "kvspec bench --seeds 2 --budget 0.2s" in text


def test_equal_seeds_give_equal_results(bench: Bench) -> None:
    bench()
    first = outcomes()
    bench("--output", "other", "--jobs", "1")
    Path("out/results.jsonl").write_bytes(Path("other/results.jsonl").read_bytes())
    assert outcomes() == first


def test_a_resumed_run_does_what_is_missing_and_nothing_twice(bench: Bench) -> None:
    bench()
    whole = outcomes()
    file = Path("out/results.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # a crash in the middle of a line
    status, output = bench("--resume")
    assert status == 1
    assert outcomes() == whole
    assert len(re.findall(r"^\[\d+/8\]", output, re.MULTILINE)) == 5
    assert bench("--resume", "--case", "the_door_is_left_shut")[0] == 0
    assert outcomes() == whole


def test_results_are_not_overwritten_nor_mixed_with_those_of_another_budget(bench: Bench) -> None:
    bench("--case", "the_door_is_left_shut")
    assert bench() == (2, "Error: out/results.jsonl has results; go on with --resume, or choose another --output.\n")
    status, output = bench("--resume", "--budget", "2s")
    assert status == 2
    assert "had a budget of 0.2 CPU-s, so they can't be gone on with" in output


def test_ctrl_c_keeps_what_is_there_and_a_resumed_run_goes_on(bench: Bench) -> None:
    asked = ["--case", "the_door_is_left_shut", "--seeds", "1", "--budget", "3s", "--jobs", "1"]
    command = [sys.executable, "-m", "kvspec.cli", "bench", "--only", "defects", "--defects", "planted", *asked]
    with subprocess.Popen([*command, "--output", "out"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        said = ""
        for line in run.stdout:
            said += line
            if "found after" in line:
                run.send_signal(signal.SIGINT)
    assert run.returncode == 130
    assert "Interrupted" in said
    assert [(row.side, row.found) for row in rows()] == [("bad", True)]
    assert "**Interrupted: what follows isn't complete.**" in Path("out/bench.md").read_text()
    assert bench(*asked, "--resume")[0] == 0
    assert [(row.side, row.found) for row in rows()] == [("bad", True), ("fixed", False)]


def test_a_worker_that_dies_takes_one_trial_with_it(
    bench: Bench, toy: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy("crash")
    status, output = bench("--jobs", "1", "--case", "nothing_is_wrong", "--budget", "2s")
    assert status == 2
    assert output.count("Worker 0 was killed by SIGSEGV") >= 1
    assert {row.seed for row in rows()} == {0, 1}
    assert all(row.died for row in rows())


def test_cases_of_a_target_share_the_histories_and_say_why_they_are_not_found(
    bench: Bench, toy: Callable[[str], None]
) -> None:
    toy("bug")
    asked = [("door", "toy:suite", "door"), ("loft", "toy:suite", "loft"), ("new", "vllm-new", "door")]
    window = CASE.format(id="window", target="toy:suite", event="door") + 'without = ["ROOF1"]\n'
    Path("cases.toml").write_text("".join(CASE.format(id=i, target=t, event=e) for i, t, e in asked) + window)
    status, output = bench("--cases", "cases.toml", "--only", "bugs", "--seeds", "1", "--budget", "2s")
    assert status == 1
    assert "toy-door, as it is, seed 0: found after" in output
    assert "NOT SILENT, DOOR-1" in output
    assert "toy-loft: the machine never makes the event 'loft'" in output
    assert "toy-window: the machine never makes the event 'ROOF1'" in output
    assert "--only bugs --cases cases.toml --defects planted" in Path("out/bench.md").read_text()
    assert f"{NOT_BUILT} (vllm-new): toy-new" in output
    alone = ["--case", "toy-loft", "--seeds", "1", "--output", "alone"]
    status, output = bench("--cases", "cases.toml", "--only", "bugs", *alone)
    assert status == 2
    assert "bugs: 0 of 0 found by every seed and silent elsewhere; 1 not run" in output


def test_a_history_that_does_not_repeat_is_kept_and_named(toy: Callable[[str], None], bench: Bench) -> None:
    toy("vanish")
    case = CASE.format(id="door", target="toy:suite", event="door")
    Path("cases.toml").write_text(re.sub("events = .*", "events = []", case))
    bench("--cases", "cases.toml", "--only", "bugs", "--seeds", "1", "--budget", "1s")
    kept = Path("out/histories/unrepeated-toy.suite-bad-0.json")
    told = f"toy:suite, seed 0: DOOR-1 was broken, but not when its history was run again ({kept})"
    assert f"* Not deterministic: {told}" in Path("out/bench.md").read_text()
    assert load_history(kept).target == "toy:suite"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--case", "no-such-bug"], "'no-such-bug' is no defect; there are "),
        (["--case", "no-such-bug"], " (--only defects leaves out the others)"),
        (["--case", "no-such-bug", "--cases", str(CASES_FILE)], "'no-such-bug' is no case or defect; there are "),
        (["--target", "vllm-nothing"], "'vllm-nothing' has neither cases nor defects"),
        (["--target", "vllm-simple@0.33.0"], "has a release"),
        (["--budget", "soon"], "'soon' is no duration"),
        (["--seeds", "0"], "0 is not in the range x>=1"),
        (["--cases", "missing.toml"], "There are no cases at missing.toml; run this in a clone of kvspec."),
        (["--defects", "missing"], "missing holds no registry of planted defects; run this in a clone of kvspec."),
        (["--cases", "planted/__init__.py"], "can't be read as cases"),
        (["--cases", "/dev/null"], "has no cases"),
        (["--output", "/dev/null/x", "--case", "the_door_is_left_shut"], "choose another --output"),
    ],
)
def test_bad_input_is_one_sentence(bench: Bench, arguments: list[str], problem: str) -> None:
    status, output = bench(*arguments)
    assert status == 2
    assert problem in output
    assert "Traceback" not in output


# Cases ----------------------------------------------------------------------------------------------------------------

CASES = load_cases(CASES_FILE)


HIDDEN_SINCE = {"offload-load-before-compute": "0.24.0"}
"""Case -> the release from which on the machine's histories don't reach its bug, though it is there."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_runs_on_the_newest_release_that_shows_its_bug(case: Case) -> None:
    assert case.fixed in RELEASES
    assert case.bad == (["", *RELEASES][RELEASES.index(HIDDEN_SINCE.get(case.id, case.fixed))])
    assert case.counts
    assert case.events
    assert not why_not(case) or why_not(case) in (NOT_BUILT, NO_RELEASE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_a_case_asks_for_and_leaves_out_exists_and_can_be_found(case: Case) -> None:
    events = reached.EVENTS.get(case.target, world.EVENTS)
    laws = LAWS.keys() | CLAUSES.keys()
    assert set(case.events) <= events.keys()
    assert set(case.without) <= events.keys() | laws
    assert all(fnmatch.filter(laws - set(case.without), counts.law) for counts in case.counts)


def test_cases_have_names_of_their_own(tmp_path: Path) -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    file = tmp_path / "cases.toml"
    file.write_text(2 * CASE.format(id="door", target="toy:suite", event="door"))
    with pytest.raises(KvspecError, match="two cases with the id 'toy-door'"):
        load_cases(file)


def test_a_case_counts_laws_that_there_are(tmp_path: Path) -> None:
    file = tmp_path / "cases.toml"
    file.write_text(CASE.format(id="door", target="vllm-simple", event="door"))
    with pytest.raises(KvspecError, match=r"toy-door counts 'DOOR-\*', which no law or clause is called"):
        load_cases(file)


def test_a_case_counts_something(tmp_path: Path) -> None:
    file = tmp_path / "cases.toml"
    text = CASE.format(id="door", target="toy:suite", event="door")
    file.write_text(re.sub("counts = .*", "counts = []", text))
    with pytest.raises(KvspecError, match=r"cases.toml can't be read as cases: .*counts"):
        load_cases(file)


def test_what_counts_is_a_law_an_op_and_a_place() -> None:
    key = Key("vllm-simple@0.23.0", "CRASH-1", "step", "v1/core/block_pool.py:touch")
    assert Counts("CRASH-*", "step", "v1/core/*").matches(key)
    assert not Counts("CRASH-1", "drain").matches(key)
    assert not Counts("CRASH-1", "step", "").matches(key)


# Statistics -----------------------------------------------------------------------------------------------------------


def test_wilsons_interval_of_a_share() -> None:
    assert share_interval(20, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert share_interval(10, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert share_interval(0, 0) == (0.0, 1.0)


def test_the_interval_of_a_median_lies_between_two_order_statistics() -> None:
    assert median_interval(range(5)) is None
    assert median_interval([6, 1, 2, 5, 3, 4]) == (1, 6)
    assert median_interval(range(1, 21)) == (6, 15)
    assert median_interval([1.0] * 12 + [math.inf] * 8) == (1.0, math.inf)


def test_a_curve_ends_at_the_share_that_was_found() -> None:
    (line,) = chart("all", [("two of four", [1.0, math.inf, 10.0, math.inf])], budget_s=100).lines
    assert (line.found, line.total) == (2, 4)
    assert line.points.endswith(" 640,130")


def test_a_seed_reached_what_is_required_only_if_all_events_were_there() -> None:
    def row(seed: int, reached: dict[str, int]) -> Row:
        effort = Effort(cpu_s=9.0, histories=5, steps=70, reached=reached)
        return Row(subject="x", side="bad", ablation="", release="1", seed=seed, found=False, effort=effort)

    figures = Figures("x", "t", "k", "A-1", "1", "2", "", ("store", "load"), "", [row(0, {"store": 3})], [], 2)
    assert not figures.reached
    assert figures.note() == "never reached load in 5 histories of 1 seed"
    figures.rows.append(row(1, {"store": 1, "load": 1}))
    assert [one.seed for one in figures.reached] == [1]
    assert not figures.is_proved


def test_nothing_is_proved_by_a_seed_that_was_not_run() -> None:
    def row(side: str, found: bool = False, failure: str = "") -> Row:
        effort = Effort(cpu_s=9.0, histories=5, steps=70)
        own = {"side": side, "found": found, "failure": failure}
        return Row(subject="x", ablation="", release="1", seed=0, effort=effort, **own)  # type: ignore[arg-type]

    def is_proved(bad: list[Row], clean: list[Row]) -> bool:
        return Figures("x", "t", "k", "A-1", "1", "2", "", (), "", bad, clean, seeds=1).is_proved

    assert is_proved([row("bad", found=True)], [row("fixed")])
    assert not is_proved([row("bad", found=True)], [])
    assert not is_proved([row("bad", found=True)], [row("fixed", failure="it died")])
    assert not is_proved([row("bad", found=True)], [row("fixed", found=True)])
    assert not is_proved([row("bad")], [row("fixed")])
    assert not is_proved([], [row("fixed")])


# Real releases --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_bug_and_a_planted_defect_are_found_and_not_seen_where_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    asked = ["--case", "simple-ack-without-copy", "--case", "loads_do_not_pin_cpu_blocks"]
    budgets = ["--budget", "60s", "--silent-budget", "6s"]
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *asked, "--seeds", "1", *budgets, "--jobs", "2", "--output", str(tmp_path / "out")])
    assert exit_.value.code == 0, capsys.readouterr().out
    text = (tmp_path / "out" / "bench.md").read_text()
    assert re.search(r"\| simple-ack-without-copy \|.*\| 0.29.0 \| 1 of 1 \| 1 of 1 \|.*\| 0.30.0: 1 of 1", text)
    assert re.search(r"\| loads_do_not_pin_cpu_blocks \|.*\| 0.33.0 \| 1 of 1 \| 1 of 1 \|.*\| 0.33.0: 1 of 1", text)
