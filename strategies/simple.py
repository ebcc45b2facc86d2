"""Histories of one engine with SimpleCPUOffloadConnector."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st

from kvspec.ops import EngineSetup
from strategies.machine import OffloadMachine


def setups() -> st.SearchStrategy[EngineSetup]:
    """Draw a small engine: pools that a handful of requests can fill."""
    return st.builds(
        EngineSetup,
        gpu_blocks=st.sampled_from([7, 9, 12]),
        cpu_blocks=st.sampled_from([4, 7, 12, 20]),
        step_tokens=st.sampled_from([6, 16, 48]),
        running_max=st.sampled_from([2, 4]),
        async_scheduling=st.booleans(),
        runner_v2=st.booleans(),
        ranks=st.sampled_from([1, 1, 1, 2]),
        lazy=st.sampled_from([False, False, False, True]),
        events=st.booleans(),
        priority=st.sampled_from([False, False, True]),
    )


class SimpleOffloadMachine(OffloadMachine):
    """SimpleCPUOffload: eager and lazy."""

    setups = setups()
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
