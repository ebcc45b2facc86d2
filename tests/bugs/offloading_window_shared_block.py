"""OffloadingConnector: a window's block that another request hits before it was stored is left out of its chunk.

The connector takes every block of a request that is admitted as given away, those that it has hit too, and puts a null
in its place in the tables of others. If that is the first block of a chunk that ends within the window, the rest is
stored, the chunk can be hit, and a hit of its end reads what the memory held before.
"""

from plain_vllm import Engine

engine = Engine(
    gpu_blocks=24, cpu_blocks=8, step_tokens=6, connector="OffloadingConnector", blocks_per_chunk=2, window=16
)
engine.add("A", list(range(17)))
engine.add("B", [*range(17), 500])
for _ in range(6):
    engine.step()
    for job in engine.metadata.store_jobs.values():
        source = job.src_spec if hasattr(job, "src_spec") else job.transfer_spec[0]
        if source.group_sizes[1] == 1:
            raise SystemExit(
                f"BUG: of a chunk of two blocks only {source.block_ids[-1]} is stored in the window's group"
            )
print("fixed: chunks of the window are stored whole")
