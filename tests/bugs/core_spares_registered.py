"""Blocks for the states of draft tokens can be hit as states of the prompt, after a step with a checkpoint.

Seen in vLLM 0.30.0 and 0.31.0 in Mamba's cache mode "align", with speculative decoding and a kernel that can export
states (``MambaSpec.num_prefill_checkpoint_blocks``). ``MambaManager.allocate_new_blocks`` then leaves the blocks for
draft tokens where they are in the row, and ``cache_blocks`` registers them as the full blocks of the places that the
chunk jumps over. No such state has been written to them. 0.32.0 moves them to the row's end.
"""

from plain_core import Cache, full, states

cache = Cache((full(4), False), (states(4, drafts=2, exports=1), False))
writer = cache.request("writer", range(31))
cache.compute(writer, cache.chunk(writer, 12))
spares = cache.rows(writer)[1][-2:]
cache.manager.new_step_starts()
cache.compute(writer, cache.chunk(writer, 19))
cache.manager.new_step_starts()
tokens, (_, state) = cache.hit(cache.request("reader", [*range(18), *range(100, 104)]))
print(f"spares after 12 tokens: blocks {spares}; hit of {tokens} tokens: state in block {state[-1] if state else None}")
if state and state[-1] in spares:
    raise SystemExit(f"BUG: no state after {tokens} tokens was ever written to block {state[-1]}")
