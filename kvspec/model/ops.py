"""The steps of a history of the core: of a block pool, and of a KV cache manager.

Ops are coarse: where one names a block or a request it gives a number, which picks one of those that there
are. So every op means something at every point of a history, and any op can be left out. ``RANGES`` says
which numbers are worth drawing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from kvspec.errors import refuse_outside
from kvspec.model.coarse import COARSE_FORMAT, SHOWS, CoarseOp, coarse_history_from_json, refuse_nonsense, shown
from kvspec.model.groups import Group, Kind
from kvspec.model.profile import CheckpointEnd, Profile
from kvspec.model.step_ops import STEP_RANGES, STEP_WEIGHTS, StepOp, StepSetup

_LIMITS = {
    "blocks": (1, 4096),
    "hash_tokens": (1, 128),
    "ratio": (1, 16),
    "lookahead": (0, 16),
    "decode": (1, 8),
    "prefill": (1, 8),
    "max_tokens": (1, 65536),
    "in_flight_tokens": (1, 65536),
    "watermark_percent": (0, 100),
    "interval": (-1, 64),
    "unit": (0, 4096),
}
"""Least and most of each number of a setup."""


class PoolSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="of", tag="pool"):
    """A block pool with two groups: blocks of group 0 hold one hash block, those of group 1 ``ratio`` of
    them.
    """

    blocks: int = 10
    hash_tokens: int = 2
    ratio: int = 2
    caching: bool = True
    lookahead: int = 0
    events: bool = True
    shows: tuple[str, ...] = ()
    """The known issues that may show; all others of the release are kept out of the way, so that a history goes on
    behind them."""

    def __post_init__(self) -> None:
        refuse_nonsense(self, _LIMITS)


class Allocate(CoarseOp, frozen=True, tag="allocate"):
    """Take ``count`` new blocks."""

    count: int = 1


class Touch(CoarseOp, frozen=True, tag="touch"):
    """Add a reference to ``count`` of the blocks that can be found, or (``held``) that are held; the null
    block may be among them.
    """

    pick: int = 0
    count: int = 1
    held: int = 0
    null: int = 0


class Free(CoarseOp, frozen=True, tag="free"):
    """Release ``count`` of the references that are held, from the ``pick``-th on; ``step`` apart in their
    list.
    """

    pick: int = 0
    count: int = 1
    step: int = 1
    at_head: int = 0
    null: int = 0


class Register(CoarseOp, frozen=True, tag="register"):
    """Register ``count`` held blocks from the ``pick``-th on as the blocks ``first`` onwards of a text."""

    text: int = 0
    group: int = 0
    first: int = 0
    count: int = 1
    pick: int = 0
    nulls: int = 0
    """Bits: these blocks of the range are null; none if negative."""
    masked: int = 0
    """Bits: these blocks of the range are not wanted; no mask at all if 0 or negative."""


class RegisterTail(CoarseOp, frozen=True, tag="register-tail"):
    """Register a held block for a prefix of ``units`` hash blocks that ends inside it."""

    text: int = 0
    units: int = 1
    pick: int = 0
    replace: int = 0
    null: int = 0
    """The null block instead."""


class Find(CoarseOp, frozen=True, tag="find"):
    """Look a block of a text up, or (``known``) one that can be found, in group 0 or 1, or in both."""

    text: int = 0
    index: int = 0
    groups: int = 0
    known: int = 0


class MoveHashes(CoarseOp, frozen=True, tag="move-hashes"):
    """Move the hashes of a held block to another one that has none."""

    pick: int = 0
    to: int = 0


class Evict(CoarseOp, frozen=True, tag="evict"):
    """Evict ``count`` blocks from an id on; ids that the pool hasn't got are possible."""

    first: int = 0
    count: int = 1


class Unpin(CoarseOp, frozen=True, tag="unpin"):
    """Release ``count`` of the references that are held, and go on reading."""

    pick: int = 0
    count: int = 1


class TellHit(CoarseOp, frozen=True, tag="tell-hit"):
    """Record the event that the first ``count`` blocks of a text were hit."""

    text: int = 0
    group: int = 0
    count: int = 1


