"""The model against vLLM's own block pool and KV cache manager: equality, known issues, and a defect for every clause.

It runs against the vLLM that is importable, else against the newest release that kvspec knows.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvspec import releases
from kvspec.history.minimise import minimise
from kvspec.model import CLAUSES, KNOWN_ISSUES, Content, Image, Profile, Text, cache, groups, keys, pool, scaling
from kvspec.model import ops as o
from kvspec.model.clauses import ClauseBroken
from kvspec.model.groups import Group, Kind
from kvspec.model.pool import NULL
from kvspec.model.profile import known_issues, profile_for
from kvspec.ops import history_to_json

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Make a vLLM importable, and return what the model expects of it."""
    if importlib.util.find_spec("vllm") is None:
        sys.path.insert(0, str(releases.ensure(releases.KNOWN_GOOD[-1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from strategies import core

        core.run("pool", 1, 0)
        return profile_for(core.target.release())


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["pool", "cache"])
def test_model_and_implementation_agree_on_everything_that_can_be_seen(level: str, profile: Profile) -> None:
    from strategies import core

    tally = core.run(level, 12_000, seed=7)
    assert not tally.findings, tally.findings[0].message
    assert not core.hollow(tally, level, profile)


def test_a_run_that_reaches_nothing_is_hollow(profile: Profile) -> None:
    from strategies import core

    assert core.hollow(core.Tally(), "pool", profile) >= {"evicted", "equal-blocks", "refused"}
    assert core.hollow(core.Tally(), "cache", profile) >= {"hit", "preempted", "left-window"}


@pytest.mark.parametrize("name", ["PoolMachine", "CacheMachine"])
def test_the_machine_finds_no_difference(name: str, profile: Profile) -> None:
    from strategies import core

    machine = type(name, (getattr(core, name),), {"reached": core.Counter()})
    run = settings(
        database=None,
        phases=[Phase.generate],
        max_examples=40,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(1)(machine), settings=run)
    assert machine.reached["ops"] > 400
    assert machine.reached.keys() >= {"evicted", "refused"}


def test_sizes_under_context_parallelism_agree(profile: Profile) -> None:
    from strategies import core

    assert core.compare_scaling(profile) > 1000


def test_a_difference_becomes_a_short_history_that_repeats(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies import core

    monkeypatch.setattr(pool.BlockPool, "touch", lambda self, blocks: None)
    tally = core.run("cache", 20_000, seed=2)
    first = tally.findings[0]
    short = minimise(first.history, lambda history: core.difference(history) == first.clause)  # type: ignore[arg-type]
    assert len(short.ops) <= 6
    again = o.core_history_from_json(history_to_json(short))
    assert core.difference(again) == tally.findings[0].clause


# Known issues ---------------------------------------------------------------------------------------------------------

FULL, LARGE = Group(Kind.FULL, 4), Group(Kind.FULL, 8)


def window(tokens: int, block_tokens: int = 4, eagle: bool = False) -> Group:
    return Group(Kind.SLIDING_WINDOW, block_tokens, tokens, eagle)


def arrive(shared: int, tail: int, branch: int = 0) -> o.Arrive:
    return o.Arrive(shared, tail, branch, content=0, reads_cache=1)


def schedule(pick: int, tokens: int = 40, external: int = 0, in_flight: int = 0) -> o.Schedule:
    return o.Schedule(pick, tokens, 0, 0, external, delay=0, must_fit=0, reserved=0, others_run=0, in_flight=in_flight)


FINISH = o.Finish(0, deferred=0)

TRIGGERS: dict[str, tuple[o.PoolSetup | o.CacheSetup, list[Any]]] = {
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
    "core-external-evicts-hits": (
        o.CacheSetup((FULL, window(100)), blocks=7),
        [arrive(2, 0), schedule(0), FINISH, arrive(0, 4, 1), schedule(0), FINISH, arrive(2, 4, 1), schedule(0, 1, 2)],
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
    from strategies import core

    setup, steps = TRIGGERS[issue.id]
    history = o.CoreHistory("vllm-core", setup, tuple(steps))
    others = known_issues(profile.release) - {issue.id}
    assert core.difference(history, others) == (issue.clause if issue.affects(profile.release) else None)
    assert core.difference(history) is None


@pytest.mark.parametrize("issue", [issue for issue in KNOWN_ISSUES if issue.id in KEYS], ids=lambda issue: issue.id)
def test_contents_are_confused_only_in_the_releases_that_are_known_for_it(issue: Any, profile: Profile) -> None:
    from strategies.core import target

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

Patch = pytest.MonkeyPatch
Wrap = Callable[[Any], Callable[..., Any]]


def changed(owner: Any, name: str, wrap: Wrap) -> Callable[[Patch], None]:
    """Return a defect: a function of the model, wherever it is used, behaves differently."""

    def plant(patch: Patch) -> None:
        from strategies import core

        original = getattr(owner, name)
        for place in (owner, cache, scaling, core):
            if vars(place).get(name) is original:
                patch.setattr(place, name, wrap(original))

    return plant


def without(owner: Any, name: str, answer: Any = None) -> Callable[[Patch], None]:
    return changed(owner, name, lambda original: lambda *arguments, **named: answer)


def _drops_last(original: Any) -> Any:
    return lambda self, blocks, **named: original(self, list(blocks)[:-1], **named)


def _forgets_nothing(original: Any) -> Any:
    def allocate(self: Any, count: int) -> Any:
        forget, self._forget = self._forget, lambda block: None
        try:
            return original(self, count)
        finally:
            self._forget = forget

    return allocate


def _reads_anyway(original: Any) -> Any:
    def lookup(self: Any, request: Any) -> Any:
        before, request.reads_cache = request.reads_cache, True
        try:
            return original(self, request)
        finally:
            request.reads_cache = before

    return lookup


def _shorter_together(original: Any) -> Any:
    def longest(self: Any, text: Any, limit: int, indices: Any, proof_limit: int | None) -> int:
        indices = list(indices)
        tokens = int(original(self, text, limit, indices, proof_limit))
        return max(0, tokens - self.alignment) if len({self.groups[i].layout() for i in indices}) > 1 else tokens

    return longest


def _twice(original: Any) -> Any:
    def touch(self: Any, blocks: Any) -> None:
        blocks = list(blocks)
        original(self, blocks)
        original(self, blocks)

    return touch


def _only(condition: Callable[..., bool], otherwise: Any) -> Wrap:
    return lambda original: (
        lambda *args, **named: (
            otherwise(original, *args, **named) if condition(*args, **named) else original(*args, **named)
        )
    )


def _unpins_to_head(original: Any) -> Any:
    def unpin(self: Any, blocks: Any, on_reuse: Any) -> None:
        free = len(self.queue)
        original(self, blocks, on_reuse)
        self.queue = self.queue[free:] + self.queue[:free]

    return unpin


def _takes_one_less(original: Any) -> Any:
    def take_external(self: Any, request: Any, external: int, computed: int) -> None:
        original(self, request, external, computed)
        for row in self.tables[request.name]:
            if row and external and row[-1] != NULL:
                self.pool.free([row.pop()])

    return take_external


def _always_at_once(original: Any) -> Any:
    return lambda self, request: self.cache.free(request)


def _keeps_order(original: Any) -> Any:
    def step_processed(self: Any) -> None:
        self.processed += 1
        while self.pending and self.pending[0][0] <= self.processed:
            self.cache.pool.free(self.pending.popleft()[1])

    return step_processed


def _in_order(original: Any) -> Any:
    def free(self: Any, request: Any) -> None:
        self.passed.pop(request.name, None)
        for row in self.tables.pop(request.name, []):
            self._release(row, by_hash=False)

    return free


P, C, D = pool.BlockPool, cache.CacheManager, cache.DeferredFrees
UNMASKED = _only(lambda *a: a[4] is None, lambda original, *a: None)

DEFECTS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "KEY-1": ("pool", changed(keys.Text, "append", lambda f: lambda self, t: (f(self, t), self.hashes.pop())[0])),
    "KEY-2": ("pool", without(keys.Content, "extras", ())),
    "KEY-3": (
        "pool",
        changed(keys.Text, "view", lambda f: lambda self, n: f(self, n)[: None if n == self.hash_tokens else -1]),
    ),
    "POOL-1": ("pool", changed(P, "_initial_queue", lambda f: lambda self: f(self)[::-1])),
    "POOL-2": ("pool", changed(P, "allocate", lambda f: lambda self, n: f(self, n)[::-1])),
    "POOL-3": (
        "pool",
        changed(P, "_refuse_too_many", lambda f: lambda self, n: f(self, n + (n > 0 and n == len(self.queue)))),
    ),
    "POOL-5": ("pool", changed(P, "touch", _twice)),
    "POOL-6": ("pool", changed(P, "free", _drops_last)),
    "POOL-7": ("pool", changed(P, "_queue_up", lambda f: lambda self, freed, at_head: f(self, freed[::-1], at_head))),
    "POOL-8": ("pool", changed(P, "usage", lambda f: lambda self: f(self) / 2)),
    "POOL-9": ("pool", changed(P, "unpin", _unpins_to_head)),
    "POOL-10": ("pool", without(P, "_end_pins")),
    "POOL-11": ("pool", changed(P, "is_writable", lambda f: lambda self, b: self.blocks[b].references == 1)),
    "INDEX-1": ("pool", changed(P, "find", lambda f: lambda self, h, g: f(self, h, g) if len(g) > 1 else None)),
    "INDEX-2": ("pool", changed(P, "register", lambda f: lambda self, *a: f(self, *a[:-1]))),
    "INDEX-3": (
        "pool",
        changed(P, "register_tail", lambda f: lambda self, *a, replace=False: f(self, *a, replace=True)),
    ),
    "INDEX-4": ("pool", changed(P, "allocate", _forgets_nothing)),
    "INDEX-5": ("pool", changed(P, "evict", _drops_last)),
    "INDEX-6": ("pool", without(P, "move_hashes")),
    "RESET-1": ("pool", without(P, "reset", False)),
    "EVENT-1": ("pool", changed(P, "take_events", lambda f: lambda self: f(self)[1:])),
    "EVENT-2": (
        "pool",
        changed(P, "_tell_stored", lambda f: lambda self, text, chosen, first, *a: f(self, text, chosen, 0, *a)),
    ),
    "EVENT-3": ("pool", changed(P, "_tell_removed", lambda f: lambda self, block, keys: f(self, block, keys[::-1]))),
    "EVENT-4": ("pool", changed(P, "tell_hit", lambda f: lambda self, text, n, *a: f(self, text, n - 1, *a))),
    "SCALE-1": ("cache", changed(scaling, "span_tokens", lambda f: lambda group, cp, profile: group.block_tokens)),
    "SCALE-2": ("scaling", without(scaling, "refuse_unsupported")),
    "SCALE-3": ("cache", changed(scaling, "alignment_tokens", lambda f: lambda *a: 2 * f(*a))),
    "SCALE-4": ("cache", changed(scaling, "hash_tokens", lambda f: lambda *a: f(*a) // 2)),
    "SCALE-5": ("scaling", changed(scaling, "slot", lambda f: lambda p, span, ranks, turn: f(p, span, ranks, 1))),
    "SCALE-6": ("scaling", changed(scaling, "tokens_on_rank", lambda f: lambda n, *a: f(n + 1, *a))),
    "SCALE-7": ("scaling", changed(scaling, "whole_blocks", lambda f: groups.blocks_for)),
    "SCALE-8": ("scaling", changed(scaling, "lazy_target_blocks", lambda f: lambda *a: f(*a) // 2)),
    "WINDOW-1": ("cache", changed(groups, "skipped_tokens", lambda f: lambda group, n: f(group, n - 1) if n else 0)),
    "WINDOW-2": ("cache", without(C, "_release_skipped")),
    "HIT-1": ("cache", changed(groups, "needed_for_hit", lambda f: lambda group, span, n: range(n // span))),
    "HIT-2": ("cache", changed(groups, "proof_for_eagle", lambda f: lambda group, span, n: range(0))),
    "HIT-3": ("cache", changed(C, "lookup", _reads_anyway)),
    "HIT-4": ("cache", changed(C, "longest", _shorter_together)),
    "HIT-5": (
        "cache",
        changed(
            C, "proof_limit_of", lambda f: lambda self, t, n: n if f(self, t, n) > n else n + (len(self.groups) > 1)
        ),
    ),
    "HIT-6": ("cache", changed(C, "_hit_row", lambda f: lambda self, *a: f(self, *a)[:-1])),
    "HIT-7": ("cache", without(C, "_parting", 0)),
    "NEED-1": (
        "cache",
        changed(C, "blocks_needed", lambda f: lambda self, *a, capped=False: f(self, *a, capped=capped) + (not capped)),
    ),
    "NEED-2": ("cache", without(C, "is_fresh", False)),
    "NEED-3": ("cache", without(groups, "admission_cap")),
    "NEED-4": ("cache", without(C, "new_step")),
    "ALLOC-1": ("cache", without(C, "_refuse_nothing")),
    "ALLOC-2": ("cache", without(C, "_watermark", 0)),
    "ALLOC-3": ("cache", without(C, "_fits", True)),
    "ALLOC-4": ("cache", changed(C, "_slots", lambda f: lambda self, n, lookahead: f(self, n, 0))),
    "ALLOC-5": ("cache", changed(P, "touch", _twice)),
    "ALLOC-6": ("cache", changed(C, "_take_external", _takes_one_less)),
    "ALLOC-7": ("cache", changed(C, "_extend", lambda f: lambda self, r, n: f(self, r, n + min(self.spans)))),
    "ALLOC-8": ("cache", changed(C, "allocate", lambda f: lambda self, *a, reserved, **n: f(self, *a, **n))),
    "REG-1": (
        "cache",
        changed(C, "register", _only(lambda self, *a: len(self.groups) == 1, lambda f, self, r, n: f(self, r, n - 1))),
    ),
    "REG-2": ("cache", changed(groups, "worth_registering", UNMASKED)),
    "REG-3": ("cache", changed(C, "_registrable", lambda f: lambda self, n, i: n)),
    "REG-4": ("cache", without(C, "_boundaries", ())),
    "REG-5": ("cache", without(C, "_register_tail")),
    "FREE-1": ("cache", changed(C, "free", _in_order)),
    "FREE-2": ("cache", changed(C, "take", lambda f: lambda self, r: f(self, r)[::-1])),
    "FREE-3": ("cache", changed(D, "free", _always_at_once)),
    "FREE-4": ("cache", changed(D, "step_processed", _keeps_order)),
}
"""Clause -> what to run, and a defect of the model that only this clause notices."""

NEEDS: dict[str, Callable[[Profile], bool]] = {
    "POOL-9": lambda profile: profile.pins,
    "POOL-10": lambda profile: profile.pins,
    "POOL-11": lambda profile: profile.says_writable,
    "INDEX-3": lambda profile: profile.secondary_hashes,
    "INDEX-6": lambda profile: profile.moves_hashes,
    "EVENT-3": lambda profile: profile.secondary_hashes,
    "EVENT-4": lambda profile: profile.reports_hits,
    "HIT-7": lambda profile: profile.retains_shared_prefix,
    "NEED-2": lambda profile: profile.caches_every_state,
    "NEED-4": lambda profile: profile.caches_every_state,
    "ALLOC-2": lambda profile: profile.watermark,
    "ALLOC-8": lambda profile: profile.reserve,
    "REG-2": lambda profile: profile.masks_unreachable,
    "REG-3": lambda profile: profile.registers_aligned,
    "REG-4": lambda profile: profile.retention,
    "REG-5": lambda profile: profile.registers_tails,
    "FREE-2": lambda profile: profile.deferred_frees,
    "FREE-3": lambda profile: profile.deferred_frees,
    "FREE-4": lambda profile: profile.deferred_frees,
    "INDEX-2": lambda profile: profile.masks_unreachable,
}
"""Clauses that not every release can break."""


def test_every_clause_has_a_defect() -> None:
    modules = tuple(module.__name__ for module in (cache, groups, keys, pool, scaling))
    assert DEFECTS.keys() == {clause.id for clause in CLAUSES.values() if clause.where.startswith(modules)}


@pytest.mark.parametrize("clause", DEFECTS)
def test_the_defect_breaks_its_clause_and_no_other(clause: str, profile: Profile, monkeypatch: Patch) -> None:
    from strategies import core

    level, plant = DEFECTS[clause]
    plant(monkeypatch)
    if level == "scaling":
        with pytest.raises(ClauseBroken) as broken:
            core.compare_scaling(profile)
        seen = {broken.value.clause.id}
    else:
        monkeypatch.setattr(core, "FINDINGS_MAX", 5)
        seen = {finding.clause for finding in core.run(level, 60_000, seed=3).findings}
    assert seen == ({clause} if NEEDS.get(clause, lambda profile: True)(profile) else set())
