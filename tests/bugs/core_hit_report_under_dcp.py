"""A lookup raises AssertionError for a request that asks for hits to be reported, under decode context parallelism.

Seen in vLLM 0.26.0 to 0.33.0: ``kv_cache_report_mode = "full"`` (a request's extra_args) with KV events on and DCP.
``emit_cached_block_events`` is given the block size of one rank, and asserts that it is a multiple of the hash block
size, which is that of all ranks.
"""

from plain_core import Cache, full

cache = Cache((full(4), False), dcp=2)
cache.compute(cache.request("writer", range(40)))
reader = cache.request("reader", range(40), extra_args={"kv_cache_report_mode": "full"})
try:
    print(cache.hit(reader))
except AssertionError as error:
    raise SystemExit(f"BUG: {error!r} in get_computed_blocks") from error
