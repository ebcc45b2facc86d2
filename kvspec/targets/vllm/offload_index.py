"""``vllm-offload-index``: OffloadingConnector's CPU manager and its scheduler side, and their state as plain data.

No expectations here: what the calls should have done is the model's business (``kvspec.model``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

RawKey = bytes


class TierState(NamedTuple):
    """A CPU manager's state."""

    chunks: dict[RawKey, tuple[int, bool, int]]
    """Key -> slot, whether it is ready, pins."""
    order: list[RawKey]
    """LRU: the chunks that may be evicted, in the order in which they would be; empty of ARC."""
    lists: tuple[list[RawKey], ...]
    """ARC: used once, used again, the ghosts of both; none of LRU."""
    target: float
    """ARC: slots for chunks used once."""


class RealTier:
    """A ``CPUOffloadingManager``.

    Args:
        slots: chunks that it can hold.
        policy: ``lru`` or ``arc``.
    """

    def __init__(self, slots: int, policy: str) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        count = "num_chunks" if "num_chunks" in _parameters(CPUOffloadingManager.__init__) else "num_blocks"
        self.manager = CPUOffloadingManager(**{count: slots}, cache_policy=policy, enable_events=True)

    def context(self, name: str, positions: Mapping[RawKey, int]) -> Any:
        """Return what the manager is told of a request: where the chunks end in its text, in tokens."""
        context = _context_class()(**_known(_context_class(), {"req_id": name, "kv_transfer_params": None}))
        if hasattr(context, "set_offload_key_position"):
            for key, position in positions.items():
                context.set_offload_key_position(key, position)
        if hasattr(self.manager, "on_new_request"):
            self.manager.on_new_request(context)
        return context

    def lookup(self, key: RawKey, context: Any) -> str:
        """Look a key up: MISS, PENDING or HIT."""
        return answer_name(self.manager.lookup(key, context))

    def prepare_load(self, keys: Sequence[RawKey], context: Any) -> list[int]:
        """Pin what is to be loaded; the slots."""
        return _slots(self.manager.prepare_load(list(keys), context))

    def complete_load(self, keys: Sequence[RawKey], context: Any) -> None:
        """A load has ended."""
        self.manager.complete_load(list(keys), *self._context_argument("complete_load", context))

    def prepare_store(
        self, keys: Sequence[RawKey], context: Any
    ) -> tuple[list[RawKey], list[int], list[RawKey]] | None:
        """Offer keys: those to be stored, their slots, what was evicted; or None."""
        placed = self.manager.prepare_store(list(keys), context)
        if placed is None:
            return None
        return list(placed.keys_to_store), _slots(placed.store_spec), list(placed.evicted_keys)

    def complete_store(self, keys: Sequence[RawKey], context: Any, success: bool) -> None:
        """A store has ended."""
        self.manager.complete_store(list(keys), *self._context_argument("complete_store", context), success=success)

    def touch(self, keys: Sequence[RawKey], context: Any) -> None:
        """Count keys as used."""
        self.manager.touch(list(keys), *self._context_argument("touch", context))

    def finish(self, context: Any) -> None:
        """A request has ended."""
        if hasattr(self.manager, "on_request_finished"):
            self.manager.on_request_finished(context)

    def reset(self) -> None:
        """Drop everything."""
        self.manager.reset_cache()

    def _context_argument(self, method: str, context: Any) -> tuple[Any, ...]:
        return (context,) if "req_context" in _parameters(getattr(self.manager, method)) else ()

    def take_events(self) -> list[tuple[tuple[RawKey, ...], bool]]:
        """Take the recorded events: keys, and whether they were removed."""
        return [(tuple(event.keys), event.removed) for event in self.manager.take_events()]

    def state(self) -> TierState:
        """Return the manager's state."""
        return tier_state(self.manager)


def tier_state(manager: Any) -> TierState:
    """Return a CPU manager's state."""
    policy = manager._policy
    if hasattr(policy, "t1"):
        lists = tuple(list(some) for some in (policy.t1, policy.t2, policy.b1, policy.b2))
        return TierState(_chunks({**policy.t1, **policy.t2}), [], lists, policy.target_t1_size)
    chunks = policy.chunks if hasattr(policy, "chunks") else policy.blocks
    return TierState(_chunks(chunks), _order(policy, chunks), (), 0.0)


def _chunks(chunks: dict[RawKey, Any]) -> dict[RawKey, tuple[int, bool, int]]:
    return {
        key: (chunk.chunk_id if hasattr(chunk, "chunk_id") else chunk.block_id, chunk.is_ready, max(0, chunk.ref_cnt))
        for key, chunk in chunks.items()
    }


def _order(policy: Any, chunks: dict[RawKey, Any]) -> list[RawKey]:
    if hasattr(policy, "_ranks"):  # 0.31 and later
        return sorted(policy._evictable, key=lambda key: (policy._ranks[key], key))
    idle = getattr(policy, "evictable_chunks", getattr(policy, "evictable_blocks", None))
    return [key for key, chunk in chunks.items() if chunk.ref_cnt == 0] if idle is None else list(idle)


def make_key(block_hash: bytes, group: int) -> RawKey:
    """Return the target's key of a chunk."""
    return _base().make_offload_key(block_hash, group)  # type: ignore[no-any-return]


def answer_name(answer: Any) -> str:
    """Return what a lookup answered: MISS, PENDING or HIT. Up to 0.24 that is False, None or True."""
    names = {False: "MISS", None: "PENDING", True: "HIT"}
    return names[answer] if answer in (False, None, True) else answer.name.replace("HIT_PENDING", "PENDING")


def _slots(spec: Any) -> list[int]:
    return [int(slot) for slot in spec.block_ids]


@functools.cache
def _base() -> Any:
    import importlib

    try:
        return importlib.import_module("vllm.v1.kv_offload.base")
    except ModuleNotFoundError:  # 0.20
        return importlib.import_module("vllm.v1.kv_offload.abstract")


def _context_class() -> Any:
    return _base().ReqContext


def _known(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in _parameters(function)}


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
