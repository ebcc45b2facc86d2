"""A store, a reset of the GPU prefix cache and a load, by each connector of the release that is importable."""

import sys

from kvspec.ops import Add, EngineSetup, History, Reset, Settle
from kvspec.targets import load_target
from kvspec.world import run_history

TARGETS = {
    "vllm-simple": EngineSetup(),
    "vllm-offloading": EngineSetup(),
    "vllm-multi": EngineSetup(backends=("offloading", "simple")),
}
"""Target -> the engine whose round trip is made."""

PROMPT = {"shared": 13, "tail": 0, "max_tokens": 2}
OPS = (Add("A", **PROMPT), Settle(), Add("wakes", shared=0, tail=2), Settle(), Reset(), Add("B", **PROMPT), Settle())

if __name__ == "__main__":
    release = sys.argv[1]
    for name in sys.argv[2:]:
        target = f"{name}@{release}"
        outcome = run_history(load_target(target), History(target, TARGETS[name], OPS))
        assert not outcome.violations, outcome.violations
        assert outcome.reached["load finished"], outcome.reached
