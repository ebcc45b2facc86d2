"""vLLM's own step with transfers that complete at once: the yardstick for what kvspec adds.

The scheduler, its connector and the engine's step functions are the real ones. There is no worker: a load is
finished, and a store reported, with the output of the step that planned it; sampled tokens are constant.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvspec.device.adversary import FairAdversary
from kvspec.engine.executor import StepFuture
from kvspec.engine.text import words
from kvspec.ops import Abort, Add, History, Op, Reset, Settle, Step
from kvspec.targets import parse_target
from kvspec.targets.vllm import offloading, simple
from kvspec.targets.vllm.answers import Answers
from kvspec.targets.vllm.config import longest_request
from kvspec.targets.vllm.engine import VllmEngine

CONNECTORS = {"vllm-simple": simple, "vllm-offloading": offloading}

STEPS_MAX = 2000


class InstantExecutor:
    """Answers at once, in the form in which a worker, or the aggregator of several, would."""

    def __init__(self, answers: Answers, transfers_of: Callable[[Any], tuple[set[str], Any]]) -> None:
        self._answers = answers
        self._transfers_of = transfers_of
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

        loaded, report = self._transfers_of(output.kv_connector_metadata)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=self._answers.sampled(output),
            kv_connector_output=KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=report),
        )

    def take_draft_token_ids(self) -> Any:
        return self._answers.proposed()


def run_instantly(history: History) -> int:
    """Let a history happen on an engine without a device; return the engine steps.

    Stop tokens are left out, and time that passes on the device doesn't exist.
    """
    engine = _InstantEngine(history)
    for op in history.ops:
        engine.apply(op)
    while engine.requests and engine.steps < STEPS_MAX:
        engine.step(1)
    return engine.steps


class _InstantEngine:
    """What a World does with an op, without watching."""

    def __init__(self, history: History) -> None:
        setup = history.setup
        connector = CONNECTORS[parse_target(history.target)[0]]
        self._vllm = VllmEngine(
            setup,
            connector.CONNECTOR,
            connector.connector_config(setup),
            FairAdversary(),
            lambda _: None,
            lambda *_: None,
        )
        self._vllm.core.model_executor = InstantExecutor(
            Answers(self._vllm.scheduler.requests, setup.drafts),
            lambda metadata: connector.instant_output(metadata, setup.world_size),
        )
        self._longest = longest_request(setup)
        self._added: dict[str, Any] = {}
        self.requests: dict[str, Any] = self._vllm.scheduler.requests
        self.steps = 0

    def apply(self, op: Op) -> None:
        match op:
            case Add():
                self._add(op)
            case Step() | Settle():
                self.step(op.count)
            case Abort() if op.request in self.requests:
                self._vllm.core.abort_requests([op.request])
            case Reset():
                # A refusal, or up to 0.23 no such thing as a reset of the connector: as documented.
                with suppress(RuntimeError, NotImplementedError):
                    self._vllm.scheduler.reset_prefix_cache(op.running, op.connector)
            case _:
                pass

    def step(self, count: int) -> None:
        while count > 0 and self._vllm.has_work():
            self._vllm.step()
            self.steps += 1
            count -= 1

    def _add(self, op: Add) -> None:
        tail = words(1000 + op.branch, 0, op.tail)
        if op.continues is None:
            prompt = words(op.trunk, 0, op.shared) + tail
        elif op.continues in self._added:
            prompt = list(self._added[op.continues].all_token_ids) + tail
        else:
            return
        if not prompt or op.request in self._added or len(prompt) + op.max_tokens > self._longest:
            return
        request = self._vllm.new_request(
            op.request,
            prompt,
            max_tokens=op.max_tokens,
            salt=op.salt,
            reads_cache=op.reads_cache,
            priority=op.priority,
            arrival=len(self._added),
        )
        self._added[op.request] = request
        self._vllm.core.add_request(request)
