"""Worlds on the real target: they repeat, they reach what they say they reach, and only the target is blamed.

Not checked here: that each law can be broken (test_planted_defects.py), and that the stand-ins go (test_targets.py).
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvspec import world as world_module
from kvspec.engine.rank import RunnerV1, RunnerV2
from kvspec.engine.shadow import RunnerState
from kvspec.errors import SetupRefused
from kvspec.history import read_history
from kvspec.history.minimise import pinned
from kvspec.known import known_as, load_known
from kvspec.ops import (
    Abort,
    Add,
    Advance,
    AttentionGroup,
    EngineSetup,
    Finish,
    History,
    Op,
    Reset,
    Settle,
    Step,
    history_from_json,
    history_to_json,
)
from kvspec.releases import KNOWN_GOOD
from kvspec.search import violation_key
from kvspec.targets import Target
from kvspec.world import (
    EVENTS,
    MULTI_EVENTS,
    OFFLOADING_EVENTS,
    STALL_STEPS,
    Outcome,
    World,
    make_adversary,
    run_history,
)
from strategies.machine import ADVERSARIES, supported
from strategies.machines import MACHINES
from strategies.simple import SimpleOffloadMachine
from strategies.traffic import SEEDS, Mix, Traffic, mixes

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=12)

HOST_FIRST = ""
"""A schedule without moves: the device does only what the host waits for."""


def play(target: Target, setup: EngineSetup, *ops: Op, adversary: str = "fair", seed: int = 0) -> Outcome:
    """Let a legal history happen to a target that obeys the laws."""
    outcome = run_history(target, History(target.name, setup, ops, adversary, seed))
    assert outcome.violations == []
    assert outcome.reached.keys() <= EVENTS.keys()
    return outcome


def apply_all(world: World, *ops: Op) -> None:
    for op in ops:
        world.apply(op)


def essence(outcome: Outcome) -> Outcome:
    """Everything but the time it took."""
    return replace(outcome, engine_seconds=0.0)


# Histories repeat -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What a machine draws for one history."""

    setup: EngineSetup
    mix: Mix
    adversary: str
    seed: int
    bursts: list[int]

    def record(self, target: Target) -> tuple[History, Outcome]:
        """Let the traffic happen for the first time, and write it down."""
        world = World(target, supported(self.setup, target), self.adversary, self.seed)
        traffic = Traffic(self.mix, world)
        for burst in self.bursts:
            for op in traffic.burst(burst):
                world.apply(op)
        outcome = world.finish()
        known = load_known()
        assert all(known_as(known, violation_key(target.name, v), KNOWN_GOOD[-1]) for v in outcome.violations)
        return world.history(), outcome


BURSTS = st.lists(SEEDS, min_size=1, max_size=4)
DRAWS = st.builds(Draw, SimpleOffloadMachine.setups, mixes(), ADVERSARIES, SEEDS, BURSTS)


@FIXED
@given(draw=DRAWS)
def test_a_history_that_went_through_json_happens_again_in_every_detail(target: Target, draw: Draw) -> None:
    history, outcome = draw.record(target)
    again = run_history(target, history_from_json(history_to_json(history)))
    assert essence(again) == essence(outcome)
    assert outcome.trace
    assert len(outcome.schedules) == len(history.ops) + 1


@FIXED
@given(draw=DRAWS, other=st.sampled_from(["fair", "random", "pct:2"]), seed=SEEDS)
def test_a_history_with_its_schedules_written_down_needs_neither_seeds_nor_adversary(
    target: Target, draw: Draw, other: str, seed: int
) -> None:
    history, outcome = draw.record(target)
    written = structs.replace(pinned(history, outcome.schedules), adversary=other, seed=seed)
    assert all(getattr(op, "seed", 0) == 0 for op in written.ops)
    assert essence(run_history(target, written)) == essence(outcome)


@FIXED
@given(draw=DRAWS)
def test_only_ops_that_carry_a_schedule_and_settling_let_time_pass(target: Target, draw: Draw) -> None:
    """So that a schedule in those ops is enough to repeat a history."""
    history, outcome = draw.record(target)
    for op, schedule in zip(history.ops, outcome.schedules, strict=False):
        assert isinstance(op, (Step, Advance, Settle)) or schedule == ""


def test_different_seeds_give_different_schedules_and_equal_ones_the_same(target: Target) -> None:
    def schedules(seed: int) -> tuple[str, ...]:
        ops = (Add("a", shared=16, tail=1, max_tokens=4), *(Step(2, seed + i) for i in range(3)), Advance(seed))
        return tuple(play(target, EngineSetup(ranks=2), *ops, adversary="random").schedules)

    assert len({schedules(seed) for seed in range(8)}) > 4
    assert schedules(3) == schedules(3)


def test_the_seed_of_the_history_matters_to_the_adversary_that_keeps_it(target: Target) -> None:
    ops = (Add("a", shared=16, tail=1, max_tokens=4), Step(3), Step(3))
    kept = {tuple(play(target, EngineSetup(), *ops, adversary="pct:1", seed=seed).schedules) for seed in range(8)}
    drawn = {tuple(play(target, EngineSetup(), *ops, adversary="random", seed=seed).schedules) for seed in range(8)}
    assert len(kept) > 1
    assert len(drawn) == 1


