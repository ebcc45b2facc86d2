import random
from itertools import count

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from kvspec.errors import SetupRefused
from kvspec.events import SearchJob
from kvspec.findings import Key
from kvspec.history import story
from kvspec.history.minimise import minimise, pinned
from kvspec.ops import Abort, Add, Advance, AttentionGroup, EngineSetup, Finish, History, Op, Reset, Settle, Step
from kvspec.search import Search, Suite
from kvspec.world import Outcome


def history(*ops: Op, **fields: object) -> History:
    values = {"target": "toy", "setup": EngineSetup(), "ops": ops, "adversary": "fair"} | fields
    return History(**values)


def noise(seed: int, length: int) -> list[Op]:
    rng = random.Random(seed)

    def draw() -> Op:
        name = f"r{rng.randrange(6)}"
        return rng.choice(
            [
                Add(name, shared=rng.randrange(30), tail=rng.randrange(9), max_tokens=rng.randrange(1, 9)),
                Step(count=rng.randrange(1, 9), seed=rng.randrange(99)),
                Abort(name, in_step=True),
                Finish(name),
                Reset(running=True),
                Advance(seed=rng.randrange(99)),
                Settle(count=rng.randrange(1, 80)),
            ]
        )

    return [draw() for _ in range(length)]


def contains_in_order(ops: tuple[Op, ...], *wanted: type[Op]) -> bool:
    found = iter(ops)
    return all(any(isinstance(op, kind) for op in found) for kind in wanted)


@pytest.mark.parametrize("seed", range(5))
def test_ops_that_are_needed_in_order_are_all_that_is_left(seed: int) -> None:
    start = history(*noise(seed, 25), Add("r1"), *noise(seed + 50, 25), Reset(), *noise(seed + 90, 9), Settle())

    def shows(candidate: History) -> bool:
        return contains_in_order(candidate.ops, Add, Reset, Settle)

    assert minimise(start, shows).ops == (Add("A"), Reset(), Settle())


def test_fields_get_the_simplest_values_that_still_show_it() -> None:
    start = history(
        Add("r7", shared=24, tail=5, max_tokens=9, trunk=3, branch=2, salt=1, reads_cache=False, priority=-4),
        Step(count=8, seed=12345),
    )

    def shows(candidate: History) -> bool:
        add, step = (*candidate.ops, None, None)[:2]
        return isinstance(add, Add) and isinstance(step, Step) and add.shared >= 9 and step.count >= 3

    assert minimise(start, shows).ops == (Add("A", shared=9), Step(count=3))


def test_a_field_that_must_be_negative_comes_as_near_to_its_default_as_it_can() -> None:
    assert minimise(history(Add("A", priority=-9)), lambda h: any(op.priority < -1 for op in h.ops)).ops == (
        Add("A", priority=-2),
    )


def test_the_setup_keeps_only_what_matters() -> None:
    setup = EngineSetup(gpu_blocks=7, ranks=2, async_scheduling=True, events=True, lazy=True)
    start = history(Step(), setup=setup, adversary="pct:3", seed=77)
    shortest = minimise(start, lambda h: h.setup.ranks == 2 and bool(h.ops))
    assert shortest == history(Step(), setup=EngineSetup(ranks=2), adversary="fair", seed=0)


def test_a_setup_is_told_with_its_ranks_and_groups() -> None:
    groups = (AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=6))
    told = story(history(Step(), setup=EngineSetup(decode_ranks=2, interleave=4, groups=groups)))[0]
    assert told.endswith(
        "decode ranks 2, prefill ranks 1, interleave 4, groups full in blocks of 8 tokens + sliding-window of 6 tokens"
        ", drafts 0"
    )


def test_a_default_that_does_not_go_with_what_matters_is_left_out() -> None:
    setup = EngineSetup(block_size=8, decode_ranks=2, interleave=8, async_scheduling=True)
    shortest = minimise(history(Step(), setup=setup), lambda h: h.setup.interleave == 8)
    assert shortest.setup == EngineSetup(block_size=8, interleave=8)


def test_a_history_whose_setup_the_target_refuses_shows_nothing() -> None:
    def refuse(history: History) -> Outcome:
        raise SetupRefused("not this one")

    job = SearchJob(job=0, target="toy", release_path=None, seed=0, budget_s=None, histories_max=1, stored=[], known=[])
    search = Search(Suite(RuleBasedStateMachine, refuse), job, lambda event: None, lambda: False)
    assert not search._shows(Key("toy", "LAW-1", "step", ""), history(Step()))


