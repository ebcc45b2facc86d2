"""What can be done with a recorded history: tell it in words, minimise it."""

from collections.abc import Sequence
from typing import Any

from kvspec.model.coarse import CoarseOp
from kvspec.model.offload_ops import OffloadHistory, offload_history_from_json
from kvspec.model.ops import CoreHistory, core_history_from_json
from kvspec.ops import History, Op, history_from_json, in_words, level_of

AnyHistory = History | CoreHistory | OffloadHistory
"""A history of any level."""
AnyOp = Op | CoarseOp
"""An op of any level."""

MOVES = (
    "moves: c compute, s store, l load stream, t copy thread, h host, each with its rank; . the engine goes on; "
    "+ - a copy is early or split, or isn't"
)
"""What the letters of a schedule mean (see kvspec.device.adversary)."""


def read_history(data: bytes) -> AnyHistory:
    """Read a history of any level. ValueError that says what is wrong, and where, if it isn't one."""
    match level_of(data):
        case "engine":
            return history_from_json(data)
        case "core":
            return core_history_from_json(data)
        case "offload":
            return offload_history_from_json(data)
        case other:
            raise ValueError(f"not a history: there is no level {other!r}; there are engine, core and offload")


def story(history: AnyHistory, schedules: Sequence[str] = ()) -> list[str]:
    """Tell a history in words, one line per op.

    The adversary's moves stand under the ops that prescribe them; with ``schedules`` (one per op, and one for
    the drain), under all.
    """
    if not isinstance(history, History):
        ops = [f"{i}. {_fields_in_words(op)}" for i, op in enumerate(history.ops, 1)]
        return [_setup_in_words(history.setup), *ops]
    prescribed = [getattr(op, "schedule", None) for op in history.ops]
    moves = list(schedules) or prescribed
    lines = [_setup_in_words(history.setup), f"adversary: {history.adversary}, seed {history.seed}"]
    if any(moves):
        lines.append(MOVES)
    for index, text in enumerate(
        [*map(in_words, history.ops), "the end: everything in flight completes"][: max(len(moves), len(history.ops))]
    ):
        lines.append(f"{index + 1}. {text}")
        if index < len(moves) and moves[index] is not None:
            lines.append(f"     moves: {moves[index] or 'none'}")
    return lines


def _setup_in_words(setup: Any) -> str:
    """Say a setup in one line: ``engine: gpu blocks 11, cpu blocks 8, …, async scheduling``."""
    return f"{setup.__struct_config__.tag or 'engine'}: {_values_in_words(setup)}"


def _fields_in_words(op: CoarseOp) -> str:
    """Say an op as those of its fields that aren't as usual: ``free: pick 3, count 2``."""
    usual = type(op)()
    values = ", ".join(
        f"{name.replace('_', ' ')} {getattr(op, name)}"
        for name in op.__struct_fields__
        if getattr(op, name) != getattr(usual, name)
    )
    return f"{op.__struct_config__.tag}: {values}" if values else str(op.__struct_config__.tag)


def _values_in_words(struct: Any) -> str:
    words = []
    for field in struct.__struct_fields__:
        value, name = getattr(struct, field), field.replace("_", " ")
        if value == ():
            continue
        if isinstance(value, tuple):
            words.append(f"{name} {' + '.join(map(str, value))}")
        elif not isinstance(value, bool):
            words.append(f"{name} {value}")
        elif value:
            words.append(name)
    return ", ".join(words)
