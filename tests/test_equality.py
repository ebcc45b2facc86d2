"""The equalities in the gate: their machines, their histories as data, and what known issues do to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from kvspec.equality.contents import CONTENTS
from kvspec.equality.world import EqualityWorld, PairHistory, run_history
from kvspec.errors import SetupRefused
from kvspec.history import read_history, story
from kvspec.history.minimise import minimise
from kvspec.known import load_known
from kvspec.laws import CRASH
from kvspec.model.groups import Group, Kind
from kvspec.model.keys import Content
from kvspec.model.lookup import Finder
from kvspec.model.offload import Offloader
from kvspec.model.offload_ops import (
    Begin,
    Come,
    EndStore,
    EndTransfers,
    IndexSetup,
    Load,
    MakeSteps,
    Offer,
    OffloadHistory,
    ResetAll,
    TierSetup,
)
from kvspec.model.ops import (
    Allocate,
    Arrive,
    CacheSetup,
    CoreHistory,
    Evict,
    Find,
    Finish,
    Free,
    PoolSetup,
    Register,
    Schedule,
    Touch,
)
from kvspec.model.pool import BlockPool
from kvspec.model.profile import KNOWN_ISSUES, profile_for
from kvspec.model.requests import Hit
from kvspec.model.step_ops import AbortOne, EngineStep, StepSetup, Submit
from kvspec.ops import EQUALITIES, history_to_json
from kvspec.search import SETTINGS, load_suite
from kvspec.targets.vllm import core

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

POOL = CoreHistory("vllm-core", PoolSetup(), (Allocate(3), Free(count=2), Touch(count=2), Allocate(9)))
CACHE = CoreHistory("vllm-core", CacheSetup(), (Arrive(shared=3, tail=1), Schedule(tokens=40), Arrive(shared=3)))
SCHEDULER = CoreHistory("vllm-core", StepSetup(), (Submit(says=2), EngineStep(2), AbortOne()))
TIER = OffloadHistory("vllm-offload-index", TierSetup(), (Come(shared=2), Offer(count=2), EndStore(), Load()))
INDEX = OffloadHistory("vllm-offload-index", IndexSetup(), (Begin(shared=3), MakeSteps(2), EndTransfers()))


def level_of(history: PairHistory) -> str:
    return str(history.setup.__struct_config__.tag)


def run_machine(name: str, histories: int) -> list[tuple[EqualityWorld, Any]]:
    """Return what the histories of a target's machine showed; the same each time."""
    seen: list[tuple[EqualityWorld, Any]] = []
    suite = load_suite(name)
    machine = type("Machine", (suite.machine,), {"sink": staticmethod(lambda *ended: seen.append(ended))})
    profile = settings(SETTINGS, max_examples=histories, stateful_step_count=suite.rules_max)
    run_state_machine_as_test(seed(1)(machine), settings=profile)
    return seen


