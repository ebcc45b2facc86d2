"""Histories of one engine with SimpleCPUOffloadConnector."""

from __future__ import annotations

from typing import Any, ClassVar

from kvspec.ops import AttentionGroup
from strategies.machine import Choices, OffloadMachine, setups

FULL = AttentionGroup()
SHAPES: tuple[dict[str, Any], ...] = (
    *[{}] * 10,
    *[{"ranks": 2}] * 3,
    {"decode_ranks": 2, "interleave": 2},
    {"decode_ranks": 2, "block_size": 2},
    {"decode_ranks": 4, "block_size": 2},
    {"prefill_ranks": 2},
    {"prefill_ranks": 2, "decode_ranks": 2, "block_size": 2, "interleave": 2},
    {"groups": (FULL, AttentionGroup("sliding-window", reach=6))},
    {"groups": (AttentionGroup("sliding-window", reach=5), FULL)},
    {"groups": (AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=5))},
    {"groups": (FULL, FULL, AttentionGroup("sliding-window", reach=9))},
)
"""Worlds of one rank, of tensor-parallel ranks, of context-parallel ones, and layers in several groups.

Small blocks keep traffic comparable where ranks share them.
"""

SETUPS: Choices = {
    "shape": SHAPES,
    "gpu_blocks": (7, 9, 12),
    "cpu_blocks": (4, 7, 12, 20),
    "step_tokens": (6, 16, 48),
    "running_max": (2, 4),
    "async_scheduling": (False, True),
    "runner_v2": (False, True),
    "lazy": (False, False, False, True),
    "events": (False, True),
    "priority": (False, False, True),
}
"""Small engines: pools that a handful of requests can fill."""


class SimpleOffloadMachine(OffloadMachine):
    """SimpleCPUOffload: eager and lazy."""

    SETUPS = SETUPS
    setups = setups(SETUPS)
    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {
            "store",
            "load",
            "load finished",
            "partial hit",
            "CPU eviction",
            "preemption",
            "resumption",
            "same-step reuse",
            "lookup without allocation",
            "abort while waiting",
            "abort while loading",
            "abort while running",
            "abort in step",
            "stop token",
            "reset",
            "reset refused",
            "reset with transfers in flight",
            "idle",
            "rank skew",
            "step without a forward",
        }
    )
