"""OffloadingConnector: a window's chunk with a hole is stored with the blocks behind the hole at the hole's place.

Blocks that have left a request's window are free, and from when one is given away the connector has a null in its place.
A chunk is stored if its last blocks are there. A null in the middle is left out of the job, and the worker, who is told
the first block and how many, puts what follows where the hole is. The chunk's end is never written, and what a hit reads
there is whatever the memory held.
"""

from plain_vllm import Engine

engine = Engine(
    gpu_blocks=14, cpu_blocks=16, step_tokens=10, connector="OffloadingConnector", blocks_per_chunk=3, window=5
)
connector = engine.scheduler.connector.connector_scheduler
engine.add("A", list(range(13)))
engine.step()
engine.add("B", list(range(100, 104)))
engine.step()
job = next(job for job in engine.metadata.store_jobs.values() if job.req_id == "A")
table = connector._req_status["A"].group_states[1].block_ids
source = getattr(job, "src_spec", None) or job.transfer_spec[0]
sizes, firsts = list(source.group_sizes), list(source.block_indices)
print("A's table in the window's group:", table)
print("stored of it:", source.block_ids[sizes[0] :].tolist(), "from block", firsts[1], "on")
stored = source.block_ids[sizes[0] :].tolist()
if stored and stored != table[firsts[1] : firsts[1] + len(stored)]:
    raise SystemExit("BUG: blocks behind the hole are stored one place too early")
print("fixed: what is stored keeps its place")