@pytest.mark.parametrize(("name", "histories"), [("vllm-core", 300), ("vllm-offload-index", 100)])
def test_the_machine_reaches_what_it_must_and_finds_no_difference(target: Any, name: str, histories: int) -> None:
    seen = run_machine(name, histories)
    known = {issue.id for issue in KNOWN_ISSUES}
    assert {v.frame for _, outcome in seen for v in outcome.violations} <= known
    reached = {event for _, outcome in seen for event in outcome.reached}
    assert reached >= load_suite(name).machine.REQUIRED  # type: ignore[attr-defined]
    assert sum(outcome.steps for _, outcome in seen) > 35 * histories


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.20.2", "0.25.1", "0.33.0"])
@pytest.mark.parametrize(("name", "histories"), [("vllm-core", "250"), ("vllm-offload-index", "250")])
def test_a_gate_finds_only_differences_that_are_known(name: str, histories: str, release: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvspec.cli", "gate", "--target", f"{name}@{release}", "--jobs", "1"]
    limits = ["--seed", "1", "--histories", histories, "--findings", str(tmp_path)]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{histories} histories" in done.stdout


@pytest.mark.parametrize("name", ["vllm-core", "vllm-offload-index"])
def test_a_history_of_the_machine_runs_again_as_it_ran(target: Any, name: str) -> None:
    for world, outcome in run_machine(name, 12):
        again = run_history(read_history(history_to_json(world.history())))  # type: ignore[arg-type]
        assert again == outcome


@pytest.mark.parametrize("history", [POOL, CACHE, SCHEDULER, TIER, INDEX], ids=level_of)
def test_histories_go_to_json_and_back(history: PairHistory) -> None:
    assert read_history(history_to_json(history)) == history


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"level": "disk"}', "there is no level 'disk'; there are engine, core and offload"),
        (b"[]", "not a history"),
        (history_to_json(replace(POOL, format=9)), "history format 9; this kvspec reads format 3"),
        (history_to_json(replace(POOL, format=1)), "history format 1; this kvspec reads format 3"),
        (
            history_to_json(POOL).replace(b'"shows": []', b'"shows": ["core-eagle-first-window"]'),
            "known issue of a pool",
        ),
        (history_to_json(replace(POOL, ops=(Arrive(),))), "op 0: a PoolSetup has no Arrive"),
        (history_to_json(replace(CACHE, ops=(Find(),))), "op 0: a CacheSetup has no Find"),
        (history_to_json(POOL).replace(b'"count"', b'"cuont"'), "unknown field `cuont`"),
        (history_to_json(POOL).replace(b'"blocks": 10', b'"blocks": -5'), "blocks is -5; it must be 1 to 4096"),
        (history_to_json(CACHE).replace(b'"decode": 1', b'"decode": 0'), "decode is 0; it must be 1 to 8"),
        (
            history_to_json(CACHE).replace(b'"shows": []', b'"shows": ["x"]'),
            "shows has 'x'; there is no such known issue",
        ),
        (history_to_json(CACHE).replace(b'"block_tokens": 4', b'"block_tokens": 0'), "block_tokens of a group is 0"),
        (history_to_json(replace(CACHE, ops=(Arrive(shared=10**6),))), "op 0: shared is 1000000"),
        (history_to_json(replace(POOL, ops=(Find(text=99),))), "op 0: text is 99; it must be 0 to 7"),
        (history_to_json(replace(TIER, ops=(Begin(),))), "op 0: a TierSetup has no Begin"),
        (history_to_json(replace(INDEX, ops=(Come(),))), "op 0: a IndexSetup has no Come"),
        (history_to_json(TIER).replace(b'"lru"', b'"mru"'), "'mru' is no policy; there are lru and arc"),
        (history_to_json(TIER).replace(b'"slots": 4', b'"slots": 0'), "slots is 0; it must be 1 to 4096"),
        (history_to_json(INDEX).replace(b'"full"', b'"mamba"'), "only full attention and sliding windows"),
        (history_to_json(replace(INDEX, ops=(Begin(params=8),))), "op 0: params is 8; it must be -8 to 7"),
    ],
)
def test_what_is_no_history_is_refused_with_a_reason(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_history(data)


def test_a_story_names_the_groups_and_leaves_out_what_is_as_usual() -> None:
    setup, first, second, third = story(CACHE)
    assert setup.startswith("cache: groups full in blocks of 4, blocks 14, caching")
    assert [first, second, third] == ["1. arrive: shared 3, tail 1", "2. schedule: tokens 40", "3. arrive: shared 3"]


@pytest.fixture
def defect(target: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Replace a method of the model's pool."""

    def plant(name: str, method: Any) -> None:
        monkeypatch.setattr(BlockPool, name, method)

    return plant


def test_a_difference_names_its_clause_and_what_both_say(defect: Callable[[str, Any], None]) -> None:
    defect("usage", lambda pool: 0.5)
    (violation,) = run_history(POOL).violations
    assert (violation.law, violation.op, violation.frame) == ("POOL-8", "start", "")
    assert violation.message == "the model says 0.5, the implementation 0.0"


def test_of_two_lists_only_the_first_item_that_differs_is_told(defect: Callable[[str, Any], None]) -> None:
    defect("_initial_queue", lambda pool: [2, 1, *range(3, len(pool.blocks))])
    (violation,) = run_history(POOL).violations
    assert violation.message == "[0]: the model says 2, the implementation 1"


def test_an_exception_of_the_implementation_is_a_crash_where_it_raised(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.block_pool import BlockPool as RealPool

    original = RealPool.touch
    source = compile("def touch(pool, blocks):\n    raise KeyError(7)", original.__code__.co_filename, "exec")
    names: dict[str, Any] = {}
    exec(source, names)
    monkeypatch.setattr(RealPool, "touch", names["touch"])
    history = replace(POOL, ops=(Allocate(2), Touch(held=1)))
    (violation,) = run_history(history).violations
    assert (violation.law, violation.frame) == (CRASH, "v1/core/block_pool.py:touch")


def test_a_difference_is_minimised_to_the_ops_that_it_needs(defect: Callable[[str, Any], None]) -> None:
    original = BlockPool.register

    def register(pool: Any, text: Any, table: Any, first: int, end: int, *rest: Any) -> None:
        original(pool, text, table, first, min(end, first + 1), *rest)

    defect("register", register)
    ops = (Allocate(2), Find(), Touch(), Allocate(1), Register(count=2, nulls=-1), Find(), Free())
    history = replace(POOL, ops=ops)
    (violation,) = run_history(history).violations
    short = minimise(history, lambda one: [v.law for v in run_history(one).violations] == [violation.law])  # type: ignore[arg-type]
    assert [type(op) for op in short.ops] == [Allocate, Register]


TWO_CUTS = CoreHistory(
    "vllm-core",
    CacheSetup((Group(Kind.FULL, 4), Group(Kind.SLIDING_WINDOW, 2, 9, eagle=True)), blocks=60),
    (Arrive(6, 1), Schedule(tokens=40), Evict(11), Arrive(3, 0), Schedule(1, tokens=40)),
)
"""Shows core-eagle-first-window, which every release has."""


RESET_TWICE = OffloadHistory(
    "vllm-offload-index",
    IndexSetup(slots=12),
    (Begin(2, says=9), MakeSteps(), ResetAll(running=1, connector=1), ResetAll(connector=1)),
)
"""Shows offload-second-reset, which every release from 0.22.1 on has: an exception."""


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        (TWO_CUTS, ("HIT-2", "schedule", "core-eagle-first-window")),
        (RESET_TWICE, (CRASH, "reset-all", "offload-second-reset")),
    ],
)
def test_known_issues_are_kept_out_of_the_way_or_named_as_the_cause(
    target: Any, history: PairHistory, shown: tuple[str, str, str]
) -> None:
    assert not run_history(history).violations
    level, release = history.setup.__struct_config__.tag, profile_for(core.release()).release
    of_level = (i.id for i in KNOWN_ISSUES if level in i.levels and i.affects(release))
    for shows in [(shown[2],), tuple(of_level)]:
        in_the_open = replace(history, setup=replace(history.setup, shows=shows))  # type: ignore[type-var]
        (violation,) = run_history(in_the_open).violations
        assert (violation.law, violation.op, violation.frame) == shown


@pytest.mark.parametrize(("content", "hits"), [(10_000, 1), (0, 0)], ids=["that of the first", "none"])
def test_a_prompt_comes_again_with_its_content(target: Any, content: int, hits: int) -> None:
    salted = CONTENTS.index(Content(salt="x"))
    requests = (
        Arrive(6, content=salted),
        Schedule(tokens=40),
        Arrive(content=content, again=1),
        Schedule(1, tokens=40),
    )
    history = CoreHistory("vllm-core", CacheSetup(blocks=60), requests)
    assert run_history(history).reached["hit"] == hits


@pytest.mark.parametrize(
    ("owner", "name", "answer", "clause", "reached"),
    [
        (Finder, "lookup", Hit(([],), 0, 0), "HIT-4", "hit"),
        (Finder, "longest", 4, "HIT-1", "hit"),
        (BlockPool, "touch", None, "ALLOC-5", "held-again"),
    ],
)
def test_what_a_call_reaches_is_counted_though_the_sides_differ(
    target: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, answer: Any, clause: str, reached: str
) -> None:
    monkeypatch.setattr(owner, name, lambda self, *arguments, **named: answer)
    history = CoreHistory(
        "vllm-core",
        CacheSetup(blocks=60),
        (Arrive(6), Schedule(tokens=40), Finish(), Arrive(again=1), Schedule(tokens=40)),
    )
    outcome = run_history(history)
    assert [violation.law for violation in outcome.violations] == [clause]
    assert outcome.reached[reached] == 1


def test_a_setup_that_the_release_does_not_run_is_refused_not_a_crash(target: Any) -> None:
    """The minimiser makes such setups, field by field."""
    history = CoreHistory("vllm-core", CacheSetup((Group(Kind.FULL, 4),), unit=3), (Arrive(6),))
    with pytest.raises(SetupRefused, match="hash blocks of 3 tokens"):
        run_history(history)


def test_a_call_that_the_model_cannot_follow_is_a_difference(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloader, "arrive", lambda self, request: None)
    (violation,) = run_history(INDEX).violations
    assert violation.law == "LOOKUP-2"


def test_a_difference_that_no_known_issue_causes_stays_a_finding(defect: Callable[[str, Any], None]) -> None:
    defect("usage", lambda pool: 0.5)
    (violation,) = run_history(replace(POOL, setup=PoolSetup(shows=("core-double-release",)))).violations
    assert violation.frame == ""


def test_known_issues_of_the_model_are_listed_like_all_others() -> None:
    for target, level in EQUALITIES.items():
        listed = {issue.id for issue in load_known() if target in issue.targets}
        assert listed >= {issue.id for issue in KNOWN_ISSUES if issue.id.startswith(f"{level}-")}
    listed_by_id = {issue.id: issue for issue in load_known()}
    assert listed_by_id["core-double-release"].releases == ">=0.20.2,<0.24.0"
    assert listed_by_id["offload-second-reset"].releases == ">=0.22.1"
