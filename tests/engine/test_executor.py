"""Ranks and the executor in front of them, around a runner that only writes down what it is asked.

Not checked here: what a real runner does with a real connector (tests/test_world.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec.device.adversary import Actor, Adversary, FairAdversary, RandomAdversary, ReplayAdversary
from kvspec.device.cuda_names import current_device, use
from kvspec.device.simulated import DeviceFault, Marker, SimulatedDevice
from kvspec.engine.executor import Executor
from kvspec.engine.rank import Rank, RunnerV1, RunnerV2

FIXED = settings(derandomize=True, database=None, deadline=None)


class Metadata:
    """A connector's plan: blocks in a list that its owner may change later."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata) and other.blocks == self.blocks

    __hash__ = None  # type: ignore[assignment]


class Fields:
    """A plain object, as the target's outputs are."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def output(step: int, tokens: int = 1) -> Any:
    """A scheduler's output."""
    return Fields(step=step, total_num_scheduled_tokens=tokens, kv_connector_metadata=Metadata([step, step + 1]))


class Notes:
    """A runner that writes down its calls, launches a forward, and yields as a real one does."""

    def __init__(self, log: list[tuple[str, int, int]]) -> None:
        self._log = log
        self.received: list[Any] = []
        self.empty = Fields(rank=None, step=None)
        """The result of every step without tokens, shared as vLLM's ``EMPTY_MODEL_RUNNER_OUTPUT`` is."""
        self.devices: list[tuple[int, int]] = []
        self.extra: Callable[[Rank], None] = lambda rank: None

    def execute_model(self, rank: Rank, output: Any, batch: Any) -> Any:
        self._log.append(("execute", rank.index, output.step))
        self.received.append(output)
        self.devices.append((rank.index, current_device().rank))
        assert batch == f"batch {output.step}"
        rank.device.yield_point()
        if not output.total_num_scheduled_tokens:
            return self.empty
        rank.device.launch("forward", lambda: self._log.append(("forward", rank.index, output.step)))
        rank.device.yield_point()
        return None

    def sample_tokens(self, rank: Rank, output: Any, batch: Any) -> Any:
        self._log.append(("sample", rank.index, output.step))
        self.extra(rank)
        rank.device.yield_point()
        return Fields(rank=rank.index, step=output.step)


class Aggregator:
    """Spoils what it gets, as the real one may, and returns who has answered."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
        self.seen.append(outputs)
        for result in outputs:
            result.spoilt = True
        return Fields(ranks=[result.rank for result in outputs], step=outputs[output_rank].step)


@dataclass
class Lab:
    """An executor with ranks of its own."""

    ranks: int
    adversary: Adversary
    log: list[tuple[str, int, int]] = field(default_factory=list)
    observed: list[tuple[int, Any]] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.actors: list[Actor] = []
        self.devices = [SimulatedDevice(rank, self.adversary, self.actors) for rank in range(self.ranks)]
        self.workers = [self._worker(rank) for rank in range(self.ranks)]
        if self.ranks > 1:
            self.actors.extend(self.workers)
        self.runner = Notes(self.log)
        self.aggregator = Aggregator() if self.ranks > 1 else None
        self.executor = Executor(
            self.workers,
            self.runner,
            SimpleNamespace(apply=lambda output: f"batch {output.step}"),
            lambda rank, result: self.observed.append((rank, result)),
            self.aggregator,
            lambda batch: f"drafts after {batch}",
        )

    def _worker(self, rank: int) -> Rank:
        memory: Any = None
        return Rank(rank, self.devices[rank], memory, f"connector {rank}", {}, self.entered.append)

    def dispatch(self, step: int, tokens: int = 1) -> Any:
        """What the engine does with one scheduler output; return the future of its result."""
        future = self.executor.execute_model(output(step, tokens), non_block=True)
        return self.executor.sample_tokens(None, non_block=True) if tokens else future

    def host(self, *kinds: str) -> list[tuple[str, int, int]]:
        """What ranks' host code has done."""
        return [entry for entry in self.log if entry[0] in (kinds or ("execute", "sample"))]


