"""A block that was never computed stays in the prefix cache: its request was preempted in the step that scheduled it.

With priority scheduling a request that has been scheduled already can be preempted later in the same schedule, for one
of higher priority. Its tokens aren't computed then, but the block that they would have filled was registered when they
were allocated (v1/core/sched/scheduler.py, schedule, the branch of the priority policy). Whoever hits it reads what
nobody has written; the victim itself does, when it is resumed. Seen in vLLM 0.20.2 to 0.33.0.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=16, cpu_blocks=80, step_tokens=16, window=6, priority=True)
engine.add("a", [100])
engine.step()
engine.add("b", [100, 7, *range(200, 211)], max_tokens=5, priority=1)
engine.step()
engine.add("c", list(range(300, 315)), max_tokens=3)
victim = engine.requests["b"]
computed = 13
for _ in range(8):
    if "b" in engine.step()[0]:
        computed = max(computed, victim.num_computed_tokens)
    for i, block_hash in enumerate(victim.block_hashes):
        stop = 4 * (i + 1)
        for group in (0, 1):
            if stop > computed and engine.scheduler.kv_cache_manager.block_pool.get_cached_block(block_hash, [group]):
                raise SystemExit(f"BUG: the prefix of {stop} tokens can be hit, and {computed} are computed")
print("fixed: nothing can be hit that wasn't computed")
