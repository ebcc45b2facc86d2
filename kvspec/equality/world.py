"""Couples the two sides: one op in, compared; until the first difference."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvspec import laws
from kvspec.equality.cache import CachePair
from kvspec.equality.index import IndexPair
from kvspec.equality.pool import PoolPair
from kvspec.equality.steps import StepPair
from kvspec.equality.tier import TierPair
from kvspec.errors import SetupRefused
from kvspec.laws import Violation
from kvspec.model import offload_ops, ops
from kvspec.model.clauses import ClauseBroken
from kvspec.model.coarse import CoarseOp
from kvspec.model.offload_ops import OffloadHistory
from kvspec.model.ops import CoreHistory
from kvspec.model.profile import known_issues, profile_for
from kvspec.model.scaling import Unsupported
from kvspec.model.step_ops import StepSetup
from kvspec.targets.vllm import core as target
from kvspec.world import Outcome, innermost_frame

PairHistory = CoreHistory | OffloadHistory
Setup = ops.CoreSetup | offload_ops.TierSetup | offload_ops.IndexSetup


class Pair(Protocol):
    """The two sides of an equality."""

    reached: Counter[str]

    def apply(self, op: Any) -> None:
        """Apply an op to both and compare. ClauseBroken if they differ."""

    def state(self) -> Any:
        """Return what tells one run of a history from another that differs."""


_PAIRS: dict[type, Callable[..., Pair]] = {
    ops.PoolSetup: PoolPair,
    ops.CacheSetup: CachePair,
    StepSetup: StepPair,
    offload_ops.TierSetup: TierPair,
    offload_ops.IndexSetup: IndexPair,
}


def history_of(name: str, setup: Setup, steps: Sequence[CoarseOp] = ()) -> PairHistory:
    """Return the history of a target's pair."""
    if isinstance(setup, offload_ops.TierSetup | offload_ops.IndexSetup):
        return OffloadHistory(name, setup, tuple(steps))  # type: ignore[arg-type]
    return CoreHistory(name, setup, tuple(steps))  # type: ignore[arg-type]


def pair_for(history: PairHistory, avoid: frozenset[str] | None = None) -> Pair:
    """Return a new pair for a history, with the implementation that is importable."""
    return _PAIRS[type(history.setup)](history.setup, profile_for(target.release()), avoid)


def replay(history: PairHistory, avoid: frozenset[str] | None = None) -> Counter[str]:
    """Apply a history to a new pair and return what it reached. ClauseBroken if there is a difference."""
    pair = pair_for(history, avoid)
    for op in history.ops:
        pair.apply(op)
    return pair.reached


def difference(history: PairHistory, avoid: frozenset[str] | None = None) -> str | None:
    """Return the clause that a history breaks, or the exception that it causes; None for neither."""
    try:
        replay(history, avoid)
    except ClauseBroken as broken:
        return broken.clause.id
    except Exception as error:  # whatever the implementation raises is a finding
        return type(error).__name__
    return None


class EqualityWorld:
    """A real and a modelled object, side by side from their start to the first difference.

    SetupRefused for a setup that the release doesn't run.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        self.alive = True
        self._name = name
        self._setup = setup
        self._ops: list[CoarseOp] = []
        self._outcome = Outcome()
        self._trace = hashlib.blake2b(digest_size=16)
        self._pair: Pair | None = None
        self._guard("start", self._start)

    def _start(self) -> None:
        try:
            self._pair = pair_for(self.history())
        except Unsupported as error:
            raise SetupRefused(f"{target.release()} doesn't run this setup: {error}") from error

    def apply(self, op: CoarseOp) -> None:
        """Apply an op to both sides and compare. Does nothing after the first difference."""
        if not self.alive or self._pair is None:
            return
        self._ops.append(op)
        self._outcome.steps += 1
        pair = self._pair
        self._guard(str(op.__struct_config__.tag), lambda: pair.apply(op))
        self._trace.update(repr(pair.state()).encode())

    def finish(self) -> Outcome:
        """Return what was seen."""
        if self._pair is not None:
            self._outcome.reached = +self._pair.reached
        self._outcome.trace = self._trace.hexdigest()
        return self._outcome

    def history(self) -> PairHistory:
        """Return what has happened, as data."""
        return history_of(self._name, self._setup, self._ops)

    def _guard(self, kind: str, run: Any) -> None:
        try:
            run()
        except ClauseBroken as broken:
            self._end(broken.clause.id, broken.difference(), kind, self._cause(broken.clause.id))
        except Exception as error:
            frame = innermost_frame(error, target.own_files())
            if frame is None:
                raise
            self._end(laws.CRASH, f"{type(error).__name__}: {error}", kind, self._cause(type(error).__name__) or frame)

    def _cause(self, seen: str) -> str:
        """Return the known issue that causes a difference, or nothing if there is one without any.

        Of several, one that causes it alone; else the first. ``seen``: the clause, or the name of the exception.
        """
        known = known_issues(profile_for(target.release()).release)
        suspects = [issue for issue in self._setup.shows if issue in known]
        if not suspects or difference(self.history(), known) is not None:
            return ""
        alone = (issue for issue in suspects if difference(self.history(), known - {issue}) == seen)
        return next(alone, suspects[0])

    def _end(self, law: str, message: str, kind: str, place: str) -> None:
        self.alive = False
        self._outcome.violations.append(Violation(law, message, kind, place, len(self._ops) - 1))


def run_history(history: PairHistory) -> Outcome:
    """Let a recorded history happen again, up to its first difference."""
    world = EqualityWorld(history.target, history.setup)
    for op in history.ops:
        world.apply(op)
    return world.finish()
