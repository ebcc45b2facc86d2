"""``vllm-core``: vLLM's own block pool and KV cache manager, called directly, and their state as plain data.

No expectations here: what the calls should have done is the model's business (``kvspec.model``).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvspec.model.profile import UNKNOWN, UNTAGGED

RawHash = bytes
RawEvent = tuple[Any, ...]


class PoolState(NamedTuple):
    """A block pool's state."""

    queue: list[int]
    """The free queue from its head on, as its links say."""
    free: int
    """The number of free blocks, as its counter says."""
    references: list[int]
    """Per block, the null block's included."""
    hashes: list[tuple[tuple[RawHash, int] | None, frozenset[tuple[RawHash, int]]]]
    """Per block: its first key, or None, and the others."""
    ends: list[int]
    """Per block: how many tokens its first key stands for; 0 where the release doesn't record it, or there
    is no key.
    """
    waiting: int
    """Events that wait to be taken."""
    found: dict[tuple[RawHash, int], list[int]]
    """Key -> blocks, the one that a look-up returns first."""


@functools.cache
def release() -> str:
    """Return what the importable vLLM says of its version; ``dev`` if it doesn't."""
    import vllm

    said = str(getattr(vllm, "__version__", ""))
    return said if re.match(r"\d+\.\d+", said) and not said.startswith(UNTAGGED) else UNKNOWN


def own_files() -> tuple[str, ...]:
    """Return the directories of the target's files."""
    import vllm

    return (str(Path(vllm.__file__).parent),)


def name_blocks_by_whole_hashes() -> None:
    """Let events name blocks by their hashes, not by 64 bits of them; vLLM asks each time that it makes one."""
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"


@functools.cache
def _modules() -> Any:
    from types import SimpleNamespace

    name_blocks_by_whole_hashes()

    from vllm.distributed import kv_events
    from vllm.lora.request import LoRARequest
    from vllm.multimodal import inputs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1 import request
    from vllm.v1.core import block_pool, kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # A refused reset is logged, each time.
    return SimpleNamespace(
        events=kv_events,
        lora=LoRARequest,
        inputs=inputs,
        params=SamplingParams,
        request=request,
        sha256=sha256,
        pool=block_pool,
        utils=kv_cache_utils,
    )


def warm_up() -> None:
    """Import what the first history would import: that takes seconds."""
    from vllm.v1.core.sched import scheduler

    del scheduler
    _modules()


@functools.cache
def _hasher(hash_tokens: int, lookahead: int) -> Callable[[Any], list[bytes]]:
    vllm = _modules()
    extra = (lookahead,) if lookahead else ()
    return vllm.utils.get_request_block_hasher(hash_tokens, vllm.sha256, *extra)  # type: ignore[no-any-return]


@functools.cache
def _sampling(max_tokens: int) -> Any:
    return _modules().params(max_tokens=max_tokens, ignore_eos=True)


def make_request(
    name: str,
    tokens: Sequence[int],
    hash_tokens: int,
    *,
    adapter: tuple[str, str] | None = None,
    images: Iterable[tuple[str, int, int]] = (),
    salt: str | None = None,
    lookahead: int = 0,
    max_tokens: int = 1000,
    priority: int = 0,
    arrival: float = 0.0,
) -> Any:
    """Return the target's ``Request``, with its block hashes. Images are (identifier, offset, length)."""
    vllm = _modules()
    features = [
        vllm.inputs.MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=vllm.inputs.PlaceholderRange(offset=offset, length=length),
        )
        for identifier, offset, length in images
    ]
    lora = None
    if adapter is not None:
        number = 1 + sum(map(ord, adapter[0]))
        lora = vllm.lora(lora_name=adapter[0], lora_int_id=number, lora_path=adapter[1])
    return vllm.request.Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=_sampling(max_tokens),
        pooling_params=None,
        mm_features=features or None,
        lora_request=lora,
        cache_salt=salt,
        priority=priority,
        arrival_time=arrival,
        block_hasher=_hasher(hash_tokens, lookahead),
    )


