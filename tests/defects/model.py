"""Defects of the model: for each clause one that makes it differ from the implementation, and that only it notices.

An equality doesn't know which side is wrong, so these say as much about what is compared as defects of vLLM would; and
they hold for all releases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvspec.defects import Defect, Patch
from kvspec.model import (
    cache,
    checkpoints,
    deferred,
    groups,
    keys,
    layout,
    lookup,
    pool,
    registration,
    scaling,
    states,
    steps,
)
from kvspec.model.pool import NULL

Wrap = Callable[[Any], Callable[..., Any]]


def changed(owner: Any, name: str, wrap: Wrap) -> Callable[[Patch], None]:
    """Return a defect: a function of the model, wherever it is used, behaves differently."""

    def plant(patch: Patch) -> None:
        from kvspec.equality import cache as pair
        from kvspec.equality import scaling as sizes

        original = getattr(owner, name)
        for place in (owner, cache, checkpoints, layout, lookup, registration, scaling, states, pair, sizes):
            if vars(place).get(name) is original:
                patch.setattr(place, name, wrap(original))

    return plant


def without(owner: Any, name: str, answer: Any = None) -> Callable[[Patch], None]:
    return changed(owner, name, lambda original: lambda *arguments, **named: answer)


def _drops_last(original: Any) -> Any:
    return lambda self, blocks, **named: original(self, list(blocks)[:-1], **named)


def _forgets_nothing(original: Any) -> Any:
    def allocate(self: Any, count: int) -> Any:
        forget, self._forget = self._forget, lambda block: None
        try:
            return original(self, count)
        finally:
            self._forget = forget

    return allocate


def _reads_anyway(original: Any) -> Any:
    def lookup(self: Any, request: Any) -> Any:
        before, request.reads_cache = request.reads_cache, True
        try:
            return original(self, request)
        finally:
            request.reads_cache = before

    return lookup


def _shorter_together(original: Any) -> Any:
    def longest(self: Any, text: Any, limit: int, indices: Any, proof_limit: int | None) -> int:
        indices = list(indices)
        tokens = int(original(self, text, limit, indices, proof_limit))
        layouts = {self.layout.groups[index].layout() for index in indices}
        return max(0, tokens - self.layout.hit_tokens) if len(layouts) > 1 else tokens

    return longest


def _only_full_blocks(original: Any) -> Any:
    def reach(self: Any, text: Any, limit: int, index: int, proof_limit: int | None) -> Any:
        tokens, blocks = original(self, text, limit, index, proof_limit)
        full = tokens // self.layout.spans[index]
        return full * self.layout.spans[index], blocks[:full]

    return reach


def _twice(original: Any) -> Any:
    def touch(self: Any, blocks: Any) -> None:
        blocks = list(blocks)
        original(self, blocks)
        original(self, blocks)

    return touch


def _only(condition: Callable[..., bool], otherwise: Any) -> Wrap:
    return lambda original: (
        lambda *args, **named: (
            otherwise(original, *args, **named) if condition(*args, **named) else original(*args, **named)
        )
    )


def _unpins_to_head(original: Any) -> Any:
    def unpin(self: Any, blocks: Any, on_reuse: Any) -> None:
        free = len(self.queue)
        original(self, blocks, on_reuse)
        self.queue = self.queue[free:] + self.queue[:free]

    return unpin


def _takes_one_less(original: Any) -> Any:
    def take_external(self: Any, request: Any, external: int, computed: int) -> None:
        original(self, request, external, computed)
        for row in self.tables[request.name]:
            if row and external and row[-1] != NULL:
                self.pool.free([row.pop()])

    return take_external


def _always_at_once(original: Any) -> Any:
    return lambda self, request: self.cache.free(request)


def _keeps_order(original: Any) -> Any:
    def step_processed(self: Any) -> None:
        self.processed += 1
        while self.pending and self.pending[0][0] <= self.processed:
            self.cache.pool.free(self.pending.popleft()[1])

    return step_processed


def _keeps_spares_in_place(original: Any) -> Any:
    def extend(pool_: Any, group: Any, span: int, tokens: int, row: list[int], running: Any) -> list[int]:
        return original(pool_, replace(group, spares=0), span, tokens, row, running)  # type: ignore[no-any-return]

    return extend


def _keeps_transient_checkpoints(original: Any) -> Any:
    def checkpoint(self: Any, *arguments: Any) -> Any:
        interval, self.registrar.interval = self.registrar.interval, None
        try:
            return original(self, *arguments)
        finally:
            self.registrar.interval = interval

    return checkpoint


def _counts_one_less(original: Any) -> Any:
    def schedule(self: Any, name: str, drafts: int) -> None:
        original(self, name, drafts)
        self.requests[name].computed -= 1

    return schedule


def _says_twice(original: Any) -> Any:
    def process(self: Any, name: str, said: int) -> None:
        original(self, name, said)
        self.requests[name].length += said > 0

    return process


def _in_order(original: Any) -> Any:
    def free(self: Any, request: Any) -> None:
        held = self.held.pop(request.name, None)
        for row in held.rows if held else ():
            self._release(row, by_hash=False)

    return free


P, C, D = pool.BlockPool, cache.CacheManager, deferred.DeferredFrees
F, R, S = lookup.Finder, registration.Registrar, steps.Steps
UNMASKED = _only(lambda *a: a[4] is None, lambda original, *a: None)

_CLAUSES: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "KEY-1": ("pool", changed(keys.Text, "append", lambda f: lambda self, t: (f(self, t), self.hashes.pop())[0])),
    "KEY-2": ("pool", without(keys.Content, "extras", ())),
    "KEY-3": (
        "pool",
        changed(keys.Text, "view", lambda f: lambda self, n: f(self, n)[: None if n == self.hash_tokens else -1]),
    ),
    "POOL-1": ("pool", changed(P, "_initial_queue", lambda f: lambda self: f(self)[::-1])),
    "POOL-2": ("pool", changed(P, "allocate", lambda f: lambda self, n: f(self, n)[::-1])),
    "POOL-3": (
        "pool",
        changed(P, "_refuse_too_many", lambda f: lambda self, n: f(self, n + (n > 0 and n == len(self.queue)))),
    ),
    "POOL-5": ("pool", changed(P, "touch", _twice)),
    "POOL-6": ("pool", changed(P, "free", _drops_last)),
    "POOL-7": ("pool", changed(P, "_queue_up", lambda f: lambda self, freed, at_head: f(self, freed[::-1], at_head))),
    "POOL-8": ("pool", changed(P, "usage", lambda f: lambda self: f(self) / 2)),
    "POOL-9": ("pool", changed(P, "unpin", _unpins_to_head)),
    "POOL-10": ("pool", without(P, "_end_pins")),
    "POOL-11": ("pool", changed(P, "is_writable", lambda f: lambda self, b: self.blocks[b].references == 1)),
    "PREFIX-1": ("pool", changed(P, "find", lambda f: lambda self, h, g: f(self, h, g) if len(g) > 1 else None)),
    "PREFIX-2": ("pool", changed(P, "register", lambda f: lambda self, *a: f(self, *a[:-1]))),
    "PREFIX-3": (
        "pool",
        changed(P, "register_tail", lambda f: lambda self, *a, replace=False: f(self, *a, replace=True)),
    ),
    "PREFIX-4": ("pool", changed(P, "allocate", _forgets_nothing)),
    "PREFIX-5": ("pool", changed(P, "evict", _drops_last)),
    "PREFIX-6": ("pool", without(P, "move_hashes")),
    "RESET-1": ("pool", without(P, "reset", False)),
    "TELL-1": ("pool", changed(P, "take_events", lambda f: lambda self: f(self)[1:])),
    "TELL-2": (
        "pool",
        changed(P, "_tell_stored", lambda f: lambda self, text, chosen, first, *a: f(self, text, chosen, 0, *a)),
    ),
    "TELL-3": ("pool", changed(P, "_tell_removed", lambda f: lambda self, block, keys: f(self, block, keys[::-1]))),
    "TELL-4": ("pool", changed(P, "tell_hit", lambda f: lambda self, text, n, *a: f(self, text, n - 1, *a))),
    "SCALE-1": ("cache", changed(scaling, "span_tokens", lambda f: lambda group, cp, profile: group.block_tokens)),
    "SCALE-2": ("scaling", without(scaling, "refuse_unsupported")),
    "SCALE-3": ("cache", changed(scaling, "alignment_tokens", lambda f: lambda *a: 2 * f(*a))),
    "SCALE-4": ("cache", changed(scaling, "hash_tokens", lambda f: lambda *a: f(*a) // 2)),
    "SCALE-9": ("cache", changed(scaling, "hit_tokens", lambda f: lambda *a: scaling.alignment_tokens(*a[:-1]))),
    "SCALE-5": ("scaling", changed(scaling, "slot", lambda f: lambda p, span, ranks, turn: f(p, span, ranks, 1))),
    "SCALE-6": ("scaling", changed(scaling, "tokens_on_rank", lambda f: lambda n, *a: f(n + 1, *a))),
    "SCALE-7": ("scaling", changed(scaling, "whole_blocks", lambda f: groups.blocks_for)),
    "SCALE-8": ("scaling", changed(scaling, "lazy_target_blocks", lambda f: lambda *a: f(*a) // 2)),
    "WINDOW-1": ("cache", changed(groups, "skipped_tokens", lambda f: lambda group, n: f(group, n - 1) if n else 0)),
    "WINDOW-2": ("cache", without(C, "_release_skipped")),
    "HIT-1": ("cache", changed(groups, "needed_for_hit", lambda f: lambda group, span, n: range(n // span))),
    "HIT-2": ("cache", changed(groups, "proof_for_eagle", lambda f: lambda group, span, n: range(0))),
    "HIT-3": ("cache", changed(F, "lookup", _reads_anyway)),
    "HIT-4": ("cache", changed(F, "longest", _shorter_together)),
    "HIT-5": (
        "cache",
        changed(
            F,
            "proof_limit_of",
            lambda f: lambda self, t, n: n if f(self, t, n) > n else n + (len(self.layout.groups) > 1),
        ),
    ),
    "HIT-6": ("cache", changed(F, "_hit_row", lambda f: lambda self, *a: f(self, *a)[:-1])),
    "HIT-7": ("cache", without(F, "_parting", 0)),
    "HIT-8": ("cache", changed(F, "reach", _only_full_blocks)),
    "NEED-1": (
        "cache",
        changed(C, "blocks_needed", lambda f: lambda self, *a, **n: f(self, *a, **n) + ("capped" not in n)),
    ),
    "NEED-2": ("cache", without(R, "is_fresh", False)),
    "NEED-3": ("cache", without(groups, "admission_cap")),
    "NEED-5": ("cache", without(C, "copies_needed", 0)),
    "NEED-4": ("cache", without(R, "new_step")),
    "NEED-6": ("cache", changed(C, "checkpoint", _keeps_transient_checkpoints)),
    "ALLOC-1": ("cache", without(C, "_refuse_nothing")),
    "ALLOC-2": ("cache", without(C, "_watermark", 0)),
    "ALLOC-3": ("cache", without(C, "_fits", True)),
    "ALLOC-4": ("cache", changed(C, "_slots", lambda f: lambda self, n, lookahead: f(self, n, 0))),
    "ALLOC-5": ("cache", changed(P, "touch", _twice)),
    "ALLOC-6": ("cache", changed(C, "_take_external", _takes_one_less)),
    "ALLOC-7": (
        "cache",
        changed(C, "_extend", lambda f: lambda self, r, n, *a: f(self, r, n + min(self.spans), *a)),
    ),
    "ALLOC-8": ("cache", changed(C, "allocate", lambda f: lambda self, *a, reserved, **n: f(self, *a, **n))),
    "ALLOC-9": ("cache", without(states, "own_tail")),
    "ALLOC-10": ("cache", without(C, "take_copies", [])),
    "REG-1": (
        "cache",
        changed(
            R,
            "register",
            _only(
                lambda self, *a, **named: len(self.layout.groups) == 1,
                lambda f, self, r, n, *a, **named: f(self, r, n - 1, *a, **named),
            ),
        ),
    ),
    "REG-2": ("cache", changed(groups, "worth_registering", UNMASKED)),
    "REG-3": ("cache", changed(R, "_registrable", lambda f: lambda self, n, i: n)),
    "REG-4": ("cache", without(R, "_boundaries", ())),
    "REG-5": ("cache", without(R, "_register_tail")),
    "REG-6": ("cache", without(R, "_register_prompt_state")),
    "REG-7": ("cache", without(R, "_ends_at_junction", False)),
    "REG-8": ("cache", without(R, "_register_checkpoint")),
    "REG-9": ("cache", without(R, "_wants_checkpoint", True)),
    "STATE-1": ("cache", changed(states, "states_needed", lambda f: lambda *a: f(*a) + 1)),
    "STATE-2": ("cache", changed(states, "extend_states", _keeps_spares_in_place)),
    "STATE-3": ("cache", without(states, "states_passed", ([], []))),
    "STATE-4": ("cache", without(states, "leave_state")),
    "STATE-5": ("cache", changed(checkpoints, "checkpoint_end", lambda f: lambda *a: f(*a) - 2)),
    "STATE-6": ("cache", without(checkpoints, "checkpoint_in")),
    "STEP-1": ("scheduler", changed(S, "schedule", _counts_one_less)),
    "STEP-2": ("scheduler", without(S, "_take_back")),
    "STEP-3": ("scheduler", changed(S, "admit", lambda f: lambda self, name, hit: f(self, name, 0))),
    "STEP-4": ("scheduler", changed(S, "process", _says_twice)),
    "STEP-5": ("scheduler", without(S, "lookahead", 0)),
    "FREE-1": ("cache", changed(C, "free", _in_order)),
    "FREE-2": ("cache", changed(C, "take", lambda f: lambda self, r: f(self, r)[::-1])),
    "FREE-3": ("cache", changed(D, "free", _always_at_once)),
    "FREE-5": ("cache", without(D, "release_copies")),
    "FREE-4": ("cache", changed(D, "step_processed", _keeps_order)),
}
"""Clause -> what to run, and a defect of the model that only this clause notices."""

DEFECTS = {
    f"model_breaks_{clause}": Defect(
        "vllm-core", "model", clause, f"The model does otherwise than {clause} says.", plant, level, in_model=True
    )
    for clause, (level, plant) in _CLAUSES.items()
}
