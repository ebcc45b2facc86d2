"""Defects of OffloadingConnector, planted in 0.33.0, and of its model: for each clause one that makes the two differ.

Few of them break a law: what isn't stored, or is evicted too early, is only missed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvspec.defects import Defect, Patch
from kvspec.model import offload
from kvspec.model.pool import NULL
from kvspec.model.tiers import Adaptive, Answer, Recency, Tier

F = offload.Offloader
Wrap = Callable[[Any], Callable[..., Any]]
Planted = tuple[str, Any, str, Wrap]
"""What to run, and a function of the model with what it is replaced by."""


def _answers(value: Any) -> Wrap:
    return lambda f: lambda self, *a, **n: value


def _all_hits(f: Any) -> Any:
    return lambda self, keys: len(keys)


def _reads_anyway(f: Any) -> Any:
    def lookup(self: Any, request: Any, local: int) -> Any:
        reads, request.reads_cache = request.reads_cache, True
        try:
            return f(self, request, local)
        finally:
            request.reads_cache = reads

    return lookup


def _most_recent(f: Any) -> Any:
    def victims(self: Any, count: int, protected: Any) -> Any:
        free = sum(chunk.idle() and key not in protected for key, chunk in self.chunks.items())
        some = f(self, max(count, free), protected)
        return some and some[len(some) - count :]

    return victims


def _one_less(f: Any) -> Any:
    return lambda self, *a, **n: max(0, f(self, *a, **n) - 1)


def _keeps_order(f: Any) -> Any:
    return lambda self, keys: f(self, list(keys)[::-1])


def _keeps_fences(f: Any) -> Any:
    def reported(self: Any, number: int, order: Any = None) -> None:
        fences = {block: set(jobs) for block, jobs in self.fences.items()}
        f(self, number, order)
        self.fences = fences

    return reported


def _stays(f: Any) -> Any:
    def advance(self: Any, request: Any, tokens: int) -> None:
        before = list(request.next_stored)
        f(self, request, tokens)
        request.next_stored[0] = before[0] if len(request.jobs) > 1 else request.next_stored[0]

    return advance


def _at_once(f: Any) -> Any:
    def finish(self: Any, request: Any, *, aborted: bool = False) -> None:
        f(self, request, aborted=aborted)
        self.tracked.pop(request.name, None)

    return finish


def _keeps_index(f: Any) -> Any:
    def reset(self: Any) -> None:
        before = {name: list(request.next_stored) for name, request in self.tracked.items()}
        f(self)
        for name, request in self.tracked.items():
            request.next_stored = before[name]

    return reset


def _reads_parameter(f: Any) -> Any:
    return lambda self, request: not f(self, request) and bool((request.params or {}).get("do_remote_decode"))


def _numbers_skip(f: Any) -> Any:
    def opened(self: Any, job: Any) -> int:
        self._next_job += self._next_job == 1
        return int(f(self, job))

    return opened


def _frees_at_once(f: Any) -> Any:
    def freed(self: Any, key: Any) -> None:
        self.ranks[key] = (self._now(), 0)

    return freed


def _loads_one_block_less(f: Any) -> Any:
    def admit(self: Any, request: Any, rows: Any, found: Any, external: int) -> None:
        f(self, request, rows, found, external)
        if external:
            self._loads[-1].blocks.pop()

    return admit


_CLAUSES: dict[str, Planted] = {
    "STORE-1": ("index", F, "refresh_keys", lambda f: lambda self, r: (f(self, r), r.keys[0] and r.keys[0].pop())),
    "STORE-2": ("index", F, "_restart", _answers(None)),
    "STORE-3": ("index", F, "_skip_loaded", _answers(None)),
    "STORE-4": ("index", F, "_wants_all", _reads_parameter),
    "STORE-5": ("index", F, "_drop_reused", _answers(None)),
    "STORE-6": ("index", F, "offloadable", lambda f: lambda self, r, n: len(r.text.tokens)),
    "STORE-7": ("index", F, "storable", _one_less),
    "STORE-8": ("index", F, "_is_refused", _answers(False)),
    "STORE-9": ("index", F, "_advance", _stays),
    "STORE-10": ("index", F, "_range", lambda f: lambda self, r, g, n: range(0, f(self, r, g, n).stop)),
    "STORE-11": (
        "index",
        F,
        "_is_worth_it",
        lambda f: lambda self, r, g, c, *a: r.table[g][(c + 1) * self.chunk_blocks - 1] == NULL or f(self, r, g, c, *a),
    ),
    "STORE-12": ("index", F, "_is_in_tail", _answers(True)),
    "STORE-13": ("index", F, "_wanted", lambda f: lambda self, g, blocks, end: [True for _ in blocks]),
    "STORE-14": ("index", F, "reset", _keeps_index),
    "STORE-15": ("index", F, "_turns", lambda f: lambda self, rows, s: f(self, rows, s)[::-1]),
    "STORE-16": ("index", F, "is_held_back", _answers(False)),
    "LOOKUP-1": ("index", F, "lookup", _reads_anyway),
    "LOOKUP-2": ("index", F, "_agreed_hit", lambda f: lambda self, r, n: f(self, r, n) or 0),
    "LOOKUP-3": ("index", F, "_prefix", _all_hits),
    "LOOKUP-4": ("index", F, "_window", lambda f: lambda self, keys, need, end: f(self, keys, need + 1, end + 1)),
    "LOOKUP-5": ("index", F, "_is_being_loaded", _answers(False)),
    "LOOKUP-6": ("index", F, "_needs_proof", _answers(False)),
    "TOUCH-1": ("index", F, "_touch", _answers(None)),
    "ADMIT-1": ("index", F, "admit", _loads_one_block_less),
    "FENCE-1": ("index", F, "_flush_preempted", _answers(None)),
    "FENCE-2": ("index", F, "_flush_reused", _answers(None)),
    "FENCE-3": ("index", F, "_flush_last", _answers(None)),
    "FENCE-4": ("index", F, "_fenced", lambda f: lambda self, job, rows: f(self, job, rows)._replace(window_blocks=())),
    "JOB-1": ("index", F, "_open", _numbers_skip),
    "JOB-2": ("index", F, "reported", _keeps_fences),
    "JOB-3": ("index", F, "is_stale", _answers(False)),
    "JOB-4": ("index", F, "keeps_stepping", _answers(False)),
    "JOB-5": ("index", F, "finish", _at_once),
    "JOB-6": ("index", F, "_end_flushed", _answers(None)),
    "TIER-1": ("tier", Tier, "lookup", lambda f: lambda self, k: Answer.HIT if k in self.chunks else Answer.MISS),
    "TIER-2": ("tier", Tier, "prepare_load", lambda f: lambda self, keys, a: f(self, keys[:1], a)),
    "TIER-3": ("tier", Tier, "complete_load", lambda f: lambda self, keys: f(self, list(keys)[:-1])),
    "TIER-4": ("tier", Tier, "missing", lambda f: lambda self, keys: f(self, keys)[::-1]),
    "TIER-5": ("tier", Tier, "room", lambda f: lambda self, keys: f(self, keys) or None),
    "TIER-6": ("tier", Tier, "_take_slots", lambda f: lambda self, n: f(self, n)[::-1]),
    "TIER-7": ("tier", Tier, "complete_store", lambda f: lambda self, keys, success=True: f(self, keys, success=True)),
    "TIER-8": ("tier", Tier, "reset", _answers(None)),
    "TIER-9": ("tier", Tier, "take_events", lambda f: lambda self: f(self)[::-1]),
    "LRU-1": ("tier", Recency, "victims", _most_recent),
    "LRU-2": ("tier", Recency, "insert", lambda f: lambda self, k, a: self.ranks.update({k: (0, 0)})),
    "LRU-3": ("tier", Recency, "touch", _keeps_order),
    "LRU-4": ("tier", Recency, "freed", _frees_at_once),
    "LRU-5": ("tier", Recency, "found", _answers(None)),
    "LRU-6": ("tier", Recency, "finished", _answers(None)),
    "ARC-1": ("tier", Adaptive, "victims", _most_recent),
    "ARC-2": ("tier", Adaptive, "evicted", lambda f: lambda self, keys: (f(self, keys), self.ghosts_once.clear())),
    "ARC-3": ("tier", Adaptive, "insert", lambda f: lambda self, k, a: self.once.append(k)),
    "ARC-4": ("tier", Adaptive, "touch", _keeps_order),
    "ARC-5": ("tier", Adaptive, "_learn", _answers(None)),
    "ARC-6": ("tier", Adaptive, "missed", _answers(None)),
    "ARC-7": ("tier", Adaptive, "finished", _answers(None)),
    "USE-1": ("tier", Tier, "_note", _answers(None)),
    "USE-2": ("tier", Tier, "_note_reuse", _answers(None)),
    "USE-3": ("tier", Tier, "_note_misses", lambda f: lambda self, keys, a: (a.missed.clear(), f(self, keys, a))),
    "USE-4": ("tier", Tier, "_forget_before_reset", lambda f: lambda self, a: setattr(a, "resets", self.resets)),
}
"""Clause -> a defect of the model in the function that states it."""


def _plant(owner: Any, name: str, wrap: Wrap) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def _connector() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    return scheduler


def _keep_indices(patch: Patch, method: str) -> None:
    """Plant that a method of the connector's scheduler side leaves the store index of all requests as it is."""
    owner = _connector().OffloadingConnectorScheduler
    real = getattr(owner, method)

    @wraps(real)
    def keeps(self: Any, *args: Any, **named: Any) -> Any:
        groups = [group for status in self._req_status.values() for group in status.group_states]
        before = [group.next_stored_chunk_idx for group in groups]
        answer = real(self, *args, **named)
        for group, index in zip(groups, before, strict=True):
            group.next_stored_chunk_idx = index
        return answer

    patch.setattr(owner, method, keeps)


