"""The adversaries: what each of them can choose, how likely it is, and that a schedule string repeats it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec.device.adversary import (
    Adversary,
    FairAdversary,
    PctAdversary,
    RandomAdversary,
    ReplayAdversary,
    SlowAdversary,
)
from kvspec.device.protocol import SrcAccessOrder

from .lab import ENQUEUEING, LOOKING, Call, Lab, NumberedAdversary, calls, outcomes, run, schedules

SEEDS = range(200)

Ran = tuple[str, ...]


def three_streams(lab: Lab) -> Ran:
    """Two kernels on each stream; the labels are the streams' letters."""
    for stream in lab.streams:
        for _ in range(2):
            lab.kernel(stream.code[0], stream)
    lab.device.synchronize()
    return lab.ran()


def two_streams_watched(lab: Lab) -> tuple[Ran, ...]:
    """What has run at each of two yield points, and in the end."""
    seen = []
    for stream in (lab.load, lab.store):
        lab.kernel(f"{stream.code[0]}1", stream)
        lab.kernel(f"{stream.code[0]}2", stream)
        lab.device.yield_point()
        seen.append(lab.ran())
    lab.device.synchronize()
    return (*seen, lab.ran())


# Fair -------------------------------------------------------------------------------------------------------


def test_under_the_slow_adversary_nothing_has_run_before_the_host_waits() -> None:
    assert two_streams_watched(Lab(SlowAdversary())) == ((), (), ("l1", "l2", "s1", "s2"))


def test_under_the_fair_adversary_everything_has_run_at_the_next_yield_point() -> None:
    assert two_streams_watched(Lab(FairAdversary())) == (
        ("l1", "l2"),
        ("l1", "l2", "s1", "s2"),
        ("l1", "l2", "s1", "s2"),
    )


def test_the_fair_adversary_runs_actors_in_their_order() -> None:
    assert three_streams(Lab(FairAdversary())) == ("c", "c", "l", "l", "s", "s")


def test_under_the_fair_adversary_copies_read_in_stream_order_and_in_one_piece() -> None:
    lab = Lab(FairAdversary())
    lab.copy(lab.load, SrcAccessOrder.ANY, *(lab.gpu.span_from(at, lab.pinned, at) for at in range(2)))
    assert lab.adversary.take_schedule() == "---l0"


# Random -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [three_streams, two_streams_watched])
def test_the_random_adversary_reaches_everything_that_can_happen(program: Callable[[Lab], Any]) -> None:
    reached = set()
    for seed in range(3000):
        lab = Lab(RandomAdversary())
        lab.adversary.begin_op(seed)
        reached.add(program(lab))
    assert reached == outcomes(program)


def test_the_random_adversary_is_nearly_prompt_in_some_ops_and_hardly_moves_in_others() -> None:
    def share_of_prompt_yields(seed: int) -> float:
        lab = Lab(RandomAdversary())
        lab.adversary.begin_op(seed)
        prompt = 0
        for _ in range(200):
            lab.kernel("a", lab.compute)
            lab.device.yield_point()
            prompt += not lab.compute.pending()
        return prompt / 200

    shares = [share_of_prompt_yields(seed) for seed in range(20)]
    assert min(shares) < 0.05
    assert max(shares) > 0.6


def test_the_random_adversary_answers_yes_as_often_as_no() -> None:
    adversary = RandomAdversary()
    adversary.begin_op(1)
    assert 400 < sum(adversary.decide() for _ in range(1000)) < 600


# The choices of one op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [RandomAdversary, lambda: PctAdversary(5, depth=0)], ids=["random", "pct:0"])
def test_an_op_s_choices_stay_the_same_when_the_op_before_it_is_dropped(
    make: Callable[[], Adversary],
) -> None:
    def schedule_of_last(seeds: Sequence[int]) -> str:
        lab = Lab(make())
        for seed in seeds:
            lab.adversary.begin_op(seed)
            lab.adversary.take_schedule()
            two_streams_watched(lab)
            lab.copy(lab.load, SrcAccessOrder.ANY, lab.gpu.span_from(0, lab.pinned, 0))
            lab.device.synchronize()
        return lab.adversary.take_schedule()

    for seed in range(20):
        assert schedule_of_last([seed + 1000, seed]) == schedule_of_last([seed])


