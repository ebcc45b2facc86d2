"""A prefill engine, and a decode engine that has nothing but what the first one offered to its CPU tier.

Both are whole engines of vLLM on the simulated device: what the decode engine reads is compared byte by byte with what
a model leaves for the prompt (SHADOW-1).
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from kvspec.ops import Add, EngineSetup, Reset, Settle
from kvspec.targets import load_target
from kvspec.targets.vllm.offload_index import RealTier, tier_state
from kvspec.world import World

PREFILL, DECODE = "prefill", "decode"

Chunks = dict[bytes, list[list[np.ndarray]]]
"""Key -> for each rank, the bytes of each layer."""


class Engine:
    """One engine, and what its requests have been told of the CPU tier, and have told it."""

    def __init__(self, setup: EngineSetup, seed: int, params: dict[str, Any] | None, *, whole: bool) -> None:
        self.world = World(load_target("vllm-offloading"), setup, "random", seed)
        self.offered: list[bytes] = []
        self.hits: list[int] = []
        engine: Any = self.world._engine
        self.tier = engine._tier
        self._watch(engine._vllm, params, whole)

    def _watch(self, vllm: Any, params: dict[str, Any] | None, whole: bool) -> None:
        from pd_prefill import whole_requests

        self.manager = vllm.connector.connector_scheduler.manager
        if whole:
            whole_requests(self.manager)
        new_request, offer = vllm.new_request, self.manager.prepare_store
        lookup = vllm.connector.get_num_new_matched_tokens

        def with_params(name: str, *arguments: Any, **fields: Any) -> Any:
            request = new_request(name, *arguments, **fields)
            request.kv_transfer_params = params if name == PREFILL else None
            return request

        def prepare_store(keys: Any, context: Any) -> Any:
            self.offered += keys
            return offer(keys, context)

        def get_num_new_matched_tokens(*arguments: Any, **more: Any) -> Any:
            answer = lookup(*arguments, **more)
            self.hits.append(answer[0] or 0)
            return answer

        vllm.new_request = with_params
        self.manager.prepare_store = prepare_store
        vllm.connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    def read(self, keys: list[bytes]) -> Chunks:
        """Return the chunks of keys that the tier has."""
        chunks = tier_state(self.manager).chunks
        slots = {key: chunks[key][0] for key in dict.fromkeys(keys) if key in chunks and chunks[key][1]}
        return {
            key: [[tensor[slot].copy() for tensor in rank.tensors] for rank in self.tier._ranks]
            for key, slot in slots.items()
        }

    def fill(self, chunks: Chunks) -> None:
        """Put chunks into the tier, as if a remote engine had sent them."""
        if not chunks:
            return
        tier = RealTier.__new__(RealTier)
        tier.manager = self.manager
        context = tier.context("remote", {})
        placed = tier.prepare_store(list(chunks), context)
        assert placed is not None
        tier.complete_store(list(chunks), context, True)
        for key, slot in zip(placed[0], placed[1], strict=True):
            for rank, layers in zip(self.tier._ranks, chunks[key], strict=True):
                for tensor, layer in zip(rank.tensors, layers, strict=True):
                    tensor[slot] = layer


def hand_over(
    seed: int, params: dict[str, Any] | None, *, whole: bool = False, damaged: bool = False
) -> dict[str, Any]:
    """Let a prompt be prefilled by one engine, which loads its beginning from its own CPU tier, and decoded by another.

    Returns the tokens that each engine found in its tier, those of the prompt's whole chunks, and the laws that each
    engine broke. With ``damaged`` a byte is changed on the way.
    """
    random = Random(seed)
    chunk_blocks, block = random.choice((1, 2, 3)), 4
    chunk = chunk_blocks * block
    setup = EngineSetup(
        gpu_blocks=40,
        cpu_blocks=24,
        block_size=block,
        step_tokens=random.choice((8, 16, 64)),
        async_scheduling=random.random() < 0.5,
        runner_v2=False,
        ranks=random.choice((1, 2)),
        blocks_per_chunk=chunk_blocks,
    )
    stored, computed = random.randint(1, 2), random.randint(1, 3)
    tokens = (stored + computed) * chunk + random.randint(1, block)
    prefill = Engine(setup, seed, params, whole=whole)
    for op in (Add("first", stored * chunk), Settle(), Reset()):
        prefill.world.apply(op)
    prefill.offered.clear()
    for op in (Add(PREFILL, tokens, 0), Settle()):
        prefill.world.apply(op)
    sent = prefill.read(prefill.offered)
    if damaged:
        next(iter(sent.values()))[0][0][0] ^= 1
    broken = {violation.law for violation in prefill.world.finish().violations}
    decode = Engine(setup, seed + 1, None, whole=False)
    decode.fill(sent)
    for op in (Add(DECODE, tokens, 0, max_tokens=5), Settle()):
        decode.world.apply(op)
    return {
        "loaded": max(prefill.hits),
        "found": max(decode.hits),
        "prompt": tokens // chunk * chunk,
        "broken in prefill": sorted(broken),
        "broken in decode": sorted({violation.law for violation in decode.world.finish().violations}),
    }
