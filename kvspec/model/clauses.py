"""The registry of clauses: every sentence of the model that an implementation can break, by its id.

A clause is the docstring of the function that computes it::

    POOL-2. Blocks are taken from the head of the free queue, in order.

    Anything that a reader needs besides.

    Source: vLLM 0.33.0, v1/core/block_pool.py, BlockPool.get_new_blocks.
    Releases: all.

``agree`` holds the two sides of an equality together and names the clause when they differ.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

_CLAUSE = re.compile(
    r"(?P<id>[A-Z]+-\d+)\. (?P<sentence>.+?)\n\n(?:(?P<text>.+)\n\n)?"
    r"Source: (?P<source>.+?)\nReleases: (?P<releases>.+?)\.?\s*\Z",
    re.DOTALL,
)
_F = TypeVar("_F", bound=Callable[..., Any])


class Clause(NamedTuple):
    """One sentence of the specification."""

    id: str
    sentence: str
    text: str
    """What its docstring says besides, as it is written there; empty for nothing."""
    source: str
    """Where the released code does it: release, file, function."""
    releases: str
    where: str
    """The function of the model that computes it."""


CLAUSES: dict[str, Clause] = {}


def clause(function: _F) -> _F:
    """Register the clause that the function's docstring states: id, sentence, Source, Releases."""
    text = inspect.getdoc(function)
    match = _CLAUSE.match(text or "")
    if match is None:
        raise ValueError(f"{function.__qualname__}: the docstring states no clause")
    fields = {name: " ".join(value.split()) for name, value in match.groupdict("").items()}
    fields["text"] = match["text"] or ""
    if fields["id"] in CLAUSES:
        raise ValueError(f"{fields['id']} is stated twice")
    where = f"{function.__module__}.{function.__qualname__}"
    CLAUSES[fields["id"]] = Clause(where=where, **fields)
    return function


class ClauseBroken(AssertionError):
    """The model and the implementation differ."""

    def __init__(self, clause_id: str, expect: object, actual: object) -> None:
        self.clause = CLAUSES[clause_id]
        self.expect = expect
        self.actual = actual
        super().__init__(
            f"{clause_id}. {self.clause.sentence}\n"
            f"  model:          {expect!r}\n"
            f"  implementation: {actual!r}\n"
            f"  source: {self.clause.source}"
        )

    def difference(self) -> str:
        """Say in one line how they differ. Of two lists of one length, only the first item that differs."""
        expect, actual, where = self.expect, self.actual, ""
        while isinstance(expect, Sequence) and isinstance(actual, Sequence) and len(expect) == len(actual) > 0:
            if isinstance(expect, str | bytes):
                break
            index = next(i for i, pair in enumerate(zip(expect, actual, strict=True)) if pair[0] != pair[1])
            expect, actual, where = expect[index], actual[index], f"{where}[{index}]"
        return f"{where + ': ' if where else ''}the model says {expect!r}, the implementation {actual!r}"


def agree(clause_id: str, expect: object, actual: object) -> None:
    """Raise ClauseBroken unless the two are equal."""
    if expect != actual:
        raise ClauseBroken(clause_id, expect, actual)
