"""What differs between releases, as named switches; everything else holds for all of them.

A switch says what changed on purpose. Where a release is wrong by its own intent there is no switch: the
model says what is right, and the difference is listed in ``KNOWN_ISSUES`` with the releases that have it.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

RELEASES = (
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
"""The releases whose code was read and run, oldest first."""


class FreeOrder(Enum):
    """Where a block goes in the free queue when its last reference is released."""

    APPEND = "all at the tail, in the order given"
    CALLER = "at the tail, or at the head if the caller asks for it"
    UNHASHED_FIRST = "blocks without a hash at the head, the others at the tail, both in the order given"


class UncachedReuse(Enum):
    """Which block is reused first when prefix caching is off and so no block has a hash."""

    OLDEST = "the one that was released longest ago"
    NEWEST = "the one that was released last"


class CpScaling(Enum):
    """By which context-parallel sizes the tokens of a block are multiplied."""

    ALL_RANKS = "prefill and decode size, every group"
    DECODE = "decode size, every attention group"
    DECODE_FULL = "decode size, full-attention groups"
    DECODE_SHARDED = "decode size, the groups that say that they are sharded"


class PromptState(Enum):
    """At which position in a prompt the state of a Mamba group in align mode is registered."""

    NOWHERE = "none"
    INSIDE = "the end of its last hash block, if that is inside a block"
    INSIDE_BEFORE_OWN_DRAFTS = "the same, but a hash block earlier if a draft model reads the group"
    INSIDE_BEFORE_DRAFTS = "the same, but a hash block earlier if there is a draft model"
    ANYWHERE = "where a resend of the prompt goes on, at a block's end too"


class CheckpointEnd(Enum):
    """At which position in a chunk a Mamba group in align mode keeps a state, if its kernel can export one."""

    NOWHERE = "none"
    BLOCK = "the end of the last block, if the chunk begins at the end of one and ends inside one"
    HASH_BLOCK = "the end of the last hash block before the last token, or with a draft model of the one before it"
    HIT = "where a resend of what is computed then goes on"


class TierRecency(Enum):
    """When a chunk of the CPU tier gets its place in the order of eviction (LRU)."""

    USE = "when it is stored, and whenever it is touched"
    RELEASE = "when its store or its last load ends, and when it is touched while idle"
    REQUEST = "when it is stored, and at the end of each request that has used it"
    POSITION = "when a request first uses the tier, its text's end first, and at the end of each request"


class WindowWait(Enum):
    """Which chunks that are being stored make the lookup of a window wait."""

    BREAKS = "any that is looked up; it ends a run, too"
    ANYWHERE = "any that is looked up"
    IN_RUN = "those of the run that is found"


class DraftTail(Enum):
    """When the last chunk of a group with draft layers isn't stored yet, as a rejected draft could change it."""

    NOWHERE = "never: draft layers are like any other"
    ALWAYS = "always"
    DECODING = "once tokens behind the prompt are computed"
    RUNNING = "while the request runs, once tokens behind the prompt are computed"


class StoreMask(Enum):
    """Which chunks of a window are worth storing, where full attention's are longer."""

    ALL = "all"
    SEGMENT = "those within a window before the end of a chunk of full attention"
    PARTIAL_SEGMENT = "those, and the last ones of the chunk of full attention that isn't full yet"
    REGISTRATION = "those that the GPU's prefix cache would register, and those at the end of the prompt or text"


class Switch(NamedTuple):
    """One thing that changed on purpose."""

    name: str
    sentence: str
    source: str
    since: dict[str, Any]
    """The first release that has the value -> the value, oldest first."""

    def at(self, release: tuple[int, ...]) -> Any:
        """Return the value of a release."""
        return [value for first, value in self.since.items() if parse(first) <= release][-1]

    def changes(self) -> list[tuple[str, str, Any]]:
        """Return (last release before, first release with, new value) of each change."""
        firsts = list(self.since)[1:]
        return [(RELEASES[RELEASES.index(first) - 1], first, self.since[first]) for first in firsts]


_OFFLOAD = "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, "


