"""Two asynchronous loads of a model with a sliding window can hold the blocks that either needs to go on.

A load is admitted if the free blocks, less what requests before it still need, are enough. For a window that need is
counted from the blocks of its table, of which those outside the window are null: they hold nothing, and the next step
needs as many new ones. So the second load is admitted, the first request can't be scheduled when its load has ended,
and it stands before the second one: nothing runs any more.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=14, cpu_blocks=24, step_tokens=6, window=5)
text = list(range(100, 121))
engine.add("first", text[:17])
for _ in range(8):
    engine.step()
engine.add("other", list(range(200, 207)), max_tokens=7)  # takes the blocks of the first one's prefix
for _ in range(20):
    engine.step()
engine.add("A", text)
engine.add("B", text[:17])
loaded = sum(engine.step()[2] for _ in range(50))
left = {name: (engine.scheduler.requests[name].status.name, engine.tables(name)) for name in engine.scheduler.requests}
print(f"{loaded} blocks loaded; after 50 steps: {left}")
if left:
    raise SystemExit("BUG: both loads have ended, and neither request is ever scheduled")
print("fixed: both go on")
