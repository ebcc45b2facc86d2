"""What a P/D prefill request stores, in the vLLM that is importable: every scenario of ``test_pd_prefill``, as JSON.

    PYTHONPATH=RELEASE:. python tests/pd_prefill.py

The scheduler, its connector and the CPU manager are the release's own; there is no worker, transfers end with the step
that they are reported in.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

from pd_engines import hand_over

from kvspec.targets.vllm.core import GroupSpec
from kvspec.targets.vllm.offload_index import RealEngine, RealTier, Transfer, plan_of

HAND_OVERS = 8
"""Pairs of engines."""
BLOCK = 4
CHUNK_BLOCKS = 3
CHUNK = BLOCK * CHUNK_BLOCKS
REMOTE_DECODE = {"do_remote_decode": True}
PARAMS: dict[str, dict[str, Any] | None] = {
    "true": REMOTE_DECODE,
    "one": {"do_remote_decode": 1},
    "word": {"do_remote_decode": "yes"},
    "with others": {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None},
    "absent": None,
    "empty": {},
    "none": {"do_remote_decode": None},
    "false": {"do_remote_decode": False},
    "zero": {"do_remote_decode": 0},
    "empty word": {"do_remote_decode": ""},
    "other keys": {"do_remote_prefill": True, "remote_engine_id": "x"},
}


class Watched:
    """An engine, and what each request has offered, stored and loaded, in GPU blocks of its own table."""

    def __init__(self, *, forwards: bool = False, whole: bool = False, connectors: int = 0, **settings: Any) -> None:
        self.plans: list[tuple[int, bool, Transfer]] = []
        self.engine = RealEngine(
            [GroupSpec("full", BLOCK, 0, eagle=False, sharded=True, checkpoint_unit=0)],
            gpu_blocks=60,
            slots=30,
            chunk_blocks=CHUNK_BLOCKS,
            connectors=connectors,
            **settings,
        )
        self._whole = whole
        for number, connector in enumerate(self.engine.connectors):
            self._watch_manager(connector, number, forwards)

    def _watch_manager(self, connector: Any, number: int, forwards: bool) -> None:
        if forwards:
            connector.manager = forwarding(connector.manager)
        if self._whole:
            connector.manager = whole_requests(connector.manager)
        build = connector.build_connector_meta

        def build_connector_meta(output: Any) -> Any:
            metadata = build(output)
            plan = plan_of(metadata)
            self.plans += [(number, False, load) for load in plan.loads]
            self.plans += [(number, True, store) for store in plan.stores]
            return metadata

        connector.build_connector_meta = build_connector_meta

    def run(self, name: str, tokens: int, params: dict[str, Any] | None = None) -> None:
        """Let a request of the one text happen, from its arrival to the end of all of its transfers."""
        self.engine.add(name, range(tokens), params=params)
        self.engine.settle()

    def reset(self) -> bool:
        """Reset the GPU's prefix cache, not the connector's."""
        return self.engine.reset()

    def moved(self, name: str, store: bool, connector: int = 0) -> list[list[int]]:
        """Return the chunks of a request that each load, or each store, has moved."""
        return [
            sorted({(transfer.firsts[0] + i) // CHUNK_BLOCKS for i in range(len(transfer.blocks))})
            for number, is_store, transfer in self.plans
            if transfer.request == name and is_store == store and number == connector
        ]


def forwarding(manager: Any) -> Any:
    """Make a CPU manager pass on all that it is offered, what it has already included: as a backend does that streams
    to a remote engine.
    """
    prepare_store = manager.prepare_store

    def prepare(keys: Any, context: Any) -> Any:
        keys = list(keys)
        placed = prepare_store(keys, context)
        if placed is None:
            return None
        slots = [slot_of(manager, key) for key in keys]
        return replace(placed, keys_to_store=keys, store_spec=type(placed.store_spec)(slots))

    manager.prepare_store = prepare
    return manager


def slot_of(manager: Any, key: bytes) -> int:
    chunk = manager._policy.get(key)
    return int(chunk.chunk_id if hasattr(chunk, "chunk_id") else chunk.block_id)


def whole_requests(manager: Any) -> Any:
    """Make a CPU manager ask for whole requests (0.23 and later)."""
    from vllm.v1.kv_offload import base

    on_new_request = manager.on_new_request

    def on_new(context: Any) -> Any:
        on_new_request(context)
        return base.RequestOffloadingContext(policy=base.OffloadPolicy.REQUEST_LEVEL)

    manager.on_new_request = on_new
    return manager


def offers(watched: Watched) -> list[int]:
    """Return the lengths of the offers to the first manager, and forget them."""
    lengths = [len(offer.keys) for offer in watched.engine.offers]
    watched.engine.offers.clear()
    return lengths


def two_chunks(params: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """One chunk is stored; the GPU's cache is reset; a request of two chunks loads the first and computes the other."""
    watched = Watched(**settings)
    watched.run("first", CHUNK)
    assert watched.reset()
    offers(watched)
    watched.run("prefill", 2 * CHUNK, params)
    return {
        "first": watched.moved("first", store=True),
        "loaded": watched.moved("prefill", store=False),
        "offered": offers(watched),
        "stored": watched.moved("prefill", store=True),
    }


