"""Histories of one engine with OffloadingConnector."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st

from kvspec.ops import EngineSetup
from strategies.machine import OffloadMachine


def setups() -> st.SearchStrategy[EngineSetup]:
    """Draw a small engine: few chunks, of one to four blocks."""
    return st.builds(
        EngineSetup,
        gpu_blocks=st.sampled_from([7, 9, 12]),
        cpu_blocks=st.sampled_from([2, 4, 7, 16]),
        step_tokens=st.sampled_from([6, 16, 48]),
        running_max=st.sampled_from([2, 4]),
        async_scheduling=st.booleans(),
        runner_v2=st.booleans(),
        ranks=st.sampled_from([1, 1, 1, 2]),
        events=st.booleans(),
        priority=st.sampled_from([False, False, True]),
        blocks_per_chunk=st.sampled_from([1, 1, 2, 3, 4]),
        eviction=st.sampled_from(["lru", "arc"]),
        prompt_only=st.booleans(),
    )


class OffloadingMachine(OffloadMachine):
    """OffloadingConnector with its CPU manager: both policies, chunks of several blocks."""

    setups = setups()
    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {
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
