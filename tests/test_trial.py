"""Trials on the real target: what an ablation takes away, and what a seed's histories don't depend on."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import toy
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvspec.errors import KvspecError
from kvspec.events import (
    FAIR,
    NO_LIVE_PREFIXES,
    UNEVEN,
    Counts,
    Event,
    Sighted,
    Trial,
    TrialDone,
    TrialJob,
    Unreachable,
    Wanted,
)
from kvspec.ops import Add, History
from kvspec.search import Suite, load_suite
from kvspec.targets import Target
from kvspec.trial import WARM_UP_HISTORIES, run_trials

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

NOTHING = Wanted("nothing", (Counts("NO-SUCH-LAW"),))
HISTORIES = 8


@pytest.fixture(scope="module")
def suite(target: Target) -> Suite:
    return load_suite(target.name)


def run(suite: Suite, stopping: Callable[[], bool] = lambda: False, **trial: Any) -> list[Event]:
    told: list[Event] = []
    job = TrialJob(
        job=0,
        target="vllm-simple",
        release_path=None,
        trials=[Trial(**{"seed": 3, "budget_cpu_s": 60.0, "wanted": (NOTHING,), **trial})],
        known=[],
        defects="",
    )
    run_trials(suite, job, told.append, stopping)
    return told


def histories(suite: Suite, **trial: Any) -> list[History]:
    """Return the first histories of a trial."""
    made: list[History] = []

    class Watched(suite.machine):  # type: ignore[name-defined,misc]
        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                made.append(self.world.history())

    watched = Suite(Watched, suite.run, suite.events, suite.rules_max)
    run(watched, lambda: len(made) >= WARM_UP_HISTORIES + HISTORIES, **trial)
    return made[WARM_UP_HISTORIES + 1 :]


def test_a_fair_device_is_the_only_difference_of_its_ablation(suite: Suite) -> None:
    whole, fair = histories(suite), histories(suite, ablation="fair-device")
    assert {history.adversary for history in fair} == {"fair"}
    assert {history.adversary for history in whole} != {"fair"}
    assert [history.setup for history in fair] == [history.setup for history in whole]


def test_without_live_prefixes_nothing_is_continued(suite: Suite) -> None:
    def continued(made: list[History]) -> bool:
        return any(isinstance(op, Add) and op.continues is not None for history in made for op in history.ops)

    assert continued(histories(suite))
    assert not continued(histories(suite, ablation="no-live-prefixes"))


def test_hypothesis_own_choices_repeat_engines(suite: Suite) -> None:
    fresh, mutated = histories(suite), histories(suite, ablation=UNEVEN)
    assert mutated == histories(suite, ablation=UNEVEN)
    assert len({history.setup for history in mutated}) <= HISTORIES / 2 < len({history.setup for history in fresh})


def test_histories_do_not_depend_on_what_is_wanted(suite: Suite) -> None:
    other = (Wanted("other", (Counts("SHADOW-1"), Counts("NO-SUCH-LAW"))), NOTHING)
    assert histories(suite) == histories(suite, wanted=other)


def test_what_needs_an_event_that_the_machine_never_makes_is_not_looked_for(suite: Suite) -> None:
    told = run(suite, wanted=(Wanted("x", (Counts("SHADOW-1"),), ("no such event",)),))
    assert [event.events for event in told if isinstance(event, Unreachable)] == [["no such event"]]
    assert [event.effort.histories for event in told if isinstance(event, TrialDone)] == [0]


@pytest.mark.parametrize("met", ["door", "DOOR-1"])
def test_a_history_that_met_what_another_bug_shows_with_does_not_count(
    monkeypatch: pytest.MonkeyPatch, met: str
) -> None:
    monkeypatch.setattr(toy, "DEFECTS", {"bug"})

    def sighted(*without: str) -> bool:
        wanted = (Wanted("door", (Counts("DOOR-1"),), without=without),)
        suite = dataclasses.replace(toy.suite, events={**toy.suite.events, "window": "somebody used the window"})
        return any(isinstance(event, Sighted) for event in run(suite, wanted=wanted, budget_cpu_s=2.0))

    assert sighted("window", "ANOTHER-1")
    assert not sighted(met)


def test_a_short_history_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a history another bug's isn't brought in when it is made short; nor is what it needs lost."""
    monkeypatch.setattr(toy, "DEFECTS", {"bug"})
    door = Wanted("door", (Counts("DOOR-1"),), events=("second request",), without=("third request",))

    def ran(history: History) -> toy.Outcome:
        outcome = toy.run(history)
        adds = sum(isinstance(op, Add) for op in history.ops)
        outcome.reached += Counter({"second request": adds >= 2, "third request": adds >= 3})
        return outcome

    class Counting(toy.ToyMachine):
        def teardown(self) -> None:
            self.sink(self.world, ran(self.world.history()))

    events = {**toy.suite.events, **dict.fromkeys(("second request", "third request"), "a request came")}
    told = run(Suite(Counting, ran, events, toy.suite.rules_max), wanted=(door,), budget_cpu_s=4.0)
    (short,) = (event.history for event in told if isinstance(event, Sighted))
    assert sum(isinstance(op, Add) for op in short.ops) == 2


@pytest.mark.parametrize("ablation", [FAIR, NO_LIVE_PREFIXES])
def test_a_machine_that_can_not_do_without_says_so(suite: Suite, ablation: str) -> None:
    class Plain(RuleBasedStateMachine):
        @rule()
        def nothing(self) -> None:
            pass

    with pytest.raises(KvspecError, match=f"can't do the ablation {ablation}"):
        run(Suite(Plain, suite.run), ablation=ablation)


def test_a_machine_that_draws_by_chance_is_an_error_with_hypothesis_own_choices() -> None:
    draws = itertools.count()

    class Fickle(toy.ToyMachine):
        @initialize(data=st.data())
        def start(self, data: st.DataObject) -> None:
            data.draw(st.booleans() if next(draws) % 3 else st.floats())

    fickle = Suite(Fickle, toy.suite.run, toy.suite.events, toy.suite.rules_max)
    with pytest.raises(KvspecError, match="draws differently after the same start"):
        run(fickle, ablation=UNEVEN, budget_cpu_s=5.0)


def test_a_machine_that_makes_no_history_is_an_error(suite: Suite) -> None:
    class Silent(suite.machine):  # type: ignore[name-defined,misc]
        def teardown(self) -> None:
            assert self.world is not None
            self.world.finish()

    with pytest.raises(KvspecError, match="makes no history"):
        run(Suite(Silent, suite.run, rules_max=1))
