"""With EAGLE, a hit shorter than the sliding window is lost when the window's blocks are shorter than the alignment.

Seen in vLLM 0.20.2 to 0.33.0. ``SlidingWindowManager.find_longest_cache_hit`` checks that a run ends at an aligned
position once the block for EAGLE has been dropped. But a run that reaches the start of the text, and is shorter than
the window, is cut to an aligned length *before* that block is dropped, and again after it: one alignment is lost.
"""

from plain_core import Cache, full, window

cache = Cache((full(4), False), (window(2, 9), True))
writer = cache.request("writer", range(100))
cache.compute(writer)
# The fourth block of the window goes, as it would if it were reused: a hit of 4 tokens needs the first three.
cache.manager.evict_blocks({cache.rows(writer)[1][3]})
tokens, rows = cache.hit(cache.request("reader", range(12)))
print(f"hit of {tokens} tokens, blocks {rows}; 4 tokens and the block that proves them are cached")
if tokens < 4:
    raise SystemExit("BUG: a hit was lost")