def test_different_ops_get_different_choices() -> None:
    def schedule(seed: int) -> str:
        lab = Lab(RandomAdversary())
        lab.adversary.begin_op(seed)
        three_streams(lab)
        return lab.adversary.take_schedule()

    assert len({schedule(seed) for seed in range(100)}) > 30


# Schedules as text ------------------------------------------------------------------------------------------


def test_a_schedule_names_the_actors_that_moved_the_returns_to_the_host_and_the_answers() -> None:
    lab = Lab(NumberedAdversary([1, 0, 1, 0, 1, 1, 2]))
    lab.kernel("a", lab.compute)
    lab.kernel("b", lab.compute)
    lab.device.yield_point()  # c0, then the host goes on
    lab.copy(lab.load, SrcAccessOrder.STREAM, *(lab.gpu.span_from(at, lab.pinned, at) for at in range(2)))
    assert lab.adversary.take_schedule() == "c0.+-c0l0"


def test_a_yield_point_at_which_nothing_can_run_leaves_no_trace() -> None:
    lab = Lab(NumberedAdversary([]))
    lab.device.yield_point()
    assert lab.adversary.take_schedule() == ""


def test_a_schedule_is_taken_once() -> None:
    lab = Lab(FairAdversary())
    three_streams(lab)
    assert lab.adversary.take_schedule() == "c0c0l0l0s0s0"
    assert lab.adversary.take_schedule() == ""


# Replay -----------------------------------------------------------------------------------------------------


class CopyThread:
    """A host thread that enqueues a copy for each request, and may be interrupted in between."""

    def __init__(self, lab: Lab) -> None:
        self.code = f"t{lab.device.rank}"
        self.requests = 0
        self.copies = 0
        self._lab = lab
        self._running = False

    def enabled(self) -> bool:
        return bool(self.requests) and not self._running

    def advance(self) -> None:
        lab = self._lab
        self._running = True
        self.requests -= 1
        lab.copy(lab.store, SrcAccessOrder.ANY, *(lab.pinned.span_from(at, lab.gpu, at) for at in range(3)))
        lab.device.launch("count", self._count, lab.store)
        self._running = False

    def _count(self) -> None:
        self.copies += 1


def two_ranks(adversary: Adversary, program: Sequence[Call], op_calls: int = 3) -> list[Any]:
    """Run the program on two ranks of one world, with a copy thread each; return all that can be seen."""
    lab = Lab(adversary)
    labs = [lab, Lab(adversary, rank=1, actors=lab.device.actors)]
    threads = [CopyThread(each) for each in labs]
    seen: list[Any] = []
    for each, thread in zip(labs, threads, strict=True):
        each.device.add_actor(thread)
    for number in range(0, len(program), op_calls):
        adversary.begin_op(number)
        for each, thread in zip(labs, threads, strict=True):
            thread.requests += 1
            each.write(each.gpu, number % 4, number % 256, each.compute)
            _, breaches, answers = run(each, program[number : number + op_calls])
            seen.append((breaches, answers, each.ran(), thread.copies, bytes(each.pinned.bytes)))
            each.log.clear()
    adversary.run_dry(lab.device.actors)
    return [*seen, *(bytes(each.pinned.bytes) for each in labs)]


ADVERSARIES = st.one_of(
    st.builds(FairAdversary),
    st.builds(SlowAdversary),
    st.builds(RandomAdversary),
    st.builds(PctAdversary, st.integers(0, 999), st.integers(0, 5), st.integers(1, 5)),
    st.builds(NumberedAdversary, st.binary(max_size=100)),
)


@settings(derandomize=True, database=None, deadline=None)
@given(adversary=ADVERSARIES, program=calls((*ENQUEUEING, *LOOKING), max_size=20))
def test_the_schedule_of_any_adversary_replays_as_the_same_execution(adversary: Adversary, program: list[Call]) -> None:
    seen = two_ranks(adversary, program)
    schedule = adversary.take_schedule()
    replay = ReplayAdversary(schedule)
    assert two_ranks(replay, program) == seen
    assert replay.take_schedule() == schedule


def test_every_schedule_of_a_program_replays_as_its_own_outcome() -> None:
    for schedule, outcome in schedules(two_streams_watched):
        assert two_streams_watched(Lab(ReplayAdversary(schedule))) == outcome


