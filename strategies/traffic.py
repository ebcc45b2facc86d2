"""What clients and operators do to an engine, drawn from a seed.

Hypothesis draws few and coarse things: a setup, a mix of ops, the seeds of bursts. A burst is a handful of ops,
which a seeded generator chooses with an eye on what the engine is doing: aborts hit requests that live, prompts
repeat or continue what was said. A Hypothesis draw costs as much as several engine steps; this way it buys about
ten.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from kvspec.ops import Abort, Add, Advance, Finish, Op, Reset, Settle, Step
from kvspec.world import World

T = TypeVar("T")

SEEDS = st.integers(0, 2**32 - 1)
PROMPTS = (
    (4, 1),
    (8, 0),
    (8, 1),
    (9, 0),
    (12, 0),
    (12, 1),
    (12, 5),
    (16, 0),
    (16, 1),
    (20, 0),
    (20, 1),
    (24, 0),
    (24, 1),
    (28, 3),
    (0, 6),
    (0, 17),
)
"""(tokens of a shared text, tokens of its own): below, at and above block edges."""
OUTPUTS = (1, 1, 2, 5, 9)
STEPS = (1, 1, 1, 2, 3, 5, 8)
OPS_PER_BURST = 12


@dataclass(frozen=True)
class Mix:
    """How often each kind of op is drawn; 0 is never. Drawn once per history, so that histories differ in kind."""

    add: int = 4
    again: int = 3
    onward: int = 1
    step: int = 8
    abort: int = 1
    finish: int = 1
    reset_gpu: int = 1
    reset_all: int = 1
    advance: int = 1
    settle: int = 1


_SOME = (0, 1, 1, 3)
MIXES: dict[str, tuple[Any, ...]] = {
    "add": (2, 4, 6),
    "again": (0, 1, 3, 6),
    "onward": _SOME,
    "step": (4, 8, 12),
    "abort": _SOME,
    "finish": _SOME,
    "reset_gpu": _SOME,
    "reset_all": _SOME,
    "advance": _SOME,
    "settle": _SOME,
}
"""Mixes in which any kind but adding and stepping may be missing."""


def drawn(make: Callable[..., T], choices: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[T]:
    """Let Hypothesis draw each argument of ``make`` from its choices."""
    return st.builds(make, **{name: st.sampled_from(values) for name, values in choices.items()})


def mixes() -> st.SearchStrategy[Mix]:
    """Draw a mix."""
    return drawn(Mix, MIXES)


class Traffic:
    """The ops of one history, burst by burst."""

    def __init__(self, mix: Mix, world: World) -> None:
        self._longest = world.longest_request
        self._world = world
        self._adds: list[Add] = []
        draws: dict[str, Callable[[random.Random], Op | None]] = {
            "add": self._add,
            "again": self._again,
            "onward": self._onward,
            "step": lambda rng: Step(rng.choice(STEPS), rng.getrandbits(16)),
            "abort": self._abort,
            "finish": self._finish,
            "reset_gpu": lambda rng: Reset(running=rng.random() < 0.5),
            "reset_all": lambda rng: Reset(running=rng.random() < 0.5, connector=True),
            "advance": lambda rng: Advance(rng.getrandbits(16)),
            "settle": lambda rng: Settle(),
        }
        self._draws = list(draws.values())
        self._weights = list(accumulate(getattr(mix, name) for name in draws))

    def burst(self, seed: int) -> Iterator[Op]:
        """Yield the ops of a burst; each must be applied before the next is drawn."""
        rng = random.Random(seed)
        for _ in range(OPS_PER_BURST if self._world.alive else 0):
            (draw,) = rng.choices(self._draws, cum_weights=self._weights)
            op = draw(rng)
            if op is not None:
                yield op

    def _name(self) -> str:
        return f"r{len(self._adds)}"

    def _keep(self, op: Add) -> Add:
        self._adds.append(op)
        return op

    def _add(self, rng: random.Random) -> Op | None:
        shared, tail = rng.choice(PROMPTS)
        max_tokens = min(rng.choice(OUTPUTS), self._longest - shared - tail)
        if max_tokens < 1:
            return None
        odd = rng.random()
        return self._keep(
            Add(
                self._name(),
                shared=shared,
                tail=tail,
                max_tokens=max_tokens,
                trunk=rng.choice((0, 0, 1, 2)),
                branch=rng.randrange(2),
                salt=1 if odd < 0.03 else 0,
                reads_cache=odd < 0.97,
                priority=rng.randrange(3),
            )
        )

    def _again(self, rng: random.Random) -> Op | None:
        """A prompt that was there before."""
        before = self._before(rng)
        return before and self._keep(replace(before, request=self._name(), reads_cache=True, priority=0))

    def _onward(self, rng: random.Random) -> Op | None:
        """A prompt that begins with a whole conversation so far."""
        before = self._before(rng)
        return before and self._keep(
            Add(
                self._name(),
                continues=before.request,
                tail=rng.choice((0, 1, 3, 5)),
                max_tokens=rng.choice((1, 4)),
                salt=before.salt,
            )
        )

    def _before(self, rng: random.Random) -> Add | None:
        return rng.choice(self._adds[-4:]) if self._adds else None

    def _abort(self, rng: random.Random) -> Op | None:
        """Abort a request; one that is loading, if there is one, three times in four: loads are short."""
        live = (self._world.loading() if rng.random() < 0.75 else None) or self._world.live()
        return Abort(rng.choice(live), in_step=rng.random() < 0.4) if live else None

    def _finish(self, rng: random.Random) -> Op | None:
        live = self._world.live()
        return Finish(rng.choice(live)) if live else None
