"""Histories of one engine with MultiConnector and two CPU backends."""

from __future__ import annotations

from typing import ClassVar

from kvspec.ops import BACKENDS
from strategies.machine import Choices, OffloadMachine, setups
from strategies.offloading import SETUPS as OFFLOADING_SETUPS

SETUPS: Choices = {**OFFLOADING_SETUPS, "backends": BACKENDS, "lazy": (False, False, False, True)}
"""The engines of OffloadingConnector, with a second connector before or after it."""


class MultiMachine(OffloadMachine):
    """MultiConnector of OffloadingConnector with SimpleCPUOffload, in either order, and of two OffloadingConnectors."""

    SETUPS = SETUPS
    setups = setups(SETUPS)
    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {
            "several groups",
            "Mamba",
            "load by the first backend",
            "load by the second backend",
            "store by both backends",
            "load finished",
            "partial hit",
            "CPU eviction",
            "preemption",
            "resumption",
            "same-step reuse",
            "flush",
            "lookup without allocation",
            "abort while loading",
            "abort while running",
            "abort in step",
            "reset",
            "connector reset",
            "reset with transfers in flight",
            "idle",
            "rank skew",
            "step without a forward",
            "draft accepted",
            "draft rejected",
        }
    )