def never(device: SimulatedDevice) -> Any:
    """An event whose record is in no stream."""
    event = device.new_event()
    event.marker = Marker()
    return event


# One rank -------------------------------------------------------------------------------------------------------------


def test_one_rank_runs_at_dispatch_and_its_device_when_somebody_waits() -> None:
    lab = Lab(1, ReplayAdversary(""))
    future = lab.dispatch(0)
    assert lab.log == [("execute", 0, 0), ("sample", 0, 0)]
    assert lab.executor.idle()
    result = future.result()
    assert lab.log[2:] == [("forward", 0, 0)]
    assert (result.rank, result.step) == (0, 0)


def test_one_rank_shares_the_metadata_with_the_scheduler() -> None:
    lab = Lab(1, FairAdversary())
    scheduled = output(0)
    lab.executor.execute_model(scheduled, non_block=True)
    (received,) = lab.runner.received
    assert received is scheduled
    assert received.kv_connector_metadata is scheduled.kv_connector_metadata


def test_one_rank_answers_without_an_aggregator_with_the_very_object() -> None:
    lab = Lab(1, FairAdversary())
    assert lab.dispatch(0, tokens=0).result() is lab.runner.empty
    assert not hasattr(lab.runner.empty, "spoilt")


# Several ranks --------------------------------------------------------------------------------------------------------

RANKS = pytest.mark.parametrize("ranks", [2, 3])


@RANKS
def test_several_ranks_do_nothing_at_dispatch_if_the_adversary_returns_to_the_host(ranks: int) -> None:
    lab = Lab(ranks, ReplayAdversary(""))
    future = lab.dispatch(0)
    assert lab.log == []
    assert not lab.executor.idle()
    assert future.result().ranks == list(range(ranks))
    assert lab.executor.idle()


def test_ranks_run_in_the_order_that_the_adversary_says() -> None:
    lab = Lab(2, ReplayAdversary("h1..h0..."))
    lab.executor.execute_model(output(0), non_block=True)
    assert lab.host() == [("execute", 1, 0)]
    future = lab.executor.sample_tokens(None, non_block=True)
    assert lab.host() == [("execute", 1, 0), ("execute", 0, 0)]
    assert future.result().ranks == [0, 1]


def run_steps(ranks: int, seed: int, plan: list[tuple[int, bool]]) -> Lab:
    """Dispatch a step per entry (its tokens, whether somebody waits for it at once); wait for all in the end."""
    adversary = RandomAdversary()
    adversary.begin_op(seed)
    lab = Lab(ranks, adversary)
    futures: list[tuple[int, Any]] = []

    def collect() -> None:
        for step, future in futures:
            result = future.result()
            assert result.step in (step, None)
            done = {(kind, rank) for kind, rank, at in lab.log if at == step}
            kinds = {"execute", "sample", "forward"} if plan[step][0] else {"execute"}
            assert done == {(kind, rank) for kind in kinds for rank in range(ranks)}
        futures.clear()

    for step, (tokens, waits) in enumerate(plan):
        futures.append((step, lab.dispatch(step, tokens)))
        if waits:
            collect()
    collect()
    return lab


PLANS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


@FIXED
@given(st.integers(1, 3), st.integers(0, 999), PLANS)
def test_each_rank_handles_the_steps_in_order_and_a_result_waits_for_every_rank(
    ranks: int, seed: int, plan: list[tuple[int, bool]]
) -> None:
    lab = run_steps(ranks, seed, plan)
    in_order = [
        (kind, step) for step, (n, _) in enumerate(plan) for kind in (["execute", "sample"] if n else ["execute"])
    ]
    for rank in range(ranks):
        assert [(kind, step) for kind, on, step in lab.host() if on == rank] == in_order
    assert lab.executor.idle()


