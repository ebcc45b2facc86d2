"""OffloadingConnector with Mamba layers and runner V2: a block is zeroed before the store that reads it has begun.

Stores of this connector hold no reference to the blocks that they read. Whoever gets such a block makes the workers
finish the store first (handle_preemptions). With Mamba layers the runner zeroes what it gets of new blocks for
attention, and copies states into new blocks. Runner V1 calls handle_preemptions before that, runner V2 after it. A
store that is planned in one step is begun in the next one; if its block has a new owner by then, the CPU tier gets
zeroes.
"""

from unittest.mock import MagicMock

import numpy as np
from plain_vllm import Engine
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class First(Exception):
    """What the runner does first."""


def first_call_of_the_runner(output):
    """Let the runner begin the step, with a stand-in for everything around it, until it zeroes or calls the
    connector."""
    runner = MagicMock()
    for name in ("num_computed_tokens_np", "num_computed_prefill_tokens", "prefill_len.np"):
        runner.configure_mock(**{f"req_states.{name}": np.zeros(4, dtype=np.int32)})
    runner.update_requests.side_effect = lambda output: GPUModelRunner.update_requests(runner, output)
    runner.kv_block_zeroer.zero_block_ids.side_effect = First("zeroes")
    runner.kv_connector.pre_forward.side_effect = First("flushes")
    try:
        GPUModelRunner.execute_model(runner, output)
    except First as first:
        return str(first)


engine = Engine(gpu_blocks=14, cpu_blocks=16, step_tokens=16, connector="OffloadingConnector", mamba=True)
engine.add("A", list(range(8)), max_tokens=7)
engine.add("B", list(range(100, 120)))
engine.add("C", list(range(200, 221)))
stores, lost = {}, set()
while not lost and engine.scheduler.has_unfinished_requests():
    engine.step()
    flushed = [stores[number] for number in engine.metadata.jobs_to_flush or ()]
    sources = {block for job in flushed for block in job.src_spec.block_ids.tolist()}
    lost = sources & set(engine.output.new_block_ids_to_zero or ())
    stores |= engine.metadata.store_jobs
print(f"blocks that a step zeroes, and flushes the stores of: {sorted(lost)}")
if lost and first_call_of_the_runner(engine.output) == "zeroes":
    raise SystemExit("BUG: the runner zeroes them before it lets the connector flush")
print("fixed: a block is stored before it is zeroed")
