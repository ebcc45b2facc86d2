"""What is checked: adapters that turn ops into calls of an implementation and its state into observations.

No expectations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvspec.device.adversary import Actor, Adversary
from kvspec.engine.shadow import Batch, ShadowMismatch
from kvspec.errors import KvspecError
from kvspec.laws import PoolView
from kvspec.ops import EQUALITIES, Add, EngineSetup


class Plan(NamedTuple):
    """What one schedule decided, as its connector sees it."""

    preempted: frozenset[str]
    new_blocks: Mapping[str, tuple[int, ...]]
    """Blocks that each scheduled request was given in this schedule."""
    stores: int
    """Blocks that the workers are told to store."""
    loads: int
    """Blocks that the workers are told to load."""
    uncomputed: bool
    """Whether a block stays registered that is never computed: this schedule has preempted whom it had scheduled."""
    trace: str
    """Everything above and the connector's metadata, for comparison with a replay."""


class CopiedBlock(NamedTuple):
    """One block copy in one layer, as it executed. Block ids, -1 for an address in no block."""

    rank: int
    gpu: int
    cpu: int
    to_gpu: bool
    job: int | None = None
    """The number of the transfer that it is part of, if the connector has such numbers."""


class FullBlock(NamedTuple):
    """A block of a request that is full of computed tokens."""

    key: bytes
    """Its key in the CPU tier."""
    stop: int
    """The position behind its last token."""
    gpu_blocks: frozenset[int]
    """The GPU blocks that are registered under the key, whoever has registered them."""


class Probe(Protocol):
    """What a world wants to hear while the target runs."""

    def looked_up(self, request: str, local_tokens: int, external_tokens: int | None) -> None:
        """The connector was asked how many tokens it can load behind ``local_tokens``."""

    def allocated(self, request: str, external_tokens: int) -> None:
        """The connector was told of an allocation; ``external_tokens`` > 0 starts a load."""

    def scheduled(self, plan: Plan) -> None:
        """A schedule is complete."""

    def loaded(self, rank: int, requests: Iterable[str]) -> None:
        """A rank reports loads as finished."""

    def ended(self, request: str, stopped: bool) -> None:
        """A request has sampled its last token, which was the stop token or not."""

    def copied(self, block: CopiedBlock) -> None:
        """A block copy has executed."""

    def mismatch(self, mismatch: ShadowMismatch) -> None:
        """Attention has read wrong bytes."""

    def saw(self, event: str) -> None:
        """Something that only this target knows of has happened: a name in ``kvspec.world.EVENTS``."""


class ResetAnswer(NamedTuple):
    """What ``reset_prefix_cache`` answered."""

    done: bool
    connector_refused: bool
    refusal: str
    """The documented exception, if there was one."""


class Engine(Protocol):
    """One engine of a target, with everything that a world does to it and sees of it."""

    actors: list[Actor]
    polls_when_idle: bool
    """Whether the engine keeps stepping until its transfers have ended."""
    cpu_null_block: int | None
    """The CPU block that no copy may touch, if there is one."""
    longest_request: int
    """Tokens, prompt and output, of the longest request that it can run."""

    def set_adversary(self, adversary: Adversary) -> None: ...
    def add(self, op: Add, prompt: list[int], arrival: int) -> None: ...
    def said(self, request: str) -> list[int] | None: ...
    def status(self, request: str) -> str | None:
        """Return ``waiting``, ``loading``, ``running`` or ``preempted``, or None for a request that is gone."""

    def finish_next(self, request: str) -> None: ...
    def abort(self, request: str, in_step: bool) -> None: ...
    def reset(self, running: bool, connector: bool) -> ResetAnswer: ...
    def has_work(self) -> bool: ...
    def step(self) -> bool: ...
    def last_batch(self) -> Batch | None: ...
    def transfers_outstanding(self) -> bool:
        """Whether a load was allocated, or a store planned, that hasn't been reported by all ranks."""

    def stores_queued(self) -> bool:
        """Whether the connector holds stores that no schedule has planned yet."""

    def stores_unstarted(self) -> int:
        """Return how many planned stores no rank has begun."""

    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]: ...
    def pools(self) -> tuple[PoolView, PoolView]: ...
    def group_of_copy(self, block: CopiedBlock) -> int | None:
        """Return the group whose table has the GPU block of a copy; None if the connector doesn't say."""

    def copy_refs(self, block: CopiedBlock) -> tuple[int, int]:
        """Return how many hold the GPU block and the CPU block of a copy, at the moment at which it executes."""

    def kept(self) -> Mapping[str, int]: ...
    def cpu_shortages(self) -> int:
        """Return how often, so far, no CPU block was left for another store."""

    def full_blocks(self, request: str) -> list[FullBlock]:
        """Return those full blocks of a request that has just ended which can be hit on the GPU, and which attention
        would read to go on; for each tier that stores eagerly (as soon as a block is full, if there is room).
        """

    def held_tokens(self, request: str, local: int) -> int | None:
        """Return how many tokens of a request the CPU tier has as ready blocks in a row from ``local`` on, short of the
        last token; None if that isn't all that decides what a lookup has to offer.
        """

    def reads_cache(self, request: str) -> bool:
        """Whether a request may hit what others have left."""

    def confirmed_tokens(self, request: str) -> int:
        """Return how many tokens of a request were known to be computed when it was scheduled last."""

    def cpu_index(self) -> Mapping[bytes, int]: ...
    def gpu_index(self) -> Mapping[bytes, int]: ...
    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None:
        """Return the tags of what a rank keeps of the block that a key stands for; None if no request has the key.

        They are the block's first tags, if the key stands for its beginning only. Those that nothing can read, because
        a window doesn't reach so far back, are masked.
        """

    def cpu_tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        """Return the tags that a block holds, as a block of the key's group; shape (layers, tokens kept)."""

    def gpu_tags(self, key: bytes, rank: int, block: int) -> np.ndarray: ...
    def flaw_of_gpu_block(self, rank: int, block: int) -> str:
        """Return what is known to be wrong with the store that the bytes of a GPU block come from; else nothing.

        ``incomplete chunk``: it has left out a block of its chunk, this one or one behind it; ``partly stored``: the
        block wasn't full when its store was planned.
        """

    def flaw_of_cpu_block(self, key: bytes, rank: int, block: int, entry: int) -> str:
        """Likewise of a CPU block, where an entry of a key's tags is."""

    def describe_tag(self, key: bytes, rank: int, index: int, tag: int) -> str:
        """Say what a tag is that was read from the ``index``-th layer of a key's group."""

    def describe_key(self, key: bytes) -> str: ...
    def group_of(self, key: bytes) -> int:
        """Return the attention group that a key's block belongs to."""

    def events(self, tier: str) -> Mapping[bytes, int] | None:
        """Return how often each key was stored, less how often removed, as the events of a tier tell; None if they
        don't tell, or not of which group they are."""

    def state(self) -> str: ...
    def waiting_requests(self) -> list[str]: ...


