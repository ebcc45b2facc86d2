"""Make a history short and simple while it still shows the same finding.

Delta debugging on ops, then on the fields of each op and of the setup, to a fixpoint. It knows nothing of
targets and laws: ``shows(history)`` says whether the finding is still there. It doesn't reorder ops and
doesn't invent new ones, except that neighbouring steps are joined.

Deterministic: which candidates are tried depends on the history and on the answers alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from kvspec.device.adversary import MOVE
from kvspec.history import AnyHistory, AnyOp
from kvspec.ops import History, Step

Candidates = Callable[[AnyHistory], Iterator[AnyHistory]]


def minimise(
    history: AnyHistory, shows: Callable[[AnyHistory], bool], spent: Callable[[], bool] = lambda: False
) -> AnyHistory:
    """Return the simplest history found for which ``shows`` is true; ``history`` itself must be one.

    Before each candidate ``spent()`` is asked; once it is true, the best so far is returned. In the end
    requests are renamed, unless their names matter.
    """
    return _Search(history, shows, spent).run()


def pinned(history: History, schedules: Sequence[str]) -> History:
    """Write the adversary's moves into the ops, so that a replay doesn't depend on what a seed means."""
    ops = tuple(
        replace(op, seed=0, schedule=schedule) if "schedule" in op.__struct_fields__ else op
        for op, schedule in zip(history.ops, schedules, strict=False)
    )
    return replace(history, ops=ops + history.ops[len(ops) :])


class _Spent(Exception):
    pass


class _Search:
    """Greedy descent: take any simpler candidate that still shows the finding, until none does."""

    def __init__(self, history: AnyHistory, shows: Callable[[AnyHistory], bool], spent: Callable[[], bool]) -> None:
        self._best = history
        self._shows = shows
        self._spent = spent
        self._tried: set[bytes] = set()

    def run(self) -> AnyHistory:
        try:
            before = None
            while before != self._best:
                before = self._best
                self._drop_ops()
                for candidates in (_simpler_histories, _joined_steps, _simpler_ops, _without_two_ops):
                    self._descend(candidates)
        except _Spent:
            pass
        renamed = _renamed(self._best)
        return renamed if self._shows(renamed) else self._best

    def _takes(self, candidate: AnyHistory) -> bool:
        fingerprint = msgspec.json.encode(candidate)
        if candidate == self._best or fingerprint in self._tried:
            return False
        if self._spent():
            raise _Spent
        self._tried.add(fingerprint)
        if not self._shows(candidate):
            return False
        self._best = candidate
        return True

    def _drop_ops(self) -> None:
        """Delta debugging: leave out ever smaller runs of ops, from the end."""
        size = max(1, len(self._best.ops) // 2)
        while True:
            end = len(self._best.ops)
            while end > 0:
                start = max(0, end - size)
                ops = self._best.ops
                self._takes(replace(self._best, ops=ops[:start] + ops[end:]))
                end = start
            if size == 1:
                return
            size = size // 2

    def _descend(self, candidates: Candidates) -> None:
        """Start anew with each success; a candidate that failed before is not tried again."""
        while any(self._takes(candidate) for candidate in candidates(self._best)):
            pass


def _simpler_histories(history: AnyHistory) -> Iterator[AnyHistory]:
    """The adversary and the setup, all at once and then one field at a time."""
    if isinstance(history, History):
        for adversary in ("fair", "random"):
            if history.adversary == adversary:
                break
            yield replace(history, adversary=adversary, seed=0)
        yield replace(history, seed=0)
    yield replace(history, setup=type(history.setup)())
    for field in msgspec.structs.fields(history.setup):
        with suppress(ValueError):  # The default may not go with another field: a block size with an interleave.
            yield replace(history, setup=replace(history.setup, **{field.name: field.default}))


def _simpler_ops(history: AnyHistory) -> Iterator[AnyHistory]:
    for index, op in enumerate(history.ops):
        for simpler in _simpler_op(op):
            yield _with_ops(history, index, index + 1, simpler)


def _simpler_op(op: AnyOp) -> Iterator[AnyOp]:
    """The op with one field nearer to its default."""
    for field in msgspec.structs.fields(op):
        if field.required:
            continue
        for value in _simpler_values(field.name, getattr(op, field.name), field.default):
            yield replace(op, **{field.name: value})


def _simpler_values(name: str, value: Any, default: Any) -> Iterator[Any]:
    """Values nearer to the default, the nearest first. A schedule gets shorter instead of going."""
    if name == "schedule" and value:
        yield from _shorter_schedules(value)
    elif name != "schedule" and value != default:
        yield default
        if isinstance(value, int) and not isinstance(value, bool):
            distance = value - default
            while abs(distance) > 1:
                distance = int(distance / 2)
                yield value - distance


def _shorter_schedules(schedule: str) -> Iterator[str]:
    moves = MOVE.findall(schedule)
    size = len(moves)
    while size:
        for end in range(len(moves), 0, -size):
            yield "".join(moves[: max(0, end - size)] + moves[end:])
        size //= 2


def _joined_steps(history: AnyHistory) -> Iterator[AnyHistory]:
    for index, (op, following) in enumerate(zip(history.ops, history.ops[1:], strict=False)):
        if isinstance(op, Step) and isinstance(following, Step):
            schedule = (op.schedule or "") + (following.schedule or "") or op.schedule
            joined = replace(op, count=op.count + following.count, schedule=schedule)
            yield _with_ops(history, index, index + 2, joined)


def _without_two_ops(history: AnyHistory) -> Iterator[AnyHistory]:
    """Two ops that are only needed for each other, such as a request that fills what another one empties."""
    ops = history.ops
    for second in range(len(ops) - 1, 0, -1):
        for first in range(second - 1, -1, -1):
            yield replace(history, ops=ops[:first] + ops[first + 1 : second] + ops[second + 1 :])


def _renamed(history: AnyHistory) -> AnyHistory:
    """Call the requests A, B, C, … in the order in which they appear."""
    names: dict[str, str] = {}

    def rename(op: AnyOp) -> AnyOp:
        values: dict[str, str] = {}
        for field in ("request", "continues"):
            if name := getattr(op, field, None):
                values[field] = names.setdefault(name, _letters(len(names)))
        return replace(op, **values)

    return replace(history, ops=tuple(rename(op) for op in history.ops))


def _letters(index: int) -> str:
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"


def _with_ops(history: AnyHistory, start: int, end: int, *ops: AnyOp) -> AnyHistory:
    return replace(history, ops=history.ops[:start] + ops + history.ops[end:])
