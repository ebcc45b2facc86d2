"""Defects of vLLM's block pool and KV cache manager, planted in 0.33.0, for the equality machines.

Many of them break no law: they cost hits or an order, and only the model knows better.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kvspec.defects import Defect, Patch


def blocks_without_a_key_are_freed_to_the_tail(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue as Queue

    patch.setattr(Queue, "prepend_n", Queue.append_n)


def blocks_are_given_out_in_reverse(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.get_new_blocks
    patch.setattr(BlockPool, "get_new_blocks", lambda self, count: real(self, count)[::-1])


def a_hit_does_not_count_as_use(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    def touch(self: Any, blocks: Any) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
                block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def evicting_skips_the_last_block(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.evict_blocks
    patch.setattr(BlockPool, "evict_blocks", lambda self, ids: real(self, sorted(ids)[:-1]))


def the_first_event_is_lost(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.take_events
    patch.setattr(BlockPool, "take_events", lambda self: real(self)[1:])


def requests_are_freed_head_first(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager as Manager

    def free(self: Any, request_id: str) -> None:
        self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))

    patch.setattr(Manager, "free", free)


def a_window_forgets_a_token_too_early(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager as Manager

    real = Manager.get_num_skipped_tokens

    def skipped(self: Any, computed: int) -> int:
        tokens = int(real(self, computed))
        return tokens + 1 if tokens else 0

    patch.setattr(Manager, "get_num_skipped_tokens", skipped)


def who_must_not_read_the_cache_reads_it(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    patch.setattr(KVCacheManager, "prefix_cache_lookup_enabled", lambda self, request: self.enable_caching)


def a_reset_keeps_the_keys_of_blocks(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.reset_prefix_cache

    def reset(self: Any) -> bool:
        keys = [block._block_hash for block in self.blocks]
        done = bool(real(self))
        for block, key in zip(self.blocks, keys, strict=True):
            block._block_hash = key
        return done

    patch.setattr(BlockPool, "reset_prefix_cache", reset)


def the_watermark_is_ignored(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    real = KVCacheManager.allocate_slots

    @wraps(real)
    def allocate(self: Any, *args: Any, **named: Any) -> Any:
        watermark, self.watermark_blocks = self.watermark_blocks, 0
        try:
            return real(self, *args, **named)
        finally:
            self.watermark_blocks = watermark

    patch.setattr(KVCacheManager, "allocate_slots", allocate)


def a_request_that_fills_the_pool_is_refused(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    real = BlockPool.get_new_blocks

    def get_new_blocks(self: Any, count: int) -> Any:
        return real(self, count + (0 < count == self.get_num_free_blocks()))

    patch.setattr(BlockPool, "get_new_blocks", get_new_blocks)


def full_attention_hits_lose_their_last_block(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    real = KVCacheManager.get_computed_blocks

    def computed(self: Any, request: Any, limit: int | None = None) -> Any:
        limit = request.num_tokens - 1 if limit is None else limit
        return real(self, request, limit - 1)

    patch.setattr(KVCacheManager, "get_computed_blocks", computed)


def a_step_takes_no_block_for_a_checkpoint(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    patch.setattr(MambaManager, "_needs_internal_checkpoint", lambda self, *arguments: False)


def a_checkpoint_ends_a_hash_block_too_early(patch: Patch) -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    real = managers.get_mamba_prefill_checkpoint_position

    def position(num_tokens: int, unit: int, *arguments: Any, **named: Any) -> int:
        return max(int(real(num_tokens, unit, *arguments, **named)) - unit, 0)

    patch.setattr(managers, "get_mamba_prefill_checkpoint_position", position)


def every_chunk_keeps_a_checkpoint(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    real = MambaManager.get_num_blocks_to_allocate

    @wraps(real)
    def needed(self: Any, *arguments: Any, **named: Any) -> Any:
        return real(self, *arguments, **named | {"prefill_end": 0})

    patch.setattr(MambaManager, "get_num_blocks_to_allocate", needed)


def every_checkpoint_can_be_hit(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    real = MambaManager._cache_partial_tail_block

    def register(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        parts = request.shared_prefix_boundary
        request.shared_prefix_boundary = self._checkpoints.get(request.request_id, (parts,))[0]
        try:
            return real(self, request, *arguments, **named)
        finally:
            request.shared_prefix_boundary = parts

    patch.setattr(MambaManager, "_cache_partial_tail_block", register)


def a_checkpoint_cannot_be_hit(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    real = MambaManager._cache_partial_tail_block

    def register(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        if request.request_id in self._checkpoints:
            return None
        return real(self, request, *arguments, **named)

    patch.setattr(MambaManager, "_cache_partial_tail_block", register)


def a_checkpoint_takes_the_place_of_a_null_block(patch: Patch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    real = MambaManager.allocate_new_blocks

    def allocate(self: Any, request_id: str, *arguments: Any) -> Any:
        kept = self._checkpoints.pop(request_id, None) if self.mamba_cache_mode == "align" else None
        blocks = real(self, request_id, *arguments)
        if kept:
            self._checkpoints[request_id] = kept
        return blocks

    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


def _core(kind: str, law: str, level: str, plant: Any, sentence: str) -> tuple[str, Defect]:
    return plant.__name__, Defect("vllm-core", kind, law, sentence, plant, level)


DEFECTS = dict(
    [
        _core(
            "eviction order",
            "POOL-7",
            "pool",
            blocks_without_a_key_are_freed_to_the_tail,
            "Blocks that can't be found are kept as long as those that can.",
        ),
        _core(
            "eviction order", "POOL-2", "pool", blocks_are_given_out_in_reverse, "The newest victim is given out first."
        ),
        _core("pinning", "POOL-5", "pool", a_hit_does_not_count_as_use, "A second holder of a block isn't counted."),
        _core("index", "PREFIX-5", "pool", evicting_skips_the_last_block, "Of the blocks to be forgotten, one isn't."),
        _core("events", "TELL-1", "pool", the_first_event_is_lost, "Of the events that are taken, the first is lost."),
        _core(
            "eviction order", "FREE-1", "cache", requests_are_freed_head_first, "A prefix is evicted before its tail."
        ),
        _core("window", "WINDOW-1", "cache", a_window_forgets_a_token_too_early, "A window is one token too short."),
        _core("index", "HIT-3", "cache", who_must_not_read_the_cache_reads_it, "A request that must not hit, hits."),
        _core("reset", "RESET-1", "pool", a_reset_keeps_the_keys_of_blocks, "After a reset, blocks still have keys."),
        _core("preemption", "ALLOC-2", "cache", the_watermark_is_ignored, "A new request may take the last blocks."),
        _core(
            "scaling",
            "POOL-3",
            "pool",
            a_request_that_fills_the_pool_is_refused,
            "The last free block isn't given out.",
        ),
        _core(
            "index",
            "HIT-4",
            "cache",
            full_attention_hits_lose_their_last_block,
            "A hit is a token shorter than it may be.",
        ),
        _core("states", "STATE-6", "cache", a_step_takes_no_block_for_a_checkpoint, "No checkpoint has a block."),
        _core(
            "states",
            "STATE-5",
            "cache",
            a_checkpoint_ends_a_hash_block_too_early,
            "A checkpoint is found a hash block before where it is.",
        ),
        _core(
            "states",
            "NEED-6",
            "cache",
            every_chunk_keeps_a_checkpoint,
            "Checkpoints that no hit needs take blocks.",
        ),
        _core("index", "REG-8", "cache", every_checkpoint_can_be_hit, "A checkpoint that nobody asks for is found."),
        _core("index", "REG-9", "cache", a_checkpoint_cannot_be_hit, "The prompt's checkpoint isn't found."),
        _core(
            "states",
            "STATE-2",
            "cache",
            a_checkpoint_takes_the_place_of_a_null_block,
            "What was counted for a checkpoint isn't taken: its place is null.",
        ),
    ]
)
