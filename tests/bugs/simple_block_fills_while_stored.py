"""SimpleCPUOffload: a block is stored while it is partly filled, and is found under the full block's key afterwards.

The eager cursor of a request goes over the block ids that it was given. Once the CPU tier has been full for a while,
the cursor meets ids whose blocks have left the window and are another request's. If such a block has a key, it is
stored. With EAGLE the last part of a prompt has one, though the block isn't full. Which key the copy gets is read when
the store ends: by then the block may be full. Whoever hits it reads tokens that were never copied.
"""

from plain_vllm import Engine, report_of
from vllm.v1.outputs import KVConnectorOutput


class Slow(Engine):
    """Its worker reports the transfers of the step before last."""

    before_last = None

    def run(self, output):
        late, self.before_last = self.before_last, self.in_flight
        result = super().run(output)
        loaded, report = report_of(late) if late else (set(), None)
        result.kv_connector_output = KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=report)
        return result


engine = Slow(gpu_blocks=15, cpu_blocks=18, step_tokens=48, window=5, full_block_size=8, drafts=1)
pool = engine.scheduler.kv_cache_manager.block_pool
tier = engine.scheduler.connector.scheduler_manager.cpu_block_pool
engine.add("B", list(range(30)), max_tokens=16)
engine.step()
engine.add("A", list(range(300, 313)), max_tokens=8)
stored = {}
for _ in range(10):
    engine.step()
    for gpu, cpu in zip(engine.metadata.store_gpu_blocks, engine.metadata.store_cpu_blocks, strict=True):
        stored[cpu] = pool.blocks[gpu].block_hash_num_tokens
    for cpu, tokens in stored.items():
        found = tier.blocks[cpu].block_hash_num_tokens
        if tokens and found not in (None, tokens):
            raise SystemExit(f"BUG: CPU block {cpu} got the block of the first {tokens} tokens, and stands for {found}")
print("fixed: a stored block keeps its key")