class Reset(CoarseOp, frozen=True, tag="reset"):
    """Reset the prefix cache; first (``empty``) release all that is held, so that it isn't refused."""

    empty: int = 0


class TakeEvents(CoarseOp, frozen=True, tag="take-events"):
    """Take the recorded events."""


PoolOp = (
    Allocate | Touch | Free | Register | RegisterTail | Find | MoveHashes | Evict | Unpin | TellHit | Reset | TakeEvents
)

TEXTS = 8
_PICK = (0, 30)
_BIT = (0, 1)

RANGES: dict[type[CoarseOp], dict[str, tuple[int, int]]] = {
    Allocate: {"count": (0, 5)},
    Touch: {"pick": _PICK, "count": (1, 3), "held": _BIT, "null": _BIT},
    Free: {"pick": _PICK, "count": (1, 5), "step": (1, 3), "at_head": _BIT, "null": _BIT},
    Register: {
        "text": (0, TEXTS - 1),
        "group": _BIT,
        "first": (0, 3),
        "count": (0, 3),
        "pick": _PICK,
        "nulls": (-9, 7),
        "masked": (-9, 7),
    },
    RegisterTail: {"text": (0, TEXTS - 1), "units": (1, 7), "pick": _PICK, "replace": _BIT, "null": (-4, 1)},
    Find: {"text": (0, TEXTS - 1), "index": (0, 7), "groups": (0, 2), "known": _BIT},
    MoveHashes: {"pick": _PICK, "to": _PICK},
    Evict: {"first": (0, 12), "count": (1, 3)},
    Unpin: {"pick": _PICK, "count": (1, 2)},
    TellHit: {"text": (0, TEXTS - 1), "group": _BIT, "count": (0, 4)},
    Reset: {"empty": _BIT},
    TakeEvents: {},
}
"""Op -> field -> (smallest, largest) number worth drawing."""


WEIGHTS: dict[type[CoarseOp], int] = {
    Allocate: 20,
    Touch: 8,
    Free: 20,
    Register: 24,
    RegisterTail: 14,
    Find: 8,
    MoveHashes: 3,
    Evict: 2,
    Unpin: 4,
    TellHit: 2,
    Reset: 3,
    TakeEvents: 4,
}
"""Op -> how often it is drawn, relative to the others."""


class CacheSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="of", tag="cache"):
    """A KV cache manager."""

    groups: tuple[Group, ...] = (Group(Kind.FULL, 4),)
    blocks: int = 14
    caching: bool = True
    decode: int = 1
    """Decode context parallel size."""
    prefill: int = 1
    """Prefill context parallel size."""
    max_tokens: int = 64
    in_flight_tokens: int = 16
    watermark_percent: int = 0
    interval: int = -1
    """Sparse retention, in units of the alignment; -1 for none."""
    unit: int = 0
    """Tokens of a hash block; 0 for as many as possible."""
    junctions: bool = False
    """Mamba states are asked for where a request parts from an earlier one."""
    eagle_fallback: bool = False
    """EAGLE without a group that is marked: then every group drops a block."""
    shows: tuple[str, ...] = ()
    """The known issues that may show; all others of the release are kept out of the way, so that a history goes on
    behind them."""

    def __post_init__(self) -> None:
        refuse_nonsense(self, _LIMITS)
        refuse_outside("the number of groups", len(self.groups), 1, 8)


class Arrive(CoarseOp, frozen=True, tag="arrive"):
    """A request arrives: ``shared`` times 4 tokens of the trunk, or an earlier prompt, then ``tail`` of branch
    ``branch``. A small ``content`` picks adapter, images, salt; else they are those of the earlier prompt, or none.
    """

    shared: int = 0
    tail: int = 0
    branch: int = 0
    content: int = 0
    reads_cache: int = 1
    again: int = 0
    """If positive: the prompt of the request that came so many before takes the place of the trunk."""


