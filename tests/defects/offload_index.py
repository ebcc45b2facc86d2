"""Defects of the model of OffloadingConnector: for each clause one that makes it differ from the implementation."""

from __future__ import annotations

from collections.abc import Callable
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
    "STORE-11": ("index", F, "_is_worth_it", lambda f: lambda self, r, g, c, *a: r.table[g][c] != NULL),
    "STORE-12": ("index", F, "_is_in_tail", _answers(True)),
    "STORE-13": ("index", F, "_wanted", lambda f: lambda self, g, blocks, end: [True for _ in blocks]),
    "STORE-14": ("index", F, "reset", _keeps_index),
    "STORE-15": ("index", F, "_turns", lambda f: lambda self, rows, s: f(self, rows, s)[::-1]),
    "LOOKUP-1": ("index", F, "lookup", _reads_anyway),
    "LOOKUP-2": ("index", F, "_agreed_hit", lambda f: lambda self, r, n: f(self, r, n) or 0),
    "LOOKUP-3": ("index", F, "_prefix", _all_hits),
    "LOOKUP-4": ("index", F, "_window", lambda f: lambda self, keys, need, end: f(self, keys, need + 1, end + 1)),
    "LOOKUP-5": ("index", F, "_is_being_loaded", _answers(False)),
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


DEFECTS = {
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
