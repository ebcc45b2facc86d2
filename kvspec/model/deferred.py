"""Deferred frees: blocks whose release waits for the steps that may still write or read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvspec.model.cache import CacheManager
from kvspec.model.clauses import clause
from kvspec.model.requests import Request
from kvspec.model.states import Copy


class DeferredFrees:
    """Gives blocks back only when the steps that may still write them have been processed.

    Used while a connector loads into blocks that aren't ordered after the engine's own writes, and steps
    overlap.
    """

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.scheduled = 0
        """The number of the last step that was scheduled."""
        self.processed = 0
        """The number of the last step whose output was processed."""
        self.pending: deque[tuple[int, list[int]]] = deque()

    @clause
    def free(self, request: Request) -> None:
        """FREE-3. A request whose last step has been processed gives back its blocks at once; else when the
        last scheduled step has been.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler._free_request_blocks.
        Releases: 0.24.0 and later.
        """
        if request.last_step <= self.processed:
            self.cache.free(request)
        elif blocks := self.cache.take(request):
            self.pending.append((self.scheduled, blocks))

    @clause
    def release_copies(self, copies: Iterable[Copy]) -> None:
        """FREE-5. The blocks of copies, source and target of each in turn, are given back when the step that runs the
        copies has been processed.

        Called before that step counts as scheduled.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler._free_cow_retained_blocks.
        Releases: 0.26.0 and later.
        """
        blocks = [block for copy in copies for block in copy]
        if blocks:
            self.pending.append((self.scheduled + 1, blocks[::-1]))

    @clause
    def step_processed(self) -> None:
        """FREE-4. Deferred blocks are released in the order in which they were given up, each request's last
        block of its last group first.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler._drain_deferred_frees.
        Releases: 0.24.0 and later.
        """
        self.processed += 1
        while self.pending and self.pending[0][0] <= self.processed:
            self.cache.pool.free(self.pending.popleft()[1][::-1])