class Schedule(CoarseOp, frozen=True, tag="schedule"):
    """Schedule a request for up to ``tokens`` tokens, and ``drafts`` if that is all of it."""

    pick: int = 0
    tokens: int = 1
    drafts: int = 0
    lookahead: int = 0
    external: int = 0
    """Of a request that holds nothing: this many tokens after the hit come from elsewhere."""
    delay: int = 0
    """They come asynchronously: nothing is computed now."""
    must_fit: int = 0
    reserved: int = 0
    others_run: int = 0
    in_flight: int = 0
    """So many of its computed tokens are still in flight."""
    stop: int = 0
    """With a Mamba group in align mode the chunk ends at the end of a block (1), of a hash block (2), of one before the
    prompt's last token (3), where the request parts from an earlier one (4), if it reaches that; else (0) anywhere. If
    the group keeps checkpoints, it ends where vLLM's scheduler ends it.
    """


class Output(CoarseOp, frozen=True, tag="output"):
    """A request says ``tokens`` more tokens, and ``rejected`` drafts are taken back."""

    pick: int = 0
    tokens: int = 1
    rejected: int = 0


class Preempt(CoarseOp, frozen=True, tag="preempt"):
    """Preempt a request."""

    pick: int = 0


class Finish(CoarseOp, frozen=True, tag="finish"):
    """A request ends; its last step is still in flight (``deferred``) or not."""

    pick: int = 0
    deferred: int = 0


class StepProcessed(CoarseOp, frozen=True, tag="step-processed"):
    """The output of the oldest step in flight is processed."""


class NewStep(CoarseOp, frozen=True, tag="new-step"):
    """A new step begins."""


CacheOp = Arrive | Schedule | Output | Preempt | Finish | StepProcessed | NewStep | Evict | Reset | TakeEvents

RANGES |= {
    Arrive: {
        "shared": (0, 10),
        "tail": (-5, 9),
        "branch": (0, 2),
        "content": (0, 319),
        "reads_cache": (0, 5),
        "again": (-4, 12),
    },
    Schedule: {
        "pick": _PICK,
        "tokens": (0, 40),
        "drafts": (-4, 3),
        "lookahead": (-4, 3),
        "external": (-12, 24),
        "delay": _BIT,
        "must_fit": (-3, 1),
        "reserved": (-12, 3),
        "others_run": _BIT,
        "in_flight": (-6, 6),
        "stop": (0, 4),
    },
    Output: {"pick": _PICK, "tokens": (1, 3), "rejected": (-2, 2)},
    Preempt: {"pick": _PICK},
    Finish: {"pick": _PICK, "deferred": _BIT},
    StepProcessed: {},
    NewStep: {},
}

WEIGHTS |= {Arrive: 12, Schedule: 30, Output: 14, Preempt: 3, Finish: 9, StepProcessed: 4, NewStep: 16}


RANGES |= STEP_RANGES
WEIGHTS |= STEP_WEIGHTS

CoreSetup = PoolSetup | CacheSetup | StepSetup
CoreOp = PoolOp | CacheOp | StepOp


class CoreHistory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="level", tag="core"):
    """What happened to one block pool, KV cache manager or scheduler. Enough to let it happen again."""

    target: str
    """``vllm-core@0.33.0``; without a release, the vLLM that was importable."""
    setup: CoreSetup
    ops: tuple[CoreOp, ...]
    format: int = COARSE_FORMAT


def pool_setup(
    profile: Profile, *, blocks: int, ratio: int, caching: int, lookahead: int, events: int, shows: int
) -> PoolSetup:
    """Return the setup that some coarse numbers mean for a release."""
    return PoolSetup(
        blocks=blocks,
        ratio=ratio,
        caching=caching > 0,
        lookahead=lookahead if profile.lookahead_hashes and lookahead < 3 else 0,
        events=events > 0,
        shows=shown(profile, "pool", shows),
    )


POOL_SETUP_RANGES = {
    "blocks": (1, 12),
    "ratio": (1, 3),
    "caching": (0, 6),
    "lookahead": (0, 6),
    "events": (0, 6),
    "shows": SHOWS,
}

INSIDE_FAMILIES = ("FA2", "F2A2", "A2F", "FA2W", "F2F2A2")
"""Families whose hits can end inside blocks, some only with hash blocks that are smaller than all blocks."""

FAMILIES = (
    *("F", "W", "C", "M", "FW", "F2W", "WF2", "FC", "FM", "FWW", "FF2", "WW2", "WWW2"),
    *("FF2W", "FWF2", "A", "FA", "AF", "F2A"),
    *INSIDE_FAMILIES * 2,
)
"""Kinds of attention, a letter for each group (A: Mamba in align mode), and 2 where its blocks are twice as long."""

