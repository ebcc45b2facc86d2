"""In Mamba's cache mode "align", a state that is past the end of a prompt can be hit as that of the prompt's end.

Seen in vLLM 0.26.0 to 0.31.0 with Mamba blocks longer than a hash block. With asynchronous scheduling the step after
the prompt is scheduled before the first output is known. ``MambaManager._cache_partial_tail_block`` then registers the
block that this step changes under the hash of the prompt, beside the copy that was made for it.
"""

from plain_core import Cache, full, states

cache = Cache((full(8), False), (states(8), False), hash_size=2)
writer = cache.request("writer", range(6))
cache.compute(writer, 6)
cache.manager.new_step_starts()
cache.compute(writer, 1)  # its token is being sampled
if hasattr(cache.manager, "take_kv_cache_block_copies"):  # 0.26 and later
    copies, _ = cache.manager.take_kv_cache_block_copies()
    cache.manager.evict_blocks({copy.dst_block_id for copy in copies})
tokens, (_, state) = cache.hit(cache.request("reader", range(7)))
running = cache.rows(writer)[1][-1]
print(f"hit of {tokens} tokens: state in block {state}, the writer's state after 7 tokens is in block {running}")
if tokens and state[-1] == running:
    raise SystemExit("BUG: the state that is hit is that after 7 tokens, not after 6")
