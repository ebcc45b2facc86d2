"""What context parallelism must keep to, as named checks on the vLLM of this process.

``python tests/context_parallel.py TARGET`` runs them all and prints a JSON object: check -> what was wrong, or null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

from msgspec.structs import replace

from kvspec.model.groups import Group, Kind
from kvspec.model.profile import Profile, profile_for
from kvspec.model.scaling import (
    ContextParallel,
    Unsupported,
    lazy_target_blocks,
    refuse_unsupported,
    span_tokens,
    whole_blocks,
)
from kvspec.ops import Add, EngineSetup, Reset, Settle
from kvspec.targets import Target, load_target
from kvspec.world import Outcome, World

SIZES = (1, 2, 4)
BLOCK_SIZES = (4, 8, 16)
WORLDS = ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2))
"""(prefill, decode) ranks of the engines that run."""
INTERLEAVES = (1, 2, 4)
PROMPT_SPANS = 4
"""Whole spans of the prompt that is stored and loaded again."""

GROUPS = {
    "full attention": (Group(Kind.FULL, 4),),
    "a sliding window": (Group(Kind.SLIDING_WINDOW, 4, 10),),
    "Mamba": (Group(Kind.MAMBA, 8),),
    "full attention and a sliding window": (Group(Kind.FULL, 8), Group(Kind.SLIDING_WINDOW, 4, 9)),
    "full attention and Mamba": (Group(Kind.FULL, 4), Group(Kind.MAMBA, 8)),
    "full attention twice, a sliding window and Mamba": (
        Group(Kind.FULL, 4),
        Group(Kind.FULL, 16),
        Group(Kind.SLIDING_WINDOW, 8, 24),
        Group(Kind.MAMBA, 8),
    ),
}
STEP_TOKENS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
"""Around the edges of spans of 8 to 64 tokens."""

Check = Callable[[Target], None]


def ranks(prefill: int, decode: int) -> str:
    return f"{prefill} prefill and {decode} decode ranks"


def span_check(prefill: int, decode: int, block: int) -> str:
    return f"the span of blocks of {block} on {ranks(prefill, decode)}"


def round_trip_check(prefill: int, decode: int, interleave: int) -> str:
    return f"store, reset, load on {ranks(prefill, decode)}, {interleave} in a row"


def partial_hit_check(prefill: int, decode: int, local: int) -> str:
    return f"a load behind {local} local blocks on {ranks(prefill, decode)}"


def edge_check(prefill: int, decode: int, extra: int) -> str:
    return f"a hit of a prompt of whole spans and {extra} tokens on {ranks(prefill, decode)}"


def lazy_check(groups: str) -> str:
    return f"the lazy target of {groups}"


def checks() -> dict[str, Check]:
    """Return all checks by name."""
    found: dict[str, Check] = {}
    for prefill, decode, block in product(SIZES, SIZES, BLOCK_SIZES):
        found[span_check(prefill, decode, block)] = partial(spans_are_scaled, prefill, decode, block)
    for (prefill, decode), interleave in product(WORLDS, INTERLEAVES):
        found[round_trip_check(prefill, decode, interleave)] = partial(round_trip, prefill, decode, interleave)
    for (prefill, decode), local in product(WORLDS, range(1, PROMPT_SPANS)):
        found[partial_hit_check(prefill, decode, local)] = partial(partial_hit, prefill, decode, local)
    for (prefill, decode), extra in product(WORLDS, (0, 1)):
        found[edge_check(prefill, decode, extra)] = partial(hit_at_an_edge, prefill, decode, extra)
    for groups in GROUPS:
        found[lazy_check(groups)] = partial(lazy_target_is_the_models, groups)
    return found


@cache
def profile() -> Profile:
    from kvspec.targets.vllm.core import release

    return profile_for(release())


def span_of(prefill: int, decode: int, block: int) -> int:
    """What the model says of one full-attention group."""
    return span_tokens(Group(Kind.FULL, block), ContextParallel(prefill, decode), profile())


# Sizes ----------------------------------------------------------------------------------------------------------------


def spans_are_scaled(prefill: int, decode: int, block: int, target: Target) -> None:
    """One span everywhere: in the scheduler, its coordinator, SimpleCPUOffload's manager and its coordinator."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    from kvspec.targets.vllm import config, core, simple

    setup = EngineSetup(block_size=block, prefill_ranks=prefill, decode_ranks=decode)
    vllm_config = config.vllm_config(setup, simple.CONNECTOR, simple.connector_config(setup))
    kv_cache_config = config.kv_cache_config(setup)
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    manager = SimpleCPUOffloadScheduler(
        vllm_config,
        kv_cache_config,
        setup.cpu_blocks * config.block_bytes(setup),
        scheduler_block_size=scheduler_block,
        hash_block_size=hash_block,
    )
    cache_of_gpu = core.RealCache(
        [core.GroupSpec("full", block, 0, eagle=False, sharded=True, checkpoint_unit=0)],
        setup.gpu_blocks,
        caching=True,
        prefill=prefill,
        decode=decode,
        eagle=False,
        max_tokens=256,
        in_flight_tokens=16,
        watermark=0.0,
        interval=None,
    )
    spans = {
        "scheduler": scheduler_block,
        "hashes": hash_block,
        "GPU coordinator": cache_of_gpu.sizes.spans[0],
        "offload manager": manager.block_size,
        "offload coordinator": manager.cpu_coordinator.single_type_managers[0].block_size,
        "offload manager, full attention": manager.fa_block_size,
        "engine": config.layouts(setup)[0].span,
    }
    expected = dict.fromkeys(spans, span_of(prefill, decode, block))
    assert spans == expected, f"{spans} instead of {expected}"


