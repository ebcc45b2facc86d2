"""OffloadingConnector: a reset drops every chunk of the CPU tier and tells no consumer of KV cache events.

The scheduler resets the connector even while a request runs; the GPU's prefix cache stays then, so nothing is emitted
at all. A router goes on sending requests to an engine for a prefix that it no longer has.
"""

from plain_vllm import Engine

engine = Engine(gpu_blocks=9, cpu_blocks=8, step_tokens=16, connector="OffloadingConnector")
connector = engine.scheduler.connector
engine.add("A", list(range(5)), max_tokens=8)
for _ in range(3):
    engine.step()
events = [*connector.take_events(), *engine.scheduler.kv_cache_manager.take_events()]
chunks = connector.connector_scheduler.manager._policy.chunks
assert len(chunks) == 1, "A's first block is in the CPU tier; its event went out with the step"
engine.scheduler.reset_prefix_cache(reset_connector=True)
assert not chunks
events = [*connector.take_events(), *engine.scheduler.kv_cache_manager.take_events()]
print("events after the reset:", events)
if not events:
    raise SystemExit("BUG: the CPU tier was dropped, and no event says so")
print("fixed: the drop is told")
