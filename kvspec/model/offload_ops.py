"""The steps of a history of OffloadingConnector's CPU tier, and of its scheduler side.

Ops are coarse, like those in ``ops``: where one names a request it gives a number, which picks one of those that there
are. So every op means something at every point of a history, and any op can be left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from kvspec.errors import refuse_outside
from kvspec.model.coarse import COARSE_FORMAT, SHOWS, CoarseOp, coarse_history_from_json, refuse_nonsense, shown
from kvspec.model.groups import Group, Kind
from kvspec.model.profile import DraftTail, Profile, StoreMask

_LIMITS = {
    "slots": (1, 4096),
    "chunk_blocks": (1, 16),
    "gpu_blocks": (2, 4096),
    "step_tokens": (1, 65536),
    "running_max": (1, 256),
    "drafts": (0, 8),
}
"""Least and most of each number of a setup."""
_POLICIES = ("lru", "arc")


def _refuse_nonsense(setup: TierSetup | IndexSetup) -> None:
    refuse_nonsense(setup, _LIMITS)
    if setup.policy not in _POLICIES:
        raise ValueError(f"{setup.policy!r} is no policy; there are {' and '.join(_POLICIES)}")


class TierSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="of", tag="tier"):
    """A CPU tier."""

    slots: int = 4
    policy: str = "lru"
    shows: tuple[str, ...] = ()
    """The known issues that may show; all others of the release are kept out of the way, so that a history goes on
    behind them."""

    def __post_init__(self) -> None:
        _refuse_nonsense(self)


class Come(CoarseOp, frozen=True, tag="come"):
    """A request comes, whose text has ``shared`` chunks of the trunk, then ``own`` of branch ``branch``; two groups."""

    shared: int = 0
    own: int = 0
    branch: int = 0


class LookUp(CoarseOp, frozen=True, tag="look-up"):
    """Look a request's ``index``-th key up."""

    pick: int = 0
    index: int = 0


class Offer(CoarseOp, frozen=True, tag="offer"):
    """Offer ``count`` keys of a request to be stored, from the ``first``-th on."""

    pick: int = 0
    first: int = 0
    count: int = 1


class EndStore(CoarseOp, frozen=True, tag="end-store"):
    """One of the stores in flight ends; it has failed if ``failed`` is above 0."""

    pick: int = 0
    failed: int = 0


class Load(CoarseOp, frozen=True, tag="load"):
    """Load those of ``count`` keys of a request that can be loaded, from the ``first``-th on; or (``any_key`` above 0)
    the first of them, whether it can be loaded or not.
    """

    pick: int = 0
    first: int = 0
    count: int = 1
    any_key: int = 0


class EndLoad(CoarseOp, frozen=True, tag="end-load"):
    """One of the loads in flight ends."""

    pick: int = 0


class TouchKeys(CoarseOp, frozen=True, tag="touch-keys"):
    """Count ``count`` keys of a request as used, from the ``first``-th on."""

    pick: int = 0
    first: int = 0
    count: int = 1


class Leave(CoarseOp, frozen=True, tag="leave"):
    """A request ends."""

    pick: int = 0


class ResetTier(CoarseOp, frozen=True, tag="reset-tier"):
    """Drop everything; what is in flight isn't reported any more."""


class TakeTierEvents(CoarseOp, frozen=True, tag="take-tier-events"):
    """Take the recorded events."""


TierOp = Come | LookUp | Offer | EndStore | Load | EndLoad | TouchKeys | Leave | ResetTier | TakeTierEvents

_PICK = (0, 30)
_FIRST = (0, 9)

RANGES: dict[type[CoarseOp], dict[str, tuple[int, int]]] = {
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

WEIGHTS: dict[type[CoarseOp], int] = {
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


def tier_setup(profile: Profile, *, slots: int, arc: int, shows: int) -> TierSetup:
    """Return the setup that some coarse numbers mean for a release."""
    return TierSetup(slots, "arc" if arc > 0 else "lru", shows=shown(profile, "tier", shows))


TIER_SETUP_RANGES = {"slots": (1, 9), "arc": (0, 1), "shows": SHOWS}


class IndexSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="of", tag="index"):
    """An engine with OffloadingConnector and a CPU tier."""

    groups: tuple[Group, ...] = (Group(Kind.FULL, 4),)
    chunk_blocks: int = 1
    gpu_blocks: int = 20
    slots: int = 4
    policy: str = "lru"
    step_tokens: int = 16
    running_max: int = 3
    asynchronous: bool = False
    prompt_only: bool = False
    drafts: int = 0
    """Tokens that a draft model proposes for each step; its layers are in the groups marked ``eagle``, if any is."""
    shows: tuple[str, ...] = ()
    """The known issues that may show; all others of the release are kept out of the way, so that a history goes on
    behind them."""

    def __post_init__(self) -> None:
        _refuse_nonsense(self)
        refuse_outside("the number of groups", len(self.groups), 1, 4)
        for group in self.groups:
            if group.kind not in (Kind.FULL, Kind.SLIDING_WINDOW):
                raise ValueError(f"{group}: only full attention and sliding windows are compared")


class Begin(CoarseOp, frozen=True, tag="begin"):
    """Add a request: ``shared`` times 4 tokens of the trunk, then ``own`` of branch ``branch``.

    It says ``says`` tokens. ``params`` picks its ``kv_transfer_params``.
    """

    shared: int = 0
    own: int = 0
    branch: int = 0
    says: int = 1
    params: int = 0
    reads_cache: int = 1


class MakeSteps(CoarseOp, frozen=True, tag="make-steps"):
    """Make ``count`` steps."""

    count: int = 1


class EndTransfer(CoarseOp, frozen=True, tag="end-transfer"):
    """One of the transfers in flight ends; it is reported with the next step."""

    pick: int = 0


class EndTransfers(CoarseOp, frozen=True, tag="end-transfers"):
    """All transfers in flight end."""


class AbortOne(CoarseOp, frozen=True, tag="abort-one"):
    """The client of a request goes away."""

    pick: int = 0


class ResetAll(CoarseOp, frozen=True, tag="reset-all"):
    """Reset the prefix cache, with what runs (``running`` above 0), and with the connector's (``connector``)."""

    running: int = 0
    connector: int = 0


IndexOp = Begin | MakeSteps | EndTransfer | EndTransfers | AbortOne | ResetAll

PARAMS: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"do_remote_decode": True},
    {"do_remote_decode": 1, "max_offload_tokens": 9},
    {"do_remote_decode": False},
    {"do_remote_decode": None, "do_remote_prefill": True},
    {"max_offload_tokens": 6},
    {"max_offload_tokens": -1},
)
"""``kv_transfer_params`` worth trying."""

