"""OffloadingConnector: after a reset, chunks of a window are stored from blocks that others have had for long.

A block that has left the window is free; where one of these is given away, the connector forgets its id, if its chunk
wasn't offered yet. After a reset of the connector's cache every chunk is offered again, those too whose ids were never
forgotten. What others wrote is stored under the keys of the old request, and loaded for the next one.
"""

from plain_vllm import Engine

engine = Engine(
    gpu_blocks=13, cpu_blocks=16, step_tokens=16, connector="OffloadingConnector", blocks_per_chunk=2, window=6
)
engine.add("A", list(range(13)), max_tokens=9)
for _ in range(3):
    engine.step()
engine.add("B", list(range(100, 112)), max_tokens=9)
engine.step()
given = {block for group in engine.tables("B") for block in group}
engine.scheduler.reset_prefix_cache(reset_connector=True)
engine.step()
for job in engine.metadata.store_jobs.values():
    source = job.src_spec if hasattr(job, "src_spec") else job.transfer_spec[0]
    print(f"stored for {job.req_id}: {source.block_ids.tolist()}; blocks of B: {sorted(given)}")
    if job.req_id == "A" and given & set(source.block_ids.tolist()):
        raise SystemExit("BUG: blocks of B are stored under keys of A")
print("fixed: nothing of B is stored for A")
