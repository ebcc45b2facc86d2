"""Lazy offload starves a request that waits for room: its stores never end, and those in flight always hold blocks.

An engine whose CPU tier is smaller than its GPU prefix cache goes on copying for ever (lazy_offload_never_idles.py).
Here the request that waits needs every block of the GPU, and transfers end two steps after they began.
"""

from plain_vllm import Engine


class Slow(Engine):
    """Transfers end a step later than those of ``Engine``."""

    late = None

    def run(self, output):
        result = super().run(output)
        self.in_flight, self.late = self.late, output.kv_connector_metadata
        return result


engine = Slow(gpu_blocks=7, cpu_blocks=3, step_tokens=16, lazy=True)
engine.add("x", list(range(100, 113)), max_tokens=1)
engine.add("z", [300], max_tokens=5)
engine.add("waits", list(range(500, 521)))
steps = stored = 0
while engine.scheduler.has_requests() and steps < 300:
    stored += engine.step()[1]
    steps += 1
left = {name: request.num_computed_tokens for name, request in engine.scheduler.requests.items()}
print(f"{steps} steps, {stored} blocks stored, left: {left}")
if left:
    raise SystemExit("BUG: a request never runs, as stores of an otherwise idle engine hold blocks for ever")
print("fixed: every request ends")
