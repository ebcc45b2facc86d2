"""Engines with drafts: what is accepted is right, what is rejected is read by nobody, and a defect that keeps it is
found."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kvspec.engine.text import STOP_TOKEN
from kvspec.known import known_as, load_known
from kvspec.laws import Violation
from kvspec.ops import Add, AttentionGroup, EngineSetup, Finish, History, Reset, Settle, Step
from kvspec.search import implementation_version, violation_key
from kvspec.targets import Target, load_target
from kvspec.targets.vllm.instant import run_instantly
from kvspec.world import Outcome, World, run_history
from strategies.machine import setup_of, supported
from strategies.machines import MACHINES
from strategies.traffic import Mix, Traffic

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

FULL, MAMBA, WINDOW = AttentionGroup(), AttentionGroup("mamba"), AttentionGroup("sliding-window", reach=6)
NGRAM = EngineSetup(gpu_blocks=14, cpu_blocks=20, drafts=3, runner_v2=False, prompt_only=False)
EAGLE = replace(NGRAM, eagle=True, runner_v2=True)
DRAFTERS_BY_NAME = {"n-grams": NGRAM, "EAGLE": EAGLE}
ANSWER = Add("A", shared=9, tail=0, max_tokens=9)
"""Three blocks of a prompt and an answer, and one that begins."""


def engine_of(name: str, target: Target) -> Target:
    """Return another target with the release that this run checks."""
    return load_target(f"{name}{target.name[len('vllm-simple') :]}")


class Run(NamedTuple):
    """A history's outcome, what A has said as the client knows it, and all that the model would have said."""

    outcome: Outcome
    said: list[int]
    text: list[int]


def run(target: Target, setup: EngineSetup, *ops: Any) -> Run:
    """Let a history with a request A happen, with a device that makes progress."""
    world = World(target, setup, "fair")
    for op in ops:
        world.apply(op)
    engine: Any = world._engine
    return Run(world.finish(), engine.said("A"), engine._vllm.texts["A"].tokens)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS_BY_NAME)
@pytest.mark.parametrize("name", ["vllm-simple", "vllm-offloading", "vllm-multi"])
def test_what_was_said_with_drafts_is_stored_and_loaded_with_its_bytes(
    name: str, drafter: str, asynchronous: bool, target: Target
) -> None:
    """The second request finds nothing on the GPU: a reset has dropped it."""
    engine = engine_of(name, target)
    backends = ("offloading", "simple") if name == "vllm-multi" else ()
    setup = replace(DRAFTERS_BY_NAME[drafter], async_scheduling=asynchronous, backends=backends)
    onward = Add("B", continues="A", tail=1, max_tokens=4)
    ops = (ANSWER, Settle(), Add("wakes"), Settle(), Reset(), onward, Settle())
    outcome = run_history(engine, History(engine.name, setup, ops, "fair"))
    assert outcome.violations == []
    assert outcome.reached.keys() >= {"draft accepted", "draft rejected", "load finished"}


def traffic_on(target: Target, setup: EngineSetup, histories: int) -> list[tuple[History, list[Violation], str]]:
    """Let traffic happen; return each history, what it has shown that isn't known, and its trace."""
    release, shown = implementation_version(target.name), []
    for number in range(histories):
        world = World(target, setup, "random", number)
        traffic = Traffic(Mix(), world)
        for seed in range(4):
            for op in traffic.burst(4 * number + seed):
                world.apply(op)
        outcome = world.finish()
        keys = [(v, violation_key(target.name, v)) for v in outcome.violations]
        found = [v for v, key in keys if not known_as(load_known(), key, release)]
        shown.append((world.history(), found, outcome.trace))
    return shown


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["vllm-simple", "vllm-offloading"])
def test_traffic_with_drafts_breaks_no_law_and_runs_the_same_again(
    name: str, asynchronous: bool, target: Target
) -> None:
    engine = engine_of(name, target)
    for history, found, trace in traffic_on(engine, replace(EAGLE, async_scheduling=asynchronous), histories=4):
        assert found == []
        assert run_history(engine, history).trace == trace


@pytest.mark.parametrize("setup", [NGRAM, replace(EAGLE, async_scheduling=True)], ids=["in step", "ahead"])
def test_an_engine_without_a_device_runs_with_drafts_too(setup: EngineSetup, target: Target) -> None:
    with target.activated():
        drafted, alone = (
            run_instantly(History(target.name, one, (ANSWER, Settle()))) for one in (setup, replace(setup, drafts=0))
        )
    assert 0 < drafted < alone


