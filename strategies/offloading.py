"""Histories of one engine with OffloadingConnector."""

from __future__ import annotations

from typing import ClassVar

from kvspec.ops import AttentionGroup
from strategies.machine import FULL, SHAPES, Choices, OffloadMachine, setups

SETUPS: Choices = {
    "shape": (*SHAPES, {"groups": (FULL, AttentionGroup("sliding-window", reach=8))}),
    "gpu_blocks": (7, 9, 12),
    "cpu_blocks": (2, 4, 8, 16, 30),
    "step_tokens": (6, 16, 48),
    "running_max": (2, 4),
    "async_scheduling": (False, True),
    "runner_v2": (False, True),
    "events": (False, True),
    "priority": (False, False, True),
    "blocks_per_chunk": (1, 1, 2, 3, 4),
    "eviction": ("lru", "arc"),
    "prompt_only": (False, True),
}
"""Small engines: few chunks, of one to four blocks; also a window that is a multiple of them, as in most models."""


class OffloadingMachine(OffloadMachine):
    """OffloadingConnector with its CPU manager: both policies, chunks of several blocks."""

    SETUPS = SETUPS
    setups = setups(SETUPS)
    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {
            "context parallelism",
            "several groups",
            "store",
            "load",
            "load finished",
            "partial hit",
            "CPU eviction",
            "LRU eviction",
            "ARC eviction",
            "store refused",
            "kernel copy",
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
        }
    )