@pytest.mark.parametrize("text", ["c", "0", "c0 l0", "c0,", "C0", "c0?"])
def test_what_is_no_schedule_is_refused_with_what_a_schedule_looks_like(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a schedule: .*moves like 'c0'"):
        ReplayAdversary(text)


def test_after_the_end_of_a_schedule_nothing_runs_until_the_host_is_blocked() -> None:
    assert two_streams_watched(Lab(ReplayAdversary("l0"))) == (("l1",), ("l1",), ("l1", "l2", "s1", "s2"))


def test_a_move_that_does_not_fit_returns_to_the_host() -> None:
    first, second, _ = two_streams_watched(Lab(ReplayAdversary("s0l0")))
    assert (first, second) == ((), ("l1",))


def test_a_question_that_the_schedule_does_not_answer_is_answered_no() -> None:
    assert [ReplayAdversary(schedule).decide() for schedule in ("", "c0", "-", "+")] == [
        False,
        False,
        False,
        True,
    ]


# Probabilistic concurrency testing --------------------------------------------------------------------------


def order_of_streams(adversary: Adversary) -> Ran:
    """The streams in the order in which they run while the host is blocked; each in one piece."""
    ran = three_streams(Lab(adversary))
    order = tuple(dict.fromkeys(ran))
    assert ran == tuple(label for label in order for _ in range(2))
    return order


def test_pct_runs_one_actor_to_its_end_before_another_one_of_lower_priority() -> None:
    for seed in SEEDS:
        order_of_streams(PctAdversary(seed, depth=0))


def test_pct_reaches_every_order_of_priorities() -> None:
    found = {order_of_streams(PctAdversary(seed, depth=0)) for seed in SEEDS}
    assert found == set(permutations("cls"))


def test_pct_keeps_its_priorities_when_there_is_no_change_point() -> None:
    for seed in SEEDS:
        adversary = PctAdversary(seed, depth=0)
        orders = set()
        for op in range(10):
            adversary.begin_op(op)
            orders.add(order_of_streams(adversary))
        assert len(orders) == 1


def test_pct_lets_an_actor_run_at_a_yield_point_only_if_it_is_above_the_host() -> None:
    shares = []
    for seed in SEEDS:
        lab = Lab(PctAdversary(seed, depth=0))
        above: set[str] | None = None
        for _ in range(3):
            lab.kernel("l", lab.load)
            lab.kernel("s", lab.store)
            lab.device.yield_point()
            ran = set(lab.log)
            assert above is None or ran == above, "the same actors are above the host at every yield point"
            above = ran
            for stream in (lab.load, lab.store):
                assert stream.pending() != (stream.code[0] in ran), "an actor runs to its end, or not at all"
        shares.append(len(above or ()))
    assert set(shares) == {0, 1, 2}


def test_pct_runs_what_is_below_the_host_while_the_host_is_blocked() -> None:
    for seed in SEEDS:
        lab = Lab(PctAdversary(seed, depth=0))
        lab.kernel("l", lab.load)
        lab.load.synchronize()
        assert lab.log == ["l"]


def test_a_change_point_puts_one_actor_behind_all_others_and_keeps_the_rest_in_order() -> None:
    demoted = set()
    for seed in SEEDS:
        adversary = PctAdversary(seed, depth=1, horizon_ops=1)
        orders = []
        for op in range(8):
            adversary.begin_op(op)
            orders.append(order_of_streams(adversary))
        for before, after in pairwise(orders):
            if before != after:
                last = after[-1]
                assert after == (*(stream for stream in before if stream != last), last)
                demoted.add(last)
    assert demoted == set("cls")


def test_a_demoted_actor_never_runs_while_another_one_can() -> None:
    demotions = 0
    for seed in SEEDS:
        adversary = PctAdversary(seed, depth=1, horizon_ops=1)
        adversary.begin_op(0)
        before = order_of_streams(adversary)
        adversary.begin_op(1)
        demoted = order_of_streams(adversary)[-1]
        if demoted != before[-1]:
            demotions += 1
            assert not overtaken_by(demoted, Lab(adversary))
    assert demotions > len(SEEDS) / 4


def overtaken_by(code: str, lab: Lab) -> bool:
    """Whether a kernel of that stream ever runs while another stream still holds one."""
    last = next(stream for stream in lab.streams if stream.code[0] == code)
    others = [stream for stream in lab.streams if stream is not last]
    early: list[bool] = []
    for _ in range(3):
        lab.device.launch("last", lambda: early.append(any(stream.pending() for stream in others)), last)
        for stream in others:
            lab.kernel("other", stream)
        lab.device.yield_point()
    lab.device.synchronize()
    assert len(early) == 3
    return any(early)


def test_a_demoted_host_lets_everything_else_go_first() -> None:
    prompt_after_lazy = 0
    for seed in SEEDS:
        lab = Lab(PctAdversary(seed, depth=1, horizon_ops=1))
        prompt = []
        for op in range(6):
            lab.adversary.begin_op(op)
            for stream in lab.streams:
                lab.kernel(stream.code[0], stream)
            lab.device.yield_point()
            prompt.append(not lab.device.pending())
            lab.device.synchronize()
        prompt_after_lazy += (False, True) in set(pairwise(prompt))
    assert prompt_after_lazy > len(SEEDS) / 10


@pytest.mark.parametrize(("depth", "horizon_ops"), [(-1, 24), (2, 0)])
def test_pct_refuses_a_depth_or_a_horizon_that_makes_no_sense(depth: int, horizon_ops: int) -> None:
    with pytest.raises(ValueError, match=f"got {depth} and {horizon_ops}"):
        PctAdversary(0, depth, horizon_ops)


def forward_and_store(adversary: Adversary, ops: int) -> list[str]:
    """Launch a forward and a store per op. Return what ran, in its order."""
    lab = Lab(adversary)
    for op in range(ops):
        adversary.begin_op(op)
        lab.kernel(f"forward {op}", lab.compute)
        lab.kernel(f"load {op}", lab.load)
        lab.kernel(f"store {op}", lab.store)
        lab.device.yield_point()
    lab.device.synchronize()
    return lab.log


def store_starves(adversary: Adversary, ops: int) -> bool:
    """A bug of two ordering constraints: the first store comes after the last forward and the last load."""
    at = forward_and_store(adversary, ops).index
    return at("store 0") > max(at(f"forward {ops - 1}"), at(f"load {ops - 1}"))


def store_lags_then_leads(adversary: Adversary, ops: int) -> bool:
    """Another: the first store comes after half of the forwards, but the last before the last forward."""
    at = forward_and_store(adversary, ops).index
    return at("store 0") > at(f"forward {ops // 2}") and at(f"store {ops - 1}") < at(f"forward {ops - 1}")


class SeededRandomAdversary(RandomAdversary):
    """The random adversary, with choices of its own for the same ops."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def begin_op(self, seed: int) -> None:
        super().begin_op(seed + 1_000_003 * self._seed)


Bug = Callable[[Adversary, int], bool]


def hits(bug: Bug, make: Callable[[int], Adversary], ops: int) -> int:
    """How many of the 200 seeds find the bug in a history of so many ops."""
    return sum(bug(make(seed), ops) for seed in SEEDS)


def pct(depth: int) -> Callable[[int], Adversary]:
    return lambda seed: PctAdversary(seed, depth)


@pytest.mark.parametrize("bug", [store_starves, store_lags_then_leads])
def test_the_fair_adversary_never_finds_a_bug_that_needs_a_late_store(bug: Bug) -> None:
    assert hits(bug, lambda seed: FairAdversary(), ops=8) == 0


def test_pct_finds_a_bug_of_two_ordering_constraints_with_more_than_one_seed_in_ten() -> None:
    assert hits(store_starves, pct(2), ops=8) > len(SEEDS) / 10


def test_pct_still_finds_it_in_a_long_history_where_the_random_adversary_does_not() -> None:
    assert hits(store_starves, pct(2), ops=24) > len(SEEDS) / 20
    assert hits(store_starves, SeededRandomAdversary, ops=24) == 0


def test_pct_needs_a_change_point_for_a_bug_in_which_an_actor_is_late_first_and_early_later() -> None:
    assert hits(store_lags_then_leads, pct(0), ops=24) == 0
    assert hits(store_lags_then_leads, pct(2), ops=24) > 0