class Target(Protocol):
    """Something that can be checked."""

    name: str
    """What the user typed: ``vllm-simple@0.33.0``."""
    own_files: tuple[str, ...]
    """Directories of the implementation; the innermost frame in one of them says where an exception came from."""

    def activated(self) -> AbstractContextManager[Any]:
        """Put the simulated device in place for the time of the context."""

    def refusal(self, setup: EngineSetup) -> str | None:
        """Say why the implementation doesn't support a setup; None if it does."""

    def start(self, setup: EngineSetup, adversary: Adversary, probe: Probe) -> Engine:
        """Start a fresh engine. SetupRefused: it doesn't support the setup."""


TARGETS = {
    "vllm-simple": "vLLM's SimpleCPUOffloadConnector under its own scheduler and engine step",
    "vllm-offloading": "vLLM's OffloadingConnector with its CPU manager (LRU, ARC), likewise",
    "vllm-multi": "vLLM's MultiConnector of two of these connectors, likewise",
    "vllm-core": "vLLM's block pool, KV cache manager and scheduler, beside the model",
    "vllm-offload-index": "OffloadingConnector's store index and CPU tier, beside the model",
}


FIRST_RELEASES = {"vllm-multi": "0.22.1"}
"""Target -> the first release that it runs on, where that isn't the first that kvspec runs on.

Before, MultiConnector doesn't hand the GPU's block pool to SimpleCPUOffload.
"""


def parse_target(name: str) -> tuple[str, str | None]:
    """Split ``vllm-simple@0.33.0`` into target and release (None: the vLLM that is importable).

    KvspecError: the target isn't known, or the release is empty.
    """
    target, at, release = name.partition("@")
    if target not in TARGETS:
        known = ", ".join(sorted(TARGETS))
        raise KvspecError(
            f"{name!r} is no target; known ones: {known} (add @RELEASE for a published "
            "release), or package.module:suite for one of your own"
        )
    if at and not release:
        raise KvspecError(
            f"{name!r} has no release after '@'; try {target}@0.33.0, or {target} for the importable vLLM"
        )
    return target, release or None


def load_target(name: str) -> Target:
    """Return the target, in a process whose ``sys.path`` has its release first. KvspecError if it has no engine."""
    target, _ = parse_target(name)
    if target in EQUALITIES:
        raise KvspecError(f"{name} is compared with the model, call by call: it has no engine.")
    if target == "vllm-offloading":
        from kvspec.targets.vllm.offloading import OffloadingTarget

        return OffloadingTarget(name)
    if target == "vllm-multi":
        from kvspec.targets.vllm.multi import MultiTarget

        return MultiTarget(name)
    from kvspec.targets.vllm.simple import SimpleOffloadTarget

    return SimpleOffloadTarget(name)
