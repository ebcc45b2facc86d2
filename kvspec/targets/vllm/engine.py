"""Puts one engine together from the target's own parts: scheduler, step functions, connectors, runners, aggregator.

``EngineCore`` is made without its constructor, which would start a model; the attributes that its step functions
read are set here. Source: vLLM 0.33.0, v1/engine/core.py (EngineCore.__init__), v1/worker/gpu_worker.py
(initialize_from_config).
"""

from __future__ import annotations

import functools
import inspect
import math
import queue
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from kvspec.device.adversary import Actor, Adversary
from kvspec.device.cuda_names import use
from kvspec.device.simulated import SimulatedDevice
from kvspec.engine.executor import Executor
from kvspec.engine.rank import Rank, Runner, RunnerV1, RunnerV2
from kvspec.engine.shadow import Batch, RunnerState, ShadowMemory, ShadowMismatch
from kvspec.engine.text import FIRST_WORD, STOP_TOKEN, Origins, Text
from kvspec.ops import EngineSetup
from kvspec.targets.vllm import config

HASH_BYTES = 32
"""Of one block hash: SHA-256."""
KEY_BYTES = HASH_BYTES + 4
"""Of a key of a block pool: the hash of the block's last tokens, and the number of the group."""


class VllmEngine:
    """One engine of the target: ``core`` is the real ``EngineCore``, everything asynchronous is in ``actors``."""

    def __init__(
        self,
        setup: EngineSetup,
        connector: str,
        connector_config: dict[str, Any],
        adversary: Adversary,
        report: Callable[[ShadowMismatch], None],
        observe_output: Callable[[int, Any], None],
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.setup = setup
        self.adversary = adversary
        self.actors: list[Actor] = []
        self.texts: dict[str, Text] = {}
        self.origins = Origins()
        self._hashed: dict[bytes, tuple[str, int]] = {}
        self._requests: dict[str, Any] = {}
        self._enter_process = _process_enterer()
        self.vllm_config = config.vllm_config(setup, connector, connector_config)
        self.kv_cache_config = config.kv_cache_config(setup)
        self.layouts = config.layouts(setup)
        world_size = setup.world_size
        self.ranks = [self._make_rank(index, report) for index in range(world_size)]
        if world_size > 1:
            self.actors.extend(self.ranks)
        runner = self._make_runner()
        self._size_cpu_tiers()
        self.scheduler, self.hash_block_size = make_scheduler(self.vllm_config, self.kv_cache_config)
        self.connector = self.scheduler.connector
        aggregator = KVOutputAggregator.from_connector(self.connector, world_size) if world_size > 1 else None
        state = RunnerState(self.layouts, self.texts, ahead=setup.async_scheduling and setup.drafts > 0)
        propose = _draft_maker(setup.drafts)
        self.executor = Executor(self.ranks, runner, state, observe_output, aggregator, propose)
        self.core = make_core(self.scheduler, self.executor, depth=2 if setup.async_scheduling else 1)

    def _make_rank(self, index: int, report: Callable[[ShadowMismatch], None]) -> Rank:
        """Construct the worker-side connector and register the KV cache; the scheduler doesn't exist yet."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        device = SimulatedDevice(index, self.adversary, self.actors, pageable=False)
        tags, caches = config.kv_cache_memory(self.setup)
        device.add_device_memory(tags.ctypes.data, tags.nbytes)
        shard = config.shard_of(index, self.setup)
        memory = ShadowMemory(tags, self.layouts, index, shard, self.origins, report)
        before = use(device)
        try:
            connector = KVConnectorFactory.create_connector(
                config.of_rank(self.vllm_config, index), KVConnectorRole.WORKER, self.kv_cache_config
            )
            rank = Rank(index, device, memory, connector, caches, self._enter_process)
            if not self.setup.runner_v2:
                connector.register_kv_caches(caches)
        finally:
            use(before)
        return rank

    def _make_runner(self) -> Runner:
        if not self.setup.runner_v2:
            from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

            return RunnerV1(KVConnectorModelRunnerMixin, self.vllm_config, _output_maker(), bool(self.setup.drafts))
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        takes_output = "scheduler_output" in inspect.signature(ActiveKVConnector.post_forward).parameters  # 0.20

        wrapped: dict[int, Any] = {}
        for rank in self.ranks:
            self._enter_process(rank.connector)
            before = use(rank.device)
            try:
                wrapped[rank.index] = ActiveKVConnector(self.vllm_config, rank.kv_caches)
            finally:
                use(before)
        return RunnerV2(wrapped, _output_maker(), takes_output, bool(self.setup.drafts))

    def _size_cpu_tiers(self) -> None:
        """Tell the scheduler's side how many CPU blocks the workers have."""
        counts = [
            connector.get_aligned_num_cpu_blocks()
            for rank in self.ranks
            for connector in children(rank.connector)
            if hasattr(connector, "get_aligned_num_cpu_blocks")  # SimpleCPUOffload, 0.33
        ]
        if counts:
            self.vllm_config.cache_config.simple_cpu_offload_num_blocks = min(counts)

    # What a history does ----------------------------------------------------------------------------------------------

    def new_request(self, name: str, prompt: list[int], **fields: Any) -> Any:
        """Return a ``Request`` of the target. ``fields``: max_tokens, salt, reads_cache, priority, arrival."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=fields["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[STOP_TOKEN],
            prompt_logprobs=None if fields["reads_cache"] else 1,
        )
        self.texts[name] = Text.of_prompt(name, prompt, fields["salt"], self.origins)
        self._requests[name] = Request(
            name,
            prompt,
            sampling,
            None,
            arrival_time=float(fields["arrival"]),
            priority=fields["priority"],
            cache_salt=str(fields["salt"]) if fields["salt"] else None,
            block_hasher=self._block_hasher(),
            **_old_request_arguments(),
        )
        return self._requests[name]

    def _block_hasher(self) -> Callable[[Any], list[Any]]:
        """Return the target's block hasher, which also notes what each hash stands for."""
        hasher = _real_block_hasher(self.hash_block_size)

        def hash_and_note(request: Any) -> list[Any]:
            start = len(request.block_hashes)
            hashes: list[Any] = hasher(request)
            for i, block_hash in enumerate(hashes, start):
                self._hashed.setdefault(block_hash, (request.request_id, i))
            return hashes

        return hash_and_note

    def tags_of_hash(self, block_hash: bytes, span: int) -> np.ndarray | None:
        """Return the tags of the tokens that a hash stands for in its block of ``span`` tokens, or None if it is
        nobody's.

        From 0.26 on a hash may stand for the beginning of a block: fewer tokens than its span. Up to 0.23 the hash of
        a block of several hash blocks is theirs, one after the other.
        """
        noted = self._hashed.get(block_hash[-HASH_BYTES:])
        if noted is None:
            return None
        request, i = noted
        stop = (i + 1) * self.hash_block_size
        return self.texts[request].tags((stop - 1) // span * span, stop)

    def tags_of_block(self, key: bytes) -> np.ndarray | None:
        """Return the tags of the tokens that a key, a hash and the group's number in 4 bytes, stands for in its block;
        None if it is nobody's."""
        return self.tags_of_hash(key[:-4], self.layouts[group_of(key)].span)

    def stops_of_full_blocks(self, name: str) -> dict[bytes, int]:
        """Return where each full block that a request's table holds stops, in tokens, by the last bytes of its key.

        The last token that was sampled was never computed; a step that was scheduled ahead has moved the windows on.
        A hit ends where blocks of all groups do, and with EAGLE each group with drafts must go a block further. Here
        all have them, so nothing behind the last such place serves a hit, though with EAGLE the GPU may keep it.
        States are left out: a request gives up the blocks of older ones, and each connector has a rule of its own for
        which of them it stores.
        """
        request = self._requests[name]
        common_span = math.lcm(*(layout.span for layout in self.layouts))
        last_common_stop = (request.num_tokens - 1) // common_span * common_span
        stops = {}
        for group, layout in enumerate(self.layouts):
            if layout.state:
                continue
            left = request.num_tokens - layout.reach + 1 if layout.reach else 0
            for stop in range(layout.span, last_common_stop + 1, layout.span):
                if stop > left:
                    last = request.block_hashes[stop // self.hash_block_size - 1]
                    stops[last[-HASH_BYTES:] + group.to_bytes(4, "big")] = stop
        return stops

    def tokens_in_a_row(self, name: str, start: int, index: Container[bytes]) -> int:
        """Return how many tokens of a request, from ``start`` on and short of its last one, an index has as whole
        blocks in a row. For engines with one group."""
        request, span = self._requests[name], self.layouts[0].span
        stop = start
        while stop + span < request.num_tokens:
            last = request.block_hashes[(stop + span) // self.hash_block_size - 1]
            if last + (0).to_bytes(4, "big") not in index:
                break
            stop += span
        return stop - start

    def describe_key(self, key: bytes) -> str:
        """Say in words which block a key stands for."""
        group = f" in group {group_of(key)}" if len(self.layouts) > 1 else ""
        noted = self._hashed.get(key[-KEY_BYTES:-4])
        if noted is None:
            return f"hash {key[:-4].hex()[:12]}{group}"
        request, i = noted
        block = ((i + 1) * self.hash_block_size - 1) // self.layouts[group_of(key)].span
        return f"block {block} of {request}{group}"

    def has_work(self) -> bool:
        """Whether the engine's busy loop would make a step."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> Any:
        """Make one step of the engine's own step function; return (outputs by client, whether a model ran)."""
        outputs, ran = self.core.step_fn()
        self.core.post_step(ran)
        return outputs, ran


def children(connector: Any) -> list[Any]:
    """Return the connectors that a MultiConnector has, or the connector itself."""
    return list(getattr(connector, "_connectors", [connector]))


def make_scheduler(vllm_config: Any, kv_cache_config: Any) -> tuple[Any, int]:
    """Return the target's scheduler, and the tokens of a hash block."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    scheduler_class = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    return scheduler, hash_block_size


def make_core(scheduler: Any, executor: Any, depth: int) -> Any:
    """Return an ``EngineCore`` that has what its step functions read; up to ``depth`` steps are in flight."""
    from vllm.v1.engine.core import EngineCore

    core = EngineCore.__new__(EngineCore)
    vllm_config = scheduler.vllm_config
    for name, value in {
        "vllm_config": vllm_config,
        "log_stats": False,
        "model_executor": executor,
        "scheduler": scheduler,
        "structured_output_manager": scheduler.structured_output_manager,
        "batch_queue_size": depth,
        "batch_queue": deque(maxlen=depth) if depth > 1 else None,
        "aborts_queue": queue.Queue(),
        "async_scheduling": vllm_config.scheduler_config.async_scheduling,
        "use_spec_decode": vllm_config.speculative_config is not None,
        "check_for_draft_tokens": vllm_config.speculative_config is not None,
        "is_pooling_model": False,
        "is_mm_encoder_only": False,
        "is_ec_producer": False,
        "is_ec_consumer": True,
        "ec_producer": False,
        "_weight_version": "default",
        "mm_receiver_cache": None,
        "_idle_state_callbacks": [],
    }.items():
        setattr(core, name, value)
    core.step_fn = core.step if depth == 1 else core.step_with_batch_queue
    return core


def group_of(key: bytes) -> int:
    """Return the group that a key of a block pool belongs to."""
    return int.from_bytes(key[-4:], "big")


def _output_maker() -> Callable[[Batch, Any], Any]:
    """Return what makes a ``ModelRunnerOutput`` of a forward and the connector's output."""
    from vllm.v1.outputs import ModelRunnerOutput

    def make(batch: Batch, connector_output: Any) -> Any:
        requests = [row.request for row in batch.rows]
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: i for i, request in enumerate(requests)},
            sampled_token_ids=list(batch.sampled.values()),
            kv_connector_output=connector_output,
        )

    return make


def _draft_maker(drafts: int) -> Callable[[Batch], Any]:
    """Return what proposes ``drafts`` tokens behind each text that a step has gone on with.

    Which tokens is nothing to the scheduler, nor to the connector; how many are accepted the text says.
    """
    from vllm.v1.outputs import DraftTokenIds

    def propose(batch: Batch) -> Any:
        requests = [request for request, tokens in batch.sampled.items() if tokens]
        return DraftTokenIds(requests, [[FIRST_WORD] * drafts for _ in requests])

    return propose


def _process_enterer() -> Callable[[Any], None]:
    """Return what makes a connector the process's KV transfer group; there is a forward context from then on."""
    import vllm.forward_context as forward_context
    from vllm.distributed.kv_transfer import kv_transfer_state

    if forward_context._forward_context is None:
        forward_context._forward_context = forward_context.ForwardContext.__new__(forward_context.ForwardContext)

    def enter(connector: Any) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = connector

    return enter


@functools.cache
def _real_block_hasher(hash_block_size: int) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    return get_request_block_hasher(hash_block_size, hash_function)


@functools.cache
def _old_request_arguments() -> dict[str, Any]:
    """Return what older releases' ``Request`` needs besides: ``eos_token_id``."""
    from vllm.v1.request import Request

    parameters = inspect.signature(Request.__init__).parameters
    return {"eos_token_id": None} if "eos_token_id" in parameters else {}
