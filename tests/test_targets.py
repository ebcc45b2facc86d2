"""Targets: their names, the stand-ins that come and go with a world, and wrappers that change nothing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvspec.device import cuda_names
from kvspec.device.adversary import FairAdversary
from kvspec.device.simulated import SimulatedDevice
from kvspec.errors import KvspecError
from kvspec.model.profile import UNKNOWN
from kvspec.ops import Add, EngineSetup, Reset, Settle
from kvspec.search import implementation_version
from kvspec.targets import TARGETS, Target, load_target, parse_target
from kvspec.targets.vllm import core
from kvspec.world import World

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_named_with_a_release_or_without(target: str) -> None:
    assert parse_target(target) == (target, None)
    assert parse_target(f"{target}@0.33.0") == (target, "0.33.0")


@pytest.mark.parametrize("name", ["", "vllm", "vllm-simpel", "@0.33.0", "VLLM-SIMPLE", " vllm-simple", "vllm@0.33.0"])
def test_an_unknown_target_is_refused_with_the_names_of_those_that_exist(name: str) -> None:
    with pytest.raises(KvspecError) as refused:
        parse_target(name)
    message = str(refused.value)
    assert message.startswith(f"{name!r} is no target")
    assert all(known in message for known in TARGETS)
    assert "@RELEASE" in message


@pytest.mark.parametrize("target", TARGETS)
def test_an_empty_release_is_refused_with_the_two_names_that_may_be_meant(target: str) -> None:
    with pytest.raises(KvspecError) as refused:
        parse_target(f"{target}@")
    message = str(refused.value)
    assert message.startswith(f"'{target}@' has no release")
    for meant in (f"{target}@0.33.0", f"{target} for the importable vLLM"):
        assert meant in message
    assert parse_target(f"{target}@0.33.0")[1] == "0.33.0"


@pytest.mark.parametrize("name", ["no-such-target", "vllm-simple@"])
def test_a_target_that_can_not_be_named_is_not_loaded(name: str) -> None:
    with pytest.raises(KvspecError):
        load_target(name)


def test_a_loaded_target_has_the_name_that_was_typed_and_knows_its_own_files(target: Target) -> None:
    import vllm

    assert parse_target(target.name)[0] in TARGETS
    assert any(vllm.__file__.startswith(directory) for directory in target.own_files)
    assert not any(inspect.getfile(World).startswith(directory) for directory in target.own_files)


# Stand-ins ------------------------------------------------------------------------------------------------------------


def replaced_names() -> list[tuple[Any, str]]:
    from kvspec.targets.vllm.simple import stand_ins

    return [(owner, name) for owner, name, _ in (*cuda_names._REPLACED, *stand_ins())]


class Watch:
    """The originals of all names that are replaced while a world lives."""

    def __init__(self) -> None:
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in replaced_names()]

    def changed(self) -> set[str]:
        return {
            f"{owner.__name__}.{name}" for owner, name, value in self._originals if getattr(owner, name) is not value
        }


@pytest.fixture
def watch(target: Target) -> Iterator[Watch]:
    """Watch the names, and don't let this test spoil the others."""
    watch = Watch()
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
    yield watch
    for owner, name, value in watch._originals:
        setattr(owner, name, value)


def test_the_stand_ins_are_there_while_a_world_lives_and_the_originals_when_it_has_finished(
    target: Target, watch: Watch
) -> None:
    world = World(target, EngineSetup(ranks=2), "random")
    for op in (Add("a", shared=8, tail=1), Settle(), Reset(), Add("b", shared=8, tail=1)):
        world.apply(op)
    changed = watch.changed()
    assert {"torch.cuda.Stream", "torch.cuda.stream", "torch.Event", "torch.cuda.current_stream"} <= changed
    assert "vllm.v1.simple_kv_offload.copy_backend.threading" in changed
    world.finish()
    assert watch.changed() == set()


def test_worlds_that_follow_each_other_leave_nothing_behind(target: Target, watch: Watch) -> None:
    for setup in (EngineSetup(), EngineSetup(runner_v2=False, ranks=2), EngineSetup(async_scheduling=True)):
        World(target, setup).finish()
        assert watch.changed() == set()
        assert cuda_names.use(None) is None


