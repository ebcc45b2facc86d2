"""Builds the target's own configuration objects for a small engine, the same way for every release.

Building a ``VllmConfig`` costs a quarter of a second, an engine half a millisecond; so one configuration is built
per process and copied with other numbers for each history.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvspec.engine.shadow import Layout
from kvspec.ops import EngineSetup
from kvspec.targets.vllm.core import name_blocks_by_whole_hashes

LAYERS = 2
STATE_BYTES = 4
"""Of a number in a Mamba state: float32."""
BYTES_PER_TOKEN = 8  # One head of size 2, keys and values, in float16: one 64-bit tag per token and layer.
MAX_MODEL_LEN = 256

_engine_numbers = itertools.count()

_MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 4,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "ffn_dim": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": 1000,
    "word_embed_proj_dim": 4,
    "torch_dtype": "float16",
}


def layer_names(group: int) -> list[str]:
    """Return the names of a group's attention layers, in order."""
    return [f"layers.{group * LAYERS + i}.attn" for i in range(LAYERS)]


def page_bytes(setup: EngineSetup) -> int:
    """Return the bytes of one block in one layer; equal in all groups."""
    return max(setup.block_sizes) * BYTES_PER_TOKEN


def block_bytes(setup: EngineSetup) -> int:
    """Return the bytes of one block in all layers of its group."""
    return LAYERS * page_bytes(setup)


def prefill_ranks_share_blocks() -> bool:
    """Whether prefill ranks share the tokens of a block with decode ranks (up to 0.25); later each has its own copy.

    Source: vLLM 0.25.1, v1/worker/block_table.py (BlockTable.compute_slot_mapping) and v1/worker/cp_utils.py.
    """
    from vllm.v1.worker import cp_utils

    return hasattr(cp_utils, "get_total_cp_world_size")


def shards(setup: EngineSetup) -> int:
    """Return among how many ranks the tokens of a block are shared out."""
    return setup.decode_ranks * (setup.prefill_ranks if prefill_ranks_share_blocks() else 1)