def group_hashes(request: Any, hash_tokens: int, block_tokens: int) -> list[RawHash]:
    """Return a request's hashes for blocks of ``block_tokens``."""
    if block_tokens == hash_tokens:
        return list(request.block_hashes)
    view = _modules().utils.BlockHashListWithBlockSize(request.block_hashes, hash_tokens, block_tokens)
    return list(view)


def set_status(request: Any, status: str) -> None:
    """Set a request's status: RUNNING or PREEMPTED."""
    request.status = _modules().request.RequestStatus[status]


class RealPool:
    """A ``BlockPool``."""

    def __init__(
        self, num_blocks: int, hash_tokens: int, *, caching: bool, lookahead: int = 0, events: bool = True
    ) -> None:
        extra = {"num_hash_lookahead_tokens": lookahead} if lookahead else {}
        self.pool = _modules().pool.BlockPool(
            num_gpu_blocks=num_blocks,
            enable_caching=caching,
            hash_block_size=hash_tokens,
            enable_kv_cache_events=events,
            **extra,
        )

    def _blocks(self, ids: Iterable[int]) -> list[Any]:
        return [self.pool.blocks[block] for block in ids]

    def allocate(self, count: int) -> list[int]:
        """Take new blocks."""
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def touch(self, ids: Iterable[int]) -> None:
        """Add references."""
        self.pool.touch(self._blocks(ids))

    def free(self, ids: Iterable[int], at_head: bool = False) -> None:
        """Release references, where the release has the choice with ``prepend``."""
        if at_head and "prepend" in inspect.signature(self.pool.free_blocks).parameters:
            self.pool.free_blocks(self._blocks(ids), prepend=True)
        else:
            self.pool.free_blocks(self._blocks(ids))

    def register(
        self,
        request: Any,
        table: Sequence[int],
        first: int,
        end: int,
        block_tokens: int,
        group: int,
        wanted: list[bool] | None,
    ) -> None:
        """Register full blocks."""
        mask = {} if wanted is None else {"block_mask": wanted}
        self.pool.cache_full_blocks(request, self._blocks(table), first, end, block_tokens, group, **mask)

    def register_tail(
        self, request: Any, block: int, tokens: int, group: int, block_tokens: int, replace: bool
    ) -> tuple[RawHash, int] | None:
        """Register a block for a prefix that ends inside it. Returns the key."""
        extra = {"replace_existing_hashes": True} if replace else {}
        key = self.pool.cache_partial_block(request, self.pool.blocks[block], tokens, group, block_tokens, **extra)
        return None if key is None else _split_key(key)

    def writable(self) -> list[bool]:
        """Return per block whether it may be changed in place."""
        return [self.pool.is_block_writable(block) for block in self.pool.blocks]

    def find(self, block_hash: RawHash, groups: list[int]) -> tuple[int, ...] | None:
        """Look a hash up."""
        found = self.pool.get_cached_block(block_hash, groups)
        return None if found is None else tuple(block.block_id for block in found)

    def evict(self, ids: Iterable[int]) -> None:
        """Evict blocks from the prefix cache."""
        self.pool.evict_blocks(ids)

    def move_hashes(self, source: int, target: int) -> None:
        """Move the hashes of a block."""
        self.pool.move_block_hashes(self.pool.blocks[source], self.pool.blocks[target])

    def unpin(self, ids: Iterable[int], on_reuse: Callable[[int], None]) -> None:
        """Release references and go on reading."""
        self.pool.unpin_blocks(self._blocks(ids), lambda block: on_reuse(block.block_id))

    def tell_hit(self, request: Any, count: int, block_tokens: int, group: int) -> None:
        """Record the event of a hit."""
        self.pool.emit_cached_block_events(request, count, block_tokens, group)

    def reset(self) -> bool:
        """Reset the prefix cache."""
        return self.pool.reset_prefix_cache()  # type: ignore[no-any-return]

    def usage(self) -> float:
        """Return the usage."""
        return float(self.pool.get_usage())

    def take_events(self) -> list[RawEvent]:
        """Take the recorded events."""
        return [raw_event(event) for event in self.pool.take_events()]

    def state(self) -> PoolState:
        """Return the pool's state."""
        return pool_state(self.pool)