def _switch(sentence: str, source: str, since: dict[str, Any]) -> dict[str, Any]:
    return {"sentence": sentence, "source": source, "since": since}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The switches of one release."""

    release: str

    free_order: FreeOrder = field(
        metadata=_switch(
            "Where released blocks join the free queue.",
            "v1/core/block_pool.py, BlockPool.free_blocks (#42656)",
            {"0.20.2": FreeOrder.APPEND, "0.23.0": FreeOrder.CALLER, "0.24.0": FreeOrder.UNHASHED_FIRST},
        )
    )
    uncached_reuse: UncachedReuse = field(
        metadata=_switch(
            "Which block is reused first when prefix caching is off.",
            "v1/core/block_pool.py, BlockPool.free_blocks",
            {
                "0.20.2": UncachedReuse.OLDEST,
                "0.24.0": UncachedReuse.NEWEST,
                "0.27.1": UncachedReuse.OLDEST,
                "0.28.0": UncachedReuse.NEWEST,
            },
        )
    )
    secondary_hashes: bool = field(
        metadata=_switch(
            "A block can carry further hashes, for prefixes that end inside it; filling it replaces them.",
            "v1/core/block_pool.py, BlockPool.cache_partial_block",
            {"0.20.2": False, "0.24.0": True},
        )
    )
    moves_hashes: bool = field(
        metadata=_switch(
            "All hashes of a block can be moved to another block.",
            "v1/core/block_pool.py, BlockPool.move_block_hashes",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    says_writable: bool = field(
        metadata=_switch(
            "The pool says whether a block may be changed in place.",
            "v1/core/block_pool.py, BlockPool.is_block_writable",
            {"0.20.2": False, "0.29.0": True},
        )
    )
    pins: bool = field(
        metadata=_switch(
            "A reader can give back its reference and go on reading until the block is reused.",
            "v1/core/block_pool.py, BlockPool.unpin_blocks",
            {"0.20.2": False, "0.30.0": True},
        )
    )
    null_has_no_references: bool = field(
        metadata=_switch(
            "The null block's reference count stays 0; before, it counted up and down without meaning.",
            "v1/core/block_pool.py, BlockPool.touch, free_blocks",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    registers_aligned: bool = field(
        metadata=_switch(
            "A cache with several groups registers blocks only up to the last position at which a hit can end.",
            "v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.cache_blocks",
            {"0.20.2": False, "0.22.1": True},
        )
    )
    masks_unreachable: bool = field(
        metadata=_switch(
            "Sliding-window blocks that no hit can use are not registered.",
            "v1/core/single_type_kv_cache_manager.py, SlidingWindowManager.reachable_block_mask",
            {"0.20.2": False, "0.22.1": True},
        )
    )
    registers_tails: bool = field(
        metadata=_switch(
            "The block in which a prompt ends is registered for the prompt's last hash block too.",
            "v1/core/single_type_kv_cache_manager.py, FullAttentionManager._cache_partial_tail_block",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    tail_ends_before_last_token: bool = field(
        metadata=_switch(
            "That hash block doesn't contain the prompt's last token, which no hit contains, unless EAGLE reads it.",
            "v1/core/single_type_kv_cache_manager.py, FullAttentionManager._cache_partial_tail_block",
            {"0.20.2": False, "0.32.0": True},
        )
    )
    retention: bool = field(
        metadata=_switch(
            "Sliding-window groups can be told to keep only some of the positions at which a hit can end.",
            "v1/core/kv_cache_coordinator.py, KVCacheCoordinator.retention_interval",
            {"0.20.2": False, "0.23.0": True},
        )
    )
    retains_states_sparsely: bool = field(
        metadata=_switch(
            "Sparse retention applies to Mamba states too.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager.reachable_block_mask",
            {"0.20.2": False, "0.24.0": True},
        )
    )
    caches_every_state: bool = field(
        metadata=_switch(
            "Mamba groups can cache the state after every block (cache mode 'all').",
            "v1/core/single_type_kv_cache_manager.py, MambaManager.__init__",
            {"0.20.2": True, "0.33.0": False},
        )
    )
    caches_every_state_if_spans_are_equal: bool = field(
        metadata=_switch(
            "They do so only if the blocks of all groups span equally many tokens, so not with context parallelism.",
            "v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes",
            {"0.20.2": False, "0.28.0": True},
        )
    )
    discounts_drafts: bool = field(
        metadata=_switch(
            "Before states are released, as many tokens as there are spare blocks are taken to be rejected.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager.remove_skipped_blocks",
            {"0.20.2": True, "0.26.0": False},
        )
    )
    counts_full_rows_as_allocated: bool = field(
        metadata=_switch(
            "A Mamba request whose first step needs no new block counts as one that has got some.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager.allocate_new_blocks",
            {"0.20.2": False, "0.28.0": True},
        )
    )
    releases_past_gaps: bool = field(
        metadata=_switch(
            "States that are passed are released wherever they stand in the row, not only up to the last null block.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager._remove_blocks_in_range",
            {"0.20.2": False, "0.30.0": True},
        )
    )
    counts_lacking_states: bool = field(
        metadata=_switch(
            "A step counts the blocks for states that it lacks; before, it counted the most that it can lack.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_blocks_to_allocate",
            {"0.20.2": False, "0.31.0": True},
        )
    )
    counts_lacking_states_at_checkpoints: bool = field(
        metadata=_switch(
            "A later step with a checkpoint counts the blocks for states that it lacks.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_blocks_to_allocate",
            {"0.20.2": False, "0.30.0": True},
        )
    )
    checkpoint_end: CheckpointEnd = field(
        metadata=_switch(
            "At which position in a chunk a state is kept, if the kernel can export one.",
            "v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position (0.29.0: "
            "v1/core/single_type_kv_cache_manager.py, MambaManager._needs_internal_checkpoint)",
            {
                "0.20.2": CheckpointEnd.NOWHERE,
                "0.29.0": CheckpointEnd.BLOCK,
                "0.30.0": CheckpointEnd.HASH_BLOCK,
                "0.32.0": CheckpointEnd.HIT,
            },
        )
    )
    checkpoints_only_at_prompt_end: bool = field(
        metadata=_switch(
            "If sparse retention keeps resends only, only the prompt's last chunk takes a block for a checkpoint.",
            "v1/core/kv_cache_coordinator.py, KVCacheCoordinator.get_num_blocks_to_allocate (prefill_end)",
            {"0.20.2": False, "0.31.0": True},
        )
    )
    registers_inner_checkpoints: bool = field(
        metadata=_switch(
            "Checkpoints of earlier chunks are registered inside blocks too, unless retention keeps resends only.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block",
            {"0.20.2": True, "0.32.0": False},
        )
    )
    hits_inside: bool = field(
        metadata=_switch(
            "Hits can end inside a block; the request goes on in a copy of it.",
            "v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.enable_partial_hash_hits",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    hits_inside_if_all_can: bool = field(
        metadata=_switch(
            "They do so only if all groups can be hit there.",
            "v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.__init__",
            {"0.20.2": False, "0.28.0": True},
        )
    )
    hits_inside_with_cp: bool = field(
        metadata=_switch(
            "They do so with decode context parallelism, too.",
            "v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.__init__",
            {"0.20.2": False, "0.29.0": True},
        )
    )
    masks_by_hash_block: bool = field(
        metadata=_switch(
            "What is worth registering follows from where hits can end, inside blocks too.",
            "v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.cache_blocks",
            {"0.20.2": False, "0.29.0": True},
        )
    )
    prompt_state: PromptState = field(
        metadata=_switch(
            "At which position in a prompt its state is registered whatever sparse retention says.",
            "v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block",
            {
                "0.20.2": PromptState.NOWHERE,
                "0.26.0": PromptState.INSIDE,
                "0.30.0": PromptState.INSIDE_BEFORE_OWN_DRAFTS,
                "0.31.0": PromptState.INSIDE_BEFORE_DRAFTS,
                "0.32.0": PromptState.ANYWHERE,
            },
        )
    )
    registers_junctions: bool = field(
        metadata=_switch(
            "Mamba groups in align mode can be asked to register the state where a request parts from an earlier one.",
            "v1/core/kv_cache_manager.py, KVCacheManager.__init__ (enable_mamba_shared_prefix_checkpoint; in 0.30.0 "
            "enable_mamba_fine_grained_prefix_cache)",
            {"0.20.2": False, "0.30.0": True},
        )
    )
    retains_shared_prefix: bool = field(
        metadata=_switch(
            "Sparse retention also keeps the position where two requests part; a lookup reports it.",
            "v1/core/kv_cache_manager.py, KVCacheManager.get_computed_blocks",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    retains_two_replays: bool = field(
        metadata=_switch(
            "With EAGLE, sparse retention keeps where a resend of the prompt and where a longer prompt end.",
            "v1/core/kv_cache_coordinator.py, replay_boundaries",
            {"0.20.2": False, "0.30.0": True},
        )
    )
    retains_before_shared_prefix: bool = field(
        metadata=_switch(
            "With EAGLE, sparse retention keeps the block before the shared prefix's end too.",
            "v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.cache_blocks",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    eagle_proof_past_last_token: bool = field(
        metadata=_switch(
            "The block that EAGLE drops may contain the last token of the request (several groups only).",
            "v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit",
            {"0.20.2": False, "0.32.0": True},
        )
    )
    watermark: bool = field(
        metadata=_switch(
            "A part of the pool is kept free when a request is admitted while others run.",
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots",
            {"0.20.2": False, "0.24.0": True},
        )
    )
    reserve: bool = field(
        metadata=_switch(
            "The caller can ask that a number of blocks stay free.",
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots",
            {"0.20.2": False, "0.23.0": True},
        )
    )
    adopts_without_new_tokens: bool = field(
        metadata=_switch(
            "A request may take over a hit without computing a token in the same step.",
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots",
            {"0.20.2": False, "0.31.0": True},
        )
    )
    deferred_frees: bool = field(
        metadata=_switch(
            "Blocks that a step in flight may still write are released once its output has been processed.",
            "v1/core/sched/scheduler.py, Scheduler._free_request_blocks",
            {"0.20.2": False, "0.24.0": True},
        )
    )
    lookahead_on_admission: bool = field(
        metadata=_switch(
            "The step that admits a request asks for slots for its draft model, too.",
            "v1/core/sched/scheduler.py, Scheduler.schedule (effective_lookahead_tokens)",
            {"0.20.2": False, "0.23.0": True},
        )
    )
    lookahead_hashes: bool = field(
        metadata=_switch(
            "A hash can cover some tokens after its block.",
            "v1/core/kv_cache_utils.py, get_request_block_hasher",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    reports_hits: bool = field(
        metadata=_switch(
            "An event consumer can ask to be told of hits as well.",
            "v1/core/block_pool.py, BlockPool.emit_cached_block_events",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    cp_scaling: CpScaling = field(
        metadata=_switch(
            "How context parallelism scales the tokens of a block.",
            "v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.__init__",
            {
                "0.20.2": CpScaling.ALL_RANKS,
                "0.26.0": CpScaling.DECODE,
                "0.29.0": CpScaling.DECODE_FULL,
                "0.31.0": CpScaling.DECODE_SHARDED,
            },
        )
    )
    cp_with_several_groups: bool = field(
        metadata=_switch(
            "Context parallelism works with several groups, if each is full attention, Mamba or not sharded.",
            "v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    offload_with_cp: bool = field(
        metadata=_switch(
            "SimpleCPUOffloadConnector runs with context parallelism.",
            "v1/simple_kv_offload/manager.py, SimpleCPUOffloadScheduler.__init__",
            {"0.20.2": False, "0.24.0": True},
        )
    )

    tier_recency: TierRecency = field(
        metadata=_switch(
            "When a chunk of the CPU tier gets its place in the order of eviction.",
            "v1/kv_offload/cpu/policies/lru.py, LRUCachePolicy",
            {
                "0.20.2": TierRecency.USE,
                "0.24.0": TierRecency.RELEASE,
                "0.31.0": TierRecency.REQUEST,
                "0.33.0": TierRecency.POSITION,
            },
        )
    )
    tier_counts_requests: bool = field(
        metadata=_switch(
            "The CPU tier counts uses by request and not by call.",
            "v1/kv_offload/cpu/manager.py, CPUOffloadingManager.on_request_finished",
            {"0.20.2": False, "0.31.0": True},
        )
    )
    tier_tells_failed_stores: bool = field(
        metadata=_switch(
            "The CPU tier tells of chunks whose store has failed.",
            "v1/kv_offload/cpu/manager.py, CPUOffloadingManager.complete_store",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    offload_reset: bool = field(
        metadata=_switch(
            "OffloadingConnector's cache can be reset.",
            _OFFLOAD + "reset_cache",
            {"0.20.2": False, "0.22.1": True},
        )
    )
    jobs_by_number: bool = field(
        metadata=_switch(
            "OffloadingConnector numbers its transfers; workers report each, and stores outlive their request.",
            _OFFLOAD + "_generate_job_id",
            {"0.20.2": False, "0.21.0": True},
        )
    )
    offload_policies: bool = field(
        metadata=_switch(
            "OffloadingConnector is told of requests when they arrive, and its tier says whether all of one is stored.",
            _OFFLOAD + "on_new_request",
            {"0.20.2": False, "0.23.0": True},
        )
    )
    fences_whole_table: bool = field(
        metadata=_switch(
            "All blocks of a request that begins to load count as given away, not only those that it loads into.",
            _OFFLOAD + "update_state_after_alloc",
            {"0.20.2": False, "0.23.0": True},
        )
    )
    flushes_when_idle: bool = field(
        metadata=_switch(
            "All transfers are flushed once all requests have ended.",
            _OFFLOAD + "build_connector_meta",
            {"0.20.2": False, "0.22.1": True, "0.24.0": False},
        )
    )
    offload_keeps_stepping: bool = field(
        metadata=_switch(
            "OffloadingConnector keeps the engine stepping until its transfers have been reported.",
            _OFFLOAD + "has_pending_push_work",
            {"0.20.2": False, "0.24.0": True},
        )
    )
    waits_for_stale_jobs: bool = field(
        metadata=_switch(
            "It does so for transfers from before a reset, too.",
            _OFFLOAD + "has_pending_push_work",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    stores_at_end: bool = field(
        metadata=_switch(
            "What a request still lacks when it ends is offered with the next step.",
            _OFFLOAD + "_build_store_jobs",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    store_index_stays: bool = field(
        metadata=_switch(
            "The store index never moves back.",
            _OFFLOAD + "RequestOffloadState.advance_stored_idx",
            {"0.20.2": False, "0.26.0": True},
        )
    )
    offers_again_after_preemption: bool = field(
        metadata=_switch(
            "A request that is looked up again offers its chunks from the first on.",
            _OFFLOAD + "get_num_new_matched_tokens",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    window_wait: WindowWait = field(
        metadata=_switch(
            "Which chunks that are being stored make the lookup of a window wait.",
            _OFFLOAD + "_sliding_window_lookup",
            {"0.20.2": WindowWait.BREAKS, "0.25.1": WindowWait.ANYWHERE, "0.30.0": WindowWait.IN_RUN},
        )
    )
    store_mask: StoreMask = field(
        metadata=_switch(
            "Which chunks of a window are worth storing.",
            _OFFLOAD + "_build_store_jobs",
            {
                "0.20.2": StoreMask.ALL,
                "0.22.1": StoreMask.SEGMENT,
                "0.27.1": StoreMask.PARTIAL_SEGMENT,
                "0.30.0": StoreMask.REGISTRATION,
            },
        )
    )
    skips_chunks_with_holes: bool = field(
        metadata=_switch(
            "A chunk isn't stored if a block of it has left the window that a hit would need.",
            _OFFLOAD + "_build_store_jobs",
            {"0.20.2": False, "0.33.0": True},
        )
    )
    draft_tail: DraftTail = field(
        metadata=_switch(
            "When the last chunk of a group with draft layers isn't stored yet.",
            _OFFLOAD + "RequestOffloadState.storable_chunks",
            {
                "0.20.2": DraftTail.NOWHERE,
                "0.24.0": DraftTail.ALWAYS,
                "0.26.0": DraftTail.DECODING,
                "0.30.0": DraftTail.RUNNING,
            },
        )
    )
    full_groups_look_further: bool = field(
        metadata=_switch(
            "The chunk that draft layers of full attention need beyond a hit may lie behind what others have found.",
            _OFFLOAD + "_lookup_complete_chunks",
            {"0.20.2": False, "0.30.0": True},
        )
    )


SWITCHES = tuple(Switch(f.name, **f.metadata) for f in fields(Profile) if f.metadata)


UNKNOWN = "dev"
"""The release of a vLLM that doesn't say which it is, such as a checkout that was never built."""


