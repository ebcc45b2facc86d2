"""vllm-multi: MultiConnector of two CPU backends."""

from __future__ import annotations

from itertools import product

import pytest
from hunt import defects_of, hunt
from msgspec.structs import replace

from kvspec.defects import planted
from kvspec.errors import SetupRefused
from kvspec.known import known_as, load_known
from kvspec.ops import BACKENDS, Abort, Add, AttentionGroup, EngineSetup, History, Op, Reset, Settle, Step
from kvspec.search import implementation_version, violation_key
from kvspec.targets import Target, load_target
from kvspec.world import Outcome, run_history
from strategies.machine import setup_of, supported
from strategies.multi import SETUPS

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

HISTORIES = 200
DEFECTS = defects_of("vllm-multi")


@pytest.fixture(scope="module")
def multi(target: Target) -> Target:
    """Return the target with the release that this run checks."""
    return load_target(f"vllm-multi{target.name[len('vllm-simple') :]}")


def run(target: Target, setup: EngineSetup, *ops: Op) -> Outcome:
    return run_history(target, History(target.name, setup, ops, "fair"))


@pytest.mark.parametrize("name", DEFECTS)
def test_the_defect_breaks_its_law(name: str, multi: Target) -> None:
    law = DEFECTS[name].law
    with planted(DEFECTS[name]):
        catch = hunt(multi, number=1, histories=HISTORIES, until=law, but_known=True)
    assert law in catch.violations, f"{sorted(catch.violations)} broken in {catch.histories} histories"


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_backends_store_a_prompt_and_the_first_one_loads_it(
    multi: Target, backends: tuple[str, str], ranks: int
) -> None:
    setup = EngineSetup(backends=backends, ranks=ranks, gpu_blocks=12, events=True, step_tokens=48)
    outcome = run(multi, setup, Add("a", shared=17), Settle(), Reset(), Add("b", shared=17), Settle())
    assert not outcome.violations
    assert outcome.stores == 8
    assert outcome.loads == 4
    assert outcome.reached["load by the first backend"] == 1
    assert outcome.reached["store by both backends"] or backends != ("offloading", "offloading")


def test_an_engine_is_drawn_that_the_release_runs(multi: Target) -> None:
    """Whatever is drawn, and whichever of the drawn values the release refuses."""
    for shape, backends, runner_v2, chunk in product(SETUPS["shape"], BACKENDS, (False, True), (1, 3)):
        drawn = setup_of(shape=shape, backends=backends, runner_v2=runner_v2, blocks_per_chunk=chunk)
        assert not multi.refusal(supported(drawn, multi))


def test_what_a_shape_says_wins_over_a_choice_of_its_own() -> None:
    assert setup_of(shape={"blocks_per_chunk": 1}, blocks_per_chunk=4).blocks_per_chunk == 1


def test_two_connectors_that_would_open_one_shared_memory_file_are_refused(
    multi: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = EngineSetup(backends=("offloading", "offloading"))
    monkeypatch.setattr("kvspec.targets.vllm.offloading.shares_one_region", lambda: True)
    assert "one shared memory file" in (multi.refusal(two) or "")
    assert supported(two, multi) == EngineSetup(backends=BACKENDS[0])


@pytest.mark.parametrize("name", ["vllm-simple", "vllm-offloading"])
def test_backends_are_refused_where_there_is_one_connector(name: str, target: Target) -> None:
    alone = load_target(f"{name}{target.name[len('vllm-simple') :]}")
    setup = EngineSetup(backends=("offloading", "simple"))
    assert "the target vllm-multi" in (alone.refusal(setup) or "")
    with pytest.raises(SetupRefused, match="the target vllm-multi"):
        run(alone, setup)


def test_the_second_backend_loads_what_the_first_has_given_up(multi: Target) -> None:
    setup = EngineSetup(backends=("offloading", "offloading"), cpu_blocks=4, gpu_blocks=12, step_tokens=48)
    other = Add("x", shared=17, trunk=1)
    outcome = run(multi, setup, Add("a", shared=17), Settle(), other, Settle(), Reset(), Add("b", shared=17), Settle())
    assert not outcome.violations
    assert outcome.reached["load by the second backend"] == 1


def test_an_engine_that_still_stores_what_its_prefix_cache_has_is_not_stuck(multi: Target) -> None:
    setup = EngineSetup(
        backends=("offloading", "simple"),
        lazy=True,
        groups=(AttentionGroup(), AttentionGroup("sliding-window", block_size=8, reach=8)),
        gpu_blocks=24,
        cpu_blocks=8,
        step_tokens=6,
        running_max=2,
        async_scheduling=True,
    )
    prompt = Add("f", shared=16, tail=1, max_tokens=2, trunk=2, branch=1)
    ops = (
        Add("a", shared=4, tail=1, max_tokens=1),
        Add("b", continues="a", tail=1, max_tokens=3),
        Add("c", continues="b", tail=5, max_tokens=1),
        Abort("a"),
        Abort("c"),
        Add("d", continues="c", tail=5, max_tokens=1, salt=1),
        Step(6, 56471),
        Add("e", continues="a", tail=1, max_tokens=4, salt=1),
        Step(1, 9388),
        Step(3, 6773),
        prompt,
        Add("g", continues="f", tail=5, max_tokens=4),
        *(replace(prompt, request=name) for name in "hijk"),
    )
    outcome = run_history(multi, History(multi.name, setup, ops, "random"))
    assert not outcome.violations


@pytest.mark.parametrize("defect", ["stores_swap_their_destinations", "loads_swap_their_destinations"])
def test_wrong_bytes_of_the_other_backend_are_no_known_issue_of_chunks(defect: str, multi: Target) -> None:
    """A block of SimpleCPUOffload is whole, however many OffloadingConnector has in a chunk."""
    setup = EngineSetup(backends=("simple", "offloading"), blocks_per_chunk=2, gpu_blocks=40, cpu_blocks=20)
    with planted(defects_of("vllm-simple")[defect]):
        outcome = run(multi, setup, Add("A", shared=17), Settle(), Reset(), Add("B", shared=17), Settle())
    release, known = implementation_version(multi.name), load_known()
    found = [v for v in outcome.violations if v.law in {"INDEX-1", "SHADOW-1", "INDEX-2"}]
    assert found
    assert not any(known_as(known, violation_key(multi.name, violation), release) for violation in found)
