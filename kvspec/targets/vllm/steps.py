"""The engine's scheduler and step function without a connector and a device.

They run with an executor that always says the same token, as many steps in flight as the configuration wants, and
draft tokens. No expectations here.

Source: vLLM 0.33.0, v1/engine/core.py (EngineCore.step, step_with_batch_queue, post_step).
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from msgspec.structs import replace

from kvspec.engine.executor import StepFuture
from kvspec.ops import EngineSetup
from kvspec.targets.vllm import config
from kvspec.targets.vllm.answers import Answers
from kvspec.targets.vllm.core import make_request, pool_state
from kvspec.targets.vllm.engine import make_core, make_scheduler


class StepEngine:
    """A scheduler in its ``EngineCore``, whose executor this is.

    Args:
        setup: blocks, step size, running requests, scheduling, runner.
        stages: pipeline-parallel size.
        drafts: draft tokens of each step, 0 for none.
        draft_model: whether a draft model makes them, which needs slots of its own; else they come from the text.
        defers: whether the release of blocks waits for steps in flight. An engine decides that by its connector.
    """

    def __init__(self, setup: EngineSetup, stages: int, drafts: int, draft_model: bool, defers: bool) -> None:
        vllm_config = _configuration(setup, stages, drafts, draft_model)
        self.scheduler, self.hash_tokens = make_scheduler(vllm_config, config.kv_cache_config(setup))
        self.defers = defers
        if defers:
            self.scheduler.defer_block_free = True
        self.core = make_core(self.scheduler, self, _depth(vllm_config))
        self.answers = Answers(self.scheduler.requests, drafts)
        self._latest: Any = None
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)  # of a step that fails

    def add(self, name: str, tokens: list[int], says: int, priority: int, arrival: int) -> None:
        """Add a request that says up to ``says`` tokens."""
        self.scheduler.add_request(
            make_request(name, tokens, self.hash_tokens, max_tokens=says, priority=priority, arrival=arrival)
        )

    def step(self) -> None:
        """Make a step, if the engine's busy loop would make one."""
        if self.scheduler.has_requests() or self.core.batch_queue:
            _, ran = self.core.step_fn()
            self.core.post_step(ran)

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.core.abort_requests([name])

    def reset(self, running: bool) -> bool:
        """Reset the prefix cache; False if that was refused."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=running))

    def live(self) -> list[str]:
        """Return the names of the requests that have not ended."""
        return list(self.scheduler.requests)

    def steps_in_flight(self) -> int:
        """Return how many steps have been dispatched and not been processed."""
        return len(self.core.batch_queue or ())

    def begins(self, plan: Any) -> dict[str, int]:
        """Return where workers are told to begin in each request that a step computes. Tokens."""
        cached = plan.scheduled_cached_reqs
        new = {request.req_id: request.num_computed_tokens for request in plan.scheduled_new_reqs}
        return new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def computed(self, name: str) -> int:
        """Return the tokens of a request that count as computed."""
        return int(self.scheduler.requests[name].num_computed_tokens)

    def in_flight(self, name: str) -> int | None:
        """Return the tokens of a request that are in flight; None where the release doesn't count them."""
        tokens: int | None = getattr(self.scheduler.requests[name], "num_in_flight_tokens", None)
        return tokens

    def length(self, name: str) -> int:
        """Return the tokens of a request's text."""
        return int(self.scheduler.requests[name].num_tokens)

    def deferred_blocks(self) -> list[list[int]]:
        """Return the blocks whose release waits."""
        return [[block.block_id for block in blocks] for _, blocks in self.scheduler.deferred_frees]

    def preempted(self) -> int:
        """Return how often living requests have been preempted."""
        return sum(request.num_preemptions for request in self.scheduler.requests.values())

    def state(self) -> Any:
        """Return what tells one run from another that differs."""
        requests = self.scheduler.requests.values()
        return [
            (request.request_id, request.status.name, request.num_computed_tokens, request.num_tokens)
            for request in requests
        ], pool_state(self.scheduler.kv_cache_manager.block_pool)

    # What the engine asks of its executor

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        self._latest = output
        if output.total_num_scheduled_tokens:
            return StepFuture(lambda: None)
        future = StepFuture(lambda: self._result(output))
        return future if non_block else future.result()

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        result = self._result(self._latest)
        return StepFuture(lambda: result) if non_block else result

    def take_draft_token_ids(self) -> Any:
        return self.answers.proposed()

    def _result(self, output: Any) -> Any:
        """Return the ``ModelRunnerOutput`` of a step."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=self.answers.sampled(output),
        )


def _configuration(setup: EngineSetup, stages: int, drafts: int, draft_model: bool) -> Any:
    result = config.vllm_config(replace(setup, drafts=drafts), "", {})
    result.kv_transfer_config = None
    if drafts and draft_model:
        result.speculative_config.method = "draft_model"
    parallel = result.parallel_config = copy.copy(result.parallel_config)
    parallel.pipeline_parallel_size = stages
    return result


def _depth(vllm_config: Any) -> int:
    """Return how many steps can be in flight. Up to 0.22 that is a property of MultiprocExecutor."""
    if hasattr(type(vllm_config), "max_concurrent_batches"):
        return int(vllm_config.max_concurrent_batches)
    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    return 2 if stages == 1 and vllm_config.scheduler_config.async_scheduling else stages