_KINDS = {"F": Kind.FULL, "W": Kind.SLIDING_WINDOW, "C": Kind.CHUNKED_LOCAL, "M": Kind.MAMBA, "A": Kind.MAMBA}


def cache_setup(
    profile: Profile,
    *,
    family: int,
    block_tokens: int,
    reach: int,
    eagle: int,
    blocks: int,
    caching: int,
    ranks: int,
    in_flight: int,
    watermark: int,
    interval: int,
    unit: int,
    junctions: int,
    checkpoint_unit: int,
    shows: int,
) -> CacheSetup:
    """Return the setup that some coarse numbers mean for a release: one that the release accepts."""
    letters = FAMILIES[family]
    checkpoint_unit = 0 if profile.checkpoint_end is CheckpointEnd.NOWHERE else max(0, checkpoint_unit)
    size = 2 * block_tokens
    groups: list[Group] = []
    for index, letter in enumerate(letters):
        if letter == "2":
            groups[-1] = replace(groups[-1], block_tokens=2 * size)
            continue
        window = (2 + (reach + 3 * index) % 9) * (1 if reach < 9 else 6)
        chunk = size * (1 + reach % 3)
        length = {"W": window, "C": chunk}.get(letter, 0)
        draft = 0 < eagle < 8 and bool(eagle >> len(groups) & 1) and letter not in "CMA" and "C" not in letters
        spares = reach % 3 if letter == "A" else 0
        unit_of_group = checkpoint_unit if letter == "A" else 0
        groups.append(Group(_KINDS[letter], size, length, draft, True, letter == "A", spares, unit_of_group))
    issues = shown(profile, "cache", shows)
    kinds = set(letters) - {"2"}
    spreads = kinds == {"F"} and (len(groups) == 1 or profile.cp_with_several_groups)
    sparse = (profile.retention and "W" in letters) or (profile.retains_states_sparsely and set("MA") & set(letters))
    keeps = any(group.checkpoint_unit for group in groups)
    caches = (caching > 0 or keeps) and (profile.caches_every_state or "M" not in letters)
    equal_spans = "M" in kinds and caches and profile.caches_every_state_if_spans_are_equal
    replicates = "F" in kinds and kinds <= set("FMA") and profile.cp_with_several_groups and not equal_spans
    may_be_smaller = profile.hits_inside and "A2" in letters and all(group.block_tokens > size for group in groups)
    return CacheSetup(
        groups=tuple(groups),
        blocks=6 + blocks * len(groups) // block_tokens,
        caching=caches,
        decode=1 + (ranks & 1) if ranks > 0 and (spreads or (replicates and ranks < 2)) else 1,
        prefill=1 + (ranks >> 1 & 1) if spreads and ranks > 0 else 1,
        in_flight_tokens=8 << in_flight,
        watermark_percent=5 * max(0, watermark),
        interval=max(interval, -1) if sparse else -1,
        unit=(0, size, size, size // 2)[unit] if may_be_smaller else 0,
        junctions=junctions > 0 and profile.registers_junctions and "A" in letters,
        eagle_fallback=eagle == 8 and "C" not in letters,
        shows=issues,
    )


CACHE_SETUP_RANGES = {
    "family": (0, len(FAMILIES) - 1),
    "block_tokens": (1, 2),
    "reach": (0, 17),
    "eagle": (-8, 8),
    "blocks": (2, 28),
    "caching": (0, 9),
    "ranks": (-4, 3),
    "in_flight": (0, 3),
    "watermark": (-4, 2),
    "interval": (-3, 2),
    "unit": (0, 3),
    "junctions": (0, 1),
    "checkpoint_unit": (-2, 2),
    "shows": SHOWS,
}


def core_history_from_json(data: bytes) -> CoreHistory:
    """Read a history. ValueError that says what is wrong, and where, if it isn't one of this format."""
    allowed: dict[type, Any] = {PoolSetup: PoolOp, CacheSetup: CacheOp, StepSetup: StepOp}
    return coarse_history_from_json(data, CoreHistory, allowed, RANGES, exact=("text", "group", "groups"))
