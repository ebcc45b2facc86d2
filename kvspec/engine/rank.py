"""One worker process: a device, the worker-side connector, and the two orders in which a model runner calls it.

Only what surrounds the connector is ours. The connector's life cycle within a step is the target's own code: the
mixin of runner V1, ``ActiveKVConnector`` of runner V2. Source: vLLM 0.33.0, v1/worker/gpu_model_runner.py
(execute_model), v1/worker/gpu/model_runner.py (execute_model, sample_tokens).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvspec.device.cuda_names import code_of_a_rank_runs, use
from kvspec.device.simulated import Marker, SimulatedDevice
from kvspec.engine.shadow import Batch, ShadowMemory


class Runner(Protocol):
    """The order in which a model runner calls the connector within one step."""

    def execute_model(self, rank: Rank, output: Any, batch: Batch) -> Any:
        """Launch the forward. Return the step's output if it schedules no tokens, else None."""

    def sample_tokens(self, rank: Rank, output: Any, batch: Batch) -> Any:
        """Return the step's output; sampled tokens are there once the compute stream has run."""


class Rank:
    """A rank's host code, run one message at a time, in order. An actor if it is a process of its own."""

    def __init__(
        self,
        index: int,
        device: SimulatedDevice,
        memory: ShadowMemory,
        connector: Any,
        kv_caches: dict[str, Any],
        enter: Callable[[Any], None],
    ) -> None:
        self.code = f"h{index}"
        self.index = index
        self.device = device
        self.memory = memory
        self.connector = connector
        self.kv_caches = kv_caches
        self._enter = enter
        self._inbox: deque[Callable[[], None]] = deque()

    def post(self, message: Callable[[], None]) -> None:
        """Queue host code; the adversary decides when it runs."""
        self._inbox.append(message)

    def run(self, message: Callable[[], None]) -> None:
        """Run host code now, on this rank's device and with its connector as the process's own."""
        before = use(self.device)
        self._enter(self.connector)
        try:
            message()
        finally:
            use(before)

    def enabled(self) -> bool:
        return bool(self._inbox) and not code_of_a_rank_runs()

    def advance(self) -> None:
        self.run(self._inbox.popleft())

    def idle(self) -> bool:
        """Whether the rank has no message left."""
        return not self._inbox

    def launch_forward(self, batch: Batch) -> None:
        self.device.launch("forward", lambda: self.memory.forward(batch))
        self.device.yield_point()

    def launch_block_updates(self, batch: Batch) -> None:
        """Zero new blocks, then copy-on-write, then take states along, all on the compute stream."""
        if batch.zero_blocks:
            self.device.launch("zero", lambda: self.memory.zero(batch.zero_blocks))
        if batch.block_copies:
            self.device.launch("copy-on-write", lambda: self.memory.copy_blocks(batch.block_copies))
        if batch.state_copies:
            self.device.launch("state copies", lambda: self.memory.copy_blocks(batch.state_copies))

    def mark_sampled(self) -> Marker:
        """Record the event on which the sampled tokens' copy to the host completes."""
        event = self.device.new_event()
        event.record(self.device.compute_stream)
        assert event.marker is not None
        return event.marker


class RunnerV1:
    """Everything inside ``execute_model``, but with a drafter: then the saves of a step are ended after it has run, in
    ``sample_tokens``. Preemptions are handled before zeroing and copy-on-write.
    """

    def __init__(
        self, mixin: Any, vllm_config: Any, make_output: Callable[[Batch, Any], Any], drafts: bool = False
    ) -> None:
        self._mixin = mixin
        self._vllm_config = vllm_config
        self._make_output = make_output
        self._drafts = drafts
        self._connector_output: dict[int, Any] = {}

    def execute_model(self, rank: Rank, output: Any, batch: Batch) -> Any:
        rank.device.yield_point()
        rank.connector.handle_preemptions(output.kv_connector_metadata)
        rank.launch_block_updates(batch)
        if not output.total_num_scheduled_tokens:
            result = self._mixin.kv_connector_no_forward(output, self._vllm_config)
            rank.device.yield_point()
            return result
        with self._mixin.maybe_get_kv_connector_output(output, defer_finalize=self._drafts) as connector_output:
            rank.launch_forward(batch)
        rank.device.yield_point()
        self._connector_output[rank.index] = connector_output
        return None

    def sample_tokens(self, rank: Rank, output: Any, batch: Batch) -> Any:
        if self._drafts:
            rank.device.yield_point()
            self._mixin.finalize_kv_connector()
            rank.device.yield_point()
        return self._make_output(batch, self._connector_output.pop(rank.index))


class RunnerV2:
    """The connector's step ends in ``sample_tokens``; preemptions are handled after zeroing and copy-on-write.

    With a drafter, from 0.33 on, the saves of a step are ended after it has run.
    """

    def __init__(
        self,
        connectors: dict[int, Any],
        make_output: Callable[[Batch, Any], Any],
        post_forward_takes_output: bool,
        drafts: bool = False,
    ) -> None:
        self._drafts = drafts
        self._connectors = connectors
        self._make_output = make_output
        self._post_forward_takes_output = post_forward_takes_output

    def execute_model(self, rank: Rank, output: Any, batch: Batch) -> Any:
        connector = self._connectors[rank.index]
        rank.launch_block_updates(batch)
        rank.device.yield_point()
        if not output.total_num_scheduled_tokens:
            result = connector.no_forward(output)
            rank.device.yield_point()
            return result
        connector.pre_forward(output)
        rank.launch_forward(batch)
        if hasattr(connector, "finish_forward"):
            connector.finish_forward()
        return None

    def sample_tokens(self, rank: Rank, output: Any, batch: Batch) -> Any:
        connector = self._connectors[rank.index]
        rank.device.yield_point()
        deferred = {"defer_finalize": True} if self._drafts and hasattr(connector, "finalize_step") else {}
        connector_output = connector.post_forward(
            output if self._post_forward_takes_output else output.finished_req_ids, **deferred
        )
        rank.device.yield_point()
        if deferred:
            connector.finalize_step()
            rank.device.yield_point()
        return self._make_output(batch, connector_output)


def private_copy(output: Any, metadata: Any) -> Any:
    """Return the scheduler's output as another process would get it: nothing that the connector can change later."""
    received = shallow_copy(output)
    received.kv_connector_metadata = metadata
    return received


def shallow_copy(output: Any) -> Any:
    """Return ``copy.copy(output)`` of a plain object, in a third of the time."""
    twin = object.__new__(type(output))
    twin.__dict__.update(output.__dict__)
    return twin
