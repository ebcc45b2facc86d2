"""OffloadingConnector: a reset of the connector's cache asserts if another one came since the last step.

The first reset leaves the jobs in flight to be flushed by the next schedule; the second takes them for a sign that it
is called inside a schedule. A caller that resets twice, as after two weight updates on a quiet engine, gets an
AssertionError, and the GPU's prefix cache has been dropped by then, the CPU's not.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=9, cpu_blocks=8, step_tokens=16, connector="OffloadingConnector")
engine.add("A", list(range(5)))
scheduled, stored, _ = engine.step()
assert stored == 1, "A has ended, and its first block is being stored"
assert engine.scheduler.reset_prefix_cache(reset_connector=True)
try:
    engine.scheduler.reset_prefix_cache(reset_connector=True)
except AssertionError as error:
    raise SystemExit("BUG: the second reset raises an AssertionError") from error
print("fixed: a second reset is no error")
