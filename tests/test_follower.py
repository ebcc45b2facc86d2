"""The model follows a running engine: the calls that the real scheduler and connector make agree with it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvspec import releases
from kvspec.model.clauses import ClauseBroken
from kvspec.model.pool import BlockPool

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Follow the manager of every engine that is started."""
    if importlib.util.find_spec("vllm") is None:
        sys.path.insert(0, str(releases.ensure(releases.KNOWN_GOOD[-1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kvspec.equality.follow import Follower
        from kvspec.targets.vllm import engine

        started: list[Any] = []
        make = engine.make_scheduler

        def make_and_follow(*configs: Any) -> tuple[Any, int]:
            scheduler, hash_tokens = make(*configs)
            started.append(Follower(scheduler.kv_cache_manager, hash_tokens))
            return scheduler, hash_tokens

        monkeypatch.setattr(engine, "make_scheduler", make_and_follow)
        yield started


def hunted(histories: int, number: int) -> None:
    from hunt import hunt

    from kvspec.targets import load_target

    hunt(load_target("vllm-simple"), number, histories)


CALLS = {
    "get_computed_blocks",
    "allocate_slots",
    "cache_blocks",
    "free",
    "reset_prefix_cache",
    "new_step_starts",
    "take_events",
    "touch",
    "free_blocks",
}


def test_the_model_agrees_with_every_call_that_a_running_engine_makes(followers: list[Any]) -> None:
    hunted(40, number=1)
    calls = sum((follower.calls for follower in followers), Counter())
    assert [follower.broken for follower in followers if follower.broken] == []
    assert calls.keys() >= CALLS
    assert calls["new_step_starts"] > 1000


def test_the_model_agrees_with_the_calls_of_an_engine_with_mamba(followers: list[Any]) -> None:
    from kvspec.ops import AttentionGroup, EngineSetup
    from kvspec.targets import load_target
    from kvspec.world import World
    from strategies.traffic import Mix, Traffic

    groups = (AttentionGroup(), AttentionGroup("mamba"))
    for number in range(8):
        setup = EngineSetup(gpu_blocks=16, cpu_blocks=20, groups=groups, async_scheduling=bool(number % 2))
        world = World(load_target("vllm-simple"), setup, "random", number)
        traffic = Traffic(Mix(), world)
        for seed in range(3):
            for op in traffic.burst(3 * number + seed):
                world.apply(op)
        world.finish()
    assert [follower.broken for follower in followers if follower.broken] == []
    assert sum((follower.calls for follower in followers), Counter())["allocate_slots"] > 100


def test_a_follower_sees_a_block_too_few_that_is_given_back(
    followers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks, **named: free(self, list(blocks)[1:], **named))
    with suppress(ClauseBroken):  # the world takes some for crashes of the target, and lets others through
        hunted(3, number=2)
    broken = {follower.broken.clause.id for follower in followers if follower.broken}
    assert broken
    assert broken <= {"FREE-1", "POOL-6"}