@pytest.mark.parametrize("setup", [NGRAM, replace(EAGLE, async_scheduling=True)], ids=["in step", "ahead"])
def test_an_answer_has_the_same_words_with_drafts_as_without_in_fewer_steps(setup: EngineSetup, target: Target) -> None:
    plain = run(target, replace(setup, drafts=0, eagle=False), ANSWER, Settle())
    drafted = run(target, setup, ANSWER, Settle())
    assert drafted.said == plain.said
    assert drafted.outcome.steps < plain.outcome.steps


@pytest.mark.parametrize("most", range(1, 8))
def test_an_answer_ends_at_its_limit_within_accepted_drafts_too(most: int, target: Target) -> None:
    outcome, said, _ = run(target, NGRAM, Add("A", shared=9, tail=0, max_tokens=most), Settle())
    assert len(said) == 9 + most
    assert outcome.violations == []


def test_an_answer_ends_with_the_stop_token_though_drafts_behind_it_are_accepted(target: Target) -> None:
    runs = [run(target, NGRAM, ANSWER, Step(steps), Finish("A"), Settle()) for steps in range(1, 4)]
    assert all(said[-1] == STOP_TOKEN for _, said, _ in runs)
    assert any(len(text) > len(said) for _, said, text in runs)


def test_a_prefix_cache_that_has_a_token_before_it_is_computed_has_a_rejected_draft(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token that a request has said is never computed. Its slot has what a draft has left there."""
    from vllm.v1.core.sched.scheduler import Scheduler

    free = Scheduler._free_request

    def register_and_free(self: Any, request: Any, *more: Any, **named: Any) -> Any:
        self.kv_cache_manager.cache_blocks(request, request.num_tokens)
        return free(self, request, *more, **named)

    monkeypatch.setattr(Scheduler, "_free_request", register_and_free)
    runs = [run(target, NGRAM, Add("A", shared=prompt, tail=0, max_tokens=9), Settle()) for prompt in range(6, 16)]
    found = [violation for outcome, _, _ in runs for violation in outcome.violations]
    assert {violation.law for violation in found} == {"INDEX-2"}
    assert any("a rejected draft of token" in violation.message for violation in found)


@pytest.mark.parametrize(
    ("setup", "fields", "reason"),
    [
        (NGRAM, {"groups": (FULL, MAMBA)}, "Mamba"),
        (NGRAM, {"decode_ranks": 2}, "context parallelism"),
        (NGRAM, {"runner_v2": True}, "n-grams"),
        (NGRAM, {"step_tokens": 3}, "room for a token and its drafts"),
    ],
)
def test_an_engine_that_is_not_run_with_drafts_is_refused_and_drawn_otherwise(
    setup: EngineSetup, fields: dict[str, Any], reason: str, target: Target
) -> None:
    engine = engine_of("vllm-offloading", target)
    refused = engine.refusal(replace(setup, **fields))
    assert refused is not None
    assert reason in refused
    assert engine.refusal(supported(replace(setup, **fields), engine)) is None


@pytest.mark.parametrize("name", MACHINES)
def test_about_a_quarter_of_all_engines_have_drafts(name: str, target: Target) -> None:
    engine, rng = engine_of(name, target), random.Random(1)
    choices = MACHINES[name].SETUPS
    setups = [
        supported(setup_of(**{field: rng.choice(values) for field, values in choices.items()}), engine)
        for _ in range(400)
    ]
    assert 0.2 < sum(setup.drafts > 0 for setup in setups) / len(setups) < 0.4
    assert {setup.eagle for setup in setups if setup.drafts} == {False, True}


@pytest.mark.parametrize(("release", "drawn"), [("0.26.0", False), ("0.27.1", True), ("", True)])
def test_drafts_beside_asynchronous_scheduling_are_drawn_from_the_first_release_on_that_counts_right(
    release: str, drawn: bool, target: Target
) -> None:
    assert bool(supported(replace(EAGLE, async_scheduling=True), target, release).drafts) == drawn
    assert supported(EAGLE, target, release) == EAGLE


@pytest.mark.parametrize(
    ("setup", "place"),
    [
        (NGRAM, "with n-grams"),
        (replace(EAGLE, priority=True), "with EAGLE and priorities"),
        (replace(NGRAM, gpu_blocks=40, groups=(FULL, WINDOW)), "groups: full, sliding-window, with n-grams"),
        (replace(NGRAM, drafts=0, priority=True), ""),
    ],
)
def test_a_stall_with_drafts_is_told_from_others(
    setup: EngineSetup, place: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(KVCacheManager, "allocate_slots", lambda *_, **__: None)
    (violation,) = run(target, setup, ANSWER).outcome.violations
    assert (violation.law, violation.frame) == ("PROGRESS-1", place)
