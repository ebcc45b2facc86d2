"""Engines with Mamba groups: which can be, what breaks when a state is lost, and that nothing does without a defect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvspec.defects import load_defects, planted
from kvspec.known import known_as, load_known
from kvspec.laws import Violation
from kvspec.ops import Add, AttentionGroup, EngineSetup, History, Reset, Settle, Step
from kvspec.search import implementation_version, load_suite, violation_key
from kvspec.targets import Target, load_target
from kvspec.world import World, run_history
from strategies.machine import supported
from strategies.traffic import Mix, Traffic

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

FULL, MAMBA = AttentionGroup(), AttentionGroup("mamba")
SETUP = EngineSetup(gpu_blocks=16, cpu_blocks=20, groups=(FULL, MAMBA), runner_v2=False, prompt_only=False)
SETUPS = {
    "vllm-simple": SETUP,
    "vllm-offloading": SETUP,
    "vllm-multi": replace(SETUP, backends=("offloading", "simple"), blocks_per_chunk=2),
}
HISTORIES = 15
REGISTRY = load_defects(Path(__file__).parent / "defects")


def engine_of(name: str, target: Target) -> Target:
    """Return another target with the release that this run checks."""
    return load_target(f"{name}{target.name[len('vllm-simple') :]}")


def traffic_on(target: Target, setup: EngineSetup, until: str = "") -> list[Violation]:
    """Let traffic happen, history by history, until a law is broken; return all that isn't known."""
    found: list[Violation] = []
    for number in range(HISTORIES):
        world = World(target, replace(setup, async_scheduling=bool(number % 2)), "random", number)
        traffic = Traffic(Mix(), world)
        for seed in range(3):
            for op in traffic.burst(3 * number + seed):
                world.apply(op)
        release = implementation_version(target.name)
        found += [
            v for v in world.finish().violations if not known_as(load_known(), violation_key(target.name, v), release)
        ]
        if any(violation.law == until for violation in found):
            break
    return found


@pytest.mark.parametrize(("release", "drawn"), [("0.25.1", False), ("0.26.0", True), ("", True)])
def test_mamba_is_drawn_from_the_first_release_on_of_which_enough_is_known(
    release: str, drawn: bool, target: Target
) -> None:
    assert (MAMBA in supported(SETUP, target, release).groups) == drawn


def test_a_suite_tells_its_machine_the_release_that_is_imported(target: Target) -> None:
    release = implementation_version(target.name)
    assert load_suite("vllm-simple").machine.release == release  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SETUPS)
def test_traffic_on_mamba_breaks_no_law(name: str, target: Target) -> None:
    assert traffic_on(engine_of(name, target), SETUPS[name]) == []


DEFECTS = {name: defect for name, defect in REGISTRY.items() if defect.kind == "states" and not defect.level}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_that_loses_a_state_is_noticed_where_mamba_goes_on_from_it(name: str, target: Target) -> None:
    defect = DEFECTS[name]
    with planted(defect):
        found = traffic_on(engine_of(defect.target, target), SETUPS[defect.target], until=defect.law)
    assert any((violation.law, violation.frame[:5]) == (defect.law, "mamba") for violation in found)


@pytest.mark.parametrize("name", ["vllm-simple", "vllm-offloading"])
def test_a_state_is_stored_and_loaded_with_the_tokens_before_it(name: str, target: Target) -> None:
    """The second request finds nothing on the GPU: a reset has dropped it."""
    engine = engine_of(name, target)
    setup = replace(SETUP, lazy=True)
    ops = (Add("A", shared=12), Settle(), Reset(), Add("B", shared=12, tail=1), Settle())
    outcome = run_history(engine, History(engine.name, setup, ops, "fair"))
    assert outcome.violations == []
    assert outcome.loads == 4  # three blocks of full attention, one state


@pytest.mark.parametrize("runner_v2", [False, True])
def test_only_runner_v2_zeroes_blocks_that_are_about_to_be_stored_and_the_place_says_so(
    runner_v2: bool, target: Target
) -> None:
    """The known issue offloading-zeroed-before-stored, which excuses nothing with runner V1."""
    engine = engine_of("vllm-offloading", target)
    setup = EngineSetup(gpu_blocks=18, groups=(MAMBA, FULL), runner_v2=runner_v2)
    first = Add("A", shared=8, tail=0, max_tokens=7)
    others = (Add("B", shared=20, tail=0, trunk=2), Add("C", shared=20, tail=1, trunk=1))
    outcome = run_history(engine, History(engine.name, setup, (first, Step(4), *others, Settle()), "fair"))
    places = {violation.frame for violation in outcome.violations}
    assert places == ({"mamba, runner V2", "full, beside mamba, runner V2"} if runner_v2 else set())


def test_a_stall_beside_mamba_is_not_taken_for_the_deadlock_of_windows(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of the step before can't be hit for ever: what waits for it never runs."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    monkeypatch.setattr(MambaManager, "new_step_starts", lambda self: None)
    prompt = {"shared": 9, "tail": 0}
    history = History(target.name, SETUP, (Add("A", **prompt), Settle(), Add("B", **prompt), Settle()), "fair")
    (violation,) = run_history(target, history).violations
    assert (violation.law, violation.frame) == ("PROGRESS-1", "groups: full, mamba")
    key, release = violation_key(target.name, violation), implementation_version(target.name)
    assert known_as(load_known(), key, release) is None


def test_wrong_bytes_of_a_window_are_the_known_ones_beside_mamba_too(target: Target) -> None:
    engine = engine_of("vllm-offloading", target)
    groups = (FULL, AttentionGroup("sliding-window", reach=5), MAMBA)
    setup = replace(SETUP, groups=groups, gpu_blocks=16, step_tokens=17, blocks_per_chunk=4)
    first, prompt = Add("filler", shared=5, tail=0, trunk=2), {"shared": 17, "max_tokens": 2}
    second = Add("B", shared=12, tail=0, trunk=1, max_tokens=2)
    ops = (first, Add("A", tail=0, **prompt), Step(1), second, Step(1), Settle(), Add("C", tail=1, **prompt), Settle())
    history = History(engine.name, setup, ops, "fair")
    violations, release = run_history(engine, history).violations, implementation_version(engine.name)
    keys = [violation_key(engine.name, violation) for violation in violations]
    assert {issue and issue.id for issue in (known_as(load_known(), key, release) for key in keys)} == {
        "offloading-window-hole"
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": (MAMBA,)}, "full-attention group"),
        ({"groups": (FULL, AttentionGroup("mamba", block_size=8))}, "blocks of its size"),
        ({"step_tokens": 3}, "room for the tokens of a block"),
        ({"decode_ranks": 2}, "context parallelism"),
    ],
)
def test_an_engine_that_vllm_has_no_mamba_for_is_refused(fields: dict[str, Any], reason: str, target: Target) -> None:
    engine = engine_of("vllm-offloading", target)
    assert engine.refusal(SETUP) is None
    refused = engine.refusal(replace(SETUP, **fields))
    assert refused is not None
    assert reason in refused