def shard_of(rank: int, setup: EngineSetup) -> int:
    """Return which share of a block's tokens a rank keeps; ranks with the same share hold copies.

    Ranks are numbered prefill rank first, and share blocks in this order. Where there are decode and prefill ranks
    that don't share blocks with each other, a decode group has ranks of the same place in different prefill groups.

    Source: vLLM 0.25.1, v1/worker/block_table.py (total_cp_rank); vLLM 0.33.0, distributed/parallel_state.py
    (initialize_model_parallel).
    """
    across_prefill = setup.prefill_ranks > 1 and not prefill_ranks_share_blocks()
    return (rank // setup.decode_ranks if across_prefill else rank) % shards(setup)


@functools.lru_cache(maxsize=1024)
def layouts(setup: EngineSetup) -> tuple[Layout, ...]:
    """Return how each group keeps tokens in blocks."""
    return tuple(
        Layout(
            block_tokens=size,
            shards=shards(setup),
            interleave=setup.interleave,
            reach=group.reach,
            state=group.kind == "mamba",
            words=max(setup.block_sizes) // (1 if group.kind == "mamba" else size),
        )
        for group, size in zip(setup.groups, setup.block_sizes, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def longest_request(setup: EngineSetup) -> int:
    """Return the most tokens, prompt and output, that a request may have: vLLM refuses to start with a longer model.

    A block of every group for each of its spans: more than a window takes, so that a request always fits. With drafts a
    step needs slots for a token, its drafts and, with EAGLE, the drafts behind those; releases from 0.31 on keep these
    free for a load.

    Source: vLLM 0.33.0, v1/core/sched/scheduler.py (_spec_decode_step_blocks).
    """
    spans = [layout.span for layout in layouts(setup)]
    step = 1 + 2 * setup.drafts if setup.drafts else 0
    tokens = MAX_MODEL_LEN
    while sum(-(-tokens // span) - (-step // span) for span in spans) > setup.gpu_blocks - 1:
        tokens -= 1
    return tokens


def refusal(setup: EngineSetup) -> str | None:
    """Say why the release can't run a setup, whatever the connector; None if it can.

    Source: vLLM 0.24.0, config/vllm.py (_get_v2_model_runner_unsupported_features); vLLM 0.33.0, config/parallel.py
    (ParallelConfig) and config/vllm.py (_get_v1_model_runner_unsupported_features); v1/core/kv_cache_coordinator.py and
    v1/core/kv_cache_utils.py (get_kv_cache_groups) of both.
    """
    if setup.backends:
        return "backends are connectors of MultiConnector, which is the target vllm-multi"
    if setup.prefill_ranks > 1:
        shared = prefill_ranks_share_blocks()
        if setup.runner_v2 == shared:
            return f"in this release prefill context parallelism needs runner {'V1' if shared else 'V2'}"
        if not shared and setup.decode_ranks not in (1, setup.prefill_ranks):
            return "in this release there must be no decode ranks besides prefill ranks, or as many"
    if len(setup.groups) > 1 and len(set(zip(setup.groups, setup.block_sizes, strict=True))) == 1:
        return "layers that are all alike are one group"
    kinds = [group.kind for group in setup.groups]
    if setup.context_ranks > 1 and kinds != ["full"]:
        return "context parallelism runs with one full-attention group only"
    if setup.drafts and (reason := _drafts_refusal(setup)):
        return reason
    return _mamba_refusal(setup) if "mamba" in kinds else None


def _drafts_refusal(setup: EngineSetup) -> str | None:
    """Say why a setup with drafts isn't run; None if it is.

    Source: vLLM 0.31.0, config/vllm.py (_get_v2_model_runner_unsupported_features); vLLM 0.33.0,
    v1/core/sched/scheduler.py (schedule, pad_spec_decode).
    """
    if any(group.kind == "mamba" for group in setup.groups):
        return "drafts write several states of Mamba, which isn't simulated"
    if setup.context_ranks > 1:
        return "drafts beside context parallelism aren't simulated"
    if setup.runner_v2 and not setup.eagle:
        return "drafts of n-grams are run with runner V1 alone; runner V2 has them from 0.32 on"
    if setup.step_tokens <= setup.drafts:
        return "a step must have room for a token and its drafts"
    return None


def _mamba_refusal(setup: EngineSetup) -> str | None:
    """Say why the release can't run a setup with Mamba layers; None if it can.

    Source: vLLM 0.22.1, v1/core/sched/scheduler.py (_mamba_block_aligned_split); 0.24.0 and 0.26.0, config/vllm.py
    (validate_block_size); all, model_executor/models/config.py (MambaModelConfig), and v1/core/kv_cache_coordinator.py
    (HybridKVCacheCoordinator.verify_and_split_kv_cache_groups).
    """
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    if _states_never_come_from_a_connector():
        return "up to 0.22 the scheduler asserts that no tokens of Mamba come from a connector"
    if setup.runner_v2 and not hasattr(ModelState, "preprocess_state"):
        return "up to 0.24 runner V2 has no Mamba with a prefix cache"
    if not any(group.kind == "full" for group in setup.groups):
        return "Mamba groups need a full-attention group beside them"
    if len(set(setup.block_sizes)) > 1:
        return "beside a Mamba group all groups have blocks of its size"
    if setup.step_tokens < setup.block_size:
        return "with Mamba a step must have room for the tokens of a block"
    return None


@functools.cache
def _states_never_come_from_a_connector() -> bool:
    from vllm.v1.core.sched.scheduler import Scheduler

    return "not verified" in inspect.getsource(Scheduler._mamba_block_aligned_split)


def _register_model() -> None:
    """Register a stand-in for the model class, so that vLLM needn't import the real one in a process of its own (15
    s)."""
    import torch
    from vllm.model_executor.models.registry import ModelRegistry

    class OPTForCausalLM(torch.nn.Module):
        def __init__(self, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: Any) -> Any:
            raise AssertionError("the model itself is never run")

        def forward(self, input_ids: Any, positions: Any) -> Any:
            raise AssertionError("the model itself is never run")

        def compute_logits(self, hidden_states: Any) -> Any:
            raise AssertionError("the model itself is never run")

    OPTForCausalLM.get_input_embeddings = OPTForCausalLM.embed_input_ids  # type: ignore[attr-defined]
    ModelRegistry.register_model("OPTForCausalLM", OPTForCausalLM)


@functools.cache
def _template() -> Any:
    """Return a ``VllmConfig`` of this process's vLLM for a two-layer model on one GPU."""
    import vllm.config as config

    name_blocks_by_whole_hashes()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # or vLLM wants Triton now; each history says which it has
    _register_model()
    with tempfile.TemporaryDirectory(prefix="kvspec-model-") as directory:
        Path(directory, "config.json").write_text(json.dumps(_MODEL))
        return config.VllmConfig(
            model_config=config.ModelConfig(
                model=directory,
                tokenizer=directory,
                skip_tokenizer_init=True,
                dtype="float16",
                max_model_len=MAX_MODEL_LEN,
                seed=0,
            ),
            cache_config=config.CacheConfig(block_size=4, enable_prefix_caching=True),
            scheduler_config=config.SchedulerConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_num_seqs=4,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            kv_transfer_config=config.KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"),
            device_config=config.DeviceConfig(device="cpu"),
        )


def vllm_config(setup: EngineSetup, connector: str, connector_config: dict[str, Any]) -> Any:
    """Return the target's ``VllmConfig`` for a setup, with its KV connector and the connector's own settings."""
    import vllm.config as config

    result = copy.copy(_template())
    scheduler = result.scheduler_config = copy.copy(result.scheduler_config)
    scheduler.max_num_batched_tokens = setup.step_tokens
    scheduler.max_num_scheduled_tokens = setup.step_tokens
    scheduler.max_num_seqs = setup.running_max
    scheduler.async_scheduling = setup.async_scheduling
    scheduler.policy = "priority" if setup.priority else "fcfs"
    cache = result.cache_config = copy.copy(result.cache_config)
    cache.block_size = min(setup.block_sizes)  # v1/engine/core.py (_initialize_kv_caches)
    cache.num_gpu_blocks = setup.gpu_blocks
    cache.mamba_cache_mode = "align" if any(group.kind == "mamba" for group in setup.groups) else "none"
    cache.mamba_block_size = cache.block_size
    parallel = result.parallel_config = copy.copy(result.parallel_config)
    parallel.world_size = setup.world_size
    parallel.tensor_parallel_size = setup.ranks * setup.decode_ranks
    parallel.decode_context_parallel_size = setup.decode_ranks
    parallel.prefill_context_parallel_size = setup.prefill_ranks
    parallel.cp_kv_cache_interleave_size = setup.interleave
    transfer = result.kv_transfer_config = copy.copy(result.kv_transfer_config)
    transfer.engine_id = f"kvspec-{os.getpid()}-{next(_engine_numbers)}"  # shared memory is named after it
    transfer.kv_connector = connector
    transfer.kv_connector_extra_config = connector_config
    result.kv_events_config = (
        config.KVEventsConfig(enable_kv_cache_events=True, publisher="null") if setup.events else None
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if setup.runner_v2 else "0"
    if setup.drafts:
        # Drafts from the text run ahead only if the GPU makes them; what else they need is nothing to the scheduler.
        ngram = "ngram_gpu" if setup.async_scheduling else "ngram"
        result.speculative_config = _speculative_config(result, setup.drafts, "eagle" if setup.eagle else ngram)
    return result


def _speculative_config(whole: Any, drafts: int, method: str) -> Any:
    """Return a ``SpeculativeConfig`` for ``drafts`` draft tokens in each step.

    It is made as for n-grams, which need no model of their own; then it gets its method, by which the scheduler and
    connectors tell what a drafter needs.
    """
    import vllm.config

    result = vllm.config.SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=whole.model_config,
        target_parallel_config=whole.parallel_config,  # of one stage: it asks the model whether it has several
    )
    result.method = method
    return result


def of_rank(whole: Any, rank: int) -> Any:
    """Return a ``VllmConfig`` as the worker process of a rank has it."""
    result = copy.copy(whole)
    parallel = result.parallel_config = copy.copy(result.parallel_config)
    parallel.rank = rank
    return result


def kv_cache_config(setup: EngineSetup) -> Any:
    """Return the target's ``KVCacheConfig``: layer i of all groups shares region i.

    A block is one group's at a time.

    Source: vLLM 0.33.0, v1/core/kv_cache_planning.py (get_kv_cache_config_from_groups); vLLM 0.24.0,
    v1/core/kv_cache_utils.py.
    """
    from vllm.v1 import kv_cache_interface as interface

    names = [layer_names(group) for group in range(len(setup.groups))]
    page = page_bytes(setup)
    layer_bytes = page * setup.gpu_blocks
    if _one_allocation(interface):
        tensors = [
            interface.KVCacheTensor(
                size=layer_bytes * LAYERS, layers=layers, layer_stride=layer_bytes, block_stride=page
            )
            for layers in names
        ]
    else:
        tensors = [
            interface.KVCacheTensor(size=layer_bytes, shared_by=list(shared)) for shared in zip(*names, strict=True)
        ]
    return interface.KVCacheConfig(
        num_blocks=setup.gpu_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            interface.KVCacheGroupSpec(layers, _spec(interface, setup, group)) for group, layers in enumerate(names)
        ],
    )


def _spec(interface: Any, setup: EngineSetup, index: int) -> Any:
    """Return a group's ``KVCacheSpec``; small blocks have as many more heads, so that pages are equal. A Mamba state
    has two parts, as if of convolution and recurrence, and fills its page."""
    import torch

    group, size = setup.groups[index], setup.block_sizes[index]
    if group.kind == "mamba":
        return interface.MambaSpec(
            block_size=size,
            shapes=tuple((part // STATE_BYTES,) for part in _state_parts(setup)),
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode="align",
        )
    common = {
        "block_size": size,
        "num_kv_heads": max(setup.block_sizes) // size,
        "head_size": 2,
        "dtype": torch.float16,
    }
    if group.kind == "full":
        spec = interface.FullAttentionSpec(**common)
    else:
        spec = interface.SlidingWindowSpec(sliding_window=group.reach, **common)
    assert spec.page_size_bytes == page_bytes(setup), (spec.page_size_bytes, page_bytes(setup))
    return spec


def _state_parts(setup: EngineSetup) -> tuple[int, int]:
    """Return the bytes of both parts of a Mamba state."""
    return STATE_BYTES, page_bytes(setup) - STATE_BYTES


def kv_cache_memory(setup: EngineSetup) -> tuple[np.ndarray, dict[str, Any]]:
    """Allocate the KV cache of one rank.

    Returns: the words, shape (layers of a group, blocks * words of a block), uint64; the tensor of each layer as the
    worker gets it, shape (blocks, page bytes), int8, in the same memory. Up to 0.26 that of a Mamba layer is a list of
    the parts of its state, shapes (blocks, numbers), float32. Releases that describe placement in one backing
    allocation get views of one storage, older ones a storage per region.
    """
    import torch
    from vllm.v1 import kv_cache_interface as interface

    words = np.zeros((LAYERS, setup.gpu_blocks * max(setup.block_sizes)), dtype=np.uint64)
    shape = (setup.gpu_blocks, page_bytes(setup))
    if _one_allocation(interface):
        regions = list(torch.from_numpy(words.reshape(-1).view(np.int8)).view(LAYERS, *shape))
    else:
        regions = [torch.from_numpy(layer.view(np.int8)).view(shape) for layer in words]
    states: list[Any] = [_states(region, setup) for region in regions] if _states_are_lists() else regions
    caches: dict[str, Any] = {}
    for number, group in enumerate(setup.groups):
        caches |= dict(zip(layer_names(number), states if group.kind == "mamba" else regions, strict=True))
    return words, caches


def _states(region: Any, setup: EngineSetup) -> list[Any]:
    """Return views of a layer's blocks, one for each part of a Mamba state."""
    import torch

    return [part.view(torch.float32) for part in region.split(_state_parts(setup), dim=1)]


def _states_are_lists() -> bool:
    """Whether a Mamba layer's memory is one tensor for each part of its state (up to 0.26); later it is one of bytes.

    Source: vLLM 0.26.0 and 0.27.1, v1/worker/gpu/attn_utils.py (_reshape_kv_cache).
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return not hasattr(MambaBase, "bind_kv_cache")


def _one_allocation(interface: Any) -> bool:
    """Whether a ``KVCacheTensor`` describes placement in one backing allocation (0.29 and later)."""
    return "layers" in interface.KVCacheTensor.__dataclass_fields__
