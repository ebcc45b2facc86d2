"""OffloadingConnector: a request that a reset preempts, and that is admitted again with a load at once, is an error.

A reset that preempts running requests (as before a weight update) is told to the connector by the next step, which may
admit them again. It then takes every job of theirs for one from before the preemption, to be flushed, and asserts that
it is a store. Here it is the load that this very step has planned: the AssertionError ends the engine.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=11, cpu_blocks=8, step_tokens=16, connector="OffloadingConnector")
engine.add("A", list(range(4)), max_tokens=3)
_, stored, _ = engine.step()
assert stored == 1, "the block of A's prompt is being stored"
engine.step()
assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
try:
    engine.step()
except AssertionError as error:
    raise SystemExit("BUG: the step that admits A again raises an AssertionError") from error
print("fixed: A is admitted again")
