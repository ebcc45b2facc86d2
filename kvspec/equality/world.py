"""Couples the two sides: one op in, compared; until the first difference."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvspec import laws
from kvspec.equality.cache import CachePair
from kvspec.equality.pool import PoolPair
from kvspec.equality.steps import StepPair
from kvspec.laws import Violation
from kvspec.model import ops
from kvspec.model.clauses import ClauseBroken
from kvspec.model.ops import CoreHistory, CoreOp
from kvspec.model.profile import Profile, known_issues, profile_for
from kvspec.model.step_ops import StepSetup
from kvspec.targets.vllm import core as target
from kvspec.world import Outcome, innermost_frame

EVENTS = {
    "evicted": "a block that could be found was reused",
    "equal-blocks": "two blocks were registered under the same key",
    "held-again": "a free block was touched",
    "shared": "a block had two holders",
    "refused": "a call was refused",
    "found": "a look-up found something",
    "left-out": "a null or masked block was left out of a registration",
    "tail-registered": "a block was registered for a prefix that ends inside it",
    "promoted": "a block that was registered for a prefix inside it was filled",
    "hashes-moved": "the hashes of a block were moved",
    "reused-while-read": "a reader was told that its block is reused",
    "reset": "the prefix cache was reset",
    "reset-several-hashes": "a reset dropped a block's several hashes",
    "reset-refused": "a reset was refused",
    "hit": "a request took over blocks that it had found",
    "content": "a request arrived with an adapter, images or a salt",
    "hit-inside": "a hit ended inside a block",
    "copied": "a block was copied because its request goes on inside it",
    "parted": "full attention's hit was longer than the other groups'",
    "external": "a request took over tokens that came from elsewhere",
    "left-window": "a request gave up blocks that it didn't read any more",
    "refused-by-reserve": "a step was refused although there were enough free blocks",
    "preempted": "a request was preempted",
    "steps-overlap": "two steps were in flight between steps",
    "reset-in-flight": "running requests were preempted by a reset while a step was in flight",
    "deferred": "the release of blocks waited for a step in flight",
}
"""What a run can reach -> what it is. A known issue that shortens or skips a step is counted as ``known:ID``."""


_ALWAYS = {"evicted", "held-again", "refused", "reset"}


POOL_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(_ALWAYS | {"equal-blocks", "shared", "found", "left-out"}, lambda profile: True),
    **dict.fromkeys({"tail-registered", "promoted"}, lambda profile: profile.secondary_hashes),
    "hashes-moved": lambda profile: profile.moves_hashes,
    "reused-while-read": lambda profile: profile.pins,
}
"""Events that a run of the pool must reach -> whether a release can."""


CACHE_REQUIRED: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(
        _ALWAYS | {"hit", "external", "left-window", "preempted", "reset-refused", "content"}, lambda profile: True
    ),
    "parted": lambda profile: profile.retains_shared_prefix,
    **dict.fromkeys({"hit-inside", "copied"}, lambda profile: profile.hits_inside),
    "refused-by-reserve": lambda profile: profile.reserve,
    "deferred": lambda profile: profile.deferred_frees,
}
"""Events that a run of the cache must reach -> whether a release can."""

STEPS_REQUIRED: dict[str, Callable[[Profile], bool]] = dict.fromkeys(
    ("preempted", "reset", "reset-refused", "reset-in-flight", "steps-overlap"), lambda profile: True
)
"""Events that a run of the scheduler must reach -> whether a release can."""


def pair_for(history: CoreHistory, avoid: frozenset[str] | None = None) -> PoolPair | CachePair | StepPair:
    """Return a new pair for a history, with the implementation that is importable."""
    profile = profile_for(target.release())
    if isinstance(history.setup, ops.PoolSetup):
        return PoolPair(history.setup, profile, avoid)
    if isinstance(history.setup, StepSetup):
        return StepPair(history.setup)
    return CachePair(history.setup, profile, avoid)


def replay(history: CoreHistory, avoid: frozenset[str] | None = None) -> Counter[str]:
    """Apply a history to a new pair and return what it reached. ClauseBroken if there is a difference."""
    pair = pair_for(history, avoid)
    for op in history.ops:
        pair.apply(op)  # type: ignore[arg-type]
    return pair.reached


def difference(history: CoreHistory, avoid: frozenset[str] | None = None) -> str | None:
    """Return the clause that a history breaks, or the exception that it causes; None for neither."""
    try:
        replay(history, avoid)
    except ClauseBroken as broken:
        return broken.clause.id
    except Exception as error:  # whatever the implementation raises is a finding
        return type(error).__name__
    return None


class EqualityWorld:
    """One block pool or KV cache manager, real and modelled, from its start to the first difference."""

    def __init__(self, name: str, setup: ops.CoreSetup) -> None:
        self.alive = True
        self._name = name
        self._setup = setup
        self._ops: list[CoreOp] = []
        self._outcome = Outcome()
        self._trace = hashlib.blake2b(digest_size=16)
        self._pair: PoolPair | CachePair | StepPair | None = None
        self._guard("start", self._start)

    def _start(self) -> None:
        self._pair = pair_for(CoreHistory(self._name, self._setup, ()))

    def apply(self, op: CoreOp) -> None:
        """Apply an op to both sides and compare. Does nothing after the first difference."""
        if not self.alive or self._pair is None:
            return
        self._ops.append(op)
        self._outcome.steps += 1
        pair: Any = self._pair
        self._guard(str(op.__struct_config__.tag), lambda: pair.apply(op))
        self._trace.update(repr(pair.state()).encode())

    def finish(self) -> Outcome:
        """Return what was seen."""
        if self._pair is not None:
            self._outcome.reached = +self._pair.reached
        self._outcome.trace = self._trace.hexdigest()
        return self._outcome

    def history(self) -> CoreHistory:
        """Return what has happened, as data."""
        return CoreHistory(self._name, self._setup, tuple(self._ops))

    def _guard(self, kind: str, run: Any) -> None:
        try:
            run()
        except ClauseBroken as broken:
            self._end(broken.clause.id, broken.difference(), kind, self._cause())
        except Exception as error:
            frame = innermost_frame(error, target.own_files())
            if frame is None:
                raise
            self._end(laws.CRASH, f"{type(error).__name__}: {error}", kind, frame)

    def _cause(self) -> str:
        """Return the known issue without which there is no difference, or nothing if there is one anyway."""
        if self._setup.avoids_known:
            return ""
        issues = sorted(known_issues(profile_for(target.release()).release))
        for count in range(1, len(issues) + 1):
            if difference(self.history(), frozenset(issues[:count])) is None:
                return issues[count - 1]
        return ""

    def _end(self, law: str, message: str, kind: str, place: str) -> None:
        self.alive = False
        self._outcome.violations.append(Violation(law, message, kind, place, len(self._ops) - 1))


def run_history(history: CoreHistory) -> Outcome:
    """Let a recorded history happen again, up to its first difference."""
    world = EqualityWorld(history.target, history.setup)
    for op in history.ops:
        world.apply(op)
    return world.finish()
