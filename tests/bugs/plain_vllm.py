"""A scheduler with an offload connector and a worker whose transfers end by the next step: vLLM and nothing else.

A script beside this file uses it to show a finding without kvspec. Run it with a vLLM on the path:

    PYTHONPATH=$(kvspec release path 0.33.0) python tests/bugs/SCRIPT.py
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm.config as config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
PAGE_BYTES = 32
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 4,
    "max_position_embeddings": 256,
    "vocab_size": 1000,
    "word_embed_proj_dim": 4,
    "torch_dtype": "float16",
}


class Engine:
    """Synchronous steps: schedule, report what the step before has transferred, update."""

    def __init__(
        self,
        gpu_blocks,
        cpu_blocks,
        step_tokens,
        lazy=False,
        connector="SimpleCPUOffloadConnector",
        blocks_per_chunk=1,
        window=None,
        mamba=False,
        priority=False,
        full_block_size=BLOCK_SIZE,
        drafts=0,
        prompt_only=True,
    ):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(MODEL))
            self.config = config.VllmConfig(
                model_config=config.ModelConfig(
                    model=directory,
                    tokenizer=directory,
                    skip_tokenizer_init=True,
                    dtype="float16",
                    max_model_len=256,
                    seed=0,
                ),
                cache_config=config.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
                scheduler_config=config.SchedulerConfig(
                    max_model_len=256,
                    max_num_batched_tokens=step_tokens,
                    max_num_seqs=4,
                    is_encoder_decoder=False,
                    enable_chunked_prefill=True,
                    async_scheduling=False,
                    policy="priority" if priority else "fcfs",
                ),
                kv_transfer_config=config.KVTransferConfig(
                    kv_connector=connector,
                    kv_role="kv_both",
                    kv_connector_extra_config={
                        "cpu_bytes_to_use": cpu_blocks * (PAGE_BYTES if "Simple" in connector else 4096),
                        "lazy_offload": lazy,
                        "offload_prompt_only": prompt_only,
                        **chunk_size(blocks_per_chunk, full_block_size),
                    },
                ),
                kv_events_config=config.KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
                device_config=config.DeviceConfig(device="cpu"),
            )
        if drafts:
            self.config.speculative_config = config.SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                prompt_lookup_max=2,
                prompt_lookup_min=1,
                target_model_config=self.config.model_config,
                target_parallel_config=self.config.parallel_config,
            )
            self.config.speculative_config.method = "eagle"  # without a draft model: the scheduler needs none
        self.config.cache_config.num_gpu_blocks = gpu_blocks
        common = {"head_size": 2, "dtype": torch.float16}
        smaller = full_block_size // BLOCK_SIZE  # all pages are equal, so smaller blocks have more heads
        specs = [FullAttentionSpec(block_size=full_block_size, num_kv_heads=1, **common)]
        if window:
            specs.append(
                SlidingWindowSpec(sliding_window=window, block_size=BLOCK_SIZE, num_kv_heads=smaller, **common)
            )
        if mamba:
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.mamba_block_size = BLOCK_SIZE
            shapes, dtypes = ((1,), (7,)), (torch.float32, torch.float32)
            specs.append(MambaSpec(BLOCK_SIZE, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align"))
        names = [f"layer{i}" for i in range(len(specs))]
        page = smaller * PAGE_BYTES
        size = gpu_blocks * page
        if "layers" in KVCacheTensor.__dataclass_fields__:
            tensors = [KVCacheTensor(size=size, layers=[name], layer_stride=size, block_stride=page) for name in names]
        else:
            tensors = [KVCacheTensor(size=size, shared_by=names)]
        groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
        cache = KVCacheConfig(gpu_blocks, tensors, groups)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(hash_block_size, hash_function)
        self.requests = {}
        self.in_flight = None

    def add(self, name, tokens, max_tokens=1, priority=0):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.requests[name] = Request(name, tokens, sampling, None, block_hasher=self.hasher, priority=priority)
        self.scheduler.add_request(self.requests[name])

    def step(self):
        """Make one step; return (tokens scheduled per request, blocks or jobs stored, blocks or jobs loaded)."""
        self.output = output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.run(output))
        self.metadata = metadata = output.kv_connector_metadata
        stored, loaded = "store_gpu_blocks", "load_gpu_blocks"
        if hasattr(metadata, "store_jobs"):
            stored, loaded = "store_jobs", "load_jobs"
        return dict(output.num_scheduled_tokens), len(getattr(metadata, stored)), len(getattr(metadata, loaded))

    def tables(self, name):
        """Return the block ids of a request, group by group, without the null block."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
        return [[block for block in group if block] for group in blocks]

    def run(self, output):
        """Stand for the worker: sample a token for each finished prompt, report the transfers of the step before."""
        done, self.in_flight = self.in_flight, output.kv_connector_metadata
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.requests[name]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        loaded, report = report_of(done) if done else (set(), None)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=loaded,
                kv_connector_worker_meta=report,
            ),
        )


class Places:
    """Which blocks of chunks of two have been stored, by (chunk, place in it)."""

    def __init__(self):
        self.stored = set()

    def lost(self, metadata):
        """Take the jobs of a step; return what its loads read that was never stored."""
        lost = []
        for job in metadata.load_jobs.values():
            lost += sorted(set(self.of(job.dst_spec, job.src_spec.block_ids)) - self.stored)
        for job in metadata.store_jobs.values():
            chunks = job.dst_spec.block_ids.tolist()
            self.stored.difference_update([(chunk, place) for chunk in chunks for place in (0, 1)])
            self.stored.update(self.of(job.src_spec, chunks))
        return lost

    def of(self, gpu, chunks):
        """Yield (chunk, place) of each block of a transfer."""
        first = 0
        for size, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            for i in range(index % 2, index % 2 + size):
                yield int(chunks[first + i // 2]), i % 2
            first += -(-(index % 2 + size) // 2) if size else 0


def chunk_size(blocks_per_chunk, full_block_size):
    """Return the setting of OffloadingConnector that says how long a chunk is: in tokens, if blocks are equal."""
    if full_block_size == BLOCK_SIZE:
        return {"block_size": blocks_per_chunk * BLOCK_SIZE}
    return {"blocks_per_chunk": blocks_per_chunk}


def report_of(metadata):
    """Return (requests loaded, worker metadata) for transfers that have ended."""
    if hasattr(metadata, "store_jobs"):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        jobs = dict.fromkeys([*metadata.load_jobs, *metadata.store_jobs], 1)
        loaded = {job.req_id for job in metadata.load_jobs.values()}
        return loaded, OffloadingWorkerMetadata(completed_jobs=jobs) if jobs else None
    stored = {metadata.store_event: 1} if metadata.store_event >= 0 else {}
    loaded = set(metadata.load_event_to_reqs.get(metadata.load_event, ()))
    return loaded, SimpleCPUOffloadWorkerMetadata(stored) if stored else None
