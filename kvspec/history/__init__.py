"""What can be done with a recorded history: tell it in words, minimise it."""

from collections.abc import Sequence

from kvspec.ops import EngineSetup, History, in_words

MOVES = (
    "moves: c compute, s store, l load stream, t copy thread, h host, each with its rank; . the engine goes on; "
    "+ - a copy is early or split, or isn't"
)
"""What the letters of a schedule mean (see kvspec.device.adversary)."""


def _setup_in_words(setup: EngineSetup) -> str:
    """Say a setup in one line: ``engine: gpu blocks 11, cpu blocks 8, …, async scheduling``."""
    words = []
    for field in setup.__struct_fields__:
        value, name = getattr(setup, field), field.replace("_", " ")
        if isinstance(value, tuple):
            words.append(f"{name} {' + '.join(map(str, value))}")
        elif not isinstance(value, bool):
            words.append(f"{name} {value}")
        elif value:
            words.append(name)
    return "engine: " + ", ".join(words)


def story(history: History, schedules: Sequence[str] = ()) -> list[str]:
    """Tell a history in words, one line per op.

    The adversary's moves stand under the ops that prescribe them; with ``schedules`` (one per op, and one for
    the drain), under all.
    """
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
