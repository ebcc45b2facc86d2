"""Defects of context parallelism and of groups, planted in the target: what finds them says so."""

from __future__ import annotations

import ctypes
from typing import Any

import context_parallel as checks
import pytest

from kvspec.device.cuda_names import current_device
from kvspec.device.simulated import SimulatedDevice
from kvspec.ops import AttentionGroup, EngineSetup
from kvspec.targets import Target
from kvspec.world import World
from strategies.traffic import Mix, Traffic

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

Patch = pytest.MonkeyPatch


def a_rank_forgets_to_store_its_share(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

    real = DmaCopyBackend.launch_copy

    def launch_copy(self: Any, sources: list[int], targets: list[int], *args: Any, is_store: bool, **more: Any) -> None:
        forgets = is_store and current_device().rank == 1
        real(self, [] if forgets else sources, [] if forgets else targets, *args, is_store=is_store, **more)

    patch.setattr(DmaCopyBackend, "launch_copy", launch_copy)


def loads_bring_tokens_back_in_another_order(patch: Patch) -> None:
    """As if the interleave had been another one when they were stored."""
    real = SimulatedDevice.run_spans

    def run_spans(self: SimulatedDevice, stream: str, spans: Any, *more: Any, **named: Any) -> None:
        real(self, stream, spans, *more, **named)
        for dst, _, size in spans:
            region = self.find_region(dst, size)
            if region is not None and region.on_device:
                turned = ctypes.string_at(dst + size // 2, size // 2) + ctypes.string_at(dst, size // 2)
                ctypes.memmove(dst, turned, size)

    patch.setattr(SimulatedDevice, "run_spans", run_spans)


def loads_count_the_tokens_of_one_rank_only(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        self.group_block_sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]

    patch.setattr(Manager, "__init__", init)


def hits_are_rounded_up_to_a_span(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator as Coordinator

    real = Coordinator.find_longest_cache_hit

    def find(self: Any, hashes: Any, most: int, *args: Any, **more: Any) -> Any:
        span = self.single_type_managers[0].block_size
        return real(self, hashes, -(-most // span) * span, *args, **more)

    patch.setattr(Coordinator, "find_longest_cache_hit", find)


CONTEXT_PARALLEL = [
    (a_rank_forgets_to_store_its_share, lambda t: checks.round_trip(1, 2, 1, t), "INDEX-1.*rank 1"),
    (loads_bring_tokens_back_in_another_order, lambda t: checks.round_trip(1, 2, 2, t), "SHADOW-1"),
    (loads_count_the_tokens_of_one_rank_only, lambda t: checks.partial_hit(1, 2, 1, t), "-1"),
    (hits_are_rounded_up_to_a_span, lambda t: checks.hit_at_an_edge(1, 2, 0, t), ""),
]


@pytest.mark.parametrize(
    ("plant", "check", "says"), CONTEXT_PARALLEL, ids=[plant.__name__ for plant, *_ in CONTEXT_PARALLEL]
)
def test_a_check_of_context_parallelism_notices_the_defect(
    target: Target, monkeypatch: Patch, plant: Any, check: Any, says: str
) -> None:
    check(target)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=says):
        check(target)


def windows_end_a_block_too_early(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager as Manager

    real = Manager.get_num_skipped_tokens
    patch.setattr(Manager, "get_num_skipped_tokens", lambda self, *args: real(self, *args) + self.block_size)


def a_group_loads_into_the_blocks_of_another(patch: Patch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager.update_state_after_alloc

    def update(self: Any, request: Any, blocks: Any, external: int) -> None:
        real(self, request, blocks, external)
        if external and (state := self._reqs_to_load.get(request.request_id)):
            state.transfer_meta.gpu_block_ids.reverse()

    patch.setattr(Manager, "update_state_after_alloc", update)


HISTORIES = 15
GROUPS = (AttentionGroup(), AttentionGroup("sliding-window", reach=6))


def broken_by_traffic(target: Target, until: str) -> set[str]:
    """Let traffic happen to an engine with a window, history by history, until a law is broken."""
    setup = EngineSetup(gpu_blocks=16, cpu_blocks=20, async_scheduling=True, groups=GROUPS)
    broken: set[str] = set()
    for number in range(HISTORIES):
        world = World(target, setup, "random", number)
        traffic = Traffic(Mix(), world)
        for seed in range(3):
            for op in traffic.burst(3 * number + seed):
                world.apply(op)
        broken |= {violation.law for violation in world.finish().violations}
        if until in broken:
            break
    return broken


@pytest.mark.parametrize("plant", [windows_end_a_block_too_early, a_group_loads_into_the_blocks_of_another])
def test_shadow_attention_notices_what_goes_wrong_between_groups(
    target: Target, monkeypatch: Patch, plant: Any
) -> None:
    plant(monkeypatch)
    assert "SHADOW-1" in broken_by_traffic(target, until="SHADOW-1")


def test_without_a_defect_traffic_on_several_groups_breaks_no_law(target: Target) -> None:
    assert broken_by_traffic(target, until="none") == set()
