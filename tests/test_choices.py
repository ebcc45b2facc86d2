"""The source of a search's choices: fresh histories, evenly drawn, and still Hypothesis' own machinery."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvspec.search import ROUND_HISTORIES, SETTINGS, run_machine

LARGEST = 2**32 - 1


class Draws(RuleBasedStateMachine):
    """Notes what it draws."""

    starts: list[int]
    bursts: list[int]

    @initialize(number=st.integers(0, LARGEST))
    def start(self, number: int) -> None:
        self.starts.append(number)

    @rule(number=st.integers(0, LARGEST))
    def burst(self, number: int) -> None:
        self.bursts.append(number)


def drawn(number: int) -> tuple[list[int], list[int]]:
    """Return what the machine draws in a round: at the start of histories, and in their rules."""
    machine = type("Noted", (Draws,), {"starts": [], "bursts": []})
    run_machine(machine, number, rules_max=6)
    return machine.starts, machine.bursts


def test_no_history_of_a_round_is_a_change_of_another() -> None:
    starts, bursts = drawn(1)
    assert len(starts) == ROUND_HISTORIES
    repeated = sum(count - 1 for count in (Counter(starts) + Counter(bursts)).values())
    assert repeated <= 15  # the simplest history, which comes first, is all zeros


def test_integers_are_drawn_evenly() -> None:
    bursts = drawn(1)[1]
    for fraction in (0.25, 0.5, 0.75):
        assert sum(number < LARGEST * fraction for number in bursts) / len(bursts) == pytest.approx(fraction, abs=0.1)


def test_a_round_repeats_and_another_seed_makes_another() -> None:
    assert drawn(1) == drawn(1)
    assert set(drawn(1)[0]) & set(drawn(2)[0]) <= {0}


def test_a_test_that_fails_is_shrunk_all_the_same() -> None:
    class Fails(RuleBasedStateMachine):
        @rule(number=st.integers(0, LARGEST))
        def burst(self, number: int) -> None:
            seen.append(number)
            assert number < 1000

    seen: list[int] = []
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            seed(1)(Fails), settings=settings(SETTINGS, phases=[Phase.generate, Phase.shrink], stateful_step_count=6)
        )
    assert seen[-1] == 1000
