"""Histories of one engine with SimpleCPUOffloadConnector."""

from __future__ import annotations

from typing import ClassVar

from strategies.machine import DRAFTERS, SHAPES, Choices, OffloadMachine, setups

SETUPS: Choices = {
    "shape": SHAPES,
    "gpu_blocks": (7, 9, 12),
    "cpu_blocks": (4, 7, 12, 20),
    "step_tokens": (6, 16, 48),
    "running_max": (2, 4),
    "async_scheduling": (False, True),
    "runner_v2": (False, True),
    "drafter": DRAFTERS,
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
            "several groups",
            "unequal groups",
            "Mamba",
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
            "draft accepted",
            "draft rejected",
        }
    )
