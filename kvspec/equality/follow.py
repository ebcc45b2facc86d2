"""The model follows the KV cache manager of a running engine: each call of the real scheduler, and of the connector
on the block pool, is made to ``kvspec.model`` too; answers and everything that can be seen are compared.

So what the equality machine (``kvspec.equality.world``) shows for calls that it draws holds for the calls that an
engine makes. Engines with full-attention, sliding-window and Mamba groups can be followed.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvspec.equality.compare import Names, compare_events, compare_pools
from kvspec.model import CacheManager, Content, ContextParallel, Group, Hit, Kind, Request, agree, profile_for
from kvspec.model.clauses import ClauseBroken
from kvspec.targets.vllm import core as target

Arguments = dict[str, Any]


class Follower:
    """Follows a ``KVCacheManager`` from its construction on.

    Args:
        manager: the real manager; its methods, and those of its pool, are wrapped in place.
        hash_tokens: tokens per hash block.

    A difference is raised as ClauseBroken out of the call that showed it; nothing is followed after that.
    """

    def __init__(self, manager: Any, hash_tokens: int) -> None:
        self.manager = manager
        self.calls: Counter[str] = Counter()
        """How often each method was followed."""
        self.broken: ClauseBroken | None = None
        self.clauses = dict(_CLAUSES)
        self.hits: dict[str, int] = {}
        """Tokens that each request's last look-up has found."""
        self.names = Names()
        self.model = _model_of(manager)
        agree("SCALE-4", self.model.layout.hash_tokens, hash_tokens)
        self._requests: dict[str, Request] = {}
        self._inside = False
        for owner, arms in (manager, _MANAGER_ARMS), (manager.block_pool, _POOL_ARMS):
            for name, arm in arms.items():
                if hasattr(owner, name):
                    self._wrap(owner, name, arm)

    def _wrap(self, owner: Any, name: str, arm: Arm) -> None:
        method = getattr(owner, name)
        bind = binding(method)

        @functools.wraps(method)
        def followed(*positional: Any, **named: Any) -> Any:
            if self._inside or self.broken:
                return method(*positional, **named)
            bound = bind(*positional, **named)
            _hold_iterables(bound.arguments)
            self._inside = True
            try:
                request = self._request_of(bound.arguments)
                expect = arm(self, request, bound.arguments)
                result = method(*bound.args, **bound.kwargs)
                self.calls[name] += 1
                self._compare(name, expect, result, bound.arguments)
            except ClauseBroken as broken:
                self.broken = broken
                raise
            finally:
                self._inside = False
            return result

        setattr(owner, name, followed)

    def _request_of(self, arguments: Arguments) -> Request | None:
        return self._synced(arguments["request"]) if "request" in arguments else None

    def _synced(self, real: Any) -> Request:
        """Return the model's request with the state that the real one has now."""
        request = self._requests.get(real.request_id)
        if request is None:
            content = Content(salt=real.cache_salt)
            request = Request(real.request_id, self.model.text([], content), real.num_prompt_tokens)
            self._requests[real.request_id] = request
        request.text.append(list(real.all_token_ids)[len(request.text.tokens) :])
        if self.model.caching:
            for index, span in enumerate(self.model.spans):
                actual = target.group_hashes(real, self.model.layout.hash_tokens, span)
                self.names.learn(index, request.text.view(span), actual, span // self.model.layout.hash_tokens)
                if self.model.profile.registers_tails:
                    self.names.learn(index, request.text.hashes, real.block_hashes)
        request.computed = real.num_computed_tokens
        request.in_flight = getattr(real, "num_in_flight_tokens", 0)
        request.waiting = real.status.name in ("WAITING", "PREEMPTED")
        request.reads_cache = not real.skip_reading_prefix_cache
        request.shared_prefix = getattr(real, "shared_prefix_boundary", 0)
        return request

    def _compare(self, name: str, expect: Any, result: Any, arguments: Arguments) -> None:
        clauses = self.clauses[name]
        if name == "take_events":
            compare_events(self.names, expect, [target.raw_event(event) for event in result])
        else:
            agree(clauses["answer"], expect, _ANSWERS.get(name, _plain)(result))
        seen = {part: clause for part, clause in clauses.items() if part != "answer"}
        compare_pools(self.names, self.model.pool, target.pool_state(self.manager.block_pool), seen)
        if "request" in arguments:
            real = arguments["request"].request_id
            rows = self.model.tables.get(real, [[] for _ in self.model.groups])
            agree(clauses["answer"], rows, list(self.manager.get_block_ids(real)))

    # What each call means to the model

    def _lookup(self, request: Request, arguments: Arguments) -> Any:
        hit = self.model.lookup(request)
        self.hits[request.name] = hit.tokens
        return hit if self.model.profile.retains_shared_prefix else hit[:2]

    def _allocate(self, request: Request, arguments: Arguments) -> Any:
        blocks = arguments["new_computed_blocks"]
        rows = tuple([block.block_id for block in row] for row in blocks.blocks) if blocks else ()
        return self.model.allocate(
            request,
            arguments["num_new_tokens"],
            Hit(rows or tuple([] for _ in self.model.groups), arguments["num_new_computed_tokens"], 0),
            lookahead=arguments["num_lookahead_tokens"],
            external=arguments["num_external_computed_tokens"],
            delay_registration=arguments["delay_cache_blocks"],
            must_fit=arguments.get("full_sequence_must_fit", False),
            reserved=arguments.get("reserved_blocks", 0),
            others_run=arguments.get("has_scheduled_reqs", True),
        )

    def _free(self, request: Request, arguments: Arguments) -> None:
        self.model.free(request)

    def _take(self, request: Request, arguments: Arguments) -> list[int]:
        return self.model.take(request)

    def _register(self, request: Request, arguments: Arguments) -> None:
        self.model.register(request, arguments["num_computed_tokens"])

    def _release_skipped(self, request: Request | None, arguments: Arguments) -> None:
        name, computed = list(arguments.values())[:2]
        if name not in self._requests:  # it ends before anything was done for it
            return
        settled = replace(self._requests[name], in_flight=0)
        self.model._release_skipped(settled, computed)

    def _evict(self, request: Request | None, arguments: Arguments) -> None:
        self.model.evict(arguments["block_ids"])

    def _reset(self, request: Request | None, arguments: Arguments) -> bool:
        return self.model.reset()

    def _new_step(self, request: Request | None, arguments: Arguments) -> None:
        self.model.new_step()

    def _take_events(self, request: Request | None, arguments: Arguments) -> Any:
        return self.model.take_events()

    def _touch(self, request: Request | None, arguments: Arguments) -> None:
        self.model.pool.touch(_ids(arguments["blocks"]))

    def _free_blocks(self, request: Request | None, arguments: Arguments) -> None:
        self.model.pool.free(_ids(arguments["ordered_blocks"]), at_head=arguments.get("prepend", False))


Arm = Callable[[Follower, Any, Arguments], Any]

_MANAGER_ARMS: dict[str, Arm] = {
    "get_computed_blocks": Follower._lookup,
    "allocate_slots": Follower._allocate,
    "free": Follower._free,
    "pop_blocks_for_free": Follower._take,
    "cache_blocks": Follower._register,
    "remove_skipped_blocks": Follower._release_skipped,
    "evict_blocks": Follower._evict,
    "reset_prefix_cache": Follower._reset,
    "new_step_starts": Follower._new_step,
    "take_events": Follower._take_events,
}
_POOL_ARMS: dict[str, Arm] = {"touch": Follower._touch, "free_blocks": Follower._free_blocks}


def binding(method: Callable[..., Any]) -> Callable[..., inspect.BoundArguments]:
    """Return what binds the arguments of a call to a method's parameters, defaults included."""
    signature = inspect.signature(method)

    def bind(*positional: Any, **named: Any) -> inspect.BoundArguments:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return bound

    return bind


def same(clause: str, **other: str) -> dict[str, str]:
    """Return that every part of what can be seen belongs to one clause, but for the others."""
    return {"answer": clause, "queue": clause, "references": clause, "hashes": clause} | other


_CLAUSES: dict[str, dict[str, str]] = {
    "get_computed_blocks": same("HIT-3", answer="HIT-4"),
    "allocate_slots": same("ALLOC-7", references="ALLOC-5", hashes="REG-1"),
    "free": same("FREE-1"),
    "pop_blocks_for_free": same("FREE-2"),
    "cache_blocks": same("REG-1"),
    "remove_skipped_blocks": same("WINDOW-2"),
    "evict_blocks": same("PREFIX-5"),
    "reset_prefix_cache": same("RESET-1"),
    "new_step_starts": same("NEED-4"),
    "take_events": same("TELL-1"),
    "touch": same("POOL-5"),
    "free_blocks": same("POOL-7", references="POOL-6"),
}
"""Method -> the clause that each part of what can be seen belongs to after it."""


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def _rows(blocks: Any) -> tuple[list[int], ...] | None:
    return None if blocks is None else tuple(_ids(row) for row in blocks.blocks)


def _plain(result: Any) -> Any:
    return result


_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "get_computed_blocks": lambda result: (_rows(result[0]), *result[1:]),
    "allocate_slots": _rows,
    "pop_blocks_for_free": lambda blocks: [block.block_id for block in blocks if not block.is_null],
}
"""Method -> its answer in the model's form."""


