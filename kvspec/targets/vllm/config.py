"""Builds the target's own configuration objects for a small engine, the same way for every release.

Building a ``VllmConfig`` costs a quarter of a second, an engine half a millisecond; so one configuration is built
per process and copied with other numbers for each history.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvspec.ops import EngineSetup

LAYERS = 2
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


def layer_names() -> list[str]:
    """Return the names of the model's attention layers, in order."""
    return [f"layers.{i}.attn" for i in range(LAYERS)]


def page_bytes(block_size: int) -> int:
    """Return the bytes of one block in one layer."""
    return block_size * BYTES_PER_TOKEN


def block_bytes(block_size: int) -> int:
    """Return the bytes of one block in all layers."""
    return LAYERS * page_bytes(block_size)


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

    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
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
    cache.block_size = setup.block_size
    cache.num_gpu_blocks = setup.gpu_blocks
    parallel = result.parallel_config = copy.copy(result.parallel_config)
    parallel.world_size = setup.ranks
    parallel.tensor_parallel_size = setup.ranks
    transfer = result.kv_transfer_config = copy.copy(result.kv_transfer_config)
    transfer.engine_id = f"kvspec-{os.getpid()}-{next(_engine_numbers)}"  # shared memory is named after it
    transfer.kv_connector = connector
    transfer.kv_connector_extra_config = connector_config
    result.kv_events_config = (
        config.KVEventsConfig(enable_kv_cache_events=True, publisher="null") if setup.events else None
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if setup.runner_v2 else "0"
    return result


def of_rank(whole: Any, rank: int) -> Any:
    """Return a ``VllmConfig`` as the worker process of a rank has it."""
    result = copy.copy(whole)
    parallel = result.parallel_config = copy.copy(result.parallel_config)
    parallel.rank = rank
    return result


def kv_cache_config(setup: EngineSetup) -> Any:
    """Return the target's ``KVCacheConfig``: one full-attention group, each layer in a region of its own."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    spec = interface.FullAttentionSpec(block_size=setup.block_size, num_kv_heads=1, head_size=2, dtype=torch.float16)
    page = page_bytes(setup.block_size)
    assert spec.page_size_bytes == page, (spec.page_size_bytes, page)
    layer_bytes = page * setup.gpu_blocks
    if _one_allocation(interface):
        tensors = [
            interface.KVCacheTensor(
                size=layer_bytes * LAYERS, layers=layer_names(), layer_stride=layer_bytes, block_stride=page
            )
        ]
    else:
        tensors = [interface.KVCacheTensor(size=layer_bytes, shared_by=[name]) for name in layer_names()]
    return interface.KVCacheConfig(
        num_blocks=setup.gpu_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[interface.KVCacheGroupSpec(layer_names(), spec)],
    )


def kv_cache_memory(setup: EngineSetup) -> tuple[np.ndarray, dict[str, Any]]:
    """Allocate the KV cache of one rank.

    Returns: the tags, shape (layers, blocks * block_size), uint64; the tensor of each layer as the worker gets it,
    shape (blocks, page bytes), int8, in the same memory. Releases that describe placement in one backing allocation
    get views of one storage, older ones a storage per layer.
    """
    import torch
    from vllm.v1 import kv_cache_interface as interface

    tags = np.zeros((LAYERS, setup.gpu_blocks * setup.block_size), dtype=np.uint64)
    shape = (setup.gpu_blocks, page_bytes(setup.block_size))
    if _one_allocation(interface):
        regions = list(torch.from_numpy(tags.reshape(-1).view(np.int8)).view(LAYERS, *shape))
    else:
        regions = [torch.from_numpy(layer.view(np.int8)).view(shape) for layer in tags]
    return tags, dict(zip(layer_names(), regions, strict=True))


def _one_allocation(interface: Any) -> bool:
    """Whether a ``KVCacheTensor`` describes placement in one backing allocation (0.29 and later)."""
    return "layers" in interface.KVCacheTensor.__dataclass_fields__