def pool_state(pool: Any) -> PoolState:
    """Return a ``BlockPool``'s state."""
    more = getattr(pool, "cached_block_hashes_by_block", {})
    cache = pool.cached_block_hash_to_block._cache
    return PoolState(
        queue=[block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        free=pool.get_num_free_blocks(),
        references=[block.ref_cnt for block in pool.blocks],
        hashes=[
            (
                block.block_hash and _split_key(block.block_hash),
                frozenset(map(_split_key, more.get(block.block_id, ()))),
            )
            for block in pool.blocks
        ],
        ends=[getattr(block, "block_hash_num_tokens", None) or 0 for block in pool.blocks],
        waiting=len(pool.kv_event_queue),
        found={
            _split_key(key): list(found) if isinstance(found, dict) else [found.block_id]
            for key, found in cache.items()
        },
    )


def _split_key(key: bytes) -> tuple[RawHash, int]:
    return key[:-4], int.from_bytes(key[-4:], "big")


def raw_event(event: Any) -> RawEvent:
    """Return an event as a tuple: its kind, then its fields."""
    kind = type(event).__name__
    if kind == "BlockStored":
        return (
            "stored",
            tuple(event.block_hashes),
            event.parent_block_hash,
            tuple(event.token_ids),
            event.block_size,
            event.group_idx,
            tuple(tuple(extras or ()) for extras in event.extra_keys or ()),
            event.lora_name,
            tuple(map(tuple, getattr(event, "lookahead_token_ids", None) or ())),
        )
    if kind == "BlockRemoved":
        (block_hash,) = event.block_hashes
        return "removed", block_hash, event.group_idx
    assert kind == "AllBlocksCleared", kind
    return ("cleared",)


@functools.lru_cache(maxsize=4096)
def event_hash(block_hash: RawHash) -> bytes | int:
    """Return the form in which events tell a hash."""
    return _modules().utils.maybe_convert_block_hash(block_hash)  # type: ignore[no-any-return]


Call = tuple[Any, ...]
"""A call that the manager made: ``("needed", whole, slots, blocks)`` (whole: for admission),
``("register", group, first, end, wanted)`` or ``("tail", group, tokens)``."""


def _needed_call(arguments: dict[str, Any], result: int) -> Call:
    return "needed", arguments.get("apply_admission_cap", False), arguments["num_tokens"], result


def _register_call(arguments: dict[str, Any], result: None) -> Call:
    del result
    first, end = arguments["num_cached_blocks"], arguments["num_full_blocks"]
    mask = arguments.get("block_mask")
    return "register", arguments["kv_cache_group_id"], first, end, [True] * (end - first) if mask is None else mask


def _tail_call(arguments: dict[str, Any], result: Any) -> Call:
    del result
    return "tail", arguments["kv_cache_group_id"], arguments["num_tokens"]


class GroupSpec(NamedTuple):
    """A group of layers."""

    kind: str
    block_tokens: int
    reach: int
    """Window or chunk, in tokens; of Mamba in align mode the blocks for states after draft tokens."""
    eagle: bool
    """Whether there are draft layers among them."""
    sharded: bool
    """Whether decode context parallelism spreads their tokens."""
    checkpoint_unit: int
    """See ``kvspec.model.groups.Group``."""


class Sizes(NamedTuple):
    """Sizes that follow from groups and context parallelism, in tokens."""

    alignment: int
    hash_tokens: int
    hit_tokens: int
    spans: list[int]


def _spec(group: GroupSpec, caching: bool) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as interface

    kind, block_tokens, reach, _, sharded, checkpoint_unit = group
    if kind in ("mamba", "mamba-align"):
        mode = "align" if kind == "mamba-align" else "all" if caching else "none"
        known = _parameters(interface.MambaSpec)
        checkpoints = {
            "num_prefill_checkpoint_blocks": int(checkpoint_unit > 0),  # 0.29 and later
            "prefill_checkpoint_alignment": checkpoint_unit or None,  # 0.30 and later
        }
        return interface.MambaSpec(
            block_size=block_tokens,
            shapes=((1,),),
            dtypes=(torch.float16,),
            mamba_cache_mode=mode,
            num_speculative_blocks=reach,
            **{name: value for name, value in checkpoints.items() if name in known},
        )
    common = {"block_size": block_tokens, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float16}
    if not sharded:
        common["dcp_sharded"] = False
    if kind == "sliding-window":
        return interface.SlidingWindowSpec(sliding_window=reach, **common)
    if kind == "chunked-local":
        return interface.ChunkedLocalAttentionSpec(attention_chunk_size=reach, **common)
    assert kind == "full", kind
    return interface.FullAttentionSpec(**common)


@functools.cache
def register_specs() -> None:
    """Let the release know its own kinds of groups (from 0.24 on it is told at start-up)."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    _modules()
    if hasattr(managers, "register_all_kvcache_specs"):
        managers.register_all_kvcache_specs(None)


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class RealCache:
    """A ``KVCacheManager``, and of the scheduler what defers the release of blocks.

    Args:
        groups: all of them.
        num_blocks: blocks of the pool.
        caching: prefix caching.
        prefill, decode: sizes of context parallelism.
        eagle: whether there is a draft model.
        max_tokens, in_flight_tokens: the longest text; the most tokens in flight at once.
        watermark: share of the pool.
        interval: sparse retention, tokens.
        unit: tokens of a hash block, 0 for the release's choice.
        junctions: whether states are asked for where requests part.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        caching: bool,
        prefill: int,
        decode: int,
        eagle: bool,
        max_tokens: int,
        in_flight_tokens: int,
        watermark: float,
        interval: int | None,
        unit: int = 0,
        junctions: bool = False,
    ) -> None:
        from vllm.v1.core import kv_cache_manager

        register_specs()
        config = cache_config(groups, num_blocks, caching, interval)
        # An engine in align mode has the blocks of its states; up to 0.27 hash blocks depend on that.
        aligned = [group for group in groups if group.kind == "mamba-align"]
        block_tokens = (aligned or groups)[0].block_tokens
        alignment, hash_tokens = _block_sizes(config, block_tokens, caching, prefill, decode, unit)
        manager = kv_cache_manager.KVCacheManager
        known = _parameters(manager.__init__)
        in_flight = "max_in_flight_tokens" if "max_in_flight_tokens" in known else "max_num_batched_tokens"
        arguments = {
            "kv_cache_config": config,
            "max_model_len": max_tokens,
            "scheduler_block_size": alignment,
            "hash_block_size": hash_tokens,
            in_flight: in_flight_tokens,
            "enable_caching": caching,
            "use_eagle": eagle,
            "enable_kv_cache_events": True,
            "dcp_world_size": decode,
            # The scheduler passes the prefill size up to 0.25, after that it leaves it at 1.
            "pcp_world_size": 1 if _has_partial_hits() else prefill,
            "watermark": watermark,
            "enable_mamba_shared_prefix_checkpoint": junctions,
            "enable_mamba_fine_grained_prefix_cache": junctions,  # its name in 0.30
        }
        with _environment("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", interval):
            self.manager = manager(**{name: value for name, value in arguments.items() if name in known})
        coordinator = self.manager.coordinator
        spans = [single.block_size for single in coordinator.single_type_managers]
        hit_tokens = getattr(coordinator, "_cache_hit_alignment_tokens", alignment)  # 0.26 and later, several groups
        self.sizes = Sizes(alignment, hash_tokens, hit_tokens, spans)
        self.pool = self.manager.block_pool
        self.fence = _fence(self.manager)
        exports = any(group.checkpoint_unit for group in aligned)
        self._splitter = _splitter(self.manager, aligned, self.sizes, eagle, max_tokens) if exports else None
        self.calls: list[Call] = []
        self._record(self.manager.coordinator, "get_num_blocks_to_allocate", _needed_call)
        self._record(self.pool, "cache_full_blocks", _register_call)
        if hasattr(self.pool, "cache_partial_block"):
            self._record(self.pool, "cache_partial_block", _tail_call)

    def _record(self, owner: Any, name: str, describe: Callable[[dict[str, Any], Any], Call]) -> None:
        method = getattr(owner, name)
        signature = inspect.signature(method)

        def recorded(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            self.calls.append(describe(signature.bind(*arguments, **named).arguments, result))
            return result

        setattr(owner, name, recorded)

    def skipped_tokens(self, index: int, tokens: int) -> int:
        """Return how many tokens a group's next token doesn't read."""
        manager = self.manager.coordinator.single_type_managers[index]
        return max(0, int(manager.get_num_skipped_tokens(tokens)))

    def group_hit(self, request: Any, limit: int, indices: list[int], drop: bool) -> int:
        """Look a request up in groups of one layout alone, with or without the block that a draft model drops.
        Tokens.
        """
        managers = self.manager.coordinator.single_type_managers
        manager = managers[indices[0]]
        find = type(manager).find_longest_cache_hit
        hashes = request.block_hashes
        if not _has_partial_hits() and manager.block_size != self.sizes.hash_tokens:
            hashes = group_hashes(request, self.sizes.hash_tokens, manager.block_size)
        named = {"drop_eagle_block": drop} if "drop_eagle_block" in _parameters(find) else {"use_eagle": drop}
        found = find(
            block_hashes=hashes,
            max_length=limit,
            kv_cache_group_ids=indices,
            block_pool=self.pool,
            kv_cache_spec=manager.kv_cache_spec,
            alignment_tokens=self.sizes.hit_tokens,
            # States are on every rank, and several groups are looked up so; 0.26 to 0.30 note the size all the same.
            dcp_world_size=1 if hasattr(manager.kv_cache_spec, "mamba_cache_mode") else manager.dcp_world_size,
            pcp_world_size=manager.pcp_world_size,
            **named,
        )
        if _has_partial_hits():
            return int(found[1])
        return len(found[0]) * int(manager.block_size)

    def lookup(self, request: Any) -> tuple[tuple[list[int], ...], int, int]:
        """Look a request up: blocks per group, tokens, shared prefix (0 where the release doesn't say it).
        Remembers the answer.
        """
        blocks, tokens, *rest = self.manager.get_computed_blocks(request)
        self._hit = blocks
        if rest:
            request.shared_prefix_boundary = rest[0]
        return tuple([block.block_id for block in row] for row in blocks.blocks), tokens, rest[0] if rest else 0

    def allocate(
        self,
        request: Any,
        new_tokens: int,
        hit_tokens: int,
        *,
        hit: bool,
        lookahead: int,
        external: int,
        delay: bool,
        must_fit: bool,
        reserved: int,
        others_run: bool,
    ) -> tuple[list[int], ...] | None:
        """Allocate, with the blocks of the last lookup or (``hit`` false) without any. ``calls`` has what
        it counted on the way.
        """
        known = _parameters(self.manager.allocate_slots)
        blocks = self._hit if hit else None
        if must_fit and "full_sequence_must_fit" not in known:
            fits = self.manager.can_fit_full_sequence(request, hit_tokens, blocks, external)
            if not fits:
                return None
        arguments = {
            "num_new_computed_tokens": hit_tokens,
            "new_computed_blocks": blocks,
            "num_lookahead_tokens": lookahead,
            "num_external_computed_tokens": external,
            "delay_cache_blocks": delay,
            "full_sequence_must_fit": must_fit,
            "reserved_blocks": reserved,
            "has_scheduled_reqs": others_run,
        }
        arguments = {name: value for name, value in arguments.items() if name in known}
        new = self.manager.allocate_slots(request, new_tokens, **arguments)
        return None if new is None else tuple([block.block_id for block in row] for row in new.blocks)

    def chunk(self, request: Any, new_tokens: int, hit_tokens: int, external: int) -> int:
        """Return how many of the new tokens the scheduler computes in one step of align mode."""
        from vllm.v1.core.sched.scheduler import Scheduler

        assert self._splitter is not None
        split = Scheduler._mamba_block_aligned_split
        return int(split(self._splitter, request, new_tokens, hit_tokens, external))

    def keeps_checkpoint(self, request: Any) -> list[bool]:
        """Return per group whether the latest step that was asked for keeps a state in the middle of its chunk."""
        managers, name = self.manager.coordinator.single_type_managers, request.request_id
        counted = [getattr(manager, "_num_checkpoint_blocks", {}).get(name, 0) for manager in managers]  # 0.29
        kept = [name in getattr(manager, "_checkpoints", ()) for manager in managers]  # 0.30 and later
        return [bool(one or count) for one, count in zip(kept, counted, strict=True)]

    def register(self, request: Any, tokens: int) -> None:
        """Register full blocks up to a token."""
        self.manager.cache_blocks(request, tokens)

    def free(self, request: Any) -> None:
        """Release all that a request holds."""
        self.manager.free(request)

    def free_when_processed(self, request: Any) -> None:
        """Release all that a request holds, as the scheduler does while a step is in flight."""
        self.fence._free_request_blocks(request)

    def step_processed(self) -> None:
        """Do what the scheduler does to deferred blocks when an output has been processed."""
        self.fence.processed_step_seq += 1
        self.fence._drain_deferred_frees()

    def deferred_blocks(self) -> list[list[int]]:
        """Return the blocks whose release waits, null blocks left out, and so requests that had no others."""
        ids = [[block.block_id for block in blocks if not block.is_null] for _, blocks in self.fence.deferred_frees]
        return [blocks for blocks in ids if blocks]

    def copies(self) -> list[list[tuple[int, int]]]:
        """Return per group what must be copied: (source, target)."""
        managers = self.manager.coordinator.single_type_managers
        return [[(one.block_id, to.block_id) for one, to in manager._pending_cow_copies] for manager in managers]

    def take_copies(self, step: int) -> list[tuple[int, int]]:
        """Take the copies that run in a step, and have their blocks released after it, as the scheduler does."""
        copies, blocks = self.manager.take_kv_cache_block_copies()
        if copies:
            self.fence._free_cow_retained_blocks(blocks, step)
        return [(copy.src_block_id, copy.dst_block_id) for copy in copies]

    def fresh(self) -> set[tuple[RawHash, int]]:
        """Return the keys that Mamba groups have registered in this step."""
        managers = self.manager.coordinator.single_type_managers
        keys = (getattr(manager, "cached_blocks_this_step", ()) for manager in managers)
        return {_split_key(key) for some in keys for key in some}

    def rows(self, request: Any) -> list[list[int]]:
        """Return a request's block table."""
        return list(self.manager.get_block_ids(request.request_id))

    def take_events(self) -> list[RawEvent]:
        """Take the recorded events."""
        return [raw_event(event) for event in self.manager.take_events()]

    def state(self) -> PoolState:
        """Return the pool's state."""
        return pool_state(self.pool)


def _has_partial_hits() -> bool:
    return hasattr(_modules().pool.BlockPool, "move_block_hashes")  # 0.26 and later


def cache_config(groups: Sequence[GroupSpec], num_blocks: int, caching: bool, interval: int | None) -> Any:
    """Return a ``KVCacheConfig`` for groups, with a layer each."""
    from vllm.v1 import kv_cache_interface as interface

    config = interface.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            interface.KVCacheGroupSpec([f"layer {index}"], _spec(group, caching), is_eagle_group=group.eagle)
            for index, group in enumerate(groups)
        ],
    )
    if hasattr(config, "prefix_cache_retention_interval"):
        config.prefix_cache_retention_interval = interval
    return config