class AssumedProfileWarning(UserWarning):
    """The release is not one whose code was read; the model assumes that it is like the nearest older one."""


UNTAGGED = "0.1.dev"
"""How the version of a vLLM begins that was built from a clone without tags: it is UNKNOWN."""


def parse(release: str) -> tuple[int, ...]:
    """Return the numbers of a release: "0.33.1rc2" is (0, 33, 1). ValueError if it isn't one."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if match is None:
        raise ValueError(f"{release!r} is not a release; one looks like 0.33.0")
    return tuple(int(number or 0) for number in match.groups())


def profile_for(release: str) -> Profile:
    """Return the profile of a release.

    A release that isn't in ``RELEASES`` gets the profile of the nearest older one, with an
    AssumedProfileWarning that says so; UNKNOWN is taken for a newer one. ValueError if it is older than all of them.
    """
    numbers = parse(RELEASES[-1] if release == UNKNOWN else release)
    if numbers < parse(RELEASES[0]):
        raise ValueError(f"the oldest release that the model covers is {RELEASES[0]}, not {release}")
    nearest = [known for known in RELEASES if parse(known) <= numbers][-1]
    if release != nearest:
        warnings.warn(
            f"kvspec's model wasn't checked against vLLM {release}; it assumes that it is like {nearest}",
            AssumedProfileWarning,
            stacklevel=2,
        )
    return Profile(release=nearest, **{switch.name: switch.at(parse(nearest)) for switch in SWITCHES})


class KnownIssue(NamedTuple):
    """A release that is wrong by its own intent."""

    id: str
    clause: str
    """The clause that it breaks."""
    bad: str
    """The oldest release of RELEASES that has it."""
    fixed: str | None
    """The first release that hasn't; None if the newest has it too."""
    sentence: str
    reference: str
    """An issue or pull request, ``vllm#45704``, or the path of a script."""
    levels: tuple[str, ...] = ("cache",)
    """Of the equalities that can show it."""

    def affects(self, release: str) -> bool:
        """Whether a release has it."""
        numbers = parse(release)
        return parse(self.bad) <= numbers and (self.fixed is None or numbers < parse(self.fixed))


