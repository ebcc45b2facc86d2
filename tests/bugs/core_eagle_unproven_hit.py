"""With two windows that a draft model reads, a hit is given although the block that proves it is missing in one.

Seen in vLLM 0.20.2 to 0.33.0. ``HybridKVCacheCoordinator.find_longest_cache_hit`` asks each EAGLE group for one
block more than the candidate, "at most once per candidate length". When a second EAGLE group shortens the candidate
while it drops its own block, the first one counts as verified still, and is asked for the shorter candidate without
its proof. Draft layers then start from an entry that depends on another continuation's next token.
"""

from plain_core import Cache, window

cache = Cache((window(2, 3), True), (window(2, 5), True), blocks=200)
writer = cache.request("writer", range(100))
cache.compute(writer)
first, second = cache.rows(writer)
cache.manager.evict_blocks({first[5], second[6]})
tokens, rows = cache.hit(cache.request("reader", range(17)))
print(f"hit of {tokens} tokens, blocks {rows}")
if tokens == 10:
    raise SystemExit("BUG: a hit of 10 tokens needs block 5 of the first group as proof, and that isn't cached")
