"""For every law a defect that trips it, planted by patching one function of the real target; and the clean target
trips none."""

from __future__ import annotations

from typing import Any

import pytest
from hunt import hunt

from kvspec.errors import KvspecError
from kvspec.known import known_as, load_known
from kvspec.laws import LAWS
from kvspec.search import implementation_version, violation_key
from kvspec.targets import Target

HISTORIES = 400


def copy_ignores_the_compute_event(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

    real = DmaCopyBackend.launch_copy

    def launch_copy(self: Any, *args: Any, wait_event: Any = None, **more: Any) -> None:
        real(self, *args, **more)

    patch.setattr(DmaCopyBackend, "launch_copy", launch_copy)


def loads_raise_at_their_end_from_the_second_on(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._cleanup_load_request

    def cleanup(self: Any, req_id: str) -> int:
        if self._load_event_counter > 1:
            raise KeyError(req_id)
        return int(real(self, req_id))

    patch.setattr(Manager, "_cleanup_load_request", cleanup)


def copies_name_a_source_beyond_its_pool(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    real = copy_backend.copy_blocks
    patch.setattr(
        copy_backend,
        "copy_blocks",
        lambda src, dst, params: real([block + 100 for block in src], dst, params),
    )


def copies_name_a_destination_beyond_its_pool(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    real = copy_backend.copy_blocks
    patch.setattr(
        copy_backend, "copy_blocks", lambda src, dst, params: real(src, [block + 100 for block in dst], params)
    )


def a_finished_load_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.get_finished

    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        sent, received = real(self, finished_req_ids)
        return sent, (received if self._load_hwm != 0 else None)

    patch.setattr(Worker, "get_finished", get_finished)


def a_load_is_reported_twice(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.get_finished

    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        sent, received = real(self, finished_req_ids)
        before, self.kvspec_before = getattr(self, "kvspec_before", None), received
        return sent, (received or set()) | (before or set()) or None

    patch.setattr(Worker, "get_finished", get_finished)


def touch_leaves_a_block_in_the_free_queue(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    def touch(self: Any, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def loads_do_not_pin_cpu_blocks(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    allocate, cleanup = Manager.update_state_after_alloc, Manager._cleanup_load_request

    def update_state_after_alloc(self: Any, request: Any, blocks: Any, external: int) -> None:
        allocate(self, request, blocks, external)
        state = self._reqs_to_load.get(request.request_id)
        if external and state is not None:
            self.cpu_block_pool.free_blocks([self.cpu_block_pool.blocks[i] for i in state.transfer_meta.cpu_block_ids])

    def cleanup_load_request(self: Any, req_id: str) -> int:
        state = self._reqs_to_load.get(req_id) or self._abandoned_reqs_to_load.get(req_id)
        if state is not None:
            self.cpu_block_pool.touch([self.cpu_block_pool.blocks[i] for i in state.transfer_meta.cpu_block_ids])
        return int(cleanup(self, req_id))

    patch.setattr(Manager, "update_state_after_alloc", update_state_after_alloc)
    patch.setattr(Manager, "_cleanup_load_request", cleanup_load_request)


def stores_swap_their_destinations(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.bind_connector_metadata

    def bind(self: Any, metadata: Any) -> None:
        metadata.store_cpu_blocks = metadata.store_cpu_blocks[::-1]
        real(self, metadata)

    patch.setattr(Worker, "bind_connector_metadata", bind)


def loads_swap_their_destinations(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker as Worker

    real = Worker.bind_connector_metadata

    def bind(self: Any, metadata: Any) -> None:
        metadata.load_gpu_blocks = metadata.load_gpu_blocks[::-1]
        real(self, metadata)

    patch.setattr(Worker, "bind_connector_metadata", bind)


def a_completed_store_keeps_its_gpu_blocks(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    real = Manager._process_store_completion

    def complete(self: Any, gpu_block_ids: list[int], *args: Any) -> None:
        self._gpu_block_pool.touch([self._gpu_block_pool.blocks[i] for i in gpu_block_ids[:1]])
        real(self, gpu_block_ids, *args)

    patch.setattr(Manager, "_process_store_completion", complete)


def reset_always_refuses(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

    patch.setattr(Manager, "reset", lambda self: False)


def removals_are_not_told(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    patch.setattr(BlockPool, "_emit_block_removed_events", lambda self, block_hashes: None)


DEFECTS = {
    "SHADOW-1": copy_ignores_the_compute_event,
    "CRASH-1": loads_raise_at_their_end_from_the_second_on,
    "DEVICE-1": copies_name_a_source_beyond_its_pool,
    "PROGRESS-1": a_finished_load_is_forgotten,
    "LOAD-1": a_load_is_reported_twice,
    "CONSERVE-1": touch_leaves_a_block_in_the_free_queue,
    "OWN-1": loads_do_not_pin_cpu_blocks,
    "INDEX-1": stores_swap_their_destinations,
    "INDEX-2": loads_swap_their_destinations,
    "RELEASE-1": a_completed_store_keeps_its_gpu_blocks,
    "REFUSE-1": reset_always_refuses,
    "EVENT-1": removals_are_not_told,
}


def test_every_law_has_a_defect() -> None:
    assert DEFECTS.keys() == LAWS.keys()


@pytest.mark.parametrize("law", DEFECTS)
def test_the_defect_breaks_its_law(law: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[law](monkeypatch)
    catch = hunt(target, number=1, histories=HISTORIES, until=law)
    assert law in catch.violations, f"{sorted(catch.violations)} broken in {catch.histories} histories"


def test_a_copy_beyond_the_cpu_pool_is_caught_before_it_writes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_name_a_destination_beyond_its_pool(monkeypatch)
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
