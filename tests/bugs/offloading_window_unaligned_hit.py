"""OffloadingConnector: a hit that ends inside a full-attention chunk loads a block of a window that was never stored.

Blocks of full attention have 8 tokens, those of the window 4, and chunks two blocks: 16 and 8 tokens. Hits are meant to
end where both end, so the window's first block, which nothing reads from there, may be left out of its chunk. But once
the window's second chunk is evicted, and the first isn't, a look-up finds 8 tokens, and reads that first block.
"""

from plain_vllm import Engine


def places(gpu, chunks):
    """Yield (chunk, place in it) of each block of a transfer."""
    first = 0
    for size, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        for i in range(index % 2, index % 2 + size):
            yield int(chunks[first + i // 2]), i % 2
        first += -(-(index % 2 + size) // 2) if size else 0


engine = Engine(
    gpu_blocks=14,
    cpu_blocks=5,
    step_tokens=16,
    connector="OffloadingConnector",
    blocks_per_chunk=2,
    window=12,
    full_block_size=8,
)
written = set()


def run(*prompts):
    for prompt in prompts:
        engine.add(f"{prompt[-1]} of {len(engine.requests)}", prompt)
    for _ in range(6):
        engine.step()
        for job in engine.metadata.load_jobs.values():
            read = set(places(job.dst_spec, job.src_spec.block_ids))
            if read - written:
                raise SystemExit(f"BUG: {sorted(read - written)} (chunk, place) is loaded, and was never stored")
        for job in engine.metadata.store_jobs.values():
            chunks = set(job.dst_spec.block_ids.tolist())
            written.difference_update([(chunk, place) for chunk in chunks for place in (0, 1)])
            written.update(places(job.src_spec, job.dst_spec.block_ids))


text, other = list(range(16)), list(range(100, 116))
run(text, [*text, 500])
engine.scheduler.reset_prefix_cache()
run([*text, 501])
run([*other, 502])
engine.scheduler.reset_prefix_cache()
run([*text, 503])
print("fixed: what is loaded was stored")
