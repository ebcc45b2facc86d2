"""The model against vLLM's own block pool and KV cache manager: equality, known issues, and a defect for every clause.

It runs against the vLLM that is importable, else against the newest release that kvspec knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from equalities import profile_of_target, shown
from msgspec import structs

from kvspec.defects import load_defects, planted
from kvspec.equality.scaling import compare_scaling
from kvspec.equality.world import difference, replay
from kvspec.history.minimise import minimise
from kvspec.model import (
    CLAUSES,
    KNOWN_ISSUES,
    RELEASES,
    Content,
    Image,
    Profile,
    Text,
    offload,
    pool,
    tiers,
)
from kvspec.model import ops as o
from kvspec.model.clauses import ClauseBroken
from kvspec.model.groups import Group, Kind
from kvspec.model.profile import CheckpointEnd, PromptState, known_issues
from kvspec.model.step_ops import EngineStep, ResetAll, StepSetup, Submit
from kvspec.ops import history_to_json
from kvspec.targets.vllm import core as target
from strategies import equality

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of_target()


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["pool", "cache"])
def test_model_and_implementation_agree_on_everything_that_can_be_seen(level: str, profile: Profile) -> None:
    tally = equality.run(level, 12_000, seed=8)
    assert not tally.findings, tally.findings[0].message
    assert not equality.hollow(tally, level, profile)


def test_a_run_that_reaches_nothing_is_hollow(profile: Profile) -> None:
    assert equality.hollow(equality.Tally(), "pool", profile) >= {"evicted", "equal-blocks", "refused"}
    assert equality.hollow(equality.Tally(), "cache", profile) >= {"hit", "preempted", "left-window"}


def test_sizes_under_context_parallelism_agree(profile: Profile) -> None:
    assert compare_scaling(profile) > 1000


@pytest.mark.parametrize("family", ["FA", "F2A2"])
def test_states_on_every_rank_agree_beside_attention_that_is_spread(family: str, profile: Profile) -> None:
    place, hits = o.FAMILIES.index(family), 0
    for number in range(60):
        random = Random(number)
        setup = equality.draw_setup(random, "cache", profile, family=place, ranks=1, caching=1, shows=0, eagle=0)
        assert setup.decode == 1 + profile.cp_with_several_groups  # type: ignore[union-attr]
        steps = equality.draw_ops(random, equality.draw_mix(random, "cache"), 60)
        hits += replay(o.CoreHistory("vllm-core", setup, steps))["hit"]  # type: ignore[arg-type]
    assert hits


def test_a_difference_becomes_a_short_history_that_repeats(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.BlockPool, "touch", lambda self, blocks: None)
    tally = equality.run("cache", 20_000, seed=4)
    first = tally.findings[0]
    short = minimise(first.history, lambda history: difference(history) == first.clause)  # type: ignore[arg-type]
    assert len(short.ops) <= 6
    again = o.core_history_from_json(history_to_json(short))
    assert difference(again) == tally.findings[0].clause


# Known issues ---------------------------------------------------------------------------------------------------------

FULL, LARGE = Group(Kind.FULL, 4), Group(Kind.FULL, 8)


def window(tokens: int, block_tokens: int = 4, eagle: bool = False) -> Group:
    return Group(Kind.SLIDING_WINDOW, block_tokens, tokens, eagle)


def arrive(shared: int, tail: int, branch: int = 0) -> o.Arrive:
    return o.Arrive(shared, tail, branch, content=0, reads_cache=1)


def schedule(pick: int, tokens: int = 40, external: int = 0, in_flight: int = 0) -> o.Schedule:
    return o.Schedule(pick, tokens, 0, 0, external, delay=0, must_fit=0, reserved=0, others_run=0, in_flight=in_flight)


FINISH = o.Finish(0, deferred=0)

INSIDE = o.CacheSetup((LARGE, Group(Kind.MAMBA, 8, align=True)), blocks=60, unit=4)
"""Hits can end in the middle of a block."""
PARTS = o.CacheSetup((replace(LARGE, eagle=True), Group(Kind.MAMBA, 8, align=True)), blocks=60, unit=4, junctions=True)
"""As before, and states are registered where requests part."""


def keeping(block_tokens: int = 4, spares: int = 0) -> Group:
    """Return a Mamba group that can keep any state in the middle of a chunk."""
    return Group(Kind.MAMBA, block_tokens, align=True, spares=spares, checkpoint_unit=1)


_EXPORTS = (LARGE, keeping(8))
KEPT = o.CacheSetup(_EXPORTS, blocks=60, unit=2)
"""Checkpoints end inside blocks, and can be hit there."""

TRIGGERS: dict[str, tuple[o.CoreSetup, list[Any]]] = {
    "core-double-release": (o.PoolSetup(), [o.Allocate(1), o.Touch(0, 1, held=1, null=0), o.Free(0, 2, 1, 0, null=0)]),
    "core-second-full-group-not-cut": (
        o.CacheSetup((FULL, LARGE, window(5)), blocks=60),
        [arrive(8, 1), schedule(0), o.Evict(22, 1), arrive(8, 1), schedule(1)],
    ),
    "core-eagle-first-window": (
        o.CacheSetup((FULL, window(9, 2, eagle=True)), blocks=60),
        [arrive(6, 1), schedule(0), o.Evict(11, 1), arrive(3, 0), schedule(1)],
    ),
    "core-eagle-unproven-hit": (
        o.CacheSetup((window(3, 2, eagle=True), window(5, 2, eagle=True)), blocks=90),
        [arrive(10, 1), schedule(0, 41), o.Evict(6, 1), o.Evict(28, 1), arrive(4, 1), schedule(1)],
    ),
    "core-eagle-window-unregistered": (
        o.CacheSetup((LARGE, window(5, eagle=True)), blocks=60),
        [arrive(8, 1), schedule(0)],
    ),
    "core-window-freed-too-early": (
        o.CacheSetup((window(5),), blocks=60),
        [arrive(8, 1), schedule(0, 12), schedule(0, 4, in_flight=6)],
    ),
    "core-mamba-hit-disagrees": (
        o.CacheSetup((FULL, Group(Kind.MAMBA, 4, align=True)), blocks=60, eagle_fallback=True),
        [arrive(5, 1), schedule(0, 4), schedule(0, 4), schedule(0, 4), arrive(4, 1), schedule(1)],
    ),
    "core-state-registered-again": (
        o.CacheSetup((FULL, Group(Kind.MAMBA, 4, align=True)), blocks=60),
        [arrive(2, 1), schedule(0, 8), o.NewStep(), schedule(0, 1)],
    ),
    "core-started-state-registered": (
        o.CacheSetup(_EXPORTS, blocks=60, unit=4),
        [arrive(1, 1), schedule(0), o.NewStep(), o.Arrive(tail=24, again=1), schedule(1)],
    ),
    "core-spares-registered": (
        o.CacheSetup((FULL, keeping(spares=2)), blocks=60),
        [arrive(7, 3), schedule(0, 12), o.NewStep(), schedule(0)],
    ),
    "core-checkpoint-counts-nulls": (
        o.CacheSetup((FULL, keeping()), blocks=60),
        [arrive(7, 3), schedule(0, 8), o.NewStep(), schedule(0)],
    ),
    "core-prompt-checkpoint-forgotten": (
        o.CacheSetup((LARGE, keeping()), blocks=60, interval=0),
        [arrive(5, 2), schedule(0)],
    ),
    "core-passed-state-registered": (INSIDE, [arrive(1, 0), schedule(0, 4), schedule(0, 1)]),
    "core-states-over-allocated": (
        o.CacheSetup((Group(Kind.MAMBA, 4, align=True, spares=2),), blocks=60),
        [
            arrive(3, 0),
            schedule(0),
            o.Output(0, 1, 0),
            schedule(0),
            o.Output(0, 1, 0),
            schedule(0),
            o.Output(0, 1, 0),
            o.Schedule(0, 1, 2, 0, 0, delay=0, must_fit=0, reserved=0, others_run=0, in_flight=0),
            o.Output(0, 1, rejected=2),
            schedule(0),
        ],
    ),
    "core-external-evicts-local-hit": (
        o.CacheSetup((FULL, window(100)), blocks=7),
        [arrive(2, 0), schedule(0), FINISH, arrive(0, 4, 1), schedule(0), FINISH, arrive(2, 4, 1), schedule(0, 1, 2)],
    ),
    "core-reset-in-flight-underflow": (
        StepSetup(asynchronous=False, stages=2),
        [Submit(says=2), EngineStep(), ResetAll(running=1), EngineStep()],
    ),
}
"""Known issue -> the history that shows it."""

_TREE = Image("tree", 5, 1)
KEYS: dict[str, tuple[Content, Content, int]] = {
    "core-hash-key-collision": (Content(adapter=("x", "/x")), Content(salt="x"), 0),
    "core-adapter-path-not-in-key": (Content(adapter=("x", "/x")), Content(adapter=("x", "/y")), 0),
    "core-images-after-resume": (
        Content(images=(Image("cat", 4, 1), _TREE)),
        Content(images=(Image("dog", 4, 1), _TREE)),
        1,
    ),
}
"""Known issue -> two contents that it confuses, and the hash block in which it does."""


def test_every_known_issue_has_a_trigger() -> None:
    assert TRIGGERS.keys() | KEYS.keys() == {issue.id for issue in KNOWN_ISSUES if issue.id.startswith("core-")}


@pytest.mark.parametrize("issue", [issue for issue in KNOWN_ISSUES if issue.id in TRIGGERS], ids=lambda issue: issue.id)
def test_a_known_issue_shows_in_the_releases_that_have_it_and_in_no_other(issue: Any, profile: Profile) -> None:
    setup, steps = TRIGGERS[issue.id]
    assert setup.__struct_config__.tag in issue.levels
    history = o.CoreHistory("vllm-core", setup, tuple(steps))
    others = known_issues(profile.release) - {issue.id}
    assert difference(history, others) == (issue.clause if issue.affects(profile.release) else None)
    assert difference(history) is None


def test_a_request_that_is_computed_again_has_no_drafts_beside_checkpoints(profile: Profile) -> None:
    """A preemption takes them. Else its text and its drafts would be a chunk with a checkpoint behind what is known."""
    setup = o.CacheSetup((FULL, FULL, keeping(spares=2)), blocks=14)
    first, second = structs.replace(schedule(0, 1, external=4), delay=1), schedule(0, 1)
    again = structs.replace(schedule(0, 2), drafts=3)
    steps = [arrive(1, 0), first, second, o.Output(0, 2, 0), o.NewStep(), o.Preempt(0), again]
    assert difference(o.CoreHistory("vllm-core", setup, tuple(steps))) is None


@pytest.mark.parametrize("issue", [issue for issue in KNOWN_ISSUES if issue.id in KEYS], ids=lambda issue: issue.id)
def test_contents_are_confused_only_in_the_releases_that_are_known_for_it(issue: Any, profile: Profile) -> None:
    first, second, block = KEYS[issue.id]
    hashes = []
    for content in (first, second):
        request = target.make_request(
            "r", range(7), 4, adapter=content.adapter, images=content.images, salt=content.salt
        )
        request.append_output_token_ids([50])
        hashes.append(request.block_hashes[block])
    expect = [Text([*range(7), 50], 4, content).hashes[block] for content in (first, second)]
    assert expect[0] != expect[1]
    assert (hashes[0] == hashes[1]) == issue.affects(profile.release)


# A defect for every clause --------------------------------------------------------------------------------------------

REGISTRY = load_defects(Path(__file__).parent / "defects")
OF_THE_MODEL = {d.law: d for d in REGISTRY.values() if d.target == "vllm-core" and d.in_model}
OF_VLLM = {name: d for name, d in REGISTRY.items() if d.target == "vllm-core" and not d.in_model}


def hits_inside(profile: Profile) -> bool:
    return profile.hits_inside


NEEDS: dict[str, Callable[[Profile], bool]] = {
    "POOL-9": lambda profile: profile.pins,
    "POOL-10": lambda profile: profile.pins,
    "POOL-11": lambda profile: profile.says_writable,
    "PREFIX-3": lambda profile: profile.secondary_hashes,
    "PREFIX-6": lambda profile: profile.moves_hashes,
    "TELL-3": lambda profile: profile.secondary_hashes,
    "TELL-4": lambda profile: profile.reports_hits,
    "HIT-7": lambda profile: profile.retains_shared_prefix,
    "ALLOC-2": lambda profile: profile.watermark,
    "ALLOC-8": lambda profile: profile.reserve,
    "REG-2": lambda profile: profile.masks_unreachable,
    "REG-3": lambda profile: profile.registers_aligned,
    "REG-4": lambda profile: profile.retention,
    "REG-5": lambda profile: profile.registers_tails,
    "REG-6": lambda profile: profile.prompt_state is PromptState.ANYWHERE,
    "REG-7": lambda profile: profile.registers_junctions,
    "NEED-6": lambda profile: profile.checkpoints_only_at_prompt_end,
    "STATE-6": lambda profile: profile.checkpoint_end is not CheckpointEnd.NOWHERE,
    **dict.fromkeys(("STATE-5", "REG-8"), lambda profile: profile.counts_lacking_states_at_checkpoints),
    "REG-9": lambda profile: profile.checkpoint_end is CheckpointEnd.HIT,
    **dict.fromkeys(("SCALE-9", "HIT-8", "NEED-5", "ALLOC-9", "ALLOC-10", "STATE-4", "FREE-5"), hits_inside),
    "FREE-2": lambda profile: profile.deferred_frees,
    "FREE-3": lambda profile: profile.deferred_frees,
    "FREE-4": lambda profile: profile.deferred_frees,
    "PREFIX-2": lambda profile: profile.masks_unreachable,
}
"""Clauses that not every release can break."""


def test_every_clause_has_a_defect() -> None:
    connector = (offload.__name__, tiers.__name__)  # see test_offload_index
    assert OF_THE_MODEL.keys() == {clause.id for clause in CLAUSES.values() if not clause.where.startswith(connector)}


_COPIED = [arrive(3, 1), schedule(0, 12), o.NewStep(), schedule(0, 1), o.NewStep()]
_HIT_INSIDE = [arrive(3, 1), schedule(0, 12), o.NewStep(), arrive(3, 1), schedule(1)]

RARE: dict[str, tuple[o.CacheSetup, list[Any]]] = {
    "REG-6": (
        o.CacheSetup((FULL, Group(Kind.MAMBA, 4, align=True)), blocks=60),
        [arrive(2, 1), schedule(0, 8), o.Evict(3, 1), schedule(0, 1)],
    ),
    "REG-7": (PARTS, [arrive(2, 0), o.Arrive(tail=4, again=1), schedule(0, 8), schedule(1, 4)]),
    "SCALE-1": (o.CacheSetup((FULL,), decode=2), []),
    **dict.fromkeys(("STATE-5", "STATE-6", "REG-8"), (KEPT, [arrive(5, 1), schedule(0)])),
    "REG-9": (KEPT, [arrive(10, 0), schedule(0, 16)]),
    "NEED-6": (o.CacheSetup(_EXPORTS, blocks=60, unit=2, interval=0), [arrive(10, 0), schedule(0, 16)]),
    **dict.fromkeys(("HIT-8", "NEED-5", "ALLOC-9"), (INSIDE, _HIT_INSIDE)),
    **dict.fromkeys(("ALLOC-10", "STATE-4", "FREE-5"), (INSIDE, _COPIED)),
}
"""Clauses whose defects random histories show too rarely, or not alone -> a history that does."""

OPS_MAX = 24_000
"""Within so many ops a defect has shown under its clause; most have after some hundred."""


@pytest.mark.parametrize("clause", OF_THE_MODEL)
def test_the_defect_breaks_its_clause_first(clause: str, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some history, that is: what a defect makes wrong can show under a later clause too."""
    monkeypatch.setattr(equality, "FINDINGS_MAX", 1)
    defect = OF_THE_MODEL[clause]
    able = NEEDS.get(clause, lambda profile: True)(profile)
    with planted(defect):
        if defect.level == "scaling":
            with pytest.raises(ClauseBroken) as broken:
                compare_scaling(profile)
            assert broken.value.clause.id == clause
        elif clause in RARE:
            setup, steps = RARE[clause]
            assert difference(o.CoreHistory("vllm-core", setup, tuple(steps))) == (clause if able else None)
        elif able:
            assert clause in shown(defect.level, OPS_MAX, clause)
        else:
            assert not shown(defect.level, 1500, clause)


@pytest.mark.parametrize("name", OF_VLLM)
def test_a_defect_of_the_newest_release_breaks_the_clause_that_it_is_against(
    name: str, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if profile.release != RELEASES[-1]:
        pytest.skip(f"planted in the code of {RELEASES[-1]}")
    monkeypatch.setattr(equality, "FINDINGS_MAX", 10)
    seen: set[str] = set()
    with planted(OF_VLLM[name]):
        for number in range(8):
            tally = equality.run(OF_VLLM[name].level, 5_000, seed=number)
            seen.update(finding.clause for finding in tally.findings)
            if OF_VLLM[name].law in seen:
                return
    assert OF_VLLM[name].law in seen
