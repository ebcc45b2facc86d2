"""For every law a planted defect that trips it; and the clean target trips none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hunt import hunt

from kvspec.defects import load_defects, planted
from kvspec.errors import KvspecError
from kvspec.known import known_as, load_known
from kvspec.laws import LAWS
from kvspec.search import implementation_version, violation_key
from kvspec.targets import Target

HISTORIES = 400


REGISTRY = load_defects(Path(__file__).parent / "defects")
SIMPLE = {name: defect for name, defect in REGISTRY.items() if defect.target == "vllm-simple"}
ONE_PER_LAW = {
    "SHADOW-1": "copy_ignores_the_compute_event",
    "CRASH-1": "loads_raise_at_their_end_from_the_second_on",
    "DEVICE-1": "copies_name_a_source_beyond_its_pool",
    "PROGRESS-1": "a_finished_load_is_forgotten",
    "LOAD-1": "a_load_is_reported_twice",
    "CONSERVE-1": "touch_leaves_a_block_in_the_free_queue",
    "OWN-1": "loads_do_not_pin_cpu_blocks",
    "INDEX-1": "stores_swap_their_destinations",
    "STORED-1": "the_end_of_a_request_stores_nothing",
    "OFFER-1": "a_lookup_misses_a_block",
    "INDEX-2": "loads_swap_their_destinations",
    "RELEASE-1": "a_completed_store_keeps_its_gpu_blocks",
    "REFUSE-1": "reset_always_refuses",
    "EVENT-1": "removals_are_not_told",
}
"""The rest of the registry is run by `kvspec bench`."""


def test_every_law_has_a_defect() -> None:
    assert ONE_PER_LAW.keys() == LAWS.keys()
    assert all(SIMPLE[name].law == law for law, name in ONE_PER_LAW.items())


def test_there_are_defects_of_many_kinds() -> None:
    assert sum(not defect.in_model for defect in REGISTRY.values()) >= 30
    kinds = {"pinning", "ordering", "scaling", "index", "reset", "preemption", "abort", "eviction order", "events"}
    assert {defect.kind for defect in REGISTRY.values()} > kinds


@pytest.mark.parametrize("name", SIMPLE)
def test_a_defect_finds_what_it_changes_and_leaves_no_trace(name: str, target: Target) -> None:
    """A defect of a function that a later release doesn't have any more would be no defect."""
    replaced: list[tuple[Any, str, Any]] = []

    class Noted:
        def setattr(self, owner: Any, attribute: str, value: Any) -> None:
            replaced.append((owner, attribute, getattr(owner, attribute)))

    SIMPLE[name].plant(Noted())
    assert replaced
    with planted(SIMPLE[name]):
        assert any(getattr(owner, attribute) != before for owner, attribute, before in replaced)
    assert all(getattr(owner, attribute) == before for owner, attribute, before in replaced)


@pytest.mark.parametrize("law", ONE_PER_LAW)
def test_the_defect_breaks_its_law(law: str, target: Target) -> None:
    with planted(SIMPLE[ONE_PER_LAW[law]]):
        catch = hunt(target, number=1, histories=HISTORIES, until=law)
    assert law in catch.violations, f"{sorted(catch.violations)} broken in {catch.histories} histories"


def test_a_copy_beyond_the_cpu_pool_is_caught_before_it_writes(target: Target) -> None:
    with planted(SIMPLE["copies_name_a_destination_beyond_its_pool"]):
        assert "DEVICE-1" in hunt(target, number=1, histories=HISTORIES, until="DEVICE-1").violations


def test_the_clean_target_breaks_no_law(target: Target) -> None:
    catch = hunt(target, number=1, histories=HISTORIES)
    new = [
        violation
        for violation in catch.violations.values()
        if not known_as(load_known(), violation_key(target.name, violation), implementation_version(target.name))
    ]
    assert not new
    assert catch.histories == HISTORIES


def test_a_reset_that_waits_for_queued_stores_is_no_finding(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.reset
    monkeypatch.setattr(Manager, "reset", lambda self: False if self._pending_finished_stores else real(self))
    assert "REFUSE-1" not in hunt(target, number=8, histories=HISTORIES).violations


def test_cuda_that_is_not_simulated_is_not_called_a_bug_of_the_target(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.v1.simple_kv_offload import copy_backend

    real = copy_backend.copy_blocks

    def copy_blocks(*args: Any) -> None:
        torch.cuda.nvtx.range_push("copy")
        real(*args)

    monkeypatch.setattr(copy_backend, "copy_blocks", copy_blocks)
    with pytest.raises(KvspecError, match="the simulated device doesn't have yet"):
        hunt(target, number=1, histories=20)
