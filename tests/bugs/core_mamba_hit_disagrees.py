"""With EAGLE and no group marked for it, a lookup reports a hit that full attention hasn't got.

Seen in vLLM 0.20.2 to 0.25.1. Where no group is marked as having draft layers, all are taken to have them. Full
attention drops its last block; then ``HybridKVCacheCoordinator.find_longest_cache_hit`` asks the Mamba group for one
block more than that, to be dropped too, which ``MambaManager`` doesn't do. The hit is a block longer than full
attention's row.
"""

from plain_core import Cache, full, states

cache = Cache((full(4), False), (states(4), False), eagle=True)
writer = cache.request("writer", range(21))
for _ in range(3):
    cache.compute(writer, 4)
tokens, rows = cache.hit(cache.request("reader", range(17)))
print(f"hit of {tokens} tokens, blocks {rows}")
if tokens > 4 * len(rows[0]):
    raise SystemExit(f"BUG: a hit of {tokens} tokens, of which full attention has {4 * len(rows[0])}")
