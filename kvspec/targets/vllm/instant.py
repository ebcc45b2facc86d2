"""vLLM's own step with transfers that complete at once: the yardstick for what kvspec adds.

The scheduler, its connector and the engine's step functions are the real ones. There is no worker: a load is
finished, and a store reported, with the output of the step that planned it; sampled tokens are constant.
"""

from __future__ import annotations

from typing import Any

from kvspec.device.adversary import FairAdversary
from kvspec.engine.executor import StepFuture
from kvspec.engine.text import FIRST_WORD, words
from kvspec.ops import Abort, Add, History, Reset, Settle, Step
from kvspec.targets.vllm import simple
from kvspec.targets.vllm.engine import VllmEngine

STEPS_MAX = 60


class InstantExecutor:
    """Answers at once, in the form in which a worker, or the aggregator of several, would."""

    def __init__(self, scheduler: Any, ranks: int) -> None:
        self._requests = scheduler.requests
        self._ranks = ranks
        self._output: Any = None

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        self._output = output
        result = None if output.total_num_scheduled_tokens else self._answer(output)
        return StepFuture(lambda: result) if non_block else result

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        result = self._answer(self._output)
        return StepFuture(lambda: result) if non_block else result

    def _answer(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        metadata = output.kv_connector_metadata
        stored = {metadata.store_event: self._ranks} if metadata.store_event >= 0 else {}
        loaded = set(metadata.load_event_to_reqs.get(metadata.load_event, ()))
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[FIRST_WORD] if self._is_complete(name) else [] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=loaded,
                kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
            ),
        )

    def _is_complete(self, name: str) -> bool:
        request = self._requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_tokens


def run_instantly(history: History) -> int:
    """Let a history happen on an engine without a device; return the engine steps.

    Stop tokens and idle time are left out.
    """
    setup = history.setup
    vllm = VllmEngine(
        setup, simple.CONNECTOR, simple.connector_config(setup), FairAdversary(), lambda _: None, lambda *_: None
    )
    executor = vllm.core.model_executor = InstantExecutor(vllm.scheduler, setup.ranks)
    assert executor is not None
    longest = (setup.gpu_blocks - 1) * setup.block_size
    prompts: dict[str, list[int]] = {}
    steps = 0

    def step(count: int) -> None:
        nonlocal steps
        while count > 0 and vllm.has_work():
            vllm.step()
            steps += 1
            count -= 1

    for op in history.ops:
        match op:
            case Add():
                start = prompts.get(op.continues) if op.continues else words(op.trunk, 0, op.shared)
                prompt = (start or []) + words(1000 + op.branch, 0, op.tail)
                if prompt and op.request not in prompts and len(prompt) + op.max_tokens <= longest:
                    prompts[op.request] = prompt
                    vllm.core.add_request(
                        vllm.new_request(
                            op.request,
                            prompt,
                            max_tokens=op.max_tokens,
                            salt=op.salt,
                            reads_cache=op.reads_cache,
                            priority=op.priority,
                            arrival=len(prompts),
                        )
                    )
            case Step() | Settle():
                step(op.count)
            case Abort() if op.request in vllm.scheduler.requests:
                vllm.core.abort_requests([op.request])
            case Reset() if not op.connector and not op.running:
                vllm.scheduler.reset_prefix_cache()
            case _:
                pass
    step(STEPS_MAX)
    return steps