def _hold_iterables(arguments: Arguments) -> None:
    """Make lists of arguments that can be iterated only once."""
    for name in ("blocks", "ordered_blocks"):
        if name in arguments and not isinstance(arguments[name], Sequence):
            arguments[name] = list(arguments[name])


def _model_of(manager: Any) -> CacheManager:
    """Return the model of a manager that has just been constructed."""
    eagle = manager.coordinator.eagle_group_ids if manager.use_eagle else ()
    groups = [
        replace(_group_of(group.kv_cache_spec), eagle=index in eagle)
        for index, group in enumerate(manager.kv_cache_config.kv_cache_groups)
    ]
    pool, single = manager.block_pool, manager.coordinator.single_type_managers[0]
    return CacheManager(
        groups,
        pool.num_gpu_blocks,
        profile_for(target.release()),
        cp=ContextParallel(single.pcp_world_size, single.dcp_world_size),
        caching=manager.enable_caching,
        max_tokens=manager.max_model_len,
        in_flight_tokens=_in_flight_tokens(groups, manager),
        events=pool.enable_kv_cache_events,
    )


def _group_of(spec: Any) -> Group:
    if hasattr(spec, "mamba_cache_mode"):
        return Group(Kind.MAMBA, spec.block_size, align=spec.mamba_cache_mode == "align")
    window = getattr(spec, "sliding_window", None)
    return Group(Kind.SLIDING_WINDOW if window else Kind.FULL, spec.block_size, window or 0)


def _in_flight_tokens(groups: Sequence[Group], manager: Any) -> int:
    """Return the most tokens in flight with which every window has the cap that it has (see ``admission_cap``)."""
    most: int = manager.max_model_len
    for group, single in zip(groups, manager.coordinator.single_type_managers, strict=True):
        name = "max_admission_blocks_per_request"
        cap = getattr(single, name) if hasattr(single, name) else getattr(single, f"_{name}")  # up to 0.30.0
        if group.kind is Kind.SLIDING_WINDOW and cap is not None:
            most = min(most, (cap - 1) * group.block_tokens - group.reach + 1)
    return most