@FIXED
@given(st.integers(1, 3), st.integers(0, 999), PLANS)
def test_each_ranks_result_of_each_step_is_observed_once_and_in_order(
    ranks: int, seed: int, plan: list[tuple[int, bool]]
) -> None:
    lab = run_steps(ranks, seed, plan)
    for rank in range(ranks):
        steps = [result.step for on, result in lab.observed if on == rank]
        assert steps == [step if tokens else None for step, (tokens, _) in enumerate(plan)]


@FIXED
@given(st.integers(1, 3), st.integers(0, 999), PLANS)
def test_code_of_a_rank_sees_its_own_device_and_connector_only(
    ranks: int, seed: int, plan: list[tuple[int, bool]]
) -> None:
    lab = run_steps(ranks, seed, plan)
    assert all(rank == device for rank, device in lab.runner.devices)
    messages = sum(2 if tokens else 1 for tokens, _ in plan)
    assert sorted(lab.entered) == sorted(f"connector {rank}" for rank in range(ranks) for _ in range(messages))
    assert use(None) is None


def test_ranks_may_be_apart_by_as_many_steps_as_are_in_flight() -> None:
    lab = Lab(2, ReplayAdversary("." * 3 + "h1" * 20))
    futures = [lab.dispatch(step) for step in range(2)]
    ahead = [step for kind, rank, step in lab.host("sample") if rank == 1]
    assert ahead == [0, 1]
    assert not any(rank == 0 for _, rank, _ in lab.host())
    for future in futures:
        future.result()
    assert [rank for _, rank, _ in lab.host("sample")] == [1, 1, 0, 0]


def test_which_rank_is_first_is_up_to_the_adversary() -> None:
    first = {run_steps(2, seed, [(1, True)]).host()[0][1] for seed in range(20)}
    assert first == {0, 1}


def test_the_code_of_one_rank_never_runs_inside_that_of_another() -> None:
    lab = Lab(2, FairAdversary())
    seen: list[list[bool]] = []
    lab.runner.extra = lambda rank: seen.append([worker.enabled() for worker in lab.workers])
    for step in range(2):
        lab.dispatch(step)
    assert len(seen) == 4
    assert not any(any(enabled) for enabled in seen)


@RANKS
def test_several_ranks_get_private_copies_of_the_metadata(ranks: int) -> None:
    lab = Lab(ranks, ReplayAdversary(""))
    scheduled = output(0)
    lab.executor.execute_model(scheduled, non_block=True)
    future = lab.executor.sample_tokens(None, non_block=True)
    planned = scheduled.kv_connector_metadata
    planned.blocks.append(99)  # The scheduler's side goes on before any rank has looked.
    future.result()
    copies = [received.kv_connector_metadata for received in lab.runner.received]
    assert copies == [Metadata([0, 1])] * ranks
    assert len({id(thing) for copy in (planned, *copies) for thing in (copy, copy.blocks)}) == 2 * (ranks + 1)
    assert scheduled.kv_connector_metadata is planned


# Waiting --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_result_waits_for_the_sampled_tokens_and_for_nothing_behind_them(ranks: int) -> None:
    lab = Lab(ranks, ReplayAdversary(""))
    future = lab.dispatch(0)
    late: list[int] = []
    for device in lab.devices:
        device.launch("drafter", lambda: late.append(1), device.new_stream("z"))
    future.result()
    assert sorted(lab.host("forward")) == [("forward", rank, 0) for rank in range(ranks)]
    assert late == []


def test_the_future_of_an_execution_with_tokens_says_nothing_and_waits_for_nothing() -> None:
    lab = Lab(2, ReplayAdversary(""))
    assert lab.executor.execute_model(output(0), non_block=True).result() is None
    assert lab.log == []