def test_an_adversary_that_matters_stays_with_its_seed() -> None:
    start = history(Step(), adversary="pct:3", seed=77)
    shortest = minimise(start, lambda h: h.adversary == "pct:3" and h.seed == 77)
    assert (shortest.adversary, shortest.seed) == ("pct:3", 77)


def test_ops_that_are_only_needed_for_each_other_go_together() -> None:
    start = history(Reset(), Add("A"), Finish("A"), Settle())

    def balanced(candidate: History) -> bool:
        kinds = [type(op) for op in candidate.ops]
        return kinds.count(Add) == kinds.count(Finish) and Settle in kinds

    assert minimise(start, balanced).ops == (Settle(),)


def test_steps_in_a_row_become_one() -> None:
    start = history(Step(count=2), Step(count=1), Step(count=1))
    shortest = minimise(start, lambda h: sum(op.count for op in h.ops if isinstance(op, Step)) >= 4)
    assert shortest.ops == (Step(count=4),)


def test_a_schedule_is_cut_to_the_moves_that_matter() -> None:
    start = history(Step(schedule="c0c0.t0+s0-.h1h1..c1"))
    assert minimise(start, lambda h: "t0" in str(h.ops) and "h1" in str(h.ops)).ops == (Step(schedule="t0h1"),)


def test_requests_are_named_in_the_order_in_which_they_appear() -> None:
    start = history(Add("r9"), Add("r3", continues="r9"), Abort("r9"))

    def shows(candidate: History) -> bool:
        return len(candidate.ops) == 3 and any(getattr(op, "continues", None) for op in candidate.ops)

    assert minimise(start, shows).ops == (Add("A"), Add("B", continues="A"), Abort("A"))


def test_names_that_matter_are_kept() -> None:
    start = history(Add("r9"))
    assert minimise(start, lambda h: h.ops == (Add("r9"),)) == start


def test_the_same_history_is_minimised_in_the_same_way() -> None:
    start = history(*noise(1, 60))
    asked: list[list[History]] = [[], []]
    for candidates in asked:
        minimise(start, lambda h, seen=candidates: seen.append(h) or contains_in_order(h.ops, Add, Finish))
    assert asked[0] == asked[1]


def test_no_candidate_is_asked_for_twice() -> None:
    asked: list[History] = []
    minimise(history(*noise(2, 30)), lambda h: asked.append(h) or contains_in_order(h.ops, Add, Step))
    assert len(asked[:-1]) == len(set(asked[:-1]))  # the last one is the renaming


def test_with_nothing_left_to_spend_the_best_so_far_is_returned() -> None:
    start = history(*noise(3, 60))
    checks = count()
    shortest = minimise(start, lambda h: contains_in_order(h.ops, Add, Settle), lambda: next(checks) >= 10)
    assert 2 < len(shortest.ops) < 60
    assert contains_in_order(shortest.ops, Add, Settle)


def test_sixty_ops_take_a_few_hundred_checks() -> None:
    asked = count()
    start = history(*noise(4, 20), Add("x"), *noise(5, 20), Reset(connector=True), *noise(6, 20), Settle())
    minimise(start, lambda h: bool(next(asked) + 1) and contains_in_order(h.ops, Add, Reset, Settle))
    assert next(asked) < 300


def test_a_pinned_history_has_its_moves_in_its_ops() -> None:
    start = history(Add("A"), Step(seed=5), Advance(seed=6), adversary="random")
    assert pinned(start, ["", "c0.", "t0", "the drain's"]).ops == (
        Add("A"),
        Step(schedule="c0."),
        Advance(schedule="t0"),
    )


def test_a_story_has_a_line_for_every_op_and_moves_where_they_are_prescribed() -> None:
    told = story(history(Add("A", shared=4), Step(count=2, schedule="c0.")))
    assert told[0].startswith("engine: gpu blocks 11, cpu blocks 8")
    assert told[1] == "adversary: fair, seed 0"
    assert told[2].startswith("moves: c compute")
    assert told[3].startswith("1. add request A: prompt 4 tokens of text 0")
    assert told[4:] == ["2. 2 engine steps", "     moves: c0."]


def test_a_story_with_schedules_tells_the_moves_of_every_op_and_of_the_end() -> None:
    told = story(history(Step(), Reset()), ["c0.", "", "t0"])
    assert told[3:] == [
        "1. 1 engine step",
        "     moves: c0.",
        "2. reset the prefix cache",
        "     moves: none",
        "3. the end: everything in flight completes",
        "     moves: t0",
    ]
