"""A request, and what a lookup says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvspec.model.keys import Text


@dataclass
class Request:
    """What the manager needs to know about a request. Its owner keeps it up to date."""

    name: str
    text: Text
    prompt_tokens: int
    computed: int = 0
    """Tokens that have their keys and values, or will have when what is in flight has run; drafts
    included.
    """
    in_flight: int = 0
    """Those of them whose step hasn't been processed yet."""
    reads_cache: bool = True
    waiting: bool = True
    """Not running: new, or preempted."""
    shared_prefix: int = 0
    """What the last lookup said about where this request parts from an earlier one; 0 for nothing."""
    last_step: int = 0
    """The last step that it was scheduled in."""


class Hit(NamedTuple):
    """What a lookup has found. It holds no references: the blocks can be gone before they are used."""

    blocks: tuple[list[int], ...]
    tokens: int
    shared_prefix: int
    """The longest hit of the first group alone, if the others cut it short; else 0."""
