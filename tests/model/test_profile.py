"""Profiles: what differs between releases, and what is said about a release that nobody has looked at."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import fields
from random import Random

import pytest

from kvspec.model import (
    CLAUSES,
    cache,
    checkpoints,
    deferred,
    groups,
    keys,
    lookup,
    offload,
    pool,
    registration,
    scaling,
    states,
    steps,
    tiers,
)
from kvspec.model.coarse import SHOWS, shown
from kvspec.model.profile import (
    KNOWN_ISSUES,
    RELEASES,
    SWITCHES,
    AssumedProfileWarning,
    FreeOrder,
    Profile,
    known_issues,
    parse,
    profile_for,
)


def test_every_field_of_a_profile_is_a_switch_that_says_what_it_means_and_where_it_was_read() -> None:
    assert [switch.name for switch in SWITCHES] == [field.name for field in fields(Profile)][1:]
    for switch in SWITCHES:
        assert switch.sentence.endswith(".")
        assert switch.source.startswith(("v1/", "distributed/kv_transfer/"))
        assert next(iter(switch.since)) == RELEASES[0]
        for before, first, value in switch.changes():
            assert parse(before) < parse(first)
            assert getattr(profile_for(first), switch.name) == value != getattr(profile_for(before), switch.name)


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_that_was_read_has_a_profile_without_a_warning(release: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile_for(release).release == release


def test_an_unknown_release_gets_the_nearest_older_profile_and_that_is_said() -> None:
    with pytest.warns(AssumedProfileWarning, match=r"0\.34\.0rc1; it assumes that it is like 0\.33\.0"):
        assert profile_for("0.34.0rc1") == profile_for("0.33.0")
    with pytest.warns(AssumedProfileWarning, match=r"like 0\.23\.0"):
        assert profile_for("0.23.5").free_order is FreeOrder.CALLER


@pytest.mark.parametrize("release", ["0.20.1", "0.1", "latest"])
def test_what_is_too_old_or_no_release_is_refused(release: str) -> None:
    with pytest.raises(ValueError, match="release"):
        profile_for(release)


def test_known_issues_name_a_clause_and_the_releases_that_have_them() -> None:
    assert len({issue.id for issue in KNOWN_ISSUES}) == len(KNOWN_ISSUES)
    for issue in KNOWN_ISSUES:
        assert issue.clause in CLAUSES
        assert issue.bad in RELEASES
        assert issue.fixed is None or issue.fixed in RELEASES
        assert issue.id in known_issues(issue.bad)
        assert issue.fixed is None or issue.id not in known_issues(issue.fixed)


@pytest.mark.parametrize("release", RELEASES)
def test_one_history_of_four_can_show_a_known_issue_of_the_release(release: str) -> None:
    profile, random = profile_for(release), Random(0)
    levels = {level for issue in KNOWN_ISSUES for level in issue.levels}
    for level in levels:
        drawn = Counter(issue for _ in range(1000) for issue in shown(profile, level, random.randint(*SHOWS)))
        assert drawn.keys() == {i.id for i in KNOWN_ISSUES if level in i.levels and i.affects(release)}
        assert all(200 <= often <= 300 for often in drawn.values())


def test_every_clause_says_what_it_means_where_it_was_read_and_for_which_releases() -> None:
    found = (
        cache,
        checkpoints,
        deferred,
        groups,
        keys,
        lookup,
        offload,
        pool,
        registration,
        scaling,
        states,
        steps,
        tiers,
    )
    modules = {module.__name__ for module in found}
    for clause in CLAUSES.values():
        assert clause.sentence.endswith((".", ")"))
        release, place = clause.source.removeprefix("vLLM ").split(", ", 1)
        assert release in RELEASES
        assert place.startswith(("v1/", "distributed/kv_transfer/"))
        assert any(word in clause.releases for word in ("all", "later", "only", " to "))
        assert release == RELEASES[-1] or clause.id in ("STORE-4", "STORE-12", "TOUCH-1", "FENCE-3", "JOB-6")
        assert clause.where.rsplit(".", 2)[0] in modules or clause.where.rsplit(".", 1)[0] in modules