def _block_sizes(
    config: Any, block_tokens: int, caching: bool, prefill: int, decode: int, unit: int
) -> tuple[int, int]:
    from types import SimpleNamespace

    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=block_tokens,
            enable_prefix_caching=caching,
            hash_block_size=unit or None,
            prefix_match_unit=unit or None,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill),
        kv_transfer_config=None,
    )
    sizes: tuple[int, int] = _modules().utils.resolve_kv_cache_block_sizes(config, vllm_config)
    return sizes


@contextlib.contextmanager
def _environment(name: str, value: object) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = str(value)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _fence(manager: Any) -> Any:
    """Return an object with the scheduler's own methods that defer releases, and nothing else of it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    names = (
        "_free_request_blocks",
        "_request_blocks_can_be_freed",
        "_free_cow_retained_blocks",
        "_drain_deferred_frees",
    )
    methods = {name: getattr(Scheduler, name) for name in names if hasattr(Scheduler, name)}
    fence = type("Fence", (), methods)()
    fence.kv_cache_manager = manager
    fence.defer_block_free = True
    fence.sched_step_seq = fence.processed_step_seq = 0
    fence.deferred_frees = collections.deque()
    return fence


def _splitter(manager: Any, aligned: Sequence[GroupSpec], sizes: Sizes, eagle: bool, step_tokens: int) -> Any:
    """Return what the scheduler's own method that ends chunks in align mode asks of a scheduler."""
    from types import SimpleNamespace

    from vllm.v1 import kv_cache_interface as interface

    block_tokens = aligned[0].block_tokens
    exports = all(group.checkpoint_unit for group in aligned)
    aligned_exports = "prefill_checkpoint_alignment" in _parameters(interface.MambaSpec)  # 0.30 and later
    inside = getattr(manager.coordinator, "enable_partial_hash_hits", False) and sizes.hash_tokens < block_tokens
    splitter = SimpleNamespace()
    splitter.cache_config = SimpleNamespace(block_size=block_tokens)
    splitter.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)
    splitter.block_size = sizes.alignment
    splitter.max_num_scheduled_tokens = step_tokens
    splitter.use_eagle = splitter.use_eagle_block_drop = eagle
    splitter.hash_block_size = sizes.hash_tokens
    splitter.num_hash_lookahead_tokens = 0
    splitter.mamba_partial_cache_hit = inside
    junctions = getattr(manager, "mamba_shared_prefix_checkpoint", False)  # 0.31 and later
    splitter.mamba_shared_prefix_checkpoint = inside and junctions
    splitter.mamba_fine_grained_prefix_cache = inside and getattr(manager, "mamba_fine_grained_prefix_cache", False)
    # Schedulers of 0.29 leave checkpoints out with a draft model.
    splitter.mamba_has_prefill_checkpoint_blocks = exports and (aligned_exports or not eagle)
    splitter.mamba_prefill_checkpoint_alignment = aligned[0].checkpoint_unit or None
    return splitter