def lazy_target_is_the_models(groups: str, target: Target) -> None:
    """Twice the blocks of a step, each group's rounded up on its own."""
    from kvspec.equality.compare import described
    from kvspec.targets.vllm import core

    layout = GROUPS[groups]
    compared = 0
    for prefill, decode, step_tokens in product(SIZES, SIZES, STEP_TOKENS):
        cp = ContextParallel(prefill, decode)
        try:
            refuse_unsupported(layout, cp, profile())
        except Unsupported:
            continue
        found = core.lazy_target_blocks(described(layout), step_tokens, prefill, decode)
        expected = lazy_target_blocks(layout, step_tokens, cp, profile())
        assert found == expected, f"{found} blocks, not {expected}: {ranks(prefill, decode)}, {step_tokens} tokens"
        compared += 1
    assert compared >= len(STEP_TOKENS)


# Engines --------------------------------------------------------------------------------------------------------------


class Watch(World):
    """A world that remembers what was looked up."""

    def __init__(self, target: Target, setup: EngineSetup) -> None:
        self.lookups: dict[str, tuple[int, int | None]] = {}
        super().__init__(target, setup, "fair")

    def looked_up(self, request: str, local_tokens: int, external_tokens: int | None) -> None:
        self.lookups[request] = (local_tokens, external_tokens)
        super().looked_up(request, local_tokens, external_tokens)


def engine(target: Target, prefill: int, decode: int, interleave: int = 1) -> Watch:
    """Start an engine with the runner that the release has for these ranks."""
    setup = EngineSetup(gpu_blocks=16, cpu_blocks=16, prefill_ranks=prefill, decode_ranks=decode, interleave=interleave)
    if target.refusal(setup):
        setup = replace(setup, runner_v2=False)
    return Watch(target, setup)


def store_and_reset(world: World, span: int) -> None:
    """Store PROMPT_SPANS spans of text 0, have that reported, and drop what the GPU knows."""
    world.apply(Add("writer", shared=PROMPT_SPANS * span, tail=1, max_tokens=3))
    world.apply(Settle())
    world.apply(Add("kick", trunk=9, shared=1))
    world.apply(Settle())
    world.apply(Reset())


def end(world: World) -> Outcome:
    outcome = world.finish()
    assert not outcome.violations, "; ".join(f"{v.law}: {v.message}" for v in outcome.violations)
    return outcome


def round_trip(prefill: int, decode: int, interleave: int, target: Target) -> None:
    """Every rank's bytes of the whole prompt come back, one load per block."""
    span = span_of(prefill, decode, 4)
    world = engine(target, prefill, decode, interleave)
    store_and_reset(world, span)
    world.apply(Add("reader", shared=PROMPT_SPANS * span, tail=1, branch=1, max_tokens=2))
    world.apply(Settle())
    outcome = end(world)
    assert world.lookups["reader"] == (0, PROMPT_SPANS * span)
    assert (outcome.stores, outcome.loads) == (PROMPT_SPANS, PROMPT_SPANS)
    assert outcome.reached["load finished"] == prefill * decode


def partial_hit(prefill: int, decode: int, local: int, target: Target) -> None:
    """What is on the GPU stays, and the blocks behind it are loaded into their own places."""
    span = span_of(prefill, decode, 4)
    world = engine(target, prefill, decode)
    store_and_reset(world, span)
    world.apply(Add("head", shared=local * span, tail=1, branch=1))
    world.apply(Settle())
    world.apply(Add("reader", shared=PROMPT_SPANS * span, tail=1, branch=2, max_tokens=2))
    world.apply(Settle())
    outcome = end(world)
    assert world.lookups["reader"] == (local * span, (PROMPT_SPANS - local) * span)
    assert outcome.loads == PROMPT_SPANS
    assert outcome.reached["partial hit"] == 1


def hit_at_an_edge(prefill: int, decode: int, extra: int, target: Target) -> None:
    """The last token is computed again, so a prompt of k whole spans hits k - 1 of them, in either tier."""
    span = span_of(prefill, decode, 4)
    hit = whole_blocks(PROMPT_SPANS * span + extra - 1, span) * span
    assert hit == (PROMPT_SPANS - 1 + extra) * span
    world = engine(target, prefill, decode)
    store_and_reset(world, span)
    for name in ("from CPU", "from GPU"):
        world.apply(Add(name, shared=PROMPT_SPANS * span + extra, tail=0))
        world.apply(Settle())
    end(world)
    assert world.lookups["from CPU"] == (0, hit)
    assert world.lookups["from GPU"] == (hit, 0)


def run(target: Target) -> Iterator[tuple[str, str | None]]:
    """Run every check; yield its name and what was wrong."""
    for name, check in checks().items():
        try:
            check(target)
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
        else:
            yield name, None


if __name__ == "__main__":
    found = dict(run(load_target(sys.argv[1])))
    print(json.dumps(found))
