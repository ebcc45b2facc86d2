"""In Mamba's cache mode "align", a request that hits a state of an earlier step isn't admitted although there is room.

Seen in vLLM 0.32.0. ``MambaManager._cache_partial_tail_block`` registers the state at the end of a prompt's last whole
block again when the prompt's rest is scheduled, and marks it as one of this step, which can't be used yet.
"""

from plain_core import Cache, full, states

cache = Cache((full(4), False), (states(4), False))
writer = cache.request("writer", range(9))
cache.compute(writer, 8)
cache.manager.new_step_starts()
cache.compute(writer, 1)
reader = cache.request("reader", range(9))
blocks, tokens, *_ = cache.manager.get_computed_blocks(reader)
admitted = cache.manager.allocate_slots(reader, 9 - tokens, tokens, blocks)
print(f"hit of {tokens} tokens, admitted: {admitted is not None}")
if tokens and admitted is None:
    raise SystemExit("BUG: the state was registered a step ago, and the pool has room")
