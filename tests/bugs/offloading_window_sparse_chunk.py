"""OffloadingConnector: a hit loads a block of a window that was left out of its chunk.

With sparse retention, which is the default, a request stores of a window what a hit at the end of its own prompt reads.
A chunk of which that is the second half may lack the first: it was hit by another request, so the connector has a null
in its place. But the chunk's key is the same, and the hit of a shorter prompt, which ends with this chunk, reads it
whole.
"""

from plain_vllm import Engine, Places

engine = Engine(
    gpu_blocks=40, cpu_blocks=12, step_tokens=16, connector="OffloadingConnector", blocks_per_chunk=2, window=12
)
places = Places()
text = list(range(24))


def run():
    for _ in range(6):
        engine.step()
        if lost := places.lost(engine.metadata):
            raise SystemExit(f"BUG: {lost} (chunk, place) is loaded, and was never stored")


engine.add("filler", [900])
engine.add("long", [*text, 500])
engine.add("short", [*text[:12], 501])
run()
engine.scheduler.reset_prefix_cache()
engine.add("between", [*text[:16], 502])
run()
print("fixed: what is loaded was stored")
