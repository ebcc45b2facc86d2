"""A ``KVCacheManager`` without an engine around it: vLLM and nothing else.

The scripts ``core_*.py`` beside this file use it to show a finding without kvspec. Run one with a vLLM on the path:

    PYTHONPATH=$(kvspec release path 0.33.0) python tests/bugs/SCRIPT.py
"""

import inspect
import math
import os
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

kv_cache_utils.init_none_hash(sha256)
if hasattr(single_type_kv_cache_manager, "register_all_kvcache_specs"):
    single_type_kv_cache_manager.register_all_kvcache_specs(None)


def full(block_size):
    return interface.FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=2, dtype=torch.float16)


def window(block_size, tokens):
    return interface.SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=2, dtype=torch.float16, sliding_window=tokens
    )


def states(block_size, drafts=0, exports=0):
    """Mamba in align mode; its kernel can export a state every so many tokens of a chunk (0: none)."""
    known = inspect.signature(interface.MambaSpec).parameters
    checkpoints = {"num_prefill_checkpoint_blocks": int(exports > 0), "prefill_checkpoint_alignment": exports or None}
    return interface.MambaSpec(
        block_size=block_size,
        shapes=((1,),),
        dtypes=(torch.float16,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
        **{name: value for name, value in checkpoints.items() if name in known},
    )


class Cache:
    """A manager for groups given as (spec, whether it has draft layers); with ``eagle`` and none marked, all have."""

    def __init__(self, *groups, blocks=100, dcp=1, hash_size=None, eagle=False):
        sizes = [spec.block_size * dcp for spec, _ in groups]
        self.hash_size = hash_size or math.gcd(*sizes)
        config = interface.KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                interface.KVCacheGroupSpec([f"layer {i}"], spec, is_eagle_group=marked)
                for i, (spec, marked) in enumerate(groups)
            ],
        )
        arguments = {
            "kv_cache_config": config,
            "max_model_len": 256,
            "scheduler_block_size": math.lcm(*sizes),
            "hash_block_size": self.hash_size,
            "enable_caching": True,
            "use_eagle": eagle or any(marked for _, marked in groups),
            "enable_kv_cache_events": True,
            "dcp_world_size": dcp,
        }
        known = inspect.signature(KVCacheManager.__init__).parameters
        self.groups = config.kv_cache_groups
        self.manager = KVCacheManager(**{name: value for name, value in arguments.items() if name in known})

    def request(self, name, tokens, **more):
        hasher = kv_cache_utils.get_request_block_hasher(self.hash_size, sha256)
        extra = more.pop("extra_args", None)
        params = SamplingParams(max_tokens=100, extra_args=extra)
        return Request(name, list(tokens), params, None, block_hasher=hasher, **more)

    def hit(self, request):
        """Return the tokens that a lookup finds, and the ids of the blocks of each group."""
        blocks, tokens, *_ = self.manager.get_computed_blocks(request)
        return tokens, [[block.block_id for block in row] for row in blocks.blocks]

    def compute(self, request, tokens=None):
        """Allocate all or so many tokens of a request, without looking it up, and count them as computed."""
        tokens = request.num_tokens if tokens is None else tokens
        assert self.manager.allocate_slots(request, tokens) is not None
        request.num_computed_tokens += tokens

    def chunk(self, request, tokens, hit=0):
        """Return how many of the next tokens the scheduler computes in one step, in align mode with checkpoints."""
        (spec,) = (group.kv_cache_spec for group in self.groups if isinstance(group.kv_cache_spec, interface.MambaSpec))
        scheduler = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=spec.block_size),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in self.groups)),
            hash_block_size=self.hash_size,
            max_num_scheduled_tokens=256,
            num_hash_lookahead_tokens=0,
            use_eagle=False,  # 0.29
            use_eagle_block_drop=False,
            mamba_has_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks > 0,
            mamba_prefill_checkpoint_alignment=getattr(spec, "prefill_checkpoint_alignment", None),
            mamba_partial_cache_hit=self.manager.coordinator.enable_partial_hash_hits,
            mamba_shared_prefix_checkpoint=False,  # 0.31 and later
            mamba_fine_grained_prefix_cache=False,  # 0.30
        )
        return Scheduler._mamba_block_aligned_split(scheduler, request, tokens, hit)

    def rows(self, request):
        return self.manager.get_block_ids(request.request_id)
