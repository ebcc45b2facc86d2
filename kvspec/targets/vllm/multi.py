"""``vllm-multi``: MultiConnector of two CPU backends, on the simulated device.

Each backend is a connector with a CPU tier of its own, and is observed as it is alone. A request is loaded by the first
backend that has a hit, and stored by both. Blocks of the tiers are numbered one after the other; keys of their indexes
say which backend they are of.

Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/multi_connector.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvspec.device.adversary import Adversary
from kvspec.errors import SetupRefused
from kvspec.laws import PoolView
from kvspec.ops import EngineSetup
from kvspec.targets import CopiedBlock, Probe, Target
from kvspec.targets.vllm import offloading, simple
from kvspec.targets.vllm.core import own_files
from kvspec.targets.vllm.engine import VllmEngine, children
from kvspec.targets.vllm.observe import ObservedEngine, Tier, Transfers

CONNECTOR = "MultiConnector"
_BACKENDS = {"simple": simple, "offloading": offloading}
_TAGS = (b"first-backend", b"other-backend")
"""What begins the keys of each backend's index."""


def connector_config(setup: EngineSetup) -> dict[str, Any]:
    """Return ``kv_connector_extra_config``: the connectors in the order in which they are asked."""
    return {
        "connectors": [
            {
                "kv_connector": _BACKENDS[backend].CONNECTOR,
                "kv_role": "kv_both",
                "kv_connector_extra_config": _BACKENDS[backend].connector_config(of_backend(setup, i)),
            }
            for i, backend in enumerate(setup.backends)
        ]
    }


def of_backend(setup: EngineSetup, number: int) -> EngineSetup:
    """Return the setup as one backend has it, alone: the second has twice the CPU blocks, so that it keeps what the
    first gives up."""
    return replace(setup, cpu_blocks=setup.cpu_blocks * (number + 1), backends=())


class MultiTarget:
    """The target ``vllm-multi``, with or without a release."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_files = own_files()
        self._simple = simple.SimpleOffloadTarget(name)
        self._offloading = offloading.OffloadingTarget(name)

    @contextmanager
    def activated(self) -> Iterator[None]:
        with ExitStack() as both:
            both.enter_context(self._simple.activated())
            both.enter_context(self._offloading.activated())
            yield

    def refusal(self, setup: EngineSetup) -> str | None:
        """Say why either backend, or MultiConnector, can't run a setup; None if they can.

        Source: vLLM 0.21.0, multi_connector.py, which has no bind_gpu_block_pool; SimpleCPUOffload can't do without.
        For two OffloadingConnectors see ``shares_one_region``: the second waits 30 s for the file to grow, and raises.
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        if not setup.backends:
            return "MultiConnector needs two backends, and the setup names none"
        if "simple" in setup.backends and "bind_gpu_block_pool" not in MultiConnector.__dict__:
            return "up to 0.21 MultiConnector doesn't hand the GPU's block pool to SimpleCPUOffload"
        if setup.backends == ("offloading", "offloading") and offloading.shares_one_region():
            return "in this release two OffloadingConnectors of an engine open one shared memory file"
        targets: dict[str, Target] = {"simple": self._simple, "offloading": self._offloading}
        refusals = (targets[backend].refusal(of_backend(setup, i)) for i, backend in enumerate(setup.backends))
        return next((reason for reason in refusals if reason), None)

    def start(self, setup: EngineSetup, adversary: Adversary, probe: Probe) -> ObservedEngine:
        if reason := self.refusal(setup):
            raise SetupRefused(f"{self.name} can't run this engine: {reason}.")

        def make_tier(vllm: VllmEngine, probe: Probe) -> MultiTier:
            return MultiTier(vllm, probe, self._make_backend)

        self._offloading.prepare(setup)
        return ObservedEngine(setup, CONNECTOR, connector_config(setup), adversary, probe, make_tier)

    def _make_backend(self, kind: str, vllm: VllmEngine, probe: Probe) -> Tier:
        return simple.SimpleOffloadTier(vllm, probe) if kind == "simple" else self._offloading.make_tier(vllm, probe)


