"""The model against OffloadingConnector: equality, known issues, and a defect for every clause.

It runs against the vLLM that is importable, else against the newest release that kvspec knows.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvspec import releases
from kvspec.defects import load_defects, planted
from kvspec.model import CLAUSES, KNOWN_ISSUES, Group, Kind, Profile, offload, tiers
from kvspec.model import offload_ops as o
from kvspec.model.profile import known_issues, profile_for
from kvspec.model.tiers import Tier
from strategies import offload_index

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Make a vLLM importable, and return what the model expects of it."""
    if importlib.util.find_spec("vllm") is None:
        sys.path.insert(0, str(releases.ensure(releases.KNOWN_GOOD[-1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offload_index.run("tier", 1, 0)
        offload_index.run("index", 1, 0)
        return profile_for(offload_index.core_target.release())


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "count"), [("tier", 12_000), ("index", 3_000)])
def test_model_and_connector_agree_on_everything_that_can_be_seen(level: str, count: int, profile: Profile) -> None:
    tally = offload_index.run(level, count, seed=1)
    assert not tally.findings, tally.findings[0].message
    assert not offload_index.hollow(tally, level, profile)


def test_a_run_that_reaches_nothing_is_hollow(profile: Profile) -> None:
    assert offload_index.hollow(offload_index.Tally(), "tier", profile) >= {"evicted", "refused", "pinned"}
    assert offload_index.hollow(offload_index.Tally(), "index", profile) >= {"loaded", "preempted", "loaded-for-remote"}


def test_a_difference_becomes_a_short_history_that_repeats(profile: Profile, monkeypatch: Patch) -> None:
    monkeypatch.setattr(offload_index, "FINDINGS_MAX", 1)
    monkeypatch.setattr(Tier, "_take_slots", lambda self, count: list(range(count)))
    tally = offload_index.run("tier", 20_000, seed=2)
    short = offload_index.shortest(tally.findings[0].history)
    assert len(short.ops) <= 8
    again = o.index_history_from_json(msgspec.json.encode(short))
    assert offload_index.difference(again) == tally.findings[0].clause == "TIER-6"


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

ROOMY = o.TierSetup(12)
SMALL = o.TierSetup(1)
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
        o.IndexSetup(tier=ROOMY),
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
        o.IndexSetup(tier=SMALL, step_tokens=4),
        [o.Begin(2, says=9), o.MakeSteps(2), o.EndTransfers(), o.MakeSteps(3), o.ResetAll(running=1), o.MakeSteps()],
    ),
    "offload-group-sizes-null": (
        o.IndexSetup((Group(Kind.SLIDING_WINDOW, 4, 6),), chunk_blocks=2, tier=SMALL, step_tokens=8),
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
        o.IndexSetup((Group(Kind.SLIDING_WINDOW, 4, 2),), chunk_blocks=3, gpu_blocks=8, tier=ROOMY, step_tokens=8),
        [o.Begin(2, says=9), o.MakeSteps(), o.Begin(own=20, branch=1), o.MakeSteps(5)],
    ),
    "offload-reset-keeps-jobs": (
        o.IndexSetup(tier=ROOMY),
        [o.Begin(2, says=9), o.MakeSteps(), o.ResetAll(running=1, connector=1), o.MakeSteps()],
    ),
    "offload-abort-never-scheduled": (
        o.IndexSetup(tier=ROOMY),
        [o.Begin(2), o.AbortOne(), o.Begin(own=1), o.MakeSteps()],
    ),
    "offload-last-slot-stored": (o.IndexSetup(tier=ROOMY), [o.Begin(1, own=3, says=5), o.MakeSteps(9)]),
    "offload-final-store-lost": (
        o.IndexSetup(tier=ROOMY),
        [o.Begin(2, says=3), o.MakeSteps(2), o.EndTransfers(), o.MakeSteps()],
    ),
    "offload-reset-then-load": (
        o.IndexSetup(tier=ROOMY),
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
        o.IndexSetup(tier=ROOMY),
        [o.Begin(2, says=9), o.MakeSteps(), o.ResetAll(running=1, connector=1), o.ResetAll(connector=1)],
    ),
}
"""Known issue -> the history that shows it."""


def test_every_known_issue_has_a_trigger() -> None:
    assert TRIGGERS.keys() == {issue.id for issue in ISSUES}


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.id)
def test_a_known_issue_shows_in_the_releases_that_have_it_and_in_no_other(issue: Any, profile: Profile) -> None:
    setup, steps = TRIGGERS[issue.id]
    history = o.IndexHistory(setup, tuple(steps))
    others = known_issues(profile.release) - {issue.id} - ENTANGLED.get(issue.id, set())
    assert (offload_index.difference(history, others) is not None) == issue.affects(profile.release)
    assert offload_index.difference(history) is None


# A defect for every clause --------------------------------------------------------------------------------------------

DEFECTS = {
    defect.law: defect
    for defect in load_defects(Path(__file__).parent / "defects").values()
    if defect.target == "vllm-offload-index"
}

NEEDS: dict[str, Callable[[Profile], bool]] = {
    "STORE-2": lambda profile: profile.offers_again_after_preemption,
    "STORE-5": lambda profile: profile.offload_policies,
    "STORE-12": lambda profile: profile.store_mask.name in ("SEGMENT", "PARTIAL_SEGMENT"),
    "STORE-13": lambda profile: profile.store_mask.name == "REGISTRATION",
    "STORE-14": lambda profile: profile.offload_reset,
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
    "LRU-4": lambda profile: profile.tier_recency.name != "RELEASE",
    "LRU-5": lambda profile: profile.tier_recency.name == "POSITION",
    **dict.fromkeys(
        ("LRU-6", "ARC-6", "ARC-7", "USE-1", "USE-2", "USE-3", "USE-4"), lambda profile: profile.tier_counts_requests
    ),
}
"""Clauses that not every release can break."""


def test_every_clause_has_a_defect() -> None:
    modules = (offload.__name__, tiers.__name__)
    assert DEFECTS.keys() == {clause.id for clause in CLAUSES.values() if clause.where.startswith(modules)}


@pytest.mark.parametrize("clause", DEFECTS)
def test_the_defect_is_noticed_in_releases_that_can_break_the_clause(
    clause: str, profile: Profile, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(offload_index, "FINDINGS_MAX", 1)
    with planted(DEFECTS[clause]):
        if NEEDS.get(clause, lambda profile: True)(profile):
            assert offload_index.run(DEFECTS[clause].level, 8_000, seed=3).findings
        else:
            assert not offload_index.run(DEFECTS[clause].level, 500, seed=3).findings
