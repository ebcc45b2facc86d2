"""The executor between the engine and its ranks.

One rank: in the engine's own process, no aggregator, the metadata shared by reference. Several: processes of their
own, each of which handles the steps in order but at its own pace; the real aggregator combines their outputs.
Source: vLLM 0.33.0, v1/executor/uniproc_executor.py and v1/executor/multiproc_executor.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from kvspec.device.simulated import DeviceFault, Marker
from kvspec.engine.rank import Rank, Runner, private_copy, shallow_copy
from kvspec.engine.shadow import Batch, RunnerState

RankOutput = Callable[[int, Any], None]


class _Step:
    """One dispatched scheduler output: what each rank returned so far, and which events its sampled tokens wait for."""

    def __init__(self, output: Any, batch: Batch, ranks: int) -> None:
        self.batch = batch
        self.output = output
        self.received = [output] * ranks
        self.results: list[Any] = [None] * ranks
        self.finished = [False] * ranks
        self.markers: list[Marker | None] = [None] * ranks


class StepFuture:
    """What the engine waits for. ``result`` lets the ranks run until the value is there."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve = resolve

    def result(self, timeout: float | None = None) -> Any:
        return self._resolve()

    def done(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Outputs are collected in ``result``; nothing calls back earlier."""


class Executor:
    """``execute_model`` and ``sample_tokens`` for the engine's step functions."""

    def __init__(
        self,
        ranks: list[Rank],
        runner: Runner,
        state: RunnerState,
        observe: RankOutput,
        aggregator: Any | None,
        propose: Callable[[Batch], Any],
    ) -> None:
        self._propose = propose
        self._ranks = ranks
        self._runner = runner
        self._state = state
        self._observe = observe
        self._aggregator = aggregator
        self._latest: _Step | None = None
        self.last_batch: Batch | None = None

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        batch = self._state.apply(output)
        self.last_batch = batch
        step = self._latest = _Step(output, batch, len(self._ranks))
        if len(self._ranks) > 1:
            sent = pickle.dumps(output.kv_connector_metadata)
            step.received = [private_copy(output, pickle.loads(sent)) for _ in self._ranks]
        self._dispatch(lambda rank: self._execute(rank, step))
        if output.total_num_scheduled_tokens:
            return StepFuture(lambda: None)
        future = StepFuture(lambda: self._collect(step))
        return future if non_block else future.result()

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        step = self._latest
        assert step is not None
        self._dispatch(lambda rank: self._sample(rank, step))
        future = StepFuture(lambda: self._collect(step))
        return future if non_block else future.result()

    def take_draft_token_ids(self) -> Any:
        """Return what the drafter proposes after the latest step."""
        assert self.last_batch is not None
        return self._propose(self.last_batch)

    def idle(self) -> bool:
        """Whether no rank has anything left to do on the host."""
        return all(rank.idle() for rank in self._ranks)

    def _dispatch(self, message: Callable[[Rank], None]) -> None:
        if len(self._ranks) == 1:
            rank = self._ranks[0]
            rank.run(lambda: message(rank))
            return
        for rank in self._ranks:
            rank.post(partial(message, rank))
        self._ranks[0].device.yield_point()

    def _execute(self, rank: Rank, step: _Step) -> None:
        result = self._runner.execute_model(rank, step.received[rank.index], step.batch)
        if result is not None:
            self._finish(rank, step, result)

    def _sample(self, rank: Rank, step: _Step) -> None:
        step.markers[rank.index] = rank.mark_sampled()
        self._finish(rank, step, self._runner.sample_tokens(rank, step.received[rank.index], step.batch))

    def _finish(self, rank: Rank, step: _Step, result: Any) -> None:
        step.results[rank.index] = result
        step.finished[rank.index] = True
        self._observe(rank.index, result)

    def _collect(self, step: _Step) -> Any:
        """Wait for every rank's host code and for the events of the sampled tokens, then combine the outputs."""
        device = self._ranks[0].device

        def done() -> bool:
            return all(step.finished) and all(marker is None or marker.done for marker in step.markers)

        if not done() and not device.adversary.block(device.actors, done):
            raise DeviceFault("a step's output never arrives: a rank or its compute stream waits for ever")
        if self._aggregator is None:
            return step.results[0]
        return self._aggregator.aggregate([shallow_copy(result) for result in step.results], output_rank=0)
