"""OffloadingConnector: after a reset, a store that names a block twice raises KeyError when it ends.

A block that has left the window can be given to the same request again, in the full-attention group. After a reset of
the connector's cache every chunk is offered again, the window's with the id that it had then. So one store has the
block in both groups. It is watched once, and that is taken back twice if the request has ended by then.
"""

from plain_vllm import Engine

engine = Engine(
    gpu_blocks=9, cpu_blocks=40, step_tokens=48, connector="OffloadingConnector", window=8, prompt_only=False
)
engine.add("A", list(range(12)), max_tokens=9)
try:
    for step in range(14):
        if step == 8:
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.step()
except KeyError as error:
    raise SystemExit(f"BUG: KeyError({error}) ends the engine") from error
print("fixed: the store ends")
