"""The KV cache manager: what a request takes, and what it gives back.

A request's *block table* has one row for each group. A row names, for each block's worth of tokens from the
start of the text on, the block that holds it, or the null block where nobody will read it any more. Rows
only grow at their end.

``CacheManager`` is also a fake: it has no device and no engine behind it, and can stand for the real one in
a unit test. What it finds is in ``lookup``, what it registers in ``registration``.

Not modelled: what ``groups``, ``states`` and ``checkpoints`` leave out; encoder blocks; zeroing; external tokens after
a hit that ends inside a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvspec.model.checkpoints import Checkpoint, checkpoint_in
from kvspec.model.clauses import clause
from kvspec.model.groups import Group, Kind, admission_cap, blocks_for, skipped_tokens
from kvspec.model.keys import PLAIN, Content, Text
from kvspec.model.layout import Layout
from kvspec.model.lookup import Finder
from kvspec.model.pool import NULL, BlockPool, Event
from kvspec.model.profile import FreeOrder, Profile
from kvspec.model.registration import Held, Registrar
from kvspec.model.requests import Hit, Request
from kvspec.model.scaling import ALONE, ContextParallel, Unsupported, whole_blocks
from kvspec.model.states import Copy, Running, extend_states, own_tail, states_needed, states_passed


class CacheManager:
    """A KV cache manager. Requests are told apart by their names.

    Args:
        groups: the attention groups, in the order of their ids.
        num_blocks: blocks of the pool, the null block included.
        profile: what differs between releases.
        cp: sizes of context parallelism.
        caching: prefix caching.
        max_tokens: the longest text that a request can have.
        in_flight_tokens: the most tokens that can be in flight at once; None for ``max_tokens``.
        watermark: the share of the pool that is kept free on admission.
        interval: sparse retention, see ``worth_registering``; None for none.
        unit: tokens of a hash block; 0 for as many as possible.
        junctions: whether states are registered where requests part.
        events: whether events are recorded.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        profile: Profile,
        *,
        cp: ContextParallel = ALONE,
        caching: bool = True,
        max_tokens: int = 1024,
        in_flight_tokens: int | None = None,
        watermark: float = 0.0,
        interval: int | None = None,
        unit: int = 0,
        junctions: bool = False,
        events: bool = False,
    ) -> None:
        every_state = caching and any(group.kind is Kind.MAMBA and not group.align for group in groups)
        if every_state and not profile.caches_every_state:
            raise Unsupported("Mamba states that are cached after every block")
        self.layout = Layout(groups, profile, cp, unit)
        self.groups, self.spans = self.layout.groups, self.layout.spans
        if every_state and profile.caches_every_state_if_spans_are_equal and len(set(self.spans)) > 1:
            raise Unsupported("Mamba states that are cached after every block, beside blocks that span other tokens")
        self.profile = profile
        self.caching = caching
        self.max_tokens = max_tokens
        self.in_flight_tokens = max_tokens if in_flight_tokens is None else in_flight_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        self.pool = BlockPool(num_blocks, profile, self.layout.hash_tokens, caching=caching, events=events)
        self.finder = Finder(self.layout, self.pool)
        self.registrar = Registrar(self.layout, self.pool, interval, junctions)
        self.held: dict[str, Held] = {}
        self.copies: list[list[Copy]] = [[] for _ in groups]
        """Per group: what must be copied before the step runs."""

    @property
    def tables(self) -> dict[str, list[list[int]]]:
        """The block table of each request that has one."""
        return {name: held.rows for name, held in self.held.items()}

    def text(self, tokens: Iterable[int], content: Content = PLAIN, lookahead: int = 0) -> Text:
        """Return a text whose hash blocks have the size that this manager uses."""
        return Text(list(tokens), self.layout.hash_tokens, content, lookahead)

    def lookup(self, request: Request) -> Hit:
        """HIT-3."""
        return self.finder.lookup(request)

    def register(self, request: Request, tokens: int) -> None:
        """REG-1."""
        self.registrar.register(request, tokens, self.held[request.name])

    def new_step(self) -> None:
        """NEED-4."""
        self.registrar.new_step()

    # Allocation

    @clause
    def allocate(
        self,
        request: Request,
        new_tokens: int,
        hit: Hit | None = None,
        *,
        lookahead: int = 0,
        external: int = 0,
        delay_registration: bool = False,
        must_fit: bool = False,
        reserved: int = 0,
        others_run: bool = True,
    ) -> tuple[list[int], ...] | None:
        """ALLOC-8. A step is refused (None) if it takes more blocks than are free, the reserved ones and the
        watermark left out.

        Else the request gets what it needs for the step. Refused or not, it has lost what it doesn't read
        any more.

        Args:
            request: whose ``computed`` tokens don't include the hit's and the external ones yet.
            new_tokens: tokens that the step will compute, drafts included.
            hit: what a lookup has just found; only for a request that holds nothing.
            lookahead: further tokens that need a slot, for a draft model.
            external: tokens after the hit whose keys and values come from elsewhere.
            delay_registration: register nothing now; ``register`` is called when they have come.
            must_fit: refuse unless the whole request would fit.
            reserved: blocks that must stay free.
            others_run: whether other requests run already.

        Returns:
            The new blocks of each group, those for external tokens left out.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots.
        Releases: all.
        """
        hit = hit or Hit(tuple([] for _ in self.groups), 0, 0)
        self._refuse_nothing(new_tokens, hit, external)
        local = request.computed + hit.tokens
        computed = min(local + external, self.max_tokens)
        watermark = self._watermark(request, others_run)
        if must_fit and not self._fits(request, hit, computed, watermark):
            return None
        slots = self._slots(computed + new_tokens, lookahead)
        self._release_skipped(request, computed)
        needed = self.blocks_needed(request, slots, hit, local + external, main=computed + new_tokens)
        if needed + watermark > len(self.pool.queue) - (reserved if self.profile.reserve else 0):
            return None
        checkpoints = self.checkpoints(request, computed, computed + new_tokens)
        if any(hit.blocks) or external:
            self._adopt(request, hit, local + external)
            self._take_external(request, external, local + external)
        new = self._extend(request, slots, computed + new_tokens, checkpoints)
        if not delay_registration:
            known = len(request.text.tokens)
            tokens, held = computed + new_tokens, self.held[request.name]
            self.registrar.register(request, min(tokens, known), held, whole_chunk=tokens <= known)
        return new

    @clause
    def _refuse_nothing(self, new_tokens: int, hit: Hit, external: int) -> None:
        """ALLOC-1. A step must compute a token, or take over external ones (or, in later releases, a hit);
        else it is refused (ValueError).

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots.
        Releases: all.
        """
        adopts = hit.tokens if self.profile.adopts_without_new_tokens else 0
        if not (new_tokens or external or adopts):
            raise ValueError("nothing to compute and nothing to take over")

    @clause
    def _watermark(self, request: Request, others_run: bool) -> int:
        """ALLOC-2. A request that is admitted while others run leaves the watermark free. Blocks.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots.
        Releases: 0.24.0 and later.
        """
        return self.watermark_blocks if self.profile.watermark and others_run and request.waiting else 0

    @clause
    def _fits(self, request: Request, hit: Hit, computed: int, watermark: int) -> bool:
        """ALLOC-3. On admission the whole request must fit, as far as it can hold blocks at once, whatever
        is reserved for others.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots
        (full_sequence_must_fit).
        Releases: all (0.20.2: can_fit_full_sequence).
        """
        tokens = min(len(request.text.tokens), self.max_tokens)
        needed = self.blocks_needed(request, tokens, hit, computed, main=tokens, capped=True)
        return needed + watermark <= len(self.pool.queue)

    @clause
    def _slots(self, tokens: int, lookahead: int) -> int:
        """ALLOC-4. A step needs slots for the computed tokens, the new ones and the lookahead, but none
        beyond the longest text. Tokens.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots.
        Releases: all.
        """
        return min(tokens + lookahead, self.max_tokens)

    @clause
    def _release_skipped(self, request: Request, computed: int) -> None:
        """WINDOW-2. What no later token reads is released first, even if the step is then refused; what is
        in flight still reads.

        Only whole blocks go, from the last one back to the first that has gone before; null blocks take
        their place.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, remove_skipped_blocks.
        Releases: all.
        """
        settled = max(0, computed - request.in_flight)
        for index, row in enumerate(self.tables.get(request.name, [])):
            group, span = self.groups[index], self.spans[index]
            if group.align:
                self._release_states(request, settled, index)
                continue
            end = min(whole_blocks(skipped_tokens(group, settled), span), len(row))
            start = end
            while start and row[start - 1] != NULL:
                start -= 1
            released = row[start:end]
            row[start:end] = [NULL] * len(released)
            self._release(released[::-1], by_hash=True)

    def _release_states(self, request: Request, settled: int, index: int) -> None:
        group, held = self.groups[index], self.held[request.name]
        row, running = held.rows[index], held.running[index]
        settled = max(0, settled - group.spares) if self.profile.discounts_drafts else settled
        passed, source = states_passed(group, self.spans[index], settled, row, running, self.profile)
        for places, by_hash in (passed, True), (source, False):
            released = [row[place] for place in places]
            for place in places:
                row[place] = NULL
            self._release(released, by_hash=by_hash)

    @clause
    def blocks_needed(
        self, request: Request, slots: int, hit: Hit, computed: int, *, main: int, capped: bool = False
    ) -> int:
        """NEED-1. A step takes from the free queue what the table lacks for its slots, and the blocks of the
        hit that are free now.

        Skipped blocks are needed by nobody, hit or not. ``computed`` includes the hit and the external
        tokens, ``main`` the new ones too; ``capped`` is for the whole request. Blocks.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, get_num_blocks_to_allocate.
        Releases: all.
        """
        needed = 0
        for index, (group, span) in enumerate(zip(self.groups, self.spans, strict=True)):
            if self.registrar.is_fresh(hit.blocks[index], index):
                needed += len(self.pool.blocks) + 1
                continue
            if group.align:
                needed += self._states_needed(request, hit, computed, main, index)
                continue
            required = blocks_for(slots, span)
            cap = admission_cap(group, self.in_flight_tokens, self.max_tokens) if capped else None
            required = required if cap is None else min(required, cap)
            held = len(self.held[request.name].rows[index]) if request.name in self.held else 0
            skipped = whole_blocks(skipped_tokens(group, computed), span)
            needed += max(required - max(held + len(hit.blocks[index]), skipped), 0)
            needed += sum(self.pool.is_free(block) for block in hit.blocks[index][skipped:])
            needed += self.copies_needed(hit, index)
        return needed

    @clause
    def copies_needed(self, hit: Hit, index: int) -> int:
        """NEED-5. A hit that ends inside a block of a group takes one block more: the request goes on in a copy.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, _has_partial_local_hit.
        Releases: 0.26.0 and later.
        """
        return int(bool(hit.blocks[index]) and hit.tokens % self.spans[index] > 0)

    def _states_needed(self, request: Request, hit: Hit, computed: int, main: int, index: int) -> int:
        row, running = hit.blocks[index], Running()
        count = len(row)
        if request.name in self.held:
            count += len(self.held[request.name].rows[index])
            running = self.held[request.name].running[index]
        copies = max(self.copies_needed(hit, index), int(running.shared is not None))
        checkpoint = self.checkpoint(request, computed, main, index)
        group, span = self.groups[index], self.spans[index]
        lacking = states_needed(group, span, main, count, copies, running, checkpoint, self.profile)
        return lacking + sum(self.pool.is_free(block) for block in row)

    def checkpoints(self, request: Request, computed: int, tokens: int) -> list[Checkpoint | None]:
        """Return what a step from ``computed`` to ``tokens`` tokens keeps in the middle of its chunk, per group."""
        return [self.checkpoint(request, computed, tokens, index) for index in range(len(self.groups))]

    @clause
    def checkpoint(self, request: Request, computed: int, tokens: int, index: int) -> Checkpoint | None:
        """NEED-6. Where sparse retention keeps resends only, a step takes a block for a checkpoint only if it computes
        the prompt to its end.

        After a preemption that is what was said as well, but for the last token. ``tokens`` are those after the step.
        Returns the checkpoint, or None for none.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, KVCacheCoordinator.get_num_blocks_to_allocate.
        Releases: 0.31.0 and later; before, all steps that can (``STATE-6``).
        """
        resends_only = self.registrar.interval == 0 and self.profile.checkpoints_only_at_prompt_end
        if resends_only and tokens < max(request.prompt_tokens, len(request.text.tokens) - 1):
            return None
        held = self.held.get(request.name)
        row, allocated = (held.rows[index], held.running[index].allocated) if held else ([], False)
        return checkpoint_in(self.layout, index, row, computed, tokens, allocated=allocated)

    @clause
    def _adopt(self, request: Request, hit: Hit, computed: int) -> None:
        """ALLOC-5. A hit is touched in every group before any block is taken, without what is skipped; that
        becomes null.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, add_local_computed_blocks.
        Releases: all.
        """
        held = self._hold(request)
        for index, (group, span) in enumerate(zip(self.groups, self.spans, strict=True)):
            skipped = whole_blocks(skipped_tokens(group, computed), span)
            used = hit.blocks[index][skipped:]
            self.pool.touch(used)
            held.rows[index] = [NULL] * skipped + used
            held.passed[index] = len(held.rows[index])
            if used and hit.tokens % span:
                held.running[index].shared = held.passed[index] = hit.tokens // span

    def _hold(self, request: Request) -> Held:
        """Return what a request holds; it is nothing yet if the request is new."""
        new = Held([[] for _ in self.groups], [0] * len(self.groups), [Running() for _ in self.groups])
        return self.held.setdefault(request.name, new)

    @clause
    def _take_external(self, request: Request, external: int, computed: int) -> None:
        """ALLOC-6. External tokens get new blocks, where the next token reads them, to the end of the last
        one's block.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, allocate_external_computed_blocks.
        Releases: all.
        """
        for group, span, row in zip(self.groups, self.spans, self.held[request.name].rows, strict=True):
            if min(external, computed - skipped_tokens(group, computed)) > 0:
                row += self.pool.allocate(max(0, blocks_for(computed, span) - len(row)))

    @clause
    def _extend(
        self, request: Request, slots: int, main: int, checkpoints: Sequence[Checkpoint | None]
    ) -> tuple[list[int], ...]:
        """ALLOC-7. Then each group's row is extended by new blocks, group by group, until it has room for
        the slots.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, allocate_new_blocks.
        Releases: all.
        """
        held, new = self._hold(request), []
        for index, (group, span) in enumerate(zip(self.groups, self.spans, strict=True)):
            row, running = held.rows[index], held.running[index]
            running.checkpoint = checkpoints[index]
            if group.align:
                blocks, copy = extend_states(self.pool, group, span, main, row, running)
            else:
                copy, before = own_tail(self.pool, row, running), len(row)
                row += self.pool.allocate(max(0, blocks_for(slots, span) - before))
                blocks = [copy.target, *row[before:]] if copy else row[before:]
            if copy:
                self.copies[index].append(copy)
                self.registrar.fresh.update(filter(None, [self.pool.blocks[copy.target].hash]))
            new.append(blocks)
        return tuple(new)

    @clause
    def take_copies(self) -> list[Copy]:
        """ALLOC-10. The copies of a step are handed over once, group by group; both blocks of each are held until it
        has run.

        Whoever takes them releases one reference to each block then, see ``DeferredFrees.release_copies``.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.take_kv_cache_block_copies.
        Releases: 0.26.0 and later.
        """
        copies = [copy for group in self.copies for copy in group]
        self.copies = [[] for _ in self.groups]
        return copies

    # Giving back

    @clause
    def free(self, request: Request) -> None:
        """FREE-1. A request gives back its blocks group by group, each row from its last block: a prefix
        outlives what follows it.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.free.
        Releases: all.
        """
        held = self.held.pop(request.name, None)
        for group, row in zip(self.groups, held.rows if held else (), strict=False):
            self._release(row[::-1], by_hash=group.kind is Kind.SLIDING_WINDOW)

    def preempt(self, request: Request) -> None:
        """Free a request that will start again: what it registered can still be found, by itself too."""
        self.free(request)
        request.computed = 0
        request.waiting = True

    @clause
    def take(self, request: Request) -> list[int]:
        """FREE-2. A request's blocks can be taken from it without being released: all rows, one after the
        other.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.pop_blocks_for_free.
        Releases: 0.24.0 and later.
        """
        held = self.held.pop(request.name, None)
        return [block for row in (held.rows if held else ()) for block in row if block != NULL]

    def _release(self, blocks: list[int], *, by_hash: bool) -> None:
        """Release blocks; where it is the caller's choice (``FreeOrder.CALLER``), ``by_hash`` puts those
        without a hash first.
        """
        if self.profile.free_order is FreeOrder.CALLER and by_hash:
            unhashed = [block for block in blocks if self.pool.blocks[block].hash is None]
            self.pool.free([block for block in blocks if block not in unhashed])
            self.pool.free(unhashed, at_head=True)
        else:
            self.pool.free(blocks)

    def evict(self, blocks: Iterable[int]) -> None:
        """PREFIX-5."""
        self.pool.evict(blocks)

    def reset(self) -> bool:
        """RESET-1."""
        return self.pool.reset()

    def take_events(self) -> list[Event]:
        """TELL-1."""
        return self.pool.take_events()
