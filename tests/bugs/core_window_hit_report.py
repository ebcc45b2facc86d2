"""A report of a hit names blocks of a sliding window that aren't cached.

Seen in vLLM 0.26.0 to 0.33.0: ``kv_cache_report_mode = "full"``. ``emit_cached_block_events`` is told how many blocks
the hit spans, not which; blocks before the window are null in it, and are reported as stored all the same. Whoever
routes by these events sends requests to a cache that hasn't got the blocks.
"""

from plain_core import Cache, window
from vllm.distributed.kv_events import BlockStored

cache = Cache((window(4, 5), False))
writer = cache.request("writer", range(41))
cache.compute(writer)
cache.manager.take_events()
cache.manager.evict_blocks(set(cache.rows(writer)[0][:5]))
removed = {event.block_hashes[0] for event in cache.manager.take_events()}
reader = cache.request("reader", range(41), extra_args={"kv_cache_report_mode": "full"})
print(cache.hit(reader))
reported = [h for event in cache.manager.take_events() if isinstance(event, BlockStored) for h in event.block_hashes]
print(f"{len(reported)} blocks reported, {len(removed & set(reported))} of them are not cached")
if removed & set(reported):
    raise SystemExit("BUG: blocks are reported as stored that can't be found")
