"""Two asynchronous loads of a model with a sliding window can hold the blocks that either needs to go on.

A load is admitted if the free blocks, less what requests before it still need, are enough. For a window that need is
counted from the blocks of its table, of which those outside the window are null: they hold nothing, and the next step
needs as many new ones. So the second load is admitted, the first request can't be scheduled when its load has ended,
and it stands before the second one: nothing runs any more.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=18, cpu_blocks=40, step_tokens=16, connector="OffloadingConnector", window=5)
engine.add("first", list(range(17)))
for _ in range(6):
    engine.step()
assert engine.scheduler.reset_prefix_cache()
engine.add("A", list(range(16)) + list(range(100, 115)))
engine.add("B", list(range(17)))
seen = [engine.step() for _ in range(12)]
waiting = {name: (engine.requests[name].status.name, engine.tables(name)) for name in ("A", "B")}
print("scheduled:", [tokens for tokens, _, _ in seen])
if not any(tokens for tokens, _, _ in seen):
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    print(f"waiting: {waiting}; {free} blocks are free")
    raise SystemExit("BUG: both loads have ended, and neither request is ever scheduled")
print("fixed: both go on")