def test_traces_tell_histories_apart(target: Target) -> None:
    """A trace holds what was scheduled, sampled, stored and loaded, what a reset answered, and the schedules."""
    a, b = Add("a", shared=16, tail=1), Add("b", shared=16, tail=1)
    start = (a, Settle())
    histories: list[tuple[Op, ...]] = [
        start,
        (structs.replace(a, max_tokens=2), Settle()),
        (structs.replace(a, trunk=1), Settle()),
        (structs.replace(a, salt=1), Settle()),
        (*start, Reset()),
        (*start, b, Settle()),
        (*start, Reset(), b, Settle()),
        (*start, Reset(connector=True), b, Settle()),
        (a, Step(schedule="c0"), Settle()),
        (a, Step(schedule="c0c0"), Settle()),
    ]
    traces = [play(target, EngineSetup(), *ops).trace for ops in histories]
    traces.append(play(target, EngineSetup(cpu_blocks=4), *start).trace)  # a block less is stored
    assert len(set(traces)) == len(traces)


def test_a_schedule_is_for_its_own_op_and_then_the_adversary_goes_on(target: Target) -> None:
    long = Add("a", shared=8, tail=1, max_tokens=4)
    outcome = play(target, EngineSetup(), long, Step(schedule=HOST_FIRST), Step(), adversary="fair")
    _, written, drawn, _ = outcome.schedules
    assert "." in written
    assert drawn, "the device has moved"
    assert "." not in drawn, "with the fair adversary it never waits for the host"


@pytest.mark.parametrize("name", ["", "unfair", "pct", "pct:", "pct:-1", "pct:x", "fair:1", "random:"])
def test_an_unknown_adversary_is_refused_with_the_names_of_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match=r"there are fair, random and pct:D"):
        make_adversary(name, 0)


# Ops that find nothing to do ------------------------------------------------------------------------------------------


def idle_ops(before: Sequence[Op]) -> list[Op]:
    """Ops that can't do anything after ``before``: requests that never were, that can't be, or that were named."""
    used = [op.request for op in before if isinstance(op, Add)]
    return [
        Abort("nobody"),
        Abort("nobody", in_step=True),
        Finish("nobody"),
        Add("empty", tail=0),
        Add("orphan", continues="nobody"),
        Add("itself", continues="itself"),
        Add("huge", shared=46, max_tokens=2, tail=0),
        Step(count=0),
        *(Add(name, shared=5) for name in used[:1]),
    ]


@FIXED
@given(draw=DRAWS.filter(lambda draw: not draw.adversary.startswith("pct")), data=st.data())
def test_an_op_that_finds_nothing_to_do_changes_nothing(target: Target, draw: Draw, data: st.DataObject) -> None:
    """Not so for ``pct``, which may change its priorities at any op."""
    history, outcome = draw.record(target)
    at = data.draw(st.integers(0, len(history.ops)))
    extra = data.draw(st.sampled_from(idle_ops(history.ops[:at])))
    ops = (*history.ops[:at], extra, *history.ops[at:])
    again = run_history(target, structs.replace(history, ops=ops))
    assert again.schedules.pop(at) == ""
    assert essence(again) == essence(outcome)


A = Add("a", shared=8, tail=1, max_tokens=3)


@pytest.mark.parametrize("adversary", ["fair", "random"])
@pytest.mark.parametrize(
    "late", [Abort("a"), Abort("a", in_step=True), Finish("a"), Add("a", shared=8, tail=1), Add("a", trunk=1, shared=4)]
)
def test_a_request_that_has_finished_is_left_alone(target: Target, late: Op, adversary: str) -> None:
    ops = (A, Settle(), late, Settle())
    with_it, without = (
        play(target, EngineSetup(), *some, adversary=adversary) for some in (ops, (A, Settle(), Settle()))
    )
    assert with_it.schedules.pop(2) == ""
    assert essence(with_it) == essence(without)


@pytest.mark.parametrize("again", [A, Add("a", shared=16, tail=3, trunk=1)])
def test_a_name_that_is_taken_is_not_given_again(target: Target, again: Op) -> None:
    outcome = play(target, EngineSetup(), A, Step(), again, Settle())
    assert outcome.schedules.pop(2) == ""
    assert essence(outcome) == essence(play(target, EngineSetup(), A, Step(), Settle()))


@pytest.mark.parametrize(("tail", "fits"), [(18, True), (19, False)])
def test_a_request_is_added_exactly_if_the_gpu_could_hold_all_that_it_may_say(
    target: Target, tail: int, fits: bool
) -> None:
    """Six blocks of four tokens, the null block aside; a prompt of shared and own tokens, and two sampled ones."""
    world = World(target, EngineSetup(gpu_blocks=7), "fair")
    world.apply(Add("a", shared=4, tail=tail, max_tokens=2))
    assert world.live() == (["a"] if fits else [])
    outcome = world.finish()
    assert outcome.violations == []
    assert (outcome.steps > 0) == fits


def test_a_prompt_that_is_far_too_long_is_left_out_before_it_is_made(target: Target) -> None:
    """That many tokens would fill the memory of any machine."""
    world = World(target, EngineSetup(), "fair")
    apply_all(world, Add("a", shared=10**30), Add("b", tail=10**30), Add("c", max_tokens=10**30))
    assert world.live() == []
    world.finish()


