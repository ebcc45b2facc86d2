"""OffloadingConnector: a window's chunk with a hole is stored with the blocks behind the hole at the hole's place.

Blocks that have left a request's window are free, and from when one is given away the connector has a null in its
place. A chunk is stored if its last blocks are there. A null in the middle is left out of the job, and the worker, who
is told the first block and how many, puts what follows where the hole is. The chunk's end is never written, and what a
hit reads there is whatever the memory held.
"""

from plain_vllm import Engine

engine = Engine(
    gpu_blocks=16, cpu_blocks=16, step_tokens=17, connector="OffloadingConnector", blocks_per_chunk=4, window=5
)
connector = engine.scheduler.connector.connector_scheduler
engine.add("filler", list(range(200, 205)))
engine.add("A", list(range(17)))
engine.step()
engine.add("B", list(range(100, 112)))
engine.step()
(job,) = (job for job in engine.metadata.store_jobs.values() if job.req_id == "A")
table = connector._req_status["A"].group_states[1].block_ids
source = job.src_spec if hasattr(job, "src_spec") else job.transfer_spec[0]
stored, first = source.block_ids[source.group_sizes[0] :].tolist(), source.block_indices[1]
print(f"A's table in the window's group: {table}; stored of it: {stored}, from place {first} on")
if stored != table[first : first + len(stored)]:
    raise SystemExit("BUG: the blocks behind the hole are stored one place too early")
print("fixed: what is stored keeps its place")
