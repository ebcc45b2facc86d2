"""What the levels of an equality have in common: coarse ops, and how their setups and histories are read.

A field of a coarse op is a number of which nearly every value means something; see ``ops``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from kvspec.errors import refuse_outside
from kvspec.model.profile import KNOWN_ISSUES, Profile
from kvspec.ops import refuse_other_format

COARSE_FORMAT = 3
"""Of histories of the equalities. Format 2 showed one known issue at most; no request took its content from another."""

_NUMBER_MAX = 10_000
"""No number of an op is larger, or smaller than its negative."""


class CoarseOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    """A step of a history."""


def refuse_nonsense(setup: msgspec.Struct, limits: Mapping[str, tuple[int, int]]) -> None:
    """Raise ValueError if a number of a setup is outside its limits, or if there is no such known issue."""
    for name, (least, most) in limits.items():
        if name in setup.__struct_fields__:
            refuse_outside(name, getattr(setup, name), least, most)
    level = setup.__struct_config__.tag
    for shows in getattr(setup, "shows", ()):
        if shows not in {issue.id for issue in KNOWN_ISSUES if level in issue.levels}:
            raise ValueError(f"shows has {shows!r}; there is no such known issue of a {level}")


SHOWS = (0, 4**12 - 1)
"""Numbers worth drawing for the known issues that may show: a digit to the base 4 for each."""


def shown(profile: Profile, level: str, number: int) -> tuple[str, ...]:
    """Return the known issues of the release whose digits are 3.

    So one history of four shows a certain one: often enough to find a rare one, and those that show in nearly every
    history don't end all of them before.
    """
    issues = [issue.id for issue in KNOWN_ISSUES if level in issue.levels and issue.affects(profile.release)]
    return tuple(issue for place, issue in enumerate(issues) if number >> 2 * place & 3 == 3)


H = TypeVar("H", bound=msgspec.Struct)


def coarse_history_from_json(
    data: bytes,
    kind: type[H],
    allowed: Mapping[type, Any],
    ranges: Mapping[type[CoarseOp], Mapping[str, tuple[int, int]]],
    exact: Collection[str],
) -> H:
    """Read a history of coarse ops. ValueError that says what is wrong, and where, if it isn't one of this format.

    Args:
        data: JSON.
        kind: the type of history.
        allowed: type of a setup -> the ops that it goes with.
        ranges: op -> field -> numbers worth drawing.
        exact: fields that must be within their range; others mean something at nearly any number.
    """
    try:
        refuse_other_format(data, COARSE_FORMAT)
        history = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a history: {error}") from error
    read: Any = history
    for i, op in enumerate(read.ops):
        if not isinstance(op, allowed[type(read.setup)]):
            raise ValueError(f"op {i}: a {type(read.setup).__name__} has no {type(op).__name__}")
        for name, limits in ranges[type(op)].items():
            within = limits if name in exact else (-_NUMBER_MAX, _NUMBER_MAX)
            refuse_outside(f"op {i}: {name}", getattr(op, name), *within)
    return history