def test_without_non_block_the_result_itself_is_returned() -> None:
    lab = Lab(2, ReplayAdversary(""))
    assert lab.executor.execute_model(output(0, tokens=0)).ranks == [None, None]
    lab.executor.execute_model(output(1))
    assert lab.executor.sample_tokens(None).ranks == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_result_behind_a_stream_that_waits_for_ever_is_a_fault_of_the_device(ranks: int) -> None:
    lab = Lab(ranks, FairAdversary())
    stuck = lab.devices[-1]
    stuck.compute_stream.wait_event(never(stuck))
    with pytest.raises(DeviceFault, match="a step's output never arrives"):
        lab.dispatch(0).result()


def test_a_result_of_a_rank_whose_code_never_runs_is_a_fault_of_the_device() -> None:
    lab = Lab(2, FairAdversary())
    lab.actors.remove(lab.workers[1])
    with pytest.raises(DeviceFault, match="a rank or its compute stream waits for ever"):
        lab.dispatch(0).result()


def test_the_batch_of_the_latest_step_can_be_seen() -> None:
    lab = Lab(1, FairAdversary())
    assert lab.executor.last_batch is None
    lab.dispatch(0)
    lab.dispatch(1, tokens=0)
    assert lab.executor.last_batch == "batch 1"


# Aggregation ----------------------------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("tokens", [0, 1])
def test_outputs_are_copied_before_they_are_aggregated(ranks: int, tokens: int) -> None:
    lab = Lab(ranks, FairAdversary())
    assert lab.aggregator is not None
    for step in range(2):
        lab.dispatch(step, tokens).result()
    returned = [result for _, result in lab.observed]
    assert not any(hasattr(result, "spoilt") for result in returned)
    given_out = [result for outputs in lab.aggregator.seen for result in outputs]
    assert len({id(result) for result in (*given_out, *returned)}) == len(given_out) + len({id(r) for r in returned})


@RANKS
def test_the_aggregator_gets_one_output_of_each_rank_in_the_order_of_ranks(ranks: int) -> None:
    lab = Lab(ranks, ReplayAdversary("".join(f"h{rank}" for rank in reversed(range(ranks)))))
    assert lab.aggregator is not None
    lab.dispatch(3).result()
    ((*outputs,),) = lab.aggregator.seen
    assert [(result.rank, result.step) for result in outputs] == [(rank, 3) for rank in range(ranks)]


# A rank ---------------------------------------------------------------------------------------------------------------


def test_a_rank_gives_the_device_back_even_if_its_code_raises() -> None:
    lab = Lab(1, FairAdversary())

    def fail() -> None:
        assert current_device() is lab.devices[0]
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        lab.workers[0].run(fail)
    assert use(None) is None


def test_a_rank_handles_its_messages_one_at_a_time_and_in_order() -> None:
    lab = Lab(1, FairAdversary())
    (rank,) = lab.workers
    done: list[str] = []
    assert rank.idle()
    assert not rank.enabled()
    for message in ("first", "second"):
        rank.post(lambda message=message: done.append(message))
    rank.advance()
    assert done == ["first"]
    assert rank.enabled()
    rank.advance()
    assert done == ["first", "second"]
    assert rank.idle()


# The order in which runners call the connector ------------------------------------------------------------------------


