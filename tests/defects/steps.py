"""Defects of vLLM's scheduler, planted in 0.33.0, for the scheduler level of the equality machine: what it counts while
steps are in flight. The pool and the cache alone can't show them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvspec.defects import Patch, registered


def the_last_token_of_a_step_is_not_counted(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._update_after_schedule

    def update(self: Any, output: Any) -> None:
        real(self, output)
        for name, tokens in output.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens -= tokens > 1

    patch.setattr(Scheduler, "_update_after_schedule", update)


def rejected_drafts_stay_computed(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler.update_from_output

    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        names = [name for name in model_runner_output.req_ids if name in self.requests]
        before = {name: self.requests[name].num_computed_tokens for name in names}
        result = real(self, scheduler_output, model_runner_output)
        for name in before.keys() & self.requests.keys():
            self.requests[name].num_computed_tokens = before[name]
        return result

    patch.setattr(Scheduler, "update_from_output", update)


def a_preempted_request_keeps_what_it_had_computed(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *more: Any, **named: Any) -> None:
        computed = request.num_computed_tokens
        real(self, request, *more, **named)
        request.num_computed_tokens = computed

    patch.setattr(Scheduler, "_preempt_request", preempt)


def a_reset_lets_steps_in_flight_go_on(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._preempt_request

    def preempt(self: Any, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        real(self, request, timestamp)

    patch.setattr(Scheduler, "_preempt_request", preempt)


def the_draft_model_gets_no_slots(patch: Patch) -> None:
    from vllm.config import VllmConfig

    patch.setattr(VllmConfig, "num_lookahead_tokens", 0)


def the_last_step_of_a_request_is_the_one_before(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler._update_after_schedule

    def update(self: Any, output: Any) -> None:
        real(self, output)
        for name in output.num_scheduled_tokens:
            self.requests[name].last_sched_seq -= 1

    patch.setattr(Scheduler, "_update_after_schedule", update)


def deferred_blocks_are_released_a_step_too_early(patch: Patch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    real = Scheduler.update_from_output

    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.processed_step_seq += 1
        try:
            return real(self, scheduler_output, model_runner_output)
        finally:
            self.processed_step_seq -= 1

    patch.setattr(Scheduler, "update_from_output", update)


_DEFECTS: dict[Callable[[Patch], None], tuple[str, str, str]] = {
    the_last_token_of_a_step_is_not_counted: ("cursor", "STEP-1", "What is scheduled counts a token less."),
    rejected_drafts_stay_computed: ("drafts", "STEP-2", "Rejected drafts still count as computed."),
    a_preempted_request_keeps_what_it_had_computed: (
        "preemption",
        "STEP-3",
        "A preempted request goes on as if it still had its blocks.",
    ),
    a_reset_lets_steps_in_flight_go_on: (
        "reset",
        "STEP-4",
        "After a reset, what was in flight is said all the same.",
    ),
    the_draft_model_gets_no_slots: ("drafts", "STEP-5", "No slots are asked for what a draft model writes."),
    the_last_step_of_a_request_is_the_one_before: (
        "ordering",
        "FREE-3",
        "Blocks are released while the last step that writes them is in flight.",
    ),
    deferred_blocks_are_released_a_step_too_early: (
        "ordering",
        "FREE-4",
        "Deferred blocks are released a step too early.",
    ),
}
"""Plant -> kind, law, sentence."""

DEFECTS = registered("vllm-core", _DEFECTS, level="scheduler")
