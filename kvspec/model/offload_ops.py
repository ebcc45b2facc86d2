"""The steps of a history of OffloadingConnector's CPU tier, and of its scheduler side.

Ops are coarse, like those in ``ops``: where one names a request it gives a number, which picks one of those that there
are. So every op means something at every point of a history, and any op can be left out.
"""

from __future__ import annotations

import msgspec

from kvspec.model.ops import CoarseOp, History


class TierSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CPU tier."""

    slots: int = 4
    policy: str = "lru"


class Come(CoarseOp, frozen=True, tag="come"):
    """A request comes, whose text has ``shared`` chunks of the trunk, then ``own`` of branch ``branch``; two groups."""

    shared: int
    own: int
    branch: int


class LookUp(CoarseOp, frozen=True, tag="look-up"):
    """Look a request's ``index``-th key up."""

    pick: int
    index: int


class Offer(CoarseOp, frozen=True, tag="offer"):
    """Offer ``count`` keys of a request to be stored, from the ``first``-th on."""

    pick: int
    first: int
    count: int


class EndStore(CoarseOp, frozen=True, tag="end-store"):
    """One of the stores in flight ends; it has failed if ``failed`` is above 0."""

    pick: int
    failed: int


class Load(CoarseOp, frozen=True, tag="load"):
    """Load those of ``count`` keys of a request that can be loaded, from the ``first``-th on; or (``any_key`` above 0)
    the first of them, whether it can be loaded or not.
    """

    pick: int
    first: int
    count: int
    any_key: int


class EndLoad(CoarseOp, frozen=True, tag="end-load"):
    """One of the loads in flight ends."""

    pick: int


class TouchKeys(CoarseOp, frozen=True, tag="touch-keys"):
    """Count ``count`` keys of a request as used, from the ``first``-th on."""

    pick: int
    first: int
    count: int


class Leave(CoarseOp, frozen=True, tag="leave"):
    """A request ends."""

    pick: int


class ResetTier(CoarseOp, frozen=True, tag="reset-tier"):
    """Drop everything; what is in flight isn't reported any more."""


class TakeTierEvents(CoarseOp, frozen=True, tag="take-tier-events"):
    """Take the recorded events."""


TierOp = Come | LookUp | Offer | EndStore | Load | EndLoad | TouchKeys | Leave | ResetTier | TakeTierEvents

_PICK = (0, 30)
_FIRST = (0, 9)

TIER_RANGES: dict[type[CoarseOp], dict[str, tuple[int, int]]] = {
    Come: {"shared": (0, 4), "own": (0, 4), "branch": (0, 2)},
    LookUp: {"pick": _PICK, "index": _FIRST},
    Offer: {"pick": _PICK, "first": _FIRST, "count": (0, 5)},
    EndStore: {"pick": _PICK, "failed": (-4, 1)},
    Load: {"pick": _PICK, "first": _FIRST, "count": (1, 5), "any_key": (-9, 1)},
    EndLoad: {"pick": _PICK},
    TouchKeys: {"pick": _PICK, "first": _FIRST, "count": (0, 6)},
    Leave: {"pick": _PICK},
    ResetTier: {},
    TakeTierEvents: {},
}
"""Op -> field -> (smallest, largest) number worth drawing."""

TIER_WEIGHTS: dict[type[CoarseOp], int] = {
    Come: 12,
    Offer: 30,
    EndStore: 24,
    LookUp: 6,
    Load: 12,
    EndLoad: 10,
    TouchKeys: 10,
    Leave: 8,
    ResetTier: 1,
    TakeTierEvents: 6,
}
"""Op -> how often it is drawn, relative to the others."""


class TierHistory(History, frozen=True):
    """What happened to one CPU tier."""

    setup: TierSetup
    ops: tuple[TierOp, ...]


def tier_from_json(data: bytes) -> TierHistory:
    """Read a history of a CPU tier. ValueError if it isn't one."""
    return msgspec.json.decode(data, type=TierHistory)