RANGES |= {
    Begin: {
        "shared": (0, 8),
        "own": (-5, 9),
        "branch": (0, 2),
        "says": (1, 9),
        "params": (-8, len(PARAMS) - 1),
        "reads_cache": (0, 12),
    },
    MakeSteps: {"count": (1, 4)},
    EndTransfer: {"pick": _PICK},
    EndTransfers: {},
    AbortOne: {"pick": _PICK},
    ResetAll: {"running": (-1, 2), "connector": (-3, 1)},
}

WEIGHTS |= {Begin: 20, MakeSteps: 36, EndTransfer: 8, EndTransfers: 18, AbortOne: 3, ResetAll: 8}

INDEX_FAMILIES = ("F", "FW", "W", "F2W", "FW2", "FWW", "FWW2")
"""Kinds of attention, a letter for each group, and 2 where its blocks are twice as long."""


def index_setup(
    profile: Profile,
    *,
    family: int,
    reach: int,
    chunk_blocks: int,
    gpu_blocks: int,
    slots: int,
    arc: int,
    step_tokens: int,
    asynchronous: int,
    prompt_only: int,
    drafts: int,
    draft_groups: int,
    shows: int,
) -> IndexSetup:
    """Return the setup that some coarse numbers mean for a release: one that the release accepts."""
    letters = INDEX_FAMILIES[family] if profile.jobs_by_number else "F"
    if profile.store_mask is StoreMask.ALL:  # Up to 0.21 all groups have blocks of one size.
        letters = letters.replace("2", "")
    drafts = max(0, drafts) if profile.draft_tail is not DraftTail.NOWHERE else 0
    groups: list[Group] = []
    for index, letter in enumerate(letters):
        if letter == "2":
            groups[-1] = replace(groups[-1], block_tokens=8)
            continue
        eagle = drafts > 0 and bool(draft_groups >> len(groups) & 1)
        kind, window = (Kind.FULL, 0) if letter == "F" else (Kind.SLIDING_WINDOW, 2 + (reach + 5 * index) % 11)
        groups.append(Group(kind, 4, window, eagle))
    return IndexSetup(
        groups=tuple(groups),
        chunk_blocks=1 if "2" in letters else chunk_blocks,
        gpu_blocks=6 + gpu_blocks * len(groups),
        slots=slots * len(groups),
        policy="arc" if arc > 0 else "lru",
        step_tokens=8 << step_tokens,
        asynchronous=asynchronous > 0,
        prompt_only=prompt_only > 0,
        drafts=drafts,
        shows=shown(profile, "index", shows),
    )


INDEX_SETUP_RANGES = {
    "family": (0, len(INDEX_FAMILIES) - 1),
    "reach": (0, 10),
    "chunk_blocks": (1, 3),
    "gpu_blocks": (6, 20),
    "slots": (1, 24),
    "arc": (-2, 1),
    "step_tokens": (0, 3),
    "asynchronous": (-1, 1),
    "prompt_only": (-1, 1),
    "drafts": (-6, 3),
    "draft_groups": (0, 7),
    "shows": SHOWS,
}


class OffloadHistory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="level", tag="offload"):
    """What happened to one CPU tier, or to one engine with OffloadingConnector. Enough to let it happen again."""

    target: str
    """``vllm-offload-index@0.33.0``; without a release, the vLLM that was importable."""
    setup: TierSetup | IndexSetup
    ops: tuple[TierOp | IndexOp, ...]
    format: int = COARSE_FORMAT


def offload_history_from_json(data: bytes) -> OffloadHistory:
    """Read a history. ValueError that says what is wrong, and where, if it isn't one of this format."""
    allowed: dict[type, Any] = {TierSetup: TierOp, IndexSetup: IndexOp}
    return coarse_history_from_json(data, OffloadHistory, allowed, RANGES, exact=("branch", "params"))