def a_preempted_request_keeps_its_store_index(patch: Patch) -> None:
    _keep_indices(patch, "get_num_new_matched_tokens")


def what_was_loaded_is_offered_again(patch: Patch) -> None:
    _keep_indices(patch, "update_state_after_alloc")


def a_reset_keeps_the_store_index(patch: Patch) -> None:
    _keep_indices(patch, "_reset_cache")


def the_store_index_skips_a_chunk(patch: Patch) -> None:
    state = _connector().RequestOffloadState
    real = state.advance_stored_idx

    def advance(self: Any, tokens: int) -> None:
        before = [group.next_stored_chunk_idx for group in self.group_states]
        real(self, tokens)
        for group, index in zip(self.group_states, before, strict=True):
            group.next_stored_chunk_idx += group.next_stored_chunk_idx > index

    patch.setattr(state, "advance_stored_idx", advance)


def what_is_held_back_is_passed(patch: Patch) -> None:
    state = _connector().RequestOffloadState
    real = state.advance_stored_idx

    def advance(self: Any, tokens: int) -> None:
        real(self, tokens)
        for config, group in zip(self.config.kv_group_configs, self.group_states, strict=True):
            chunks = min(tokens // config.tokens_per_chunk, len(group.offload_keys))
            group.next_stored_chunk_idx = max(group.next_stored_chunk_idx, chunks)

    patch.setattr(state, "advance_stored_idx", advance)


def draft_layers_hold_nothing_back(patch: Patch) -> None:
    state = _connector().RequestOffloadState
    real = state.storable_chunks

    def storable(self: Any, config: Any, group: Any, tokens: int) -> Any:
        return real(self, config._replace(is_eagle_group=False), group, tokens)

    patch.setattr(state, "storable_chunks", storable)


def a_window_further_left_is_a_chunk_too_short(patch: Patch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

    real = config.get_sliding_window_size_in_chunks

    def size(spec: Any, tokens: int) -> int | None:
        chunks: int | None = real(spec, tokens)
        return chunks and max(1, chunks - 1)

    patch.setattr(config, "get_sliding_window_size_in_chunks", size)


def a_refused_store_counts_as_stored(patch: Patch) -> None:
    owner = _connector().OffloadingConnectorScheduler
    real = owner._build_store_jobs

    def build(self: Any, output: Any) -> Any:
        jobs = real(self, output)
        for name, tokens in output.num_scheduled_tokens.items():
            status = self._req_status[name]
            computed = status.req.num_computed_tokens + tokens
            status.advance_stored_idx(self._calc_num_offloadable_tokens(status, computed))
        return jobs

    patch.setattr(owner, "_build_store_jobs", build)


def a_prefix_hit_loses_its_last_chunk(patch: Patch) -> None:
    owner = _connector().OffloadingConnectorScheduler
    real = owner._maximal_prefix_lookup

    def lookup(self: Any, *args: Any) -> int | None:
        found: int | None = real(self, *args)
        return found and found - 1

    patch.setattr(owner, "_maximal_prefix_lookup", lookup)


def a_window_is_a_chunk_shorter(patch: Patch) -> None:
    owner = _connector().OffloadingConnectorScheduler
    real = owner._sliding_window_lookup

    def lookup(self: Any, keys: Any, window: int, context: Any, first: int) -> Any:
        return real(self, keys, max(1, window - 1), context, max(1, first - 1))

    patch.setattr(owner, "_sliding_window_lookup", lookup)


def who_must_not_read_the_cache_reads_the_tier(patch: Patch) -> None:
    owner = _connector().OffloadingConnectorScheduler
    real = owner.get_num_new_matched_tokens

    def matched(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        skips, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        try:
            return real(self, request, *args, **named)
        finally:
            request.skip_reading_prefix_cache = skips

    patch.setattr(owner, "get_num_new_matched_tokens", matched)


def stores_of_a_preempted_request_are_not_awaited(patch: Patch) -> None:
    owner = _connector().OffloadingConnectorScheduler
    real = owner._build_connector_meta

    def build(self: Any, output: Any) -> Any:
        preempted, output.preempted_req_ids = output.preempted_req_ids, None
        try:
            return real(self, output)
        finally:
            output.preempted_req_ids = preempted

    patch.setattr(owner, "_build_connector_meta", build)


def the_engine_sleeps_over_its_stores(patch: Patch) -> None:
    patch.setattr(_connector().OffloadingConnectorScheduler, "has_pending_push_work", lambda self: False)


def a_chunk_in_flight_is_a_miss(patch: Patch) -> None:
    from vllm.v1.kv_offload.base import LookupResult
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    real = Manager.lookup

    def lookup(self: Any, key: Any, context: Any) -> Any:
        answer = real(self, key, context)
        return LookupResult.MISS if answer is LookupResult.HIT_PENDING else answer

    patch.setattr(Manager, "lookup", lookup)


def the_end_of_a_load_keeps_a_pin(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    real = Manager.complete_load
    patch.setattr(Manager, "complete_load", wraps(real)(lambda self, keys, context: real(self, keys[1:], context)))


def a_failed_store_counts(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    real = Manager.complete_store
    patch.setattr(Manager, "complete_store", wraps(real)(lambda self, keys, context, **_: real(self, keys, context)))


def the_first_event_of_the_tier_is_lost(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as Manager

    real = Manager.take_events
    patch.setattr(Manager, "take_events", lambda self: list(real(self))[1:])


def the_most_recent_chunk_is_evicted(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy as Policy

    def evict(self: Any, count: int, protected: set[Any]) -> Any:
        free = sorted(self._evictable - protected, key=lambda key: (self._ranks[key], key))
        if len(free) < count:
            return None
        taken = free[len(free) - count :]
        self._evictable.difference_update(taken)
        for key in taken:
            del self._ranks[key]
        return [(key, self.chunks.pop(key)) for key in taken]

    patch.setattr(Policy, "evict", evict)


def ghosts_teach_nothing(patch: Patch) -> None:
    from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy as Policy

    patch.setattr(Policy, "_adapt_to_ghost_hit", lambda self, *args: None)


def _of_vllm(kind: str, law: str, level: str, plant: Any, sentence: str) -> tuple[str, Defect]:
    return plant.__name__, Defect("vllm-offload-index", kind, law, sentence, plant, level)


_OF_VLLM = dict(
    [
        _of_vllm(
            "cursor",
            "STORE-9",
            "index",
            the_store_index_skips_a_chunk,
            "The store index passes one chunk more than was offered, which is never stored.",
        ),
        _of_vllm(
            "cursor",
            "STORE-9",
            "index",
            what_is_held_back_is_passed,
            "The store index passes the last chunk of draft layers, which is never stored.",
        ),
        _of_vllm(
            "cursor",
            "STORE-16",
            "index",
            draft_layers_hold_nothing_back,
            "The last chunk of draft layers is stored while a draft that is rejected can change it.",
        ),
        _of_vllm(
            "groups",
            "LOOKUP-4",
            "index",
            a_window_further_left_is_a_chunk_too_short,
            "Where the end of a window is no hit, one further left needs a chunk less than attention reads.",
        ),
        _of_vllm(
            "preemption",
            "STORE-2",
            "index",
            a_preempted_request_keeps_its_store_index,
            "After a preemption, chunks that were offered before are not offered again.",
        ),
        _of_vllm(
            "cursor",
            "STORE-3",
            "index",
            what_was_loaded_is_offered_again,
            "A load does not move the store index.",
        ),
        _of_vllm(
            "reset",
            "STORE-14",
            "index",
            a_reset_keeps_the_store_index,
            "After a reset, what was stored before is not stored again.",
        ),
        _of_vllm(
            "cursor",
            "STORE-8",
            "index",
            a_refused_store_counts_as_stored,
            "What the tier has no room for is never offered again.",
        ),
        _of_vllm(
            "index",
            "LOOKUP-1",
            "index",
            who_must_not_read_the_cache_reads_the_tier,
            "A request that must not hit, hits.",
        ),
        _of_vllm(
            "index",
            "LOOKUP-3",
            "index",
            a_prefix_hit_loses_its_last_chunk,
            "A hit of full attention is a chunk shorter than it may be.",
        ),
        _of_vllm(
            "window",
            "LOOKUP-4",
            "index",
            a_window_is_a_chunk_shorter,
            "A window is found although its first chunk is missing.",
        ),
        _of_vllm(
            "preemption",
            "FENCE-1",
            "index",
            stores_of_a_preempted_request_are_not_awaited,
            "The blocks of a preempted request are written while they are stored.",
        ),
        _of_vllm(
            "completion",
            "JOB-4",
            "index",
            the_engine_sleeps_over_its_stores,
            "The engine goes idle while stores are in flight.",
        ),
        _of_vllm(
            "index",
            "TIER-1",
            "tier",
            a_chunk_in_flight_is_a_miss,
            "A chunk that is being stored is not there, instead of being there soon.",
        ),
        _of_vllm(
            "pinning",
            "TIER-3",
            "tier",
            the_end_of_a_load_keeps_a_pin,
            "A chunk that was loaded can never be evicted.",
        ),
        _of_vllm(
            "completion",
            "TIER-7",
            "tier",
            a_failed_store_counts,
            "Chunks whose store has failed can be loaded.",
        ),
        _of_vllm(
            "events",
            "TIER-9",
            "tier",
            the_first_event_of_the_tier_is_lost,
            "Of the events that are taken, the first is lost.",
        ),
        _of_vllm(
            "eviction order",
            "LRU-1",
            "tier",
            the_most_recent_chunk_is_evicted,
            "The chunk goes that was used last.",
        ),
        _of_vllm(
            "eviction order",
            "ARC-5",
            "tier",
            ghosts_teach_nothing,
            "A chunk that was evicted too early does not move the target.",
        ),
    ]
)

DEFECTS = _OF_VLLM | {
    f"model_breaks_{clause}": Defect(
        "vllm-offload-index",
        "model",
        clause,
        f"The model does otherwise than {clause} says.",
        _plant(owner, name, wrap),
        level,
        in_model=True,
    )
    for clause, (level, owner, name, wrap) in _CLAUSES.items()
}