KNOWN_ISSUES = (
    KnownIssue(
        "core-double-release",
        "POOL-6",
        "0.20.2",
        "0.24.0",
        "A list that releases two references to one block puts it into the free queue twice.",
        "vllm#42085",
        ("pool",),
    ),
    KnownIssue(
        "core-hash-key-collision",
        "KEY-2",
        "0.20.2",
        "0.31.0",
        "An adapter and a cache salt of the same name give the same hash.",
        "vllm#44701",
    ),
    KnownIssue(
        "core-adapter-path-not-in-key",
        "KEY-2",
        "0.20.2",
        "0.31.0",
        "Two adapters of one name and different paths give the same hash.",
        "vllm#44701",
    ),
    KnownIssue(
        "core-images-after-resume",
        "KEY-2",
        "0.20.2",
        "0.31.0",
        "Of several images in a block that is filled later than the request began, only the last is in the hash.",
        "tests/bugs/core_images_after_resume.py",
    ),
    KnownIssue(
        "core-eagle-first-window",
        "HIT-2",
        "0.20.2",
        None,
        "With EAGLE and a window's blocks shorter than the alignment, a hit shorter than the window is cut twice.",
        "tests/bugs/core_eagle_first_window.py",
    ),
    KnownIssue(
        "core-eagle-unproven-hit",
        "HIT-4",
        "0.20.2",
        None,
        "With two or more windows that EAGLE reads, a hit that one has shortened isn't proved again to the others.",
        "tests/bugs/core_eagle_unproven_hit.py",
    ),
    KnownIssue(
        "core-second-full-group-not-cut",
        "HIT-6",
        "0.20.2",
        "0.29.0",
        "Of two full-attention layouts only the first one's row is cut to the hit; the other's stays longer.",
        "vllm#52828",
    ),
    KnownIssue(
        "core-eagle-window-unregistered",
        "REG-2",
        "0.22.1",
        "0.23.0",
        "With EAGLE and a window's blocks shorter than the alignment, the block that proves a hit isn't registered.",
        "tests/test_core_machine.py",
    ),
    KnownIssue(
        "core-window-freed-too-early",
        "WINDOW-2",
        "0.20.2",
        "0.26.0",
        "Blocks that leave a window are released on the basis of what is scheduled: a step in flight still reads them.",
        "vllm#47728",
    ),
    KnownIssue(
        "core-external-evicts-local-hit",
        "ALLOC-6",
        "0.20.2",
        "0.24.0",
        "Blocks for an earlier group's external tokens can be those that a later group has hit and not touched yet.",
        "vllm#44409",
    ),
    KnownIssue(
        "core-mamba-hit-disagrees",
        "HIT-4",
        "0.20.2",
        "0.26.0",
        "With EAGLE and no group marked for it, a state one block after what full attention holds counts as the hit.",
        "vllm#43559",
    ),
    KnownIssue(
        "core-state-registered-again",
        "REG-6",
        "0.32.0",
        "0.33.0",
        "A state that is registered already is registered again when its prompt goes on: no hit in that step.",
        "tests/test_core_machine.py",
    ),
    KnownIssue(
        "core-passed-state-registered",
        "REG-6",
        "0.26.0",
        "0.32.0",
        "A step that is scheduled before the first output registers a state past the prompt's end as that of the end.",
        "tests/bugs/core_passed_state_registered.py",
    ),
    KnownIssue(
        "core-started-state-registered",
        "REG-8",
        "0.30.0",
        None,
        "The state inside a block that a chunk with a checkpoint begins with is registered as that of the block's end.",
        "tests/bugs/core_started_state_registered.py",
    ),
    KnownIssue(
        "core-spares-registered",
        "STATE-1",
        "0.30.0",
        "0.32.0",
        "In a step with a checkpoint spares stay in their places, and are registered as the states of blocks' ends.",
        "tests/bugs/core_spares_registered.py",
    ),
    KnownIssue(
        "core-checkpoint-counts-nulls",
        "STATE-1",
        "0.30.0",
        "0.31.0",
        "A later step with a checkpoint counts a block for each place that it jumps over.",
        "tests/test_core_machine.py",
    ),
    KnownIssue(
        "core-prompt-checkpoint-forgotten",
        "REG-9",
        "0.30.0",
        "0.31.0",
        "If sparse retention keeps resends only, the checkpoint of the prompt's last chunk isn't registered.",
        "tests/test_core_machine.py",
    ),
    KnownIssue(
        "core-states-over-allocated",
        "STATE-2",
        "0.20.2",
        "0.23.0",
        "In align mode, a step that needs fewer blocks than rejected drafts left in the row raises AssertionError.",
        "tests/bugs/core_states_over_allocated.py",
    ),
    KnownIssue(
        "core-reset-in-flight-underflow",
        "STEP-4",
        "0.20.2",
        "0.27.1",
        "What a step in flight says of a request that was preempted since is taken for what a later step says.",
        "vllm#48245",
        ("scheduler",),
    ),
    KnownIssue(
        "offload-in-flight-is-a-miss",
        "TIER-1",
        "0.20.2",
        "0.21.0",
        "A chunk whose store is in flight isn't there, instead of being there soon.",
        "tests/test_offload_index.py",
        ("tier", "index"),
    ),
    KnownIssue(
        "offload-arc-gives-up",
        "TIER-5",
        "0.20.2",
        "0.30.0",
        "ARC refuses a store when no chunk used again can go, although one used once can.",
        "vllm#55461",
        ("tier", "index"),
    ),
    KnownIssue(
        "offload-skip-reading-ignored",
        "LOOKUP-1",
        "0.20.2",
        "0.24.0",
        "A request that may not read the prefix cache is given a hit in the CPU tier.",
        "vllm#44592",
        ("index",),
    ),
    KnownIssue(
        "offload-readmit-with-store-in-flight",
        "LOOKUP-1",
        "0.21.0",
        "0.24.0",
        "A request is looked up while its stores are in flight; if it has a hit, its load is refused.",
        "vllm#46014",
        ("index",),
    ),
    KnownIssue(
        "offload-abort-while-loading",
        "JOB-6",
        "0.20.2",
        "0.21.0",
        "A request that has stored and is aborted while it loads is reported as stored, and released, under the load.",
        "tests/test_offload_index.py",
        ("index",),
    ),
    KnownIssue(
        "offload-external-evicts-hits",
        "ADMIT-1",
        "0.21.0",
        "0.24.0",
        "Blocks for one group's external tokens can be those that another has hit: an assertion, or a wrong load.",
        "vllm#44409",
        ("index",),
    ),
    KnownIssue(
        "offload-group-sizes-null",
        "STORE-11",
        "0.21.0",
        "0.22.1",
        "The sizes of a store count blocks that have left the window.",
        "vllm#42945",
        ("index",),
    ),
    KnownIssue(
        "offload-stale-window-block",
        "STORE-5",
        "0.21.0",
        "0.23.0",
        "A block that has left a window is stored as the request's after it was given to another.",
        "tests/test_offload_index.py",
        ("index",),
    ),
    KnownIssue(
        "offload-window-assert",
        "ADMIT-1",
        "0.21.0",
        "0.27.1",
        "A load whose end lies inside a window's chunk is refused: the window reaches into one block more.",
        "vllm#48911",
        ("index",),
    ),
    KnownIssue(
        "offload-window-chunk-missed",
        "LOOKUP-4",
        "0.21.0",
        "0.30.0",
        "A hit that ends inside a window's chunk counts, though the chunk that the window reaches into isn't there.",
        "tests/test_offload_index.py",
        ("index",),
    ),
    KnownIssue(
        "offload-draft-chunk-passed",
        "STORE-9",
        "0.24.0",
        "0.26.0",
        "The last chunk of draft layers, which isn't stored yet, is passed as if it were.",
        "vllm#46971",
        ("index",),
    ),
    KnownIssue(
        "offload-unmarked-drafts",
        "STORE-16",
        "0.24.0",
        "0.30.0",
        "If no group is marked as a draft model's, all count as such, and a hit needs one chunk more of each.",
        "vllm#52735",
        ("index",),
    ),
    KnownIssue(
        "offload-reset-keeps-jobs",
        "STORE-14",
        "0.22.1",
        "0.26.0",
        "After a reset a request still waits for jobs that won't be reported.",
        "vllm#48102",
        ("index",),
    ),
    KnownIssue(
        "offload-abort-never-scheduled",
        "STORE-6",
        "0.26.0",
        "0.27.1",
        "What an aborted request hasn't computed is stored, or asserted to have blocks.",
        "vllm#49118",
        ("index",),
    ),
    KnownIssue(
        "offload-last-slot-stored",
        "STORE-6",
        "0.26.0",
        "0.30.0",
        "The slot of the last token said, which is never computed, is stored.",
        "vllm#54193",
        ("index",),
    ),
    KnownIssue(
        "offload-final-store-lost",
        "JOB-5",
        "0.26.0",
        "0.27.1",
        "A request whose earlier stores are reported as it ends is forgotten before its last chunks are offered.",
        "tests/test_offload_index.py",
        ("index",),
    ),
    KnownIssue(
        "offload-reset-then-load",
        "FENCE-1",
        "0.25.1",
        "0.33.0",
        "A reset that preempts a request which loads again in the next step makes that step fail.",
        "tests/bugs/offloading_reset_and_load.py",
        ("index",),
    ),
    KnownIssue(
        "offload-window-after-reset",
        "JOB-2",
        "0.26.0",
        None,
        "After a reset a window's blocks are stored that are others' by then; a job that has one twice can't end.",
        "tests/bugs/offloading_window_after_reset.py",
        ("index",),
    ),
    KnownIssue(
        "offload-second-reset",
        "STORE-14",
        "0.22.1",
        None,
        "Resetting again before a step has flushed the jobs of the first reset is refused.",
        "tests/bugs/offloading_second_reset.py",
        ("index",),
    ),
)
"""The differences between the releases and the model that are the releases' fault."""


def known_issues(release: str) -> frozenset[str]:
    """Return the ids of the known issues of a release."""
    return frozenset(issue.id for issue in KNOWN_ISSUES if issue.affects(release))
