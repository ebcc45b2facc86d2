"""Sizes under context parallelism: the model's beside the release's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from kvspec.equality.compare import Refused, attempt, described
from kvspec.model.cache import CacheManager
from kvspec.model.clauses import agree
from kvspec.model.groups import Group, Kind
from kvspec.model.profile import CpScaling, Profile
from kvspec.model.scaling import (
    ContextParallel,
    lazy_target_blocks,
    refuse_unsupported,
    slot,
    tokens_on_rank,
    whole_blocks,
)
from kvspec.targets.vllm import core as target

_FULL = Group(Kind.FULL, 4)
_CP_GROUPS = (
    (_FULL,),
    (Group(Kind.SLIDING_WINDOW, 4, 8),),
    (Group(Kind.CHUNKED_LOCAL, 4, 8),),
    (_FULL, Group(Kind.FULL, 8)),
    (_FULL, Group(Kind.SLIDING_WINDOW, 4, 8)),
    (_FULL, Group(Kind.MAMBA, 4)),
    (_FULL, Group(Kind.MAMBA, 8, align=True)),
)


def compare_scaling(profile: Profile) -> int:
    """Compare everything that follows from sizes alone, for all sizes up to 4. Returns the number of comparisons."""
    compared = 0
    layouts = list(_CP_GROUPS)
    if profile.cp_scaling is CpScaling.DECODE_SHARDED:
        layouts += [
            tuple(replace(group, sharded=index == 0) for index, group in enumerate(layout)) for layout in layouts
        ]
    for groups, prefill, decode in product(layouts, (1, 2, 4), (1, 2, 4)):
        cp = ContextParallel(prefill, decode)
        _compare_sizes(groups, cp, profile)
        if profile.offload_with_cp or prefill * decode == 1:
            for step_tokens in (1, 16, 17, 32, 33):
                _compare_lazy_target(groups, step_tokens, cp, profile)
        compared += 1
    for ranks, interleave, tokens in product((1, 2, 4), (1, 2, 4), range(40)):
        slots = [slot(position, 4 * ranks, ranks, interleave) for position in range(tokens)]
        for rank in range(ranks):
            actual = target.tokens_on_rank(tokens, rank, ranks, interleave)
            agree("SCALE-6", tokens_on_rank(tokens, rank, ranks, interleave), actual)
            agree("SCALE-5", sum(place.rank == rank for place in slots), actual)
            compared += 1
    for tokens, span in product(range(40), (2, 4, 8)):
        request = target.make_request("r", range(tokens), 2)
        agree("SCALE-7", whole_blocks(tokens, span), len(target.group_hashes(request, 2, span)))
        compared += 1
    return compared


def _compare_sizes(groups: tuple[Group, ...], cp: ContextParallel, profile: Profile) -> None:
    """Compare whether a combination is refused; the first lookup counts too, where construction doesn't mind."""
    for caching in (True, False) if any(group.kind is Kind.MAMBA for group in groups) else (True,):
        expect = attempt(partial(CacheManager, groups, 40, profile, cp=cp, caching=caching))
        actual = attempt(target.first_lookup, described(groups), cp.prefill, cp.decode, caching)
        agree("SCALE-2", isinstance(expect, Refused), isinstance(actual, Refused))


def _compare_lazy_target(groups: tuple[Group, ...], step_tokens: int, cp: ContextParallel, profile: Profile) -> None:
    if isinstance(attempt(refuse_unsupported, groups, cp, profile), Refused):
        return
    expect = lazy_target_blocks(groups, step_tokens, cp, profile)
    agree("SCALE-8", expect, target.lazy_target_blocks(described(groups), step_tokens, cp.prefill, cp.decode))
