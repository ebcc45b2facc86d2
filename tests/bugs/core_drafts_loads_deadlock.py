"""With EAGLE and priorities, two asynchronous loads can hold the blocks that the more urgent request needs to go on.

A load is admitted if the free blocks are enough for the whole prompt, and for what is loaded beside what other loads
and the drafts of a step still need. The rest of its own prompt and the drafts are never counted together. When the load
has ended, the step that goes on asks for both. Another load that has ended holds the block that is missing, and stands
behind the more urgent request: nothing runs any more. First come, first served, the other one goes first.
"""

from plain_vllm import Engine

engine = Engine(
    gpu_blocks=9,
    cpu_blocks=8,
    step_tokens=16,
    connector="OffloadingConnector",
    blocks_per_chunk=2,
    priority=True,
    drafts=1,
)
texts = {name: list(range(start, start + 24)) for name, start in (("urgent", 100), ("other", 200), ("filler", 300))}
for name, tokens in (("urgent", 17), ("other", 24), ("filler", 24)):  # the last takes the blocks of both prefixes
    engine.add(f"first {name}", texts[name][:tokens])
    for _ in range(12):
        engine.step()
engine.add("other", texts["other"][:9], priority=2)
engine.step()
slow, engine.in_flight = engine.in_flight, None  # this load takes longer
engine.add("urgent", texts["urgent"], max_tokens=2, priority=1)
loaded = sum(engine.step()[2] for _ in range(3))
engine.in_flight = slow
loaded += sum(engine.step()[2] for _ in range(50))
left = {name: (engine.scheduler.requests[name].status.name, engine.tables(name)) for name in engine.scheduler.requests}
print(f"{loaded} loads; after 50 steps: {left}")
if left:
    raise SystemExit("BUG: both loads have ended, and neither request is ever scheduled")
print("fixed: both go on")