def lazy_target_blocks(groups: Sequence[GroupSpec], step_tokens: int, prefill: int, decode: int) -> int:
    """Return what SimpleCPUOffload keeps ready to be reused in lazy mode. Blocks."""
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    estimate = SimpleCPUOffloadScheduler._estimate_lazy_target_blocks
    ranks = decode if _has_partial_hits() else prefill * decode
    extra = (ranks,) if "cp_world_size" in _parameters(estimate) else ()
    return int(estimate(cache_config(groups, 10, False, None), step_tokens, *extra))


def tokens_on_rank(tokens: int, rank: int, ranks: int, interleave: int) -> int:
    """Return how many of the first tokens are kept by a rank."""
    import torch
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    return int(get_dcp_local_seq_lens(torch.tensor([tokens]), ranks, rank, interleave)[0])


def first_lookup(
    groups: Sequence[GroupSpec], prefill: int, decode: int, caching: bool
) -> tuple[tuple[list[int], ...], int, int]:
    """Build a manager and look a request up in it: what the release refuses, it refuses in one of the two."""
    cache = RealCache(
        groups,
        40,
        caching=caching,
        prefill=prefill,
        decode=decode,
        eagle=False,
        max_tokens=64,
        in_flight_tokens=64,
        watermark=0.0,
        interval=None,
    )
    return cache.lookup(make_request("first", range(40), cache.sizes.hash_tokens))
