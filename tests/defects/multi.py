"""Defects of MultiConnector, planted in the real functions of vLLM 0.33.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvspec.defects import Patch, registered


def the_second_backends_events_are_lost(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    patch.setattr(MultiConnector, "take_events", lambda self: self._connectors[0].take_events())


def the_other_backend_is_told_to_load(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    real = MultiConnector.update_state_after_alloc

    def update_state_after_alloc(self: Any, request: Any, blocks: Any, external: int) -> None:
        chosen = self._requests_to_connector.get(request.request_id)
        if chosen is not None:
            self._requests_to_connector[request.request_id] = 1 - chosen
        real(self, request, blocks, external)

    patch.setattr(MultiConnector, "update_state_after_alloc", update_state_after_alloc)


def a_request_stays_chosen_for_a_backend(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    real = MultiConnector._aggregate_request_finished

    def finished(self: Any, request: Any, of_connector: Any) -> Any:
        chosen = dict(self._requests_to_connector)
        answer = real(self, request, of_connector)
        self._requests_to_connector.update(chosen)
        return answer

    patch.setattr(MultiConnector, "_aggregate_request_finished", finished)


def the_second_backend_gets_no_reports(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    real = MultiConnector.build_connector_worker_meta

    def build(self: Any) -> Any:
        metadata = real(self)
        if metadata is not None:
            metadata.metadata = (metadata.metadata[0], *[None] * (len(self._connectors) - 1))
        return metadata

    patch.setattr(MultiConnector, "build_connector_worker_meta", build)


def a_backend_hears_only_of_requests_that_it_loads(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    real = MultiConnector.update_state_after_alloc

    def update_state_after_alloc(self: Any, request: Any, blocks: Any, external: int) -> None:
        chosen = self._requests_to_connector.get(request.request_id)
        if chosen is None:
            real(self, request, blocks, external)
        else:
            self._connectors[chosen].update_state_after_alloc(request, blocks, external)

    patch.setattr(MultiConnector, "update_state_after_alloc", update_state_after_alloc)


_DEFECTS: dict[Callable[[Patch], None], tuple[str, str, str]] = {
    the_second_backends_events_are_lost: ("events", "EVENT-1", "Events of the second backend are never taken."),
    the_other_backend_is_told_to_load: ("index", "CRASH-1", "The backend without the hit is told to load it."),
    a_request_stays_chosen_for_a_backend: ("abort", "RELEASE-1", "Which backend loads outlives the request."),
    a_backend_hears_only_of_requests_that_it_loads: (
        "index",
        "STORED-1",
        "A backend isn't told of a request that the other one loads.",
    ),
    the_second_backend_gets_no_reports: ("reports", "PROGRESS-1", "Stores of the second backend never end."),
}
"""Plant -> kind, law, sentence."""

DEFECTS = registered("vllm-multi", _DEFECTS, "multi_")
