"""Who runs next: the scheduler of everything that is asynchronous.

At every *yield point* (a place where the host has just made a call) the adversary may advance any *actor* —
a stream, the copy thread of a worker, the host loop of a rank in another process — by any number of units.
Which, and how often, is the only nondeterminism in a world, so a history with its adversary's choices replays
exactly.

A schedule is written as a string of moves: ``c0`` advances the compute stream of rank 0 by one unit, ``l``
the load stream, ``s`` the store stream, ``t`` the copy thread, ``h`` the host of a rank; ``.`` returns to the
host although something could still run; ``+`` and ``-`` answer a yes/no question (whether a copy reads its
source early, whether it is split). Example: ``c0c0.t0.s0+``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Protocol

MOVE = re.compile(r"[a-z]\d+|[.+-]")
"""One move of a schedule."""


class Actor(Protocol):
    """Something that runs by itself."""

    code: str
    """One letter and the rank, unique in a world: ``c0``, ``l0``, ``s1`` …"""

    def enabled(self) -> bool:
        """Whether the actor can make a step now."""

    def advance(self) -> None:
        """Make one step."""


class Adversary:
    """Chooses moves and writes them down; subclasses say how."""

    def __init__(self) -> None:
        self._moves: list[str] = []

    def begin_op(self, seed: int) -> None:
        """Start the choices of one op.

        They depend on ``seed`` alone, so that an op can be dropped without moving the others'.
        """

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        """Return the actor to advance by one unit, or None to let the host go on."""
        raise NotImplementedError

    def pick_while_blocked(self, enabled: Sequence[Actor]) -> Actor:
        """Return the actor to advance while the host can't go on (``enabled`` isn't empty)."""
        return self.pick(enabled) or enabled[0]

    def answer(self) -> bool:
        """Answer a yes/no question about how an operation runs."""
        raise NotImplementedError

    def yield_to(self, actors: Sequence[Actor]) -> None:
        """Yield point: advance actors until the adversary returns to the host."""
        enabled = [actor for actor in actors if actor.enabled()]
        while enabled:
            chosen = self.pick(enabled)
            if chosen is None:
                self._moves.append(".")
                return
            self._moves.append(chosen.code)
            chosen.advance()
            enabled = [actor for actor in actors if actor.enabled()]

    def block(self, actors: Sequence[Actor], done: Callable[[], bool]) -> bool:
        """The host waits for ``done``. Return False if nothing is left that could make it true."""
        while not done():
            enabled = [actor for actor in actors if actor.enabled()]
            if not enabled:
                return False
            chosen = self.pick_while_blocked(enabled)
            self._moves.append(chosen.code)
            chosen.advance()
        return True

    def run_dry(self, actors: Sequence[Actor]) -> None:
        """Let everything that is asynchronous come to its end."""
        self.block(actors, lambda: False)

    def decide(self) -> bool:
        """Answer a question of the device and write the answer down."""
        answer = self.answer()
        self._moves.append("+" if answer else "-")
        return answer

    def take_schedule(self) -> str:
        """Return the moves since the last call, as a schedule string."""
        schedule = "".join(self._moves)
        self._moves.clear()
        return schedule


class FairAdversary(Adversary):
    """Everything asynchronous happens at once, in the order of the actors; copies read in stream order."""

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        return enabled[0]

    def answer(self) -> bool:
        return False


class SlowAdversary(Adversary):
    """Nothing asynchronous happens but while the host waits: a step is over before the transfers that it began."""

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        return None

    def answer(self) -> bool:
        return False


class RandomAdversary(Adversary):
    """Advances a random actor, with a laziness drawn per op: from nearly prompt to hardly ever."""

    LAZINESS = (0.2, 0.5, 0.8, 0.95)

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0).random
        self._laziness = 0.5

    def begin_op(self, seed: int) -> None:
        rng = random.Random(seed)
        self._random = rng.random
        self._laziness = self.LAZINESS[int(rng.random() * len(self.LAZINESS))]

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        draw = self._random()
        if draw < self._laziness:
            return None
        return enabled[int((draw - self._laziness) / (1 - self._laziness) * len(enabled))]

    def pick_while_blocked(self, enabled: Sequence[Actor]) -> Actor:
        return enabled[int(self._random() * len(enabled))]

    def answer(self) -> bool:
        return self._random() < 0.5


class PctAdversary(Adversary):
    """Probabilistic concurrency testing: fixed priorities, but for about ``depth`` changes in ``horizon_ops`` ops.

    The enabled actor with the highest priority always runs; the host has a priority too, and actors below it
    run only while it is blocked. A bug that needs d ordering constraints is hit with a probability that falls
    with the (d-1)th power of the history's length, not exponentially (Burckhardt et al., ASPLOS 2010). Here a
    change point falls on the beginning of an op.
    """

    HOST = "host"

    def __init__(self, seed: int, depth: int, horizon_ops: int = 24) -> None:
        super().__init__()
        if depth < 0 or horizon_ops < 1:
            raise ValueError(f"depth must be >= 0 and horizon_ops >= 1, got {depth} and {horizon_ops}")
        self._seed = seed
        self._change_probability = min(1.0, depth / horizon_ops)
        self._priorities: dict[str, float] = {}
        self._random = random.Random(seed).random

    def _priority(self, code: str) -> float:
        priority = self._priorities.get(code)
        if priority is None:
            priority = self._priorities[code] = random.Random(f"{self._seed}:{code}").random()
        return priority

    def begin_op(self, seed: int) -> None:
        """Perhaps demote one of those known so far, the host included, below all the others."""
        self._random = draw = random.Random((self._seed << 64) + seed).random
        changes, which, how_far = draw() < self._change_probability, draw(), draw()
        if changes and self._priorities:
            known = sorted(self._priorities)
            demoted = known[int(which * len(known))]
            self._priorities[demoted] = how_far * min(self._priorities.values())

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        highest = max(enabled, key=lambda actor: self._priority(actor.code))
        return highest if self._priority(highest.code) > self._priority(self.HOST) else None

    def pick_while_blocked(self, enabled: Sequence[Actor]) -> Actor:
        return max(enabled, key=lambda actor: self._priority(actor.code))

    def answer(self) -> bool:
        return self._random() < 0.5


class ReplayAdversary(Adversary):
    """Repeats a schedule string. A move that doesn't fit, or that is missing, returns to the host."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        moves = MOVE.findall(schedule)
        if "".join(moves) != schedule:
            raise ValueError(f"not a schedule: {schedule!r}; it is made of moves like 'c0', and of '.', '+' and '-'")
        self._prescribed = moves[::-1]

    def pick(self, enabled: Sequence[Actor]) -> Actor | None:
        if not self._prescribed:
            return None
        move = self._prescribed.pop()
        return next((actor for actor in enabled if actor.code == move), None)

    def answer(self) -> bool:
        return bool(self._prescribed) and self._prescribed.pop() == "+"