class MultiTier:
    """The CPU tiers of both backends, as one."""

    def __init__(self, vllm: VllmEngine, probe: Probe, make_backend: Callable[[str, VllmEngine, Probe], Tier]) -> None:
        self._vllm = vllm
        self._probe = probe
        self._event_sources: dict[int, tuple[int, Any]] = {}
        """id() of an event -> its backend, and the event itself: so no other can get its id."""
        setups = [of_backend(vllm.setup, i) for i in range(len(vllm.setup.backends))]
        self._starts = [0, setups[0].cpu_blocks]
        self._backends: list[Tier] = [
            make_backend(kind, _alone(vllm, i, setup), probe)
            for i, (kind, setup) in enumerate(zip(vllm.setup.backends, setups, strict=True))
        ]
        self.events_name_groups = all(backend.events_name_groups for backend in self._backends)
        self.polls_when_idle = all(backend.polls_when_idle for backend in self._backends)
        nulls = [
            start + backend.null_block
            for start, backend in zip(self._starts, self._backends, strict=True)
            if backend.null_block is not None
        ]
        self.null_block = nulls[0] if nulls else None
        for i, connector in enumerate(children(vllm.connector)):
            self._listen_to_events(i, connector)

    @property
    def shortages(self) -> int:
        """How often a backend had no block left for another store."""
        return sum(backend.shortages for backend in self._backends)

    def _listen_to_events(self, number: int, connector: Any) -> None:
        take = connector.take_events
        connector.take_events = lambda: self._from(number, take())

    def _from(self, number: int, events: Iterable[Any]) -> list[Any]:
        """Note which backend events are of; they don't say so."""
        taken = list(events)
        self._event_sources.update((id(event), (number, event)) for event in taken)
        return taken

    def allocated(self, request: str, external_tokens: int) -> None:
        if external_tokens:
            chosen = self._vllm.connector._requests_to_connector[request]
            self._probe.saw("load by the second backend" if chosen else "load by the first backend")
        for backend in self._backends:
            backend.allocated(request, external_tokens)

    def planned(self, output: Any, metadata: Any) -> Transfers:
        plans = [backend.planned(output, part) for backend, part in zip(self._backends, metadata.metadata, strict=True)]
        if all(plan.stores for plan in plans):
            self._probe.saw("store by both backends")
        stores, loads, traces = zip(*plans, strict=True)
        return Transfers(sum(stores), sum(loads), "".join(traces))

    def reported(self, output: Any) -> None:
        whole = output.kv_connector_worker_meta
        for i, backend in enumerate(self._backends):
            backend.reported(
                SimpleNamespace(
                    finished_sending=output.finished_sending,
                    finished_recving=output.finished_recving,
                    kv_connector_worker_meta=whole and whole.metadata[i],
                )
            )

    def copied(self, block: CopiedBlock) -> None:
        for i, backend in enumerate(self._backends):
            if i == self._backend_at(block.cpu):
                backend.copied(block._replace(cpu=block.cpu - self._starts[i]))
            elif block.to_gpu and isinstance(backend, offloading.OffloadingTier):
                backend.overwritten(block)

    def block_of(self, rank: int, address: int) -> int:
        for start, backend in zip(self._starts, self._backends, strict=True):
            block = backend.block_of(rank, address)
            if block >= 0:
                return start + block
        return -1

    def stores_due(self) -> bool:
        return any(backend.stores_due() for backend in self._backends)

    def stores_queued(self) -> bool:
        return any(backend.stores_queued() for backend in self._backends)

    def stores_unstarted(self) -> int:
        return sum(backend.stores_unstarted() for backend in self._backends)

    def blocks_in_stores(self) -> tuple[Set[int], Set[int]]:
        plans = [backend.blocks_in_stores() for backend in self._backends]
        gpu = set(chain.from_iterable(gpu for gpu, _ in plans))
        return gpu, {start + block for start, (_, cpu) in zip(self._starts, plans, strict=True) for block in cpu}

    def pool(self) -> PoolView:
        """Both pools, one after the other."""
        pools = [backend.pool() for backend in self._backends]
        return PoolView(
            "CPU",
            [count for pool in pools for count in pool.refs],
            [start + block for start, pool in zip(self._starts, pools, strict=True) for block in pool.free],
            sum(pool.free_count for pool in pools),
            -1 if self.null_block is None else self.null_block,
        )

    def group_of(self, block: CopiedBlock) -> int | None:
        i = self._backend_at(block.cpu)
        return None if i is None else self._backends[i].group_of(block._replace(cpu=block.cpu - self._starts[i]))

    def places_of(self, block: CopiedBlock) -> range | None:
        i = self._backend_at(block.cpu)
        return None if i is None else self._backends[i].places_of(block._replace(cpu=block.cpu - self._starts[i]))

    def is_partly_stored(self, block: CopiedBlock) -> bool:
        i = self._backend_at(block.cpu)
        return i is not None and self._backends[i].is_partly_stored(block._replace(cpu=block.cpu - self._starts[i]))

    def refs(self, block: CopiedBlock, gpu_refs: int) -> tuple[int, int]:
        i = self._backend_at(block.cpu)
        if i is None:
            return gpu_refs, 0
        return self._backends[i].refs(block._replace(cpu=block.cpu - self._starts[i]), gpu_refs)

    def _backend_at(self, block: int) -> int | None:
        """Return which backend has a block; None: none has."""
        return next((i for i in reversed(range(len(self._backends))) if block >= self._starts[i]), None)

    def kept(self) -> Mapping[str, int]:
        connector = self._vllm.connector
        own = {name: len(getattr(connector, name)) for name in ("_requests_to_connector", "_extra_async_saves")}
        parts = [
            {f"{kind} {i}: {name}": count for name, count in backend.kept().items()}
            for i, (kind, backend) in enumerate(zip(self._vllm.setup.backends, self._backends, strict=True))
        ]
        return own | {name: count for part in parts for name, count in part.items()}

    def index(self) -> Mapping[bytes, int]:
        return {
            tag + key: start + block
            for tag, start, backend in zip(_TAGS, self._starts, self._backends, strict=True)
            for key, block in backend.index().items()
        }

    def held_tokens(self, request: str, local: int) -> int | None:
        return None  # the first backend that offers something wins

    def keys_to_store(self, key: bytes) -> Iterable[bytes]:
        """Each backend is told of every request and every step, whichever of them loads.

        Source: vLLM 0.22.1 and 0.33.0, multi_connector.py (update_state_after_alloc, build_connector_meta); up to 0.25
        those that don't load are told of no blocks, and SimpleCPUOffload takes its blocks from the step.
        """
        return [
            tag + own for tag, backend in zip(_TAGS, self._backends, strict=True) for own in backend.keys_to_store(key)
        ]

    def tags(self, key: bytes, rank: int, block: int) -> np.ndarray:
        i, own = _backend_of(key)
        return self._backends[i].tags(own, rank, block - self._starts[i])

    def expected_tags(self, key: bytes, rank: int) -> np.ndarray | None:
        i, own = _backend_of(key)
        return self._backends[i].expected_tags(own, rank)

    def describe_key(self, key: bytes) -> str:
        i, own = _backend_of(key)
        where = "" if own == key else f" in backend {i + 1}"
        return f"{self._backends[i].describe_key(own)}{where}"

    def keys_of_event(self, event: Any) -> Iterable[bytes]:
        i, _ = self._event_sources.pop(id(event))
        return [_TAGS[i] + key for key in self._backends[i].keys_of_event(event)]

    def drain_events(self) -> Iterable[Any]:
        return [event for i, backend in enumerate(self._backends) for event in self._from(i, backend.drain_events())]


def _alone(vllm: VllmEngine, number: int, setup: EngineSetup) -> VllmEngine:
    """Return the engine as one backend sees it: as if its connector were the only one."""
    alone = copy.copy(vllm)
    alone.setup = setup
    alone.connector = children(vllm.connector)[number]
    alone.ranks = [copy.copy(rank) for rank in vllm.ranks]
    for rank in alone.ranks:
        rank.connector = children(rank.connector)[number]
    return alone


def _backend_of(key: bytes) -> tuple[int, bytes]:
    """Return the backend that a key is of, and the key as the backend has it; a key of the GPU's index is nobody's."""
    i = next((i for i, tag in enumerate(_TAGS) if key.startswith(tag)), None)
    return (0, key) if i is None else (i, key[len(_TAGS[i]) :])
