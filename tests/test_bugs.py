"""The regression corpus: histories of real bugs, each seen in a release that has it and not in one that has its fix.

Each case runs in two processes of its own, since a process imports one release.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kvspec import releases
from kvspec.gate import prepare, replay_history
from kvspec.ops import Add, AttentionGroup, EngineSetup, History, Settle, history_from_json
from kvspec.targets import parse_target

BUGS = Path(__file__).parent / "bugs"


class Case(NamedTuple):
    """A history and what it shows. ``reference``: numbers of vLLM's issues and pull requests."""

    history: str
    law: str
    bad: str
    fixed: str
    ops_max: int
    reference: str


CASES = [
    Case("store_before_compute.json", "SHADOW-1", "0.23.0", "0.24.0", 4, "45704, 46278"),
    Case("stranded_load.json", "PROGRESS-1", "0.28.0", "0.31.0", 7, "45388, 57841"),
    Case("reset_forgets_pins.json", "REFUSE-1", "0.28.0", "0.32.0", 7, "none; fixed in 0.32"),
    Case("events_of_the_wrong_tier.json", "EVENT-1", "0.28.0", "0.30.0", 1, "54325, 39860, 46397"),
    Case("offloading_last_slot.json", "INDEX-1", "0.26.0", "0.30.0", 1, "54193, 54288"),
    Case("offloading_abort_before_schedule.json", "CRASH-1", "0.26.0", "0.28.0", 2, "49118, 49285, 49889"),
    Case("offloading_reset_keeps_jobs.json", "CRASH-1", "0.24.0", "0.26.0", 3, "48102"),
    Case("offloading_reset_and_reload.json", "CRASH-1", "0.30.0", "0.33.0", 3, "none; fixed in 0.33"),
]


def laws_broken(history: History, release: str) -> set[str]:
    prepared = prepare(f"{parse_target(history.target)[0]}@{release}")
    replayed = replay_history(prepared, replace(history, target=prepared.target))
    assert replayed.repeats
    return {key.law for key, _, _ in replayed.violations}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.history.partition(".")[0])
def test_the_bug_is_seen_where_it_is_and_not_where_it_is_fixed(case: Case) -> None:
    history = history_from_json((BUGS / case.history).read_bytes())
    assert len(history.ops) <= case.ops_max
    assert case.law in laws_broken(history, case.bad)
    assert case.law not in laws_broken(history, case.fixed)


@pytest.mark.slow
def test_a_block_that_serves_no_hit_need_not_be_stored() -> None:
    """A hit ends where blocks of all groups do. With EAGLE the GPU keeps a block behind the last such place, and
    SimpleCPUOffload stores it from 0.32 on; where all groups have drafts, no lookup offers more for that."""
    groups = (AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=5))
    setup = EngineSetup(gpu_blocks=28, groups=groups, drafts=1, eagle=True)
    history = History("vllm-simple", setup, (Add("A", shared=20, max_tokens=1), Settle()), "fair")
    assert laws_broken(history, "0.31.0") == set()


SCRIPTS = {
    "core_drafts_loads_deadlock.py": "0.33.0",
    "core_spares_registered.py": "0.31.0",
    "core_started_state_registered.py": "0.33.0",
    "core_victim_of_its_own_step.py": "0.20.2",
    "core_window_loads_deadlock.py": "0.33.0",
    "lazy_offload_never_idles.py": "0.33.0",
    "lazy_offload_starves.py": "0.33.0",
    "offloading_reset_and_load.py": "0.32.0",
    "offloading_second_reset.py": "0.33.0",
    "offloading_silent_reset.py": "0.33.0",
    "offloading_window_after_reset.py": "0.33.0",
    "offloading_window_fenced_twice.py": "0.33.0",
    "offloading_window_hole.py": "0.33.0",
    "offloading_window_shared_block.py": "0.32.0",
    "offloading_window_sparse_chunk.py": "0.33.0",
    "offloading_window_unaligned_hit.py": "0.33.0",
    "offloading_zeroed_before_stored.py": "0.33.0",
    "simple_block_fills_while_stored.py": "0.33.0",
}
"""Script -> a release that has its bug."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "release"), SCRIPTS.items(), ids=SCRIPTS)
def test_the_script_shows_the_bug_on_plain_vllm(name: str, release: str) -> None:
    """The script imports nothing of kvspec; it is what a maintainer of vLLM would run."""
    assert "kvspec" not in (BUGS / "plain_vllm.py").read_text().partition('"""\n\n')[2]
    environment = prepare(f"vllm-simple@{release}").environment | {"PYTHONPATH": str(releases.path(release))}
    environment.pop("PYTHONSAFEPATH")
    ran = subprocess.run([sys.executable, BUGS / name], env=environment, capture_output=True, text=True, check=False)
    assert "BUG" in ran.stderr, ran.stderr[-2000:]