def three_after_one(params: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """Three chunks are stored; after a reset the first is loaded by a request that computes no more; then a prefill has
    that one on the GPU, loads the second and third, and computes the fourth.
    """
    watched = Watched(**settings)
    watched.run("first", 3 * CHUNK + 1)
    assert watched.reset()
    watched.run("short", CHUNK + 1)
    offers(watched)
    watched.run("prefill", 4 * CHUNK, params)
    return {
        "loaded": watched.moved("prefill", store=False),
        "offered": offers(watched),
        "stored": watched.moved("prefill", store=True),
    }


def on_the_gpu(params: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """A prefill finds its first chunk on the GPU, and nothing has to be loaded."""
    watched = Watched(**settings)
    watched.run("first", CHUNK + 1)
    watched.run("prefill", 2 * CHUNK, params)
    return {"loaded": watched.moved("prefill", store=False), "stored": watched.moved("prefill", store=True)}


def in_small_steps(params: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """As two_chunks with five chunks, in steps of 8 tokens: chunked prefill."""
    watched = Watched(step_tokens=8, **settings)
    watched.run("first", 2 * CHUNK)
    assert watched.reset()
    watched.run("prefill", 5 * CHUNK, params)
    return {"loaded": watched.moved("prefill", store=False), "stored": watched.moved("prefill", store=True)}


def two_backends(params: dict[str, Any] | None, empty_second: bool, **settings: Any) -> dict[str, Any]:
    """As two_chunks under MultiConnector with two CPU backends, the second of which may have lost everything."""
    watched = Watched(connectors=2, **settings)
    watched.run("first", CHUNK)
    assert watched.reset()
    if empty_second:
        watched.engine.connectors[1].manager = RealTier(30, "lru").manager
    watched.run("prefill", 2 * CHUNK, params)
    return {
        f"{what} by {backend}": watched.moved("prefill", store, backend)
        for what, store in (("loaded", False), ("stored", True))
        for backend in (0, 1)
    }


def scenarios() -> dict[str, dict[str, Any]]:
    """Return what is seen in every scenario, by name."""
    seen: dict[str, dict[str, Any]] = {}
    for asynchronous, (name, params) in product((False, True), PARAMS.items()):
        how = "async" if asynchronous else "sync"
        for backend in ("cpu", "forwarding"):
            settings = {"asynchronous": asynchronous, "forwards": backend == "forwarding"}
            seen[f"two_chunks {how} {backend} {name}"] = two_chunks(params, **settings)
            if name not in ("true", "absent"):
                continue
            for scenario in (three_after_one, on_the_gpu, in_small_steps):
                seen[f"{scenario.__name__} {how} {backend} {name}"] = scenario(params, **settings)
        if name in ("true", "absent"):
            for empty in (False, True):
                what = "lost" if empty else "kept"
                seen[f"two_backends {how} {what} {name}"] = two_backends(params, empty, asynchronous=asynchronous)
        if name == "absent" and decides_by_tier():
            seen[f"two_chunks {how} whole"] = two_chunks(None, asynchronous=asynchronous, forwards=True, whole=True)
    for seed in range(HAND_OVERS):
        for name in ("true", "absent"):
            seen[f"hand_over {name} {seed}"] = hand_over(seed, PARAMS[name])
        if decides_by_tier():
            seen[f"hand_over whole {seed}"] = hand_over(seed, None, whole=True)
    asks = {"whole": True, "params": None} if decides_by_tier() else {"params": REMOTE_DECODE}
    seen["hand_over damaged"] = hand_over(0, damaged=True, **asks)
    return seen


def decides_by_tier() -> bool:
    """Whether the release asks the manager what is stored of a request."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    return hasattr(CPUOffloadingManager, "on_new_request")


if __name__ == "__main__":
    json.dump(scenarios(), sys.stdout)
