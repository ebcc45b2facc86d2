"""A state inside a block can be hit as that of the block's end, if its request goes on with a checkpoint.

Seen in vLLM 0.30.0 to 0.33.0 in Mamba's cache mode "align", with blocks longer than a hash block and a kernel that can
export states (``MambaSpec.num_prefill_checkpoint_blocks``). A request whose hit ends inside a block goes on in a copy
of that block. With a checkpoint, ``Scheduler._mamba_block_aligned_split`` doesn't end its chunk at the block's end, so
no state is ever written there: the running state is in the row's last block, the checkpoint in the one before.
``MambaManager.cache_blocks`` registers the copy as a full block all the same. Without checkpoints the same prompt is
computed up to the block's end first.
"""

from plain_core import Cache, full, states

cache = Cache((full(8), False), (states(8, exports=1), False), hash_size=4)
first = cache.request("first", range(5))
for _ in range(2):  # the chunk up to the prompt's last hash block, and its last token
    cache.compute(first, cache.chunk(first, first.num_tokens - first.num_computed_tokens))
    cache.manager.new_step_starts()
writer = cache.request("writer", range(29))
found, hit, *_ = cache.manager.get_computed_blocks(writer)
chunk = cache.chunk(writer, 29 - hit, hit)
assert cache.manager.allocate_slots(writer, chunk, hit, found) is not None
copies, _ = cache.manager.take_kv_cache_block_copies()
begun = cache.rows(writer)[1][0]
assert begun in {copy.dst_block_id for copy in copies}
cache.manager.new_step_starts()
tokens, (_, state) = cache.hit(cache.request("reader", [*range(8), *range(100, 108)]))
print(f"the writer's step computes tokens {hit} to {hit + chunk}; block {begun} has the state after {hit} tokens")
print(f"the reader hits {tokens} tokens: state in block {state[-1]}")
if tokens == 8 and state[-1] == begun and hit + chunk > 8:
    raise SystemExit(f"BUG: the state that is hit is that after {hit} tokens, not after 8")
