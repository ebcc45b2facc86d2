"""Lazy offload copies for ever on an idle engine when the CPU pool is smaller than the GPU's prefix cache.

Seen in vLLM 0.30.0 to 0.33.0 (``has_pending_push_work`` came with 0.30.0). Each empty step stores the blocks at the
head of the GPU free queue; their stores complete, the blocks go to the tail of the queue, and the next blocks,
which the CPU pool has meanwhile evicted, are at the head. The engine always has a store in flight, so it never goes
idle: it spins, and evicts its CPU tier round and round.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=11, cpu_blocks=7, step_tokens=6, lazy=True)
engine.add("a", list(range(100, 108)), max_tokens=9)  # 4 full blocks
engine.add("b", list(range(200, 211)), max_tokens=2)  # 3 full blocks; 7 in all, for 6 usable CPU blocks
steps = stored = 0
while engine.scheduler.has_requests() and steps < 1000:
    _, blocks, _ = engine.step()
    steps += 1
    stored += blocks
print(f"{steps} steps, {stored} blocks stored, requests left: {len(engine.scheduler.requests)}")
if engine.scheduler.has_requests():
    raise SystemExit("BUG: no request is left, and the engine still steps and copies")