class Recorder:
    """A rank, a connector and the target's own wrappers, all of which write down their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device = self
        self.connector = self
        self.index = 0

    def __getattr__(self, name: str) -> Any:
        if name == "yield_point":
            return lambda: None
        return lambda *_: self.calls.append(name)

    @contextmanager
    def maybe_get_kv_connector_output(self, output: Any, defer_finalize: bool) -> Iterator[str]:
        self.calls.append("begin")
        yield "said"
        self.calls.append("end, not yet of saves" if defer_finalize else "end")

    def finalize_kv_connector(self) -> None:
        self.calls.append("finalize_kv_connector")

    def kv_connector_no_forward(self, output: Any, config: Any) -> str:
        self.calls.append("no_forward")
        return "empty"

    def no_forward(self, output: Any) -> str:
        self.calls.append("no_forward")
        return "empty"

    def post_forward(self, what: Any, defer_finalize: bool = False) -> str:
        self.calls.append("post_forward, not yet of saves" if defer_finalize else "post_forward")
        self.post_forward_got = what
        return "said"


def run_runner(runner: Any, recorder: Recorder, tokens: int) -> Any:
    scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens, kv_connector_metadata="plan", finished_req_ids={"a"})
    result = runner.execute_model(recorder, scheduled, "batch")
    if result is None:
        recorder.calls.append("—")
        result = runner.sample_tokens(recorder, scheduled, "batch")
    return result


@pytest.mark.parametrize(
    ("tokens", "calls", "result"),
    [
        (1, ["handle_preemptions", "launch_block_updates", "begin", "launch_forward", "end", "—"], ("batch", "said")),
        (0, ["handle_preemptions", "launch_block_updates", "no_forward"], "empty"),
    ],
)
def test_runner_v1_handles_preemptions_before_blocks_are_zeroed(tokens: int, calls: list[str], result: object) -> None:
    recorder = Recorder()
    runner = RunnerV1(recorder, None, lambda batch, said: (batch, said))
    assert run_runner(runner, recorder, tokens) == result
    assert recorder.calls == calls


@pytest.mark.parametrize(
    ("tokens", "calls", "result"),
    [
        (
            1,
            ["launch_block_updates", "pre_forward", "launch_forward", "finish_forward", "—", "post_forward"],
            ("batch", "said"),
        ),
        (0, ["launch_block_updates", "no_forward"], "empty"),
    ],
)
def test_runner_v2_begins_the_connectors_step_after_blocks_are_zeroed_and_ends_it_when_sampling(
    tokens: int, calls: list[str], result: object
) -> None:
    recorder = Recorder()
    runner = RunnerV2({0: recorder}, lambda batch, said: (batch, said), post_forward_takes_output=False)
    assert run_runner(runner, recorder, tokens) == result
    assert recorder.calls == calls


@pytest.mark.parametrize("takes_output", [True, False])
def test_runner_v2_ends_the_step_with_what_the_release_takes(takes_output: bool) -> None:
    recorder = Recorder()
    run_runner(RunnerV2({0: recorder}, lambda *_: "result", takes_output), recorder, tokens=1)
    got = recorder.post_forward_got
    assert (got.finished_req_ids if takes_output else got) == {"a"}


def test_runner_v1_ends_saves_when_the_drafter_has_run() -> None:
    recorder = Recorder()
    run_runner(RunnerV1(recorder, None, lambda *_: "result", drafts=True), recorder, tokens=1)
    assert recorder.calls[-4:] == ["launch_forward", "end, not yet of saves", "—", "finalize_kv_connector"]


class OldRecorder(Recorder):
    """The wrapper of runner V2 in releases that end saves before the drafter runs."""

    def __getattr__(self, name: str) -> Any:
        if name == "finalize_step":
            raise AttributeError
        return super().__getattr__(name)


@pytest.mark.parametrize(
    ("recorder", "calls"),
    [
        (Recorder(), ["post_forward, not yet of saves", "finalize_step"]),
        (OldRecorder(), ["post_forward"]),
    ],
)
def test_runner_v2_ends_saves_when_the_drafter_has_run_if_the_release_does(
    recorder: Recorder, calls: list[str]
) -> None:
    run_runner(RunnerV2({0: recorder}, lambda *_: "result", False, drafts=True), recorder, tokens=1)
    assert recorder.calls[recorder.calls.index("—") + 1 :] == calls


def test_drafts_are_those_after_the_latest_step() -> None:
    lab = Lab(1, FairAdversary())
    for step in (1, 2):
        lab.dispatch(step)
    assert lab.executor.take_draft_token_ids() == "drafts after batch 2"
