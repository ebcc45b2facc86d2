"""What never changes about a cache: its groups, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

from kvspec.model.groups import Group, Kind
from kvspec.model.profile import Profile
from kvspec.model.scaling import (
    ContextParallel,
    alignment_tokens,
    ends_inside,
    hash_tokens,
    hit_tokens,
    refuse_unsupported,
    span_tokens,
)


class Layout:
    """The groups of a cache in one release. Sizes are tokens.

    Args:
        groups: the attention groups, in the order of their ids.
        profile: what differs between releases.
        cp: sizes of context parallelism.
        unit: the hash block that is asked for; 0 for the largest possible one.
    """

    def __init__(self, groups: Sequence[Group], profile: Profile, cp: ContextParallel, unit: int = 0) -> None:
        refuse_unsupported(groups, cp, profile)
        self.groups = tuple(groups)
        self.profile = profile
        self.spans = [span_tokens(group, cp, profile) for group in groups]
        self.alignment = alignment_tokens(groups, cp, profile)
        self.hash_tokens = hash_tokens(groups, cp, profile, unit)
        self.hit_tokens = hit_tokens(groups, cp, profile, self.hash_tokens)
        self.ends_inside = ends_inside(groups, cp, profile, self.hash_tokens)
        """Whether hits are looked for inside blocks; with context parallelism even if all blocks are one hash block."""
        self.mates = [
            [index for index, other in enumerate(groups) if other.layout() == group.layout()] for group in groups
        ]
        """Per group: the groups that are looked up together with it, itself included."""
        self.drops = [any(groups[mate].eagle for mate in mates) for mates in self.mates]
        """Per group: whether a draft model reads along in it or in one that is looked up with it."""

    def hit_inside(self, index: int) -> bool:
        """Whether a hit can end inside a full-attention group's block."""
        return self.groups[index].kind is Kind.FULL and self.hit_tokens < self.spans[index]
