"""Histories of one engine with OffloadingConnector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvspec.ops import AttentionGroup
from strategies.machine import DRAFTERS, FULL, SHAPES, Choices, OffloadMachine, setups


def _window(tokens: int, block_size: int = 0) -> AttentionGroup:
    return AttentionGroup("sliding-window", block_size, reach=tokens)


WINDOWS: tuple[dict[str, Any], ...] = (
    {"groups": (FULL, _window(8)), "ranks": 2},
    {"groups": (_window(8), FULL)},
    {"groups": (FULL, _window(12)), "ranks": 2},
    {"groups": (FULL, _window(16))},
    {"groups": (FULL, _window(12), _window(6)), "ranks": 2},
    {"groups": (AttentionGroup(block_size=8), _window(12))},
    {"groups": (FULL, _window(8, block_size=8)), "blocks_per_chunk": 1},
    {"groups": (_window(20, block_size=8), FULL), "blocks_per_chunk": 1},
)
"""Windows of one to five chunks (a hit needs a row of them, and can have a part of that), some of them multiples of a
chunk, as in most models; with shorter and with longer blocks than full attention's. Those with longer ones have chunks
of one block: a hit that is made of two blocks never ends inside one that is twice as long."""

SETUPS: Choices = {
    "shape": (*SHAPES, *WINDOWS),
    "gpu_blocks": (7, 9, 12),
    "cpu_blocks": (3, 6, 10, 20),
    "step_tokens": (6, 16, 48),
    "running_max": (2, 4),
    "async_scheduling": (False, True),
    "runner_v2": (False, True),
    "drafter": DRAFTERS,
    "events": (False, True),
    "priority": (False, False, True),
    "blocks_per_chunk": (1, 1, 2, 3, 4),
    "eviction": ("lru", "arc"),
    "prompt_only": (False, True),
}
"""Small engines: few chunks, of one to four blocks. More than a third have several groups: loads of several groups are
where most can go wrong, and a group's blocks depend on those of the others."""


class OffloadingMachine(OffloadMachine):
    """OffloadingConnector with its CPU manager: both policies, chunks of several blocks."""

    SETUPS = SETUPS
    setups = setups(SETUPS)
    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {
            "context parallelism",
            "several groups",
            "unequal groups",
            "Mamba",
            "store",
            "load",
            "load finished",
            "partial hit",
            "CPU eviction",
            "LRU eviction",
            "ARC eviction",
            "store refused",
            "kernel copy",
            "prompts only",
            "deferred lookup",
            "chunk behind a local hit",
            "preemption",
            "preemption with a store in flight",
            "resumption",
            "re-admission before the report",
            "same-step reuse",
            "flush",
            "lookup without allocation",
            "abort while waiting",
            "abort before any schedule",
            "abort while loading",
            "abort while running",
            "abort in step",
            "stop token",
            "reset",
            "reset refused",
            "connector reset",
            "reset with transfers in flight",
            "idle",
            "rank skew",
            "step without a forward",
            "draft accepted",
            "draft rejected",
        }
    )
    SINCE: ClassVar[Mapping[str, str]] = {
        **OffloadMachine.SINCE,
        "several groups": "0.21.0",  # before, the connector isn't one for hybrid memory (SupportsHMA)
        "unequal groups": "0.21.0",
        "context parallelism": "0.21.0",  # before, it doesn't count the ranks that share a block
        "kernel copy": "0.23.0",  # before, there is no v1/kv_offload/cpu/swap_blocks_triton.py
        "prompts only": "0.23.0",  # before, there is no offload_prompt_only
    }
