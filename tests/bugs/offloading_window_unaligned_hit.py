"""OffloadingConnector: a hit that ends inside a full-attention chunk loads a block of a window that was never stored.

Blocks of full attention have 8 tokens, those of the window 4, and chunks two blocks: 16 and 8 tokens. Hits are meant to
end where both end, so the window's first block, which nothing reads from there, may be left out of its chunk. But once
the window's second chunk is evicted, and the first isn't, a look-up finds 8 tokens, and reads that first block.
"""

from plain_vllm import Engine, Places

engine = Engine(
    gpu_blocks=14,
    cpu_blocks=5,
    step_tokens=16,
    connector="OffloadingConnector",
    blocks_per_chunk=2,
    window=12,
    full_block_size=8,
)
places = Places()


def run(*prompts):
    for prompt in prompts:
        engine.add(f"{prompt[-1]} of {len(engine.requests)}", prompt)
    for _ in range(6):
        engine.step()
        if lost := places.lost(engine.metadata):
            raise SystemExit(f"BUG: {lost} (chunk, place) is loaded, and was never stored")


text, other = list(range(16)), list(range(100, 116))
run(text, [*text, 500])
engine.scheduler.reset_prefix_cache()
run([*text, 501])
run([*other, 502])
engine.scheduler.reset_prefix_cache()
run([*text, 503])
print("fixed: what is loaded was stored")