def test_a_request_continues_all_that_another_has_said(target: Target) -> None:
    """Sixteen tokens of prompt and one sampled make four full blocks, which the second finds in the CPU tier."""
    first = Add("a", shared=16, tail=0, max_tokens=2)
    outcome = play(target, EngineSetup(), first, Settle(), Reset(), Add("b", continues="a", tail=1), Settle())
    assert outcome.loads == 4
    outcome = play(target, EngineSetup(), first, Settle(), Reset(), Add("b", continues="a", tail=1, salt=1), Settle())
    assert outcome.loads == 0


# The end of a world ---------------------------------------------------------------------------------------------------


def raise_in(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the copy loop of the target raise."""
    from vllm.v1.simple_kv_offload import copy_backend

    def copy_blocks(*_: Any) -> None:
        raise error

    patch.setattr(copy_backend, "copy_blocks", copy_blocks)


def test_after_a_fatal_violation_the_world_is_dead_and_ignores_ops(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_in(monkeypatch, ValueError("planted"))
    world = World(target, EngineSetup(), "fair")
    apply_all(world, A, Add("b", shared=12, tail=1), Settle())
    assert not world.alive
    assert world.live() == []
    ops, steps = list(world.ops), world._outcome.steps
    apply_all(world, Add("c"), Step(3), Abort("b"), Reset(running=True), Finish("b"), Advance(), Settle())
    assert world.ops == ops
    outcome = world.finish()
    assert outcome.steps == steps
    assert [(v.law, v.op, v.op_index) for v in outcome.violations] == [("CRASH-1", "step", 2)]
    assert world.history().ops == (A, Add("b", shared=12, tail=1), Settle())
    assert outcome.trace == run_history(target, world.history()).trace


def test_a_violation_that_the_target_survives_is_noted_once_and_the_history_goes_on(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores that swap their destinations: every block of the CPU tier is wrong."""
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.bind_connector_metadata

    def bind(self: Any, metadata: Any) -> None:
        metadata.store_cpu_blocks = metadata.store_cpu_blocks[::-1]
        real(self, metadata)

    monkeypatch.setattr(Worker, "bind_connector_metadata", bind)
    world = World(target, EngineSetup(), "fair")
    apply_all(world, A, Settle(), Add("b", trunk=1, shared=12, tail=1), Settle())
    assert world.alive
    outcome = world.finish()
    (violation,) = [v for v in outcome.violations if v.law == "INDEX-1"]
    assert (violation.op, violation.op_index) == ("step", 1)
    assert violation.message == (
        "CPU block 1 can be hit as block 0 of a, but on rank 0, layer 0, token 0 of the block, it holds token 4 of a"
    )
    assert outcome.reached["store"] == 2


def test_a_world_that_has_finished_ignores_ops_and_gives_the_same_outcome(target: Target) -> None:
    world = World(target, EngineSetup(), "fair")
    world.apply(A)
    outcome = world.finish()
    before = replace(outcome)
    world.apply(Add("b"))
    world.apply(Step())
    assert world.finish() is outcome
    assert outcome == before
    assert world.history().ops == (A,)


def test_what_is_left_to_do_is_done_at_the_end(target: Target) -> None:
    outcome = play(target, EngineSetup(), A, Add("b", trunk=1, shared=4))
    assert outcome.reached["idle"] == 1
    assert outcome.stores == 3
    assert len(outcome.schedules) == 3


# Who is to blame ------------------------------------------------------------------------------------------------------


def crash(target: Target, *ops: Op) -> tuple[str, str, str]:
    outcome = run_history(target, History(target.name, EngineSetup(), ops or (A, Settle()), "fair"))
    (violation,) = outcome.violations
    return violation.law, violation.message, violation.frame


def test_an_exception_of_the_target_is_a_crash_with_its_innermost_frame(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_in(monkeypatch, KeyError("planted"))
    assert crash(target) == ("CRASH-1", "KeyError: 'planted'", "v1/simple_kv_offload/copy_backend.py:_copy_loop")


def test_an_exception_of_a_library_is_the_fault_of_the_target_that_called_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    monkeypatch.setattr(copy_backend, "copy_blocks", lambda *_: json.loads("{"))
    law, message, frame = crash(target)
    assert (law, frame) == ("CRASH-1", "v1/simple_kv_offload/copy_backend.py:_copy_loop")
    assert message.startswith("JSONDecodeError: ")


def test_an_exception_of_the_target_between_steps_is_a_crash_during_that_op(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def reset_prefix_cache(self: Any) -> bool:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(KVCacheManager, "reset_prefix_cache", reset_prefix_cache)
    outcome = run_history(target, History(target.name, EngineSetup(), (A, Settle(), Reset(), Step()), "fair"))
    (violation,) = outcome.violations
    assert violation[:2] == ("CRASH-1", "ZeroDivisionError: planted")
    assert violation.op == "reset"
    assert violation.op_index == 2
    assert violation.frame == "v1/core/sched/scheduler.py:reset_prefix_cache"


def test_a_fault_of_the_device_is_its_own_law_with_the_frame_that_asked_for_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    real = copy_backend.copy_blocks
    monkeypatch.setattr(
        copy_backend, "copy_blocks", lambda src, dst, params: real([block + 100 for block in src], dst, params)
    )
    law, _, frame = crash(target)
    assert law == "DEVICE-1"
    assert frame.startswith("v1/simple_kv_offload/")


def break_the_forward(patch: pytest.MonkeyPatch) -> None:
    """In the executor: the target's step function has called it."""
    patch.setattr(RunnerState, "_forward", lambda self: None)


def break_the_block_hasher(patch: pytest.MonkeyPatch) -> None:
    """In a callback: the target's scheduler has called the hasher that notes what hashes stand for."""
    from kvspec.targets.vllm import engine

    patch.setattr(engine, "_real_block_hasher", lambda size: lambda request: len(request))


def break_a_wrapper(patch: pytest.MonkeyPatch) -> None:
    """In a wrapper around the connector: the target's scheduler has called it."""
    patch.setattr(World, "looked_up", lambda self: None)


def break_a_check(patch: pytest.MonkeyPatch) -> None:
    """After the step."""
    patch.setattr(world_module.laws, "pool_is_conserved", lambda pool: iter(pool.nothing))


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (break_the_forward, TypeError),
        (break_the_block_hasher, TypeError),
        (break_a_wrapper, TypeError),
        (break_a_check, AttributeError),
    ],
)
def test_an_exception_of_kvspecs_own_code_is_raised_and_not_blamed_on_the_target(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
) -> None:
    break_it(monkeypatch)
    world = World(target, EngineSetup(), "fair")
    try:
        with pytest.raises(error):
            apply_all(world, A, Settle())
        assert world._outcome.violations == []
    finally:
        monkeypatch.undo()
        world._context.close()


# Scenarios ------------------------------------------------------------------------------------------------------------

LONG, AGAIN = Add("a", shared=16, tail=1), Add("b", shared=16, tail=1)
STORED = (LONG, Settle(), Reset())
"""Four blocks of the text are in the CPU tier, and nowhere else."""
LOADING = (*STORED, AGAIN, Step(schedule=HOST_FIRST))
"""Request b waits for its load, of which nothing has happened yet."""
CROWD = (
    Add("a", shared=8, tail=1, max_tokens=9),
    Add("b", trunk=1, shared=8, tail=1, max_tokens=9),
)
"""Two requests that a GPU of six blocks can hold at first, but not until they are done."""
PLAIN = EngineSetup()
SMALL = EngineSetup(gpu_blocks=7)


@dataclass(frozen=True)
class Scenario:
    """A short history, what it reaches and how often, and what it never does."""

    ops: tuple[Op, ...]
    reaches: dict[str, int]
    setup: EngineSetup = PLAIN
    never: frozenset[str] = frozenset()
    stores: int | None = None
    loads: int | None = None


SCENARIOS = {
    "what was stored is loaded after the GPU has lost it": Scenario(
        (*STORED, AGAIN, Settle()),
        {"store": 1, "reset": 1, "load": 1, "load finished": 1, "idle": 3},
        never=frozenset({"partial hit", "CPU eviction", "connector reset", "stop token"}),
        stores=4,
        loads=4,
    ),
    "an engine of context-parallel ranks stores and loads what its ranks share": Scenario(
        (*STORED, AGAIN, Settle()),
        {"context parallelism": 1, "store": 1, "load": 1, "load finished": 2},
        EngineSetup(block_size=2, decode_ranks=2),
        never=frozenset({"several groups"}),
        stores=4,
        loads=4,
    ),
    "an engine of several groups has a block table for each": Scenario(
        (*STORED, AGAIN, Settle()),
        {"several groups": 1, "store": 1, "load": 1, "load finished": 1},
        EngineSetup(gpu_blocks=30, cpu_blocks=30, groups=(AttentionGroup(), AttentionGroup("sliding-window", reach=6))),
        never=frozenset({"context parallelism", "unequal groups"}),
    ),
    "a group can be Mamba's, with one state to load": Scenario(
        (*STORED, AGAIN, Settle()),
        {"several groups": 1, "Mamba": 1, "load": 1, "load finished": 1},
        EngineSetup(gpu_blocks=30, cpu_blocks=30, groups=(AttentionGroup(), AttentionGroup("mamba")), runner_v2=False),
        never=frozenset({"context parallelism", "unequal groups"}),
    ),
    "some of what a drafter proposes is said, and some is not": Scenario(
        (Add("A", max_tokens=9), Settle()),
        {"draft accepted": 3, "draft rejected": 1},
        EngineSetup(drafts=3, eagle=True),
    ),
    "groups can have blocks of unequal sizes": Scenario(
        (*STORED, AGAIN, Settle()),
        {"several groups": 1, "unequal groups": 1, "store": 1, "load": 1, "load finished": 1},
        EngineSetup(
            gpu_blocks=30,
            cpu_blocks=30,
            groups=(AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=6)),
        ),
    ),
    "a request is preempted in the schedule that has just given it the end of a block": Scenario(
        (Add("A", 0, 12, max_tokens=9, priority=1), Step(), Add("B", 0, 12, branch=1, max_tokens=9), Step(count=8)),
        {"preemption": 1, "victim of its own step": 1},
        EngineSetup(
            gpu_blocks=13,
            cpu_blocks=80,
            step_tokens=16,
            groups=(AttentionGroup(), AttentionGroup("sliding-window", reach=6)),
            priority=True,
        ),
    ),
    "who is preempted by a reset and comes back at once is no victim of the step": Scenario(
        (Add("A", 0, 12, max_tokens=9), Step(3), Reset(running=True, connector=True), Step(6)),
        {"reset": 1},
        EngineSetup(priority=True),
        never=frozenset({"victim of its own step"}),
    ),
    "what the GPU still has is not loaded": Scenario(
        (LONG, Settle(), AGAIN, Settle()),
        {"store": 1},
        never=frozenset({"load", "reset"}),
        stores=4,
        loads=0,
    ),
    "what the GPU has is hit, and only the rest is loaded": Scenario(
        (
            *(Add("a", shared=8, tail=1), Settle(), Reset()),
            *(Add("b", shared=4, tail=1), Settle()),
            *(Add("c", shared=8, tail=2), Settle()),
        ),
        {"load": 2, "partial hit": 1},
        stores=2,
        loads=2,
    ),
    "a CPU tier that is full makes room": Scenario(
        (Add("a", shared=12, tail=1), Settle(), Add("b", trunk=1, shared=12, tail=1), Settle()),
        {"store": 2, "CPU eviction": 1},
        EngineSetup(cpu_blocks=4),
        stores=6,
    ),
    "a CPU tier with room for all evicts nothing": Scenario(
        (Add("a", shared=12, tail=1), Settle(), Add("b", trunk=1, shared=12, tail=1), Settle()),
        {"store": 2},
        EngineSetup(cpu_blocks=7),
        never=frozenset({"CPU eviction"}),
        stores=6,
    ),
    "a request is preempted for lack of blocks and resumes": Scenario(
        (*CROWD, Settle()),
        {"preemption": 1, "same-step reuse": 1, "lookup without allocation": 4, "resumption": 1},
        SMALL,
    ),
    "with enough blocks nobody is preempted": Scenario(
        (*CROWD, Settle()),
        {"store": 6},
        never=frozenset({"preemption", "same-step reuse", "resumption", "lookup without allocation", "load"}),
    ),
    "a request that is preempted after it has loaded loads again, and its only rank is never ahead of itself": Scenario(
        (
            *(Add("b", shared=8, tail=1), Settle(), Reset()),
            *(Add("a", trunk=1, shared=8, tail=1, max_tokens=9), Add("c", shared=8, tail=1, max_tokens=9), Settle()),
        ),
        {"preemption": 1, "resumption": 1, "load": 2, "load finished": 2},
        EngineSetup(gpu_blocks=7, cpu_blocks=20),
        never=frozenset({"rank skew"}),
    ),
    "a load goes on although its request is gone": Scenario(
        (*LOADING, Abort("b")),
        {"abort while loading": 1, "load finished": 1},
        never=frozenset({"abort while running", "abort while waiting", "abort in step"}),
        loads=4,
    ),
    "an abort arrives in a step while the request loads": Scenario(
        (*LOADING, Abort("b", in_step=True), Step(schedule=HOST_FIRST)),
        {"abort while loading": 1, "abort in step": 1, "load finished": 1},
    ),
    "a request is aborted before it was scheduled": Scenario(
        (LONG, Abort("a")),
        {"abort while waiting": 1, "abort before any schedule": 1},
        never=frozenset({"store", "abort in step"}),
    ),
    "a request is aborted while it runs": Scenario(
        (structs.replace(LONG, max_tokens=3), Step(), Abort("a")),
        {"abort while running": 1, "store": 1},
        never=frozenset({"abort in step", "abort while waiting"}),
    ),
    "a request is aborted between its forward and the update": Scenario(
        (structs.replace(LONG, max_tokens=3), Step(), Abort("a", in_step=True), Step()),
        {"abort while running": 1, "abort in step": 1},
    ),
    "a preempted request is aborted": Scenario(
        (*CROWD, Step(5), Abort("b")),
        {"preemption": 1, "abort of a preempted request": 1},
        SMALL,
        never=frozenset({"resumption", "abort while running"}),
    ),
    "the model stops before the limit": Scenario(
        (Add("a", shared=8, tail=1, max_tokens=9), Step(), Finish("a"), Step(3)),
        {"stop token": 1, "idle": 2},
    ),
    "a request that is aborted before it could stop has not stopped": Scenario(
        (Add("a", shared=8, tail=1, max_tokens=9), Finish("a"), Abort("a")),
        {"abort while waiting": 1},
        never=frozenset({"stop token"}),
    ),
    "a reset with a load in flight is refused, and one without is not": Scenario(
        (*LOADING, Reset(connector=True), Settle(), Reset(connector=True), Add("c", shared=16), Settle()),
        {"reset with transfers in flight": 1, "reset refused": 1, "reset": 2, "connector reset": 1, "load": 1},
        stores=8,
    ),
    "a reset is refused while a request runs": Scenario(
        (Add("a", shared=8, tail=1, max_tokens=9), Step(), Reset()),
        {"reset refused": 1},
        never=frozenset({"reset", "connector reset", "reset with transfers in flight"}),
    ),
    "a reset that preempts what runs is not refused": Scenario(
        (Add("a", shared=8, tail=1, max_tokens=9), Step(), Reset(running=True)),
        {"reset": 1, "resumption": 1},
        never=frozenset({"preemption", "reset refused", "connector reset"}),
    ),
    "the connector forgets what it had": Scenario(
        (LONG, Settle(), Reset(connector=True), AGAIN, Settle()),
        {"reset": 1, "connector reset": 1, "store": 2},
        never=frozenset({"load", "CPU eviction"}),
        stores=8,
        loads=0,
    ),
    "one rank reports a load a step earlier than the other": Scenario(
        (*LOADING, Step(schedule="t0---.l0l0h0"), Settle()),
        {"load": 1, "load finished": 2, "rank skew": 1},
        EngineSetup(ranks=2),
        loads=4,
    ),
    "ranks that report in the same step are not apart": Scenario(
        (*STORED, AGAIN, Settle()),
        {"load": 1, "load finished": 2},
        EngineSetup(ranks=2),
        never=frozenset({"rank skew"}),
        loads=4,
    ),
    "a request ends while its blocks are being stored": Scenario(
        (Add("a", shared=8, tail=1, max_tokens=2), Step(2, schedule=HOST_FIRST)),
        {"finish with stores in flight": 1, "store": 1},
        stores=2,
    ),
    "a request whose blocks have been stored ends with nothing in flight": Scenario(
        (Add("a", shared=8, tail=1, max_tokens=3), Settle()),
        {"store": 1},
        never=frozenset({"finish with stores in flight"}),
    ),
    "an engine with nothing to compute steps for what is left to tell": Scenario(
        (LONG, Settle()),
        {"step without a forward": 1, "idle": 2},
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, target: Target) -> None:
    scenario = SCENARIOS[name]
    outcome = play(target, scenario.setup, *scenario.ops)
    assert {event: outcome.reached[event] for event in scenario.reaches} == scenario.reaches
    assert not scenario.never & outcome.reached.keys()
    assert scenario.stores in (None, outcome.stores)
    assert scenario.loads in (None, outcome.loads)


def test_an_exception_at_the_start_of_an_engine_is_a_crash(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    source = compile("def refuse(*args, **named):\n    raise KeyError(7)", inspect.getfile(Manager), "exec")
    names: dict[str, Any] = {}
    exec(source, names)
    monkeypatch.setattr(Manager, "__init__", names["refuse"])
    world = World(target, EngineSetup(), "fair")
    assert not world.alive
    assert list(Traffic(Mix(), world).burst(1)) == []
    (violation,) = world.finish().violations
    assert (violation.law, violation.op) == ("CRASH-1", "start")
    assert violation.frame == "v1/simple_kv_offload/manager.py:refuse"


LAZY = EngineSetup(gpu_blocks=24, cpu_blocks=48, lazy=True, async_scheduling=True)


def test_a_request_that_waits_for_the_last_stores_is_not_stuck(target: Target) -> None:
    """They take longer than the steps without a change after which an engine that stores nothing is stuck."""
    texts = [
        Add("W", 44, 1, max_tokens=5),
        Add("X", 4, 1, trunk=1, max_tokens=3),
        Add("Y", 12, 2, trunk=2, max_tokens=1),
    ]
    assert play(target, LAZY, *texts, Add("Z", 88, 1, trunk=9, max_tokens=1)).stores > STALL_STEPS


def test_a_request_that_waits_for_stores_without_end_is_stuck_and_told_from_others(target: Target) -> None:
    waits = Add("Z", 20, 1, max_tokens=1, priority=2)
    others = [Add("X", 0, 1, max_tokens=1), Add("Y", 0, 10, max_tokens=1, priority=1), Add("W", 0, 1, max_tokens=5)]
    late = [Add("U", 8, 0, trunk=1, branch=1, max_tokens=1, priority=1), Add("V", 16, 1, max_tokens=1)]
    setup = structs.replace(LAZY, gpu_blocks=7, cpu_blocks=4, priority=True)
    ops = (waits, Add("T", 0, 1, max_tokens=1), *others, *late)
    (violation,) = run_history(target, History(target.name, setup, ops, "fair", 0)).violations
    assert (violation.law, violation.frame) == ("PROGRESS-1", "while stores go on")


UNEQUAL = EngineSetup(
    gpu_blocks=11, cpu_blocks=8, groups=(AttentionGroup(), AttentionGroup("sliding-window", block_size=8, reach=8))
)


def test_a_block_that_only_another_request_has_registered_need_not_be_stored(target: Target) -> None:
    """What is computed of the second one ends before the end of a block of the longest group, so vLLM registers none of
    it; the first one's block can be hit under the same key, but its own stores were before the reset."""
    first, second = Add("C", 8, 1, trunk=1, max_tokens=1), Add("D", 4, 1, trunk=1, max_tokens=2)
    outcome = play(target, UNEQUAL, first, Step(), Reset(connector=True), second, Settle())
    assert outcome.reached["reset refused"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("victim_of_its_own_step", "after a victim of its own step"),
        ("block_fills_while_stored", "partly stored"),
    ],
)
def test_wrong_bytes_say_what_they_come_from(name: str, place: str, target: Target) -> None:
    history = read_history((Path(__file__).parent / "bugs" / f"{name}.json").read_bytes())
    assert isinstance(history, History)
    outcome = run_history(target, structs.replace(history, target=target.name))
    assert {violation.frame for violation in outcome.violations} == {place}


def test_every_event_is_reached_by_some_scenario() -> None:
    reached = {event for scenario in SCENARIOS.values() for event in scenario.reaches}
    assert reached == EVENTS.keys() - OFFLOADING_EVENTS.keys() - MULTI_EVENTS.keys()


def test_the_code_names_no_event_that_is_not_listed() -> None:
    tree = ast.parse(inspect.getsource(world_module))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._reach"]
    constants = [node.value for call in calls for node in ast.walk(call) if isinstance(node, ast.Constant)]
    assert len(calls) > 15
    assert set(constants) <= EVENTS.keys()


@pytest.mark.parametrize("machine", MACHINES)
def test_machines_require_events_that_exist(machine: str) -> None:
    assert MACHINES[machine].REQUIRED
    assert EVENTS.keys() >= MACHINES[machine].REQUIRED


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_requires_of_a_release_what_it_can_reach_and_of_an_unknown_one_everything(machine: str) -> None:
    chosen = MACHINES[machine]
    assert chosen.required("") == chosen.required(KNOWN_GOOD[-1]) == chosen.REQUIRED >= chosen.SINCE.keys()
    for event, first in chosen.SINCE.items():
        assert event in chosen.required(first)
        assert event not in chosen.required(KNOWN_GOOD[KNOWN_GOOD.index(first) - 1])


# Setups ---------------------------------------------------------------------------------------------------------------

ALL_SETUPS = [
    EngineSetup(gpu_blocks=7, async_scheduling=deep, runner_v2=v2, ranks=ranks, lazy=lazy)
    for deep, v2, ranks, lazy in product([False, True], [False, True], [1, 2], [False, True])
]
WINDOW = AttentionGroup("sliding-window", reach=6)
SHAPED_SETUPS = [
    EngineSetup(gpu_blocks=7, decode_ranks=2, async_scheduling=True),
    EngineSetup(gpu_blocks=7, decode_ranks=2, interleave=4, runner_v2=False),
    EngineSetup(gpu_blocks=7, decode_ranks=4, block_size=1, lazy=True),
    EngineSetup(gpu_blocks=7, prefill_ranks=2),
    EngineSetup(gpu_blocks=7, prefill_ranks=2, decode_ranks=2, block_size=2, interleave=2, async_scheduling=True),
    EngineSetup(gpu_blocks=14, cpu_blocks=16, groups=(AttentionGroup(), WINDOW)),
    EngineSetup(gpu_blocks=14, cpu_blocks=16, groups=(WINDOW, AttentionGroup()), async_scheduling=True, lazy=True),
    EngineSetup(gpu_blocks=14, cpu_blocks=16, groups=(AttentionGroup(block_size=8), WINDOW), ranks=2),
    EngineSetup(gpu_blocks=21, cpu_blocks=24, groups=(AttentionGroup(), AttentionGroup(), WINDOW), runner_v2=False),
]
"""Context parallelism and several groups, as the newest release has them."""


def in_short(setup: EngineSetup) -> str:
    return "-".join(
        [
            "async" if setup.async_scheduling else "sync",
            "v2" if setup.runner_v2 else "v1",
            f"{setup.ranks}ranks",
            "lazy" if setup.lazy else "eager",
            *([f"{setup.prefill_ranks}x{setup.decode_ranks}"] if setup.context_ranks > 1 else []),
            *map(str, setup.groups[: len(setup.groups) if len(setup.groups) > 1 else 0]),
        ]
    )


@pytest.fixture
def world(target: Target) -> Iterator[Callable[..., World]]:
    """Make worlds in which a few ops have happened, to be looked into; they finish with the test."""
    with ExitStack() as stack:

        def make(setup: EngineSetup, *ops: Op) -> World:
            made = World(target, setup, "fair")
            stack.callback(made.finish)
            apply_all(made, *ops)
            return made

        yield make


@pytest.mark.parametrize("setup", ALL_SETUPS + SHAPED_SETUPS, ids=in_short)
def test_the_engine_is_made_of_what_the_setup_says(world: Callable[..., World], setup: EngineSetup) -> None:
    engine: Any = world(setup)._engine
    assert (engine._vllm.core.batch_queue is not None) == setup.async_scheduling
    assert isinstance(engine._vllm.executor._runner, RunnerV2 if setup.runner_v2 else RunnerV1)
    assert len(engine._vllm.ranks) == setup.world_size
    assert len(engine._vllm.scheduler.kv_cache_manager.get_block_ids("nobody")) == len(setup.groups)
    assert engine._tier._manager._lazy_mode == setup.lazy
    assert [len(pool.refs) for pool in engine.pools()] == [setup.gpu_blocks, setup.cpu_blocks]


@pytest.mark.parametrize(
    ("setup", "rows"),
    [
        (EngineSetup(), [("a", 0, 9), ("b", 0, 7)]),
        (EngineSetup(step_tokens=10), [("a", 0, 9), ("b", 0, 1)]),
        (EngineSetup(step_tokens=6), [("a", 0, 6)]),
        (EngineSetup(running_max=1), [("a", 0, 9)]),
        (EngineSetup(running_max=1, priority=True), [("b", 0, 9)]),
    ],
    ids=["plain", "10 tokens", "6 tokens", "one at once", "by priority"],
)
def test_a_step_is_as_large_as_the_setup_says_and_begins_with_whom_it_says(
    world: Callable[..., World], setup: EngineSetup, rows: list[tuple[str, int, int]]
) -> None:
    """Step budget, requests at once, and the policy."""
    first, second = Add("a", shared=8, priority=1), Add("b", trunk=1, shared=8, priority=0)
    batch = world(setup, first, second, Step())._engine.last_batch()
    assert batch is not None
    assert [tuple(row) for row in batch.rows] == rows


@pytest.mark.parametrize("deep", [False, True], ids=["sync", "async"])
def test_a_request_has_said_what_its_client_has_received(world: Callable[..., World], deep: bool) -> None:
    """With two steps in flight, a token is delivered a step after it was sampled."""
    made = world(EngineSetup(async_scheduling=deep), Add("a", shared=8, tail=1, max_tokens=4))
    said: list[int] = []
    for _ in range(3):
        made.apply(Step())
        tokens = made._engine.said("a")
        assert tokens is not None
        said.append(len(tokens))
    assert said == ([9, 10, 11] if deep else [10, 11, 12])


@pytest.mark.parametrize("in_step", [False, True])
def test_an_abort_takes_effect_at_once_or_in_the_next_step(world: Callable[..., World], in_step: bool) -> None:
    made = world(EngineSetup(), Add("a", shared=8, max_tokens=4), Step(), Abort("a", in_step=in_step))
    assert made.live() == (["a"] if in_step else [])
    made.apply(Step())
    assert made.live() == []
    batch = made._engine.last_batch()
    assert batch is not None
    assert bool(batch.rows) == in_step, "in a step, the forward has run when the abort arrives"


@pytest.mark.parametrize("setup", ALL_SETUPS, ids=in_short)
def test_in_every_setup_what_was_stored_is_loaded_after_the_gpu_has_lost_it(target: Target, setup: EngineSetup) -> None:
    outcome = play(target, setup, *STORED, AGAIN, Settle())
    assert (outcome.stores, outcome.loads) == (4, 4)
    assert {event: outcome.reached[event] for event in ("reset", "load", "load finished")} == {
        "reset": 1,
        "load": 1,
        "load finished": setup.world_size,
    }


@pytest.mark.parametrize("setup", ALL_SETUPS, ids=in_short)
def test_in_every_setup_a_crowd_is_preempted_resumed_aborted_and_reset_under_any_adversary(
    target: Target, setup: EngineSetup
) -> None:
    for adversary, seed in (("fair", 0), ("random", 1), ("random", 2), ("pct:2", 3)):
        outcome = play(
            target,
            setup,
            *CROWD,
            Step(4, seed),
            Add("c", shared=8, tail=1),
            Step(8, seed + 100),
            Abort("a", in_step=True),
            Step(2, seed + 200),
            Reset(running=True, connector=True),
            Add("d", trunk=1, shared=8, tail=1),
            Settle(),
            adversary=adversary,
            seed=seed,
        )
        assert outcome.reached["preemption"]
        assert outcome.stores


@pytest.mark.parametrize("setup", SHAPED_SETUPS, ids=in_short)
def test_ranks_and_groups_that_share_blocks_store_load_and_survive_a_crowd(target: Target, setup: EngineSetup) -> None:
    for adversary, seed in (("fair", 0), ("random", 1), ("pct:2", 3)):
        outcome = play(
            target,
            setup,
            *STORED,
            AGAIN,
            Settle(),
            *CROWD,
            Step(12, seed),
            Reset(running=True, connector=True),
            Add("d", trunk=1, shared=8, tail=1),
            Settle(),
            adversary=adversary,
            seed=seed,
        )
        assert outcome.stores
        if not setup.lazy:
            assert outcome.loads
            assert outcome.reached["load finished"] >= setup.world_size


def test_a_setup_that_the_release_does_not_support_is_refused_with_its_reason(target: Target) -> None:
    refused = [
        (EngineSetup(prefill_ranks=2, runner_v2=False), "in this release prefill context parallelism needs runner V2"),
        (EngineSetup(prefill_ranks=2, decode_ranks=4), "there must be no decode ranks besides prefill ranks"),
        (EngineSetup(groups=(WINDOW,)), "SimpleCPUOffload needs a full-attention group"),
        (EngineSetup(groups=(AttentionGroup(), AttentionGroup())), "layers that are all alike are one group"),
        (EngineSetup(decode_ranks=2, groups=(AttentionGroup(), WINDOW)), "with one full-attention group only"),
    ]
    for setup, reason in refused:
        with pytest.raises(SetupRefused, match=reason):
            World(target, setup)


def test_the_same_requests_get_the_same_answers_in_every_setup(target: Target) -> None:
    """Offloading, preemption and ranks don't change what the model says."""
    answers = set()
    for setup in ALL_SETUPS:
        world = World(target, setup, "random")
        apply_all(world, *CROWD, Step(6, seed=3), Reset(running=True), Settle())
        answers.add(tuple(tuple(world._engine.said(name) or ()) for name in "ab"))
        assert world.finish().violations == []
    (answer,) = answers
    assert [len(said) for said in answer] == [18, 18]


def test_lazy_mode_stores_only_what_is_about_to_be_evicted(target: Target) -> None:
    """Twice as many blocks as one step can fill count as about to be evicted: here four, of twenty."""
    roomy = EngineSetup(gpu_blocks=21, cpu_blocks=20, step_tokens=8)
    fillers: list[Op] = [
        op for trunk in range(1, 5) for op in (Add(f"filler {trunk}", trunk=trunk, shared=8, tail=1), Settle())
    ]

    def stores(lazy: bool, others: int) -> int:
        setup = structs.replace(roomy, lazy=lazy)
        return play(target, setup, LONG, Settle(), *fillers[: 2 * others]).stores

    assert [stores(lazy=False, others=n) for n in range(5)] == [4, 6, 8, 10, 12]
    lazy = [stores(lazy=True, others=n) for n in range(5)]
    assert lazy[0] == 0, "the queue is full of blocks that hold nothing"
    assert lazy == sorted(lazy)
    assert 0 < lazy[-1] < 12
