"""The steps of a history of the scheduler: requests, engine steps, and what clients and operators do in between."""

from __future__ import annotations

from random import Random

import msgspec

from kvspec.errors import refuse_outside
from kvspec.model.coarse import CoarseOp


class StepSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="of", tag="scheduler"):
    """An engine's scheduler without a connector, with one full-attention group."""

    blocks: int = 9
    block_tokens: int = 4
    step_tokens: int = 16
    running_max: int = 4
    asynchronous: bool = True
    stages: int = 1
    """Pipeline-parallel size: so many steps are in flight, one more with asynchronous scheduling where that works."""
    drafts: int = 0
    """Draft tokens of each step."""
    priority: bool = False
    avoids_known: bool = True
    """Whether known issues of the release are kept out of the way; there are none that this could meet."""

    def __post_init__(self) -> None:
        for name, most in {"blocks": 4096, "block_tokens": 64, "step_tokens": 4096, "running_max": 64}.items():
            refuse_outside(name, getattr(self, name), 2, most)
        refuse_outside("stages", self.stages, 1, 4)
        refuse_outside("drafts", self.drafts, 0, 4)


class Submit(CoarseOp, frozen=True, tag="submit"):
    """A request arrives: ``shared`` tokens of the trunk, then ``tail`` of its own; it says up to ``most`` tokens."""

    shared: int = 0
    tail: int = 1
    most: int = 1
    priority: int = 0


class EngineStep(CoarseOp, frozen=True, tag="step"):
    """The engine makes ``count`` steps; ``accepted`` decides how many drafts are accepted."""

    count: int = 1
    accepted: int = 0


class GiveUp(CoarseOp, frozen=True, tag="give-up"):
    """A client goes away."""

    pick: int = 0


class ResetAll(CoarseOp, frozen=True, tag="reset-all"):
    """The prefix cache is reset; with ``running`` what runs is preempted for it."""

    running: int = 1


StepOp = Submit | EngineStep | GiveUp | ResetAll

STEP_RANGES: dict[type[CoarseOp], dict[str, tuple[int, int]]] = {
    Submit: {"shared": (0, 12), "tail": (1, 8), "most": (1, 9), "priority": (0, 2)},
    EngineStep: {"count": (1, 3), "accepted": (0, 999)},
    GiveUp: {"pick": (0, 30)},
    ResetAll: {"running": (0, 1)},
}
"""Op -> field -> (smallest, largest) number worth drawing."""

STEP_WEIGHTS: dict[type[CoarseOp], int] = {Submit: 10, EngineStep: 26, GiveUp: 2, ResetAll: 7}
"""Op -> how often it is drawn, relative to the others."""


def draw_step_setup(random: Random) -> StepSetup:
    """Draw a setup: a small pool, and every way in which steps overlap.

    With several stages and synchronous scheduling there are no drafts: a worker proposes them before the engine knows
    the token that they follow, and what vLLM makes of that isn't described anywhere.
    """
    asynchronous, stages = random.random() < 0.7, random.choice((1, 2, 2, 3))
    return StepSetup(
        blocks=random.choice((7, 9, 12, 20)),
        step_tokens=random.choice((6, 16, 48)),
        running_max=random.choice((2, 4)),
        asynchronous=asynchronous,
        stages=stages,
        drafts=random.choice((0, 0, 1, 3)) if asynchronous or stages == 1 else 0,
        priority=random.random() < 0.3,
    )