def test_the_originals_are_back_even_if_the_engine_does_not_start(
    target: Target, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def fail(self: Any, *_: Any, **__: Any) -> None:
        assert watch.changed(), "the connector's workers have been started by now"
        raise ValueError("planted")

    monkeypatch.setattr(Scheduler, "__init__", fail)
    with pytest.raises(ValueError, match="planted") as raised:
        World(target, EngineSetup())
    assert watch.changed() == set()
    assert raised.tb, "as long as the world can be reached, nothing is put back by the garbage collector"
    assert cuda_names.use(None) is None


def test_the_originals_are_back_even_if_the_device_does_not_start(
    target: Target, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(SimulatedDevice, "__init__", fail)
    with pytest.raises(ValueError, match="planted") as raised:
        World(target, EngineSetup())
    assert watch.changed() == set()
    assert raised.tb, "as long as the world can be reached, nothing is put back by the garbage collector"


def test_the_originals_are_back_even_if_a_check_of_kvspec_fails_at_the_end(
    target: Target, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(target, EngineSetup())
    monkeypatch.setattr(World, "_run_to_idle", lambda self, missing: None)
    with pytest.raises(TypeError, match="missing"):
        world.finish()
    assert watch.changed() == set()


def test_a_target_that_has_crashed_leaves_nothing_behind(
    target: Target, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    world = World(target, EngineSetup(ranks=2), "fair")
    with monkeypatch.context() as patch:
        patch.setattr(copy_backend, "copy_blocks", lambda *_: 1 / 0)
        for op in (Add("a", shared=8, tail=1), Settle()):
            world.apply(op)
    assert not world.alive
    world.finish()
    assert watch.changed() == set()
    assert cuda_names.use(None) is None


def test_a_name_that_a_release_lacks_is_not_replaced(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload import worker

    from kvspec.targets.vllm.simple import stand_ins

    before = {(owner.__name__, name) for owner, name, _ in stand_ins()}
    monkeypatch.delattr(worker, "PIN_MEMORY")
    after = {(owner.__name__, name) for owner, name, _ in stand_ins()}
    assert before - after == {("vllm.v1.simple_kv_offload.worker", "PIN_MEMORY")}


# Wrappers -------------------------------------------------------------------------------------------------------------


class Silence:
    """A probe that wants to hear nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Sentinel:
    """Passed in or returned by the connector's own methods; knows nothing but what the wrappers look at."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __repr__(self) -> str:
        return "sentinel"


def scheduler_output() -> Sentinel:
    return Sentinel(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=Sentinel(req_ids=[], new_block_ids=[]),
        preempted_req_ids=None,
        num_scheduled_tokens={},
    )


CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "get_num_new_matched_tokens": ((Sentinel(request_id="a"), 8), (12, True)),
    "update_state_after_alloc": ((Sentinel(request_id="a"), Sentinel(), 4), None),
    "build_connector_meta": (
        (scheduler_output(),),
        Sentinel(store_event=-1, store_gpu_blocks=[], store_cpu_blocks=[], load_gpu_blocks=[]),
    ),
    "update_connector_output": ((Sentinel(finished_recving=None, kv_connector_worker_meta=None),), None),
    "reset_cache": ((), None),
    "take_events": ((), [Sentinel(medium="CPU", block_hashes=[], group_idx=0)]),
}
"""The connector's own methods that are wrapped: arguments, and what the real one answers."""


def start(target: Target, **setup: Any) -> Any:
    """An engine to which nobody listens; the device's stand-ins are in place."""
    probe: Any = Silence()
    return target.start(EngineSetup(**setup), FairAdversary(), probe)


def test_these_are_all_the_methods_that_are_wrapped(target: Target) -> None:
    with target.activated():
        connector = start(target, events=True)._connector
    assert {name for name, value in vars(connector).items() if inspect.isfunction(value)} == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrapper_passes_arguments_and_answer_on_unchanged(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    arguments, answer = CALLS[name]
    got: list[tuple[Any, ...]] = []
    with target.activated():
        connector = start(target)._connector

        def real(self: Any, *arguments: Any) -> Any:
            got.append(arguments)
            return answer

        monkeypatch.setattr(type(connector), name, real)
        returned = getattr(start(target, events=True)._connector, name)(*arguments)
    assert len(got) == 1
    assert all(one is other for one, other in zip(got[0], arguments, strict=True))
    if name == "take_events":
        assert [id(event) for event in returned] == [id(event) for event in answer]
    else:
        assert returned is answer


@pytest.mark.parametrize("name", CALLS)
def test_a_wrapper_lets_the_targets_exceptions_through(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with target.activated():
        connector = start(target)._connector

        def real(self: Any, *_: Any) -> Any:
            raise LookupError("planted")

        monkeypatch.setattr(type(connector), name, real)
        wrapper = getattr(start(target, events=True)._connector, name)
        with pytest.raises(LookupError, match="planted"):
            wrapper(*CALLS[name][0])


@pytest.mark.parametrize("events", [False, True])
def test_an_engine_does_the_same_whether_anybody_listens_or_not(
    target: Target, monkeypatch: pytest.MonkeyPatch, events: bool
) -> None:
    from kvspec.targets.vllm.observe import ObservedEngine

    def batches() -> list[str]:
        with target.activated():
            engine = start(target, gpu_blocks=7, events=events)
            seen: list[str] = []
            for trunk in (0, 1, 0):
                engine.add(Add(f"r{len(seen)}", max_tokens=6), list(range(10 + trunk, 20 + trunk)), arrival=len(seen))
                for _ in range(4):
                    engine.step()
                    batch = engine.last_batch()
                    assert batch is not None
                    ((accesses,),) = batch.accesses
                    seen.append(repr((batch.rows, batch.sampled, accesses.read_slots.tolist(), engine.pools())))
            return seen

    listening = batches()
    monkeypatch.setattr(ObservedEngine, "_listen", lambda self: None)
    assert batches() == listening


def test_a_build_without_tags_is_of_an_unknown_release(monkeypatch: pytest.MonkeyPatch) -> None:
    built = SimpleNamespace(__version__="0.1.dev1+gdeadbee")
    monkeypatch.setitem(sys.modules, "vllm", built)
    assert implementation_version("vllm-simple") == ""
    assert core.release.__wrapped__() == UNKNOWN
    monkeypatch.setattr(built, "__version__", "0.33.1.dev3+gdeadbee")
    assert implementation_version("vllm-simple") == "0.33.1.dev3+gdeadbee"
    assert core.release.__wrapped__() == "0.33.1.dev3+gdeadbee"
