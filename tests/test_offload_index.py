"""The model against OffloadingConnector: equality, known issues, and a defect for every clause.

It runs against the vLLM that is importable, else against the newest release that kvspec knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equalities import profile_of_target, shown

from kvspec.defects import load_defects, planted
from kvspec.equality.world import difference
from kvspec.history import read_history
from kvspec.history.minimise import minimise
from kvspec.model import CLAUSES, KNOWN_ISSUES, RELEASES, Group, Kind, Profile, offload, tiers
from kvspec.model import offload_ops as o
from kvspec.model.profile import DraftTail, known_issues, profile_for
from kvspec.model.tiers import Tier
from kvspec.ops import history_to_json
from strategies import equality

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of_target()


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "count"), [("tier", 12_000), ("index", 3_000)])
def test_model_and_connector_agree_on_everything_that_can_be_seen(level: str, count: int, profile: Profile) -> None:
    tally = equality.run(level, count, seed=1)
    assert not tally.findings, tally.findings[0].message
    assert not equality.hollow(tally, level, profile)


def test_a_run_that_reaches_nothing_is_hollow(profile: Profile) -> None:
    assert equality.hollow(equality.Tally(), "tier", profile) >= {"evicted", "refused", "pinned"}
    assert equality.hollow(equality.Tally(), "index", profile) >= {"loaded", "preempted", "loaded-for-remote"}


def test_a_difference_becomes_a_short_history_that_repeats(profile: Profile, monkeypatch: Patch) -> None:
    monkeypatch.setattr(equality, "FINDINGS_MAX", 1)
    monkeypatch.setattr(Tier, "_take_slots", lambda self, count: list(range(count)))
    first = equality.run("tier", 20_000, seed=2).findings[0]
    short = minimise(first.history, lambda history: difference(history) == first.clause)  # type: ignore[arg-type]
    assert len(short.ops) <= 8
    assert difference(read_history(history_to_json(short))) == first.clause == "TIER-6"  # type: ignore[arg-type]


# The model alone ------------------------------------------------------------------------------------------------------


def test_the_store_index_of_a_prefill_stays_where_it_is_only_in_releases_that_read_the_parameter() -> None:
    for release, params, whole, index in (
        ("0.20.2", {"do_remote_decode": True}, False, 0),
        ("0.22.1", {"do_remote_decode": "yes"}, False, 0),
        ("0.22.1", {"do_remote_decode": 0}, False, 2),
        ("0.22.1", None, False, 2),
        ("0.23.0", {"do_remote_decode": True}, False, 2),
        ("0.33.0", {"do_remote_decode": True}, True, 0),
    ):
        tier: Tier[Any] = Tier(8, profile_for(release))
        connector = offload.Offloader([Group(Kind.FULL, 4)], tier, profile_for(release))
        text = offload.Text(list(range(9)), 4)
        request = offload.OffloadRequest("r", text, 9, params, whole=whole)
        connector.arrive(request)
        connector.refresh_keys(request)
        placed = tier.prepare_store(request.keys[0], request.access)
        assert placed is not None
        tier.complete_store(placed.keys)
        assert connector.lookup(request, 0) == 8
        connector.admit(request, [[1, 2, 3]], [[False, False, False]], 8)
        assert request.next_stored == [index], (release, params)


def test_a_tier_refuses_a_policy_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="lru and arc"):
        Tier(2, profile_for("0.33.0"), "fifo")


# Known issues ---------------------------------------------------------------------------------------------------------

ISSUES = [issue for issue in KNOWN_ISSUES if issue.id.startswith("offload-")]
ENTANGLED = {"offload-second-reset": {"offload-reset-keeps-jobs"}}
"""What shows a known issue shows another one first, in releases that have both."""

TRIGGERS: dict[str, tuple[o.TierSetup | o.IndexSetup, list[Any]]] = {
    "offload-in-flight-is-a-miss": (o.TierSetup(), [o.Come(2), o.Offer(), o.LookUp()]),
    "offload-arc-gives-up": (
        o.TierSetup(2, "arc"),
        [
            o.Come(2),
            o.Offer(count=2),
            o.EndStore(),
            o.Offer(first=2),
            o.EndStore(),
            o.TouchKeys(),
            o.TouchKeys(),
            o.TouchKeys(first=1),
            o.Load(first=1),
            o.Offer(first=3),
        ],
    ),
    "offload-skip-reading-ignored": (
        o.IndexSetup(slots=12),
        [
            o.Begin(3),
            o.Begin(own=2, branch=1, says=9),
            o.MakeSteps(2),
            o.EndTransfers(),
            o.MakeSteps(2),
            o.EndTransfers(),
            o.MakeSteps(),
            o.Begin(3, reads_cache=0),
            o.MakeSteps(),
        ],
    ),
    "offload-readmit-with-store-in-flight": (
        o.IndexSetup(slots=1, step_tokens=4),
        [o.Begin(2, says=9), o.MakeSteps(2), o.EndTransfers(), o.MakeSteps(3), o.ResetAll(running=1), o.MakeSteps()],
    ),
    "offload-abort-while-loading": (
        o.IndexSetup(),
        [
            o.Begin(1),
            o.MakeSteps(2),
            o.EndTransfers(),
            o.Begin(1, own=3, says=4),
            o.MakeSteps(3),
            o.EndTransfers(),
            o.ResetAll(running=1),
            o.MakeSteps(),
            o.AbortOne(),
            o.EndTransfer(),
            o.MakeSteps(),
        ],
    ),
    "offload-external-evicts-hits": (
        o.IndexSetup((Group(Kind.FULL, 4), Group(Kind.SLIDING_WINDOW, 4, 12)), gpu_blocks=17, slots=60),
        [o.Begin(6, own=1), o.MakeSteps(), o.Begin(1, own=5), o.Begin(4), o.MakeSteps(3)],
    ),
    "offload-draft-chunk-passed": (
        o.IndexSetup((Group(Kind.FULL, 4, eagle=True),), slots=12, drafts=1),
        [o.Begin(4, own=3), o.MakeSteps()],
    ),
    "offload-unmarked-drafts": (
        o.IndexSetup(slots=12, drafts=1),
        [o.Begin(4), o.MakeSteps(2), o.EndTransfers(), o.MakeSteps(), o.ResetAll(), o.Begin(4, own=1), o.MakeSteps()],
    ),
    "offload-group-sizes-null": (
        o.IndexSetup((Group(Kind.SLIDING_WINDOW, 4, 6),), chunk_blocks=2, slots=1, step_tokens=8),
        [
            o.Begin(4, says=9),
            o.MakeSteps(2),
            o.EndTransfers(),
            o.MakeSteps(3),
            o.EndTransfers(),
            o.MakeSteps(2),
            o.Begin(3, own=2, branch=1, says=3),
            o.MakeSteps(),
        ],
    ),
    "offload-stale-window-block": (
        o.IndexSetup((Group(Kind.SLIDING_WINDOW, 4, 2),), chunk_blocks=3, gpu_blocks=8, slots=12, step_tokens=8),
        [o.Begin(2, says=9), o.MakeSteps(), o.Begin(own=20, branch=1), o.MakeSteps(5)],
    ),
    "offload-window-assert": (
        o.IndexSetup(
            (Group(Kind.FULL, 4), Group(Kind.SLIDING_WINDOW, 4, 12), Group(Kind.SLIDING_WINDOW, 8, 6)),
            gpu_blocks=39,
            slots=15,
            policy="arc",
            step_tokens=32,
        ),
        [
            o.Begin(5, says=9),
            o.MakeSteps(4),
            o.EndTransfers(),
            o.MakeSteps(5),
            o.ResetAll(),
            o.Begin(4),
            o.MakeSteps(),
        ],
    ),
    "offload-window-chunk-missed": (
        o.IndexSetup((Group(Kind.FULL, 4), Group(Kind.SLIDING_WINDOW, 8, 6)), gpu_blocks=30, slots=14),
        [
            o.Begin(8, own=4),
            o.Begin(own=4),
            o.MakeSteps(2),
            o.EndTransfers(),
            o.MakeSteps(),
            o.Begin(4, own=1),
            o.Begin(1, own=4),
            o.MakeSteps(),
            o.ResetAll(),
            o.Begin(4),
            o.MakeSteps(),
        ],
    ),
    "offload-window-after-reset": (
        o.IndexSetup(
            (Group(Kind.FULL, 4), Group(Kind.SLIDING_WINDOW, 4, 4), Group(Kind.SLIDING_WINDOW, 8, 9)),
            gpu_blocks=66,
            slots=33,
        ),
        [
            o.Begin(6, own=2, says=7),
            o.Begin(2, says=6),
            o.MakeSteps(3),
            o.ResetAll(connector=1),
            o.MakeSteps(5),
        ],
    ),
    "offload-reset-keeps-jobs": (
        o.IndexSetup(slots=12),
        [o.Begin(2, says=9), o.MakeSteps(), o.ResetAll(running=1, connector=1), o.MakeSteps()],
    ),
    "offload-abort-never-scheduled": (
        o.IndexSetup(slots=12),
        [o.Begin(2), o.AbortOne(), o.Begin(own=1), o.MakeSteps()],
    ),
    "offload-last-slot-stored": (o.IndexSetup(slots=12), [o.Begin(1, own=3, says=5), o.MakeSteps(9)]),
    "offload-final-store-lost": (
        o.IndexSetup(slots=12),
        [o.Begin(2, says=3), o.MakeSteps(2), o.EndTransfers(), o.MakeSteps()],
    ),
    "offload-reset-then-load": (
        o.IndexSetup(slots=12),
        [
            o.Begin(2, own=1, says=9),
            o.MakeSteps(2),
            o.EndTransfers(),
            o.MakeSteps(),
            o.ResetAll(running=1),
            o.MakeSteps(),
        ],
    ),
    "offload-second-reset": (
        o.IndexSetup(slots=12),
        [o.Begin(2, says=9), o.MakeSteps(), o.ResetAll(running=1, connector=1), o.ResetAll(connector=1)],
    ),
}
"""Known issue -> the history that shows it."""


def test_every_known_issue_has_a_trigger() -> None:
    assert TRIGGERS.keys() == {issue.id for issue in ISSUES}


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.id)
def test_a_known_issue_shows_in_the_releases_that_have_it_and_in_no_other(issue: Any, profile: Profile) -> None:
    setup, steps = TRIGGERS[issue.id]
    assert setup.__struct_config__.tag in issue.levels
    if isinstance(setup, o.IndexSetup) and setup.groups != o.IndexSetup().groups and not profile.jobs_by_number:
        pytest.skip("up to 0.20 only one group of full attention is compared")
    history = o.OffloadHistory("vllm-offload-index", setup, tuple(steps))
    others = known_issues(profile.release) - {issue.id} - ENTANGLED.get(issue.id, set())
    assert (difference(history, others) is not None) == issue.affects(profile.release)
    assert difference(history) is None


def test_a_known_issue_excuses_nothing_but_what_it_raises(monkeypatch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler as Real

    def update_connector_output(self: Any, output: Any) -> None:
        raise KeyError(0)

    monkeypatch.setattr(Real, "update_connector_output", update_connector_output)
    steps = (o.Begin(2), o.MakeSteps(), o.ResetAll(running=1, connector=1), o.MakeSteps(3), o.EndTransfers())
    history = o.OffloadHistory("vllm-offload-index", o.IndexSetup(slots=12), (*steps, o.MakeSteps(3)))
    assert difference(history) == "KeyError"


# A defect for every clause --------------------------------------------------------------------------------------------

REGISTRY = load_defects(Path(__file__).parent / "defects")
OF_THE_MODEL = {d.law: d for d in REGISTRY.values() if d.target == "vllm-offload-index" and d.in_model}
OF_VLLM = {name: d for name, d in REGISTRY.items() if d.target == "vllm-offload-index" and not d.in_model}

NEEDS: dict[str, Callable[[Profile], bool]] = {
    "LOOKUP-1": lambda profile: "offload-skip-reading-ignored" not in known_issues(profile.release),
    "STORE-2": lambda profile: profile.offers_again_after_preemption,
    "STORE-5": lambda profile: profile.offload_policies,
    "STORE-12": lambda profile: profile.store_mask.name in ("SEGMENT", "PARTIAL_SEGMENT"),
    "STORE-13": lambda profile: profile.store_mask.name == "REGISTRATION",
    "STORE-14": lambda profile: profile.offload_reset,
    **dict.fromkeys(("STORE-16", "LOOKUP-6"), lambda profile: profile.draft_tail is not DraftTail.NOWHERE),
    "TOUCH-1": lambda profile: not profile.tier_counts_requests,
    "FENCE-2": lambda profile: profile.jobs_by_number,
    "FENCE-3": lambda profile: profile.flushes_when_idle,
    "FENCE-4": lambda profile: profile.jobs_by_number,
    "JOB-1": lambda profile: profile.jobs_by_number,
    "JOB-2": lambda profile: profile.jobs_by_number,
    "JOB-3": lambda profile: profile.offload_reset,
    "JOB-4": lambda profile: profile.offload_keeps_stepping,
    "JOB-6": lambda profile: not profile.jobs_by_number,
    "TIER-8": lambda profile: profile.offload_reset,
    "LRU-2": lambda profile: profile.tier_recency.name != "RELEASE",
    "LRU-4": lambda profile: profile.tier_recency.name != "RELEASE",
    "LRU-5": lambda profile: profile.tier_recency.name == "POSITION",
    **dict.fromkeys(
        ("LRU-6", "ARC-6", "ARC-7", "USE-1", "USE-2", "USE-3", "USE-4"), lambda profile: profile.tier_counts_requests
    ),
}
"""Clauses that not every release can break."""


def test_every_clause_has_a_defect() -> None:
    modules = (offload.__name__, tiers.__name__)
    assert OF_THE_MODEL.keys() == {clause.id for clause in CLAUSES.values() if clause.where.startswith(modules)}


OPS_MAX = 12_000
"""Within so many ops a defect has shown under its clause; most have after a hundred."""


@pytest.mark.parametrize("clause", OF_THE_MODEL)
def test_the_defect_breaks_its_clause_first(clause: str, profile: Profile, monkeypatch: Patch) -> None:
    """In some history, that is: what a defect makes wrong can show under a later clause too."""
    monkeypatch.setattr(equality, "FINDINGS_MAX", 1)
    defect = OF_THE_MODEL[clause]
    with planted(defect):
        if NEEDS.get(clause, lambda profile: True)(profile):
            assert clause in shown(defect.level, OPS_MAX, clause)
        else:
            assert not equality.run(defect.level, 300, seed=3).findings


@pytest.mark.parametrize("name", OF_VLLM)
def test_a_defect_of_the_newest_release_breaks_the_clause_that_it_is_against(
    name: str, profile: Profile, monkeypatch: Patch
) -> None:
    if profile.release != RELEASES[-1]:
        pytest.skip(f"planted in the code of {RELEASES[-1]}")
    monkeypatch.setattr(equality, "FINDINGS_MAX", 1)
    with planted(OF_VLLM[name]):
        assert OF_VLLM[name].law in shown(OF_VLLM[name].level, OPS_MAX, OF_VLLM[name].law)
