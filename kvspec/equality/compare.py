"""What the pairs have in common: comparisons, and what makes them impossible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvspec.model.clauses import agree
from kvspec.model.groups import Group
from kvspec.model.keys import BlockHash, Key
from kvspec.model.pool import NULL, BlockPool, Event, Removed, Stored
from kvspec.model.profile import Profile, known_issues
from kvspec.targets.vllm import core as target


class Setup(Protocol):
    """What all setups of a pair have."""

    @property
    def shows(self) -> tuple[str, ...]: ...


def avoided(setup: Setup, profile: Profile) -> frozenset[str]:
    """Return the known issues that a history must keep out of the way."""
    return known_issues(profile.release) - set(setup.shows)


class Known(Exception):
    """A known issue, named by its id, has made the two sides differ; from here on they can't be compared."""


class EndsAtKnown:
    """A pair of which nothing is compared after a known issue whose consequences the model can't say."""

    reached: Counter[str]
    over = False

    def apply(self, op: Any) -> None:
        """Apply an op. ClauseBroken if the two sides differ; whatever the implementation raises goes through."""
        if self.over:
            return
        try:
            self._apply(op)
        except Known as known:
            self.reached[f"known:{known}"] += 1
            self.over = True

    def _apply(self, op: Any) -> None:
        raise NotImplementedError


class Refused(NamedTuple):
    """A call raised."""

    error: str


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns, or that it was refused with ValueError or AssertionError."""
    try:
        return call(*arguments)
    except (ValueError, AssertionError) as error:
        return Refused(type(error).__name__)


_NEVER = b"a key that the implementation never had"


class Names:
    """Which hash of the implementation names which content: one to one in each group."""

    def __init__(self) -> None:
        self._names: dict[Key, bytes] = {}
        self._contents: dict[tuple[bytes, int], BlockHash] = {}

    def learn(self, group: int, expect: Sequence[BlockHash], actual: Sequence[bytes], hash_blocks: int = 1) -> None:
        """Check that the implementation's hashes of a text name the model's, and remember which.

        They are those of blocks of so many hash blocks.
        """
        agree("KEY-1" if hash_blocks == 1 else "KEY-3", len(expect), len(actual))
        for block_hash, name in zip(expect, actual, strict=True):
            known = self._contents.setdefault((name, group), block_hash)
            agree("KEY-2", block_hash, known)
            agree("KEY-2", self._names.setdefault(Key(block_hash, group), name), name)

    def of(self, key: Key) -> tuple[bytes, int]:
        """Return the implementation's form of a key, or what is no key if it never had one for that content."""
        return self._names.get(key, _NEVER), key.group

    def event(self, event: Event) -> target.RawEvent:
        """Return the implementation's form of an event. Extra keys are told without saying what they are."""
        if isinstance(event, Stored):
            names = tuple(self._told(Key(block_hash, event.group)) for block_hash in event.hashes)
            parent = None if event.parent is None else self._told(Key(event.parent, event.group))
            extras = tuple(
                tuple(extra[1:] if extra[0] == "image" else extra[1] for extra in block) for block in event.extras
            )
            rest = (event.tokens, event.block_tokens, event.group, extras, event.adapter, event.lookahead)
            return ("stored", names, parent, *rest)
        if isinstance(event, Removed):
            return ("removed", self._told(event.key), event.key.group)
        return ("cleared",)

    def _told(self, key: Key) -> bytes | int:
        return target.event_hash(self.of(key)[0])


def compare_events(names: Names, expect: list[Event], actual: list[target.RawEvent]) -> None:
    """Compare events in order; of those that one block's loss of hashes causes, all but the first come in
    any order.
    """
    agree("TELL-1", [type(event).__name__ for event in expect], [_EVENT_TYPES[event[0]] for event in actual])
    told = [names.event(event) for event in expect]
    start = 0
    while start < len(expect):
        end = start + 1
        event = expect[start]
        if isinstance(event, Removed):
            while end < len(expect) and isinstance(later := expect[end], Removed) and later.block == event.block:
                end += 1
            agree("TELL-3", told[start], actual[start])
            agree("TELL-3", sorted(told[start + 1 : end]), sorted(actual[start + 1 : end]))
        else:
            agree("TELL-2", told[start], actual[start])
        start = end


_EVENT_TYPES = {"stored": "Stored", "removed": "Removed", "cleared": "Cleared"}


def compare_pools(names: Names, model: BlockPool, actual: target.PoolState, clauses: dict[str, str]) -> None:
    """Compare all that can be seen of two pools; ``clauses`` says which clause each part belongs to after
    this op.
    """
    agree(clauses["references"], [block.references for block in model.blocks[1:]], actual.references[1:])
    agree(clauses["references"], sorted(model.queue), sorted(actual.queue))
    agree(clauses["references"], len(model.queue), actual.free)
    if model.profile.null_has_no_references:
        agree("POOL-5", 0, actual.references[NULL])
    agree(clauses["queue"], model.queue, actual.queue)
    agree(
        clauses["hashes"],
        [(block.hash and names.of(block.hash), set(map(names.of, block.more_hashes))) for block in model.blocks],
        actual.hashes,
    )
    if model.profile.secondary_hashes:
        agree(clauses["hashes"], [block.hash_end for block in model.blocks], actual.ends)
    agree("TELL-1", model.events_waiting(), actual.waiting)
    agree(clauses["hashes"], {names.of(key): found for key, found in model.index.items()}, actual.found)


def picked(some: list[int], pick: int, count: int, step: int) -> list[int]:
    """Return up to ``count`` different entries of a list from the ``pick``-th on, ``step`` apart."""
    places = [(pick + step * i) % len(some) for i in range(count)] if some else []
    return [some[place] for place in dict.fromkeys(places)]


def described(groups: Sequence[Group]) -> list[target.GroupSpec]:
    """Return groups as the target takes them."""
    return [
        target.GroupSpec(
            "mamba-align" if group.align else group.kind.value,
            group.block_tokens,
            group.spares if group.align else group.reach,
            group.eagle,
            group.sharded,
            group.checkpoint_unit,
        )
        for group in groups
    ]
