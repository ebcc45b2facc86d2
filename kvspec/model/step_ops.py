"""The steps of a history of the scheduler: requests, engine steps, and what clients and operators do in between."""

from __future__ import annotations

import msgspec

from kvspec.model.coarse import SHOWS, CoarseOp, refuse_nonsense, shown
from kvspec.model.profile import Profile

_LIMITS = {
    "blocks": (2, 4096),
    "block_tokens": (2, 64),
    "step_tokens": (2, 4096),
    "running_max": (2, 64),
    "stages": (1, 4),
    "drafts": (0, 4),
}
"""Least and most of each number of a setup."""


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
    draft_model: bool = False
    """A draft model makes them, whose keys and values have slots of their own."""
    defers: bool = False
    """Blocks that a step in flight may still write are released after it, as for a connector that loads."""
    priority: bool = False
    shows: tuple[str, ...] = ()
    """The known issues that may show; all others of the release are kept out of the way, so that a history goes on
    behind them."""

    def __post_init__(self) -> None:
        refuse_nonsense(self, _LIMITS)


class Submit(CoarseOp, frozen=True, tag="submit"):
    """A request arrives: ``shared`` tokens of the trunk, then ``tail`` of its own; it says up to ``says`` tokens."""

    shared: int = 0
    tail: int = 1
    says: int = 1
    priority: int = 0


class EngineStep(CoarseOp, frozen=True, tag="step"):
    """The engine makes ``count`` steps; ``accepted`` decides how many drafts are accepted."""

    count: int = 1
    accepted: int = 0


class AbortOne(CoarseOp, frozen=True, tag="abort-one"):
    """The client of a request goes away."""

    pick: int = 0


class ResetAll(CoarseOp, frozen=True, tag="reset-all"):
    """The prefix cache is reset; with ``running`` what runs is preempted for it."""

    running: int = 1


StepOp = Submit | EngineStep | AbortOne | ResetAll

STEP_RANGES: dict[type[CoarseOp], dict[str, tuple[int, int]]] = {
    Submit: {"shared": (0, 12), "tail": (1, 8), "says": (1, 9), "priority": (0, 2)},
    EngineStep: {"count": (1, 3), "accepted": (0, 999)},
    AbortOne: {"pick": (0, 30)},
    ResetAll: {"running": (0, 1)},
}
"""Op -> field -> (smallest, largest) number worth drawing."""

STEP_WEIGHTS: dict[type[CoarseOp], int] = {Submit: 10, EngineStep: 26, AbortOne: 2, ResetAll: 7}
"""Op -> how often it is drawn, relative to the others."""


def step_setup(
    profile: Profile,
    *,
    blocks: int,
    step_tokens: int,
    running_max: int,
    asynchronous: int,
    stages: int,
    drafts: int,
    draft_model: int,
    defers: int,
    priority: int,
    shows: int,
) -> StepSetup:
    """Return the setup that some coarse numbers mean for a release: a small pool, and a way in which steps overlap.

    With several stages and synchronous scheduling there are no drafts: whether vLLM means to run them isn't known, and
    the executor here may propose them earlier than real workers would.
    """
    return StepSetup(
        blocks=(7, 9, 12, 20)[blocks],
        step_tokens=(6, 16, 48)[step_tokens],
        running_max=2 * running_max,
        asynchronous=asynchronous > 0,
        stages=(1, 2, 2, 3)[stages],
        drafts=(0, 0, 1, 3)[drafts] if asynchronous > 0 or not stages else 0,
        draft_model=draft_model > 0,
        defers=defers > 0 and profile.deferred_frees,
        priority=priority > 0,
        shows=shown(profile, "scheduler", shows),
    )


STEP_SETUP_RANGES = {
    "blocks": (0, 3),
    "step_tokens": (0, 2),
    "running_max": (1, 2),
    "asynchronous": (-2, 4),
    "stages": (0, 3),
    "drafts": (0, 3),
    "draft_model": (0, 1),
    "defers": (0, 1),
    "priority": (-1, 1),
    "shows": SHOWS,
}
