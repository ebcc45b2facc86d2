"""The KV cache manager: what a request finds, what it takes, what it registers for others, and what it gives
back.

A request's *block table* has one row for each group. A row names, for each block's worth of tokens from the
start of the text on, the block that holds it, or the null block where nobody will read it any more. Rows
only grow at their end.

``CacheManager`` is also a fake: it has no device and no engine behind it, and can stand for the real one in
a unit test.

Not modelled: what ``groups`` and ``states`` leave out; encoder blocks; zeroing; the KV connector's own lookup;
multi-module drafting; the reports of hits (0.26.0 and later) beyond ``BlockPool.tell_hit``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvspec.model.clauses import clause
from kvspec.model.groups import (
    Group,
    Kind,
    admission_cap,
    blocks_for,
    needed_for_hit,
    proof_for_eagle,
    skipped_tokens,
    worth_registering,
)
from kvspec.model.keys import PLAIN, Content, Key, Text
from kvspec.model.pool import NULL, BlockPool, Event
from kvspec.model.profile import FreeOrder, Profile
from kvspec.model.scaling import (
    ALONE,
    ContextParallel,
    Unsupported,
    alignment_tokens,
    hash_tokens,
    refuse_unsupported,
    span_tokens,
    whole_blocks,
)
from kvspec.model.states import Running, extend_states, states_needed, states_passed


@dataclass
class Request:
    """What the manager needs to know about a request. Its owner keeps it up to date."""

    name: str
    text: Text
    prompt_tokens: int
    computed: int = 0
    """Tokens that have their keys and values, or will have when what is in flight has run; drafts
    included.
    """
    in_flight: int = 0
    """Those of them whose step hasn't been processed yet."""
    reads_cache: bool = True
    waiting: bool = True
    """Not running: new, or preempted."""
    shared_prefix: int = 0
    """What the last lookup said about where this request parts from an earlier one; 0 for nothing."""
    last_step: int = 0
    """The last step that it was scheduled in."""


class Hit(NamedTuple):
    """What a lookup has found. It holds no references: the blocks can be gone before they are used."""

    blocks: tuple[list[int], ...]
    tokens: int
    shared_prefix: int
    """The longest hit of the first group alone, if the others cut it short; else 0."""


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
        events: bool = False,
    ) -> None:
        refuse_unsupported(groups, cp, profile)
        every_state = any(group.kind is Kind.MAMBA and not group.align for group in groups)
        if caching and not profile.caches_every_state and every_state:
            raise Unsupported("Mamba states that are cached after every block")
        self.groups = tuple(groups)
        self.profile = profile
        self.caching = caching
        self.max_tokens = max_tokens
        self.in_flight_tokens = max_tokens if in_flight_tokens is None else in_flight_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        self.interval = interval
        self.spans = [span_tokens(group, cp, profile) for group in groups]
        self.alignment = alignment_tokens(groups, cp, profile)
        self.hash_tokens = hash_tokens(groups, cp, profile)
        self.mates = [
            [index for index, other in enumerate(groups) if other.layout() == group.layout()] for group in groups
        ]
        self.drops = [any(groups[mate].eagle for mate in mates) for mates in self.mates]
        self.pool = BlockPool(num_blocks, profile, self.hash_tokens, caching=caching, events=events)
        self.tables: dict[str, list[list[int]]] = {}
        self.running: dict[str, list[Running]] = {}
        """Per request and group: see ``states``."""
        self.passed: dict[str, list[int]] = {}
        """Per request and group: the blocks from the start on that needn't be considered for registration
        any more.
        """
        self.fresh: set[Key] = set()
        """What Mamba groups have registered in this step."""

    def text(self, tokens: Iterable[int], content: Content = PLAIN, lookahead: int = 0) -> Text:
        """Return a text whose hash blocks have the size that this manager uses."""
        return Text(list(tokens), self.hash_tokens, content, lookahead)

    # Lookup

    @clause
    def lookup(self, request: Request) -> Hit:
        """HIT-3. A lookup never reaches the last token, which must be computed to go on from; it changes
        nothing.

        Nothing is looked up without prefix caching, or for a request that may not read it.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.get_computed_blocks.
        Releases: all.
        """
        if not (self.caching and request.reads_cache):
            return Hit(tuple([] for _ in self.groups), 0, 0)
        limit = len(request.text.tokens) - 1
        proof_limit = self.proof_limit_of(request.text, limit)
        tokens = self.longest(request.text, limit, range(len(self.groups)), proof_limit)
        blocks = tuple(self._hit_row(request.text, tokens, index) for index in range(len(self.groups)))
        return Hit(blocks, tokens, self._parting(request.text, limit, tokens))

    @clause
    def longest(self, text: Text, limit: int, indices: Iterable[int], proof_limit: int | None) -> int:
        """HIT-4. The hit is the longest one, ending where hits can end, that all groups accept: each has found all
        that it needs.

        Groups of one layout are looked up together: a block counts as found if it is in every one of them. ``limit``
        is the longest that it may be; blocks that prove it to a draft model end at ``proof_limit`` at the latest
        (None: no proof is asked for). Tokens.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, find_longest_cache_hit of the coordinators.
        Releases: all.
        """
        indices = list(indices)
        for tokens in range(limit // self.alignment * self.alignment, 0, -self.alignment):
            if all(self._accepts(text, tokens, proof_limit, index) for index in indices):
                return tokens
        return 0

    def _accepts(self, text: Text, tokens: int, proof_limit: int | None, index: int) -> bool:
        group, span = self.groups[index], self.spans[index]
        if not self._all_found(text, needed_for_hit(group, span, tokens), index):
            return False
        if proof_limit is None or not self.drops[index]:
            return True
        proof = proof_for_eagle(group, span, tokens)
        return proof.stop * span <= proof_limit and self._all_found(text, proof, index)

    @clause
    def proof_limit_of(self, text: Text, limit: int) -> int:
        """HIT-5. The block that proves a hit to a draft model ends before the last token too; with several groups,
        anywhere in the text.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit.
        Releases: all; anywhere in the text 0.32.0 and later.
        """
        anywhere = len(self.groups) > 1 and self.profile.eagle_proof_past_last_token
        return len(text.tokens) if anywhere else limit

    def _all_found(self, text: Text, blocks: range, index: int) -> bool:
        hashes = text.view(self.spans[index])
        return all(
            block < len(hashes) and self.pool.find(hashes[block], self.mates[index]) is not None for block in blocks
        )

    @clause
    def _hit_row(self, text: Text, tokens: int, index: int) -> list[int]:
        """HIT-6. A hit's row covers exactly the hit in every group: the blocks that it needs, and null
        blocks before them.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit.
        Releases: all.
        """
        needed = needed_for_hit(self.groups[index], self.spans[index], tokens)
        hashes = text.view(self.spans[index])
        found = [self.pool.find(hashes[block], [index]) for block in needed]
        return [NULL] * needed.start + [blocks[0] for blocks in found if blocks is not None]

    @clause
    def _parting(self, text: Text, limit: int, tokens: int) -> int:
        """HIT-7. A lookup also says how long the hit of full attention alone is, if that is longer: there
        this text parts from an earlier one.

        Without full attention it is the first group's. 0 if it isn't longer.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit.
        Releases: 0.26.0 and later.
        """
        if not self.profile.retains_shared_prefix:
            return 0
        full = [index for index, group in enumerate(self.groups) if group.kind is Kind.FULL]
        alone = self.longest(text, limit, self.mates[[*full, 0][0]], self.proof_limit_of(text, limit))
        return alone if alone > tokens else 0

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
        if any(hit.blocks) or external:
            self._adopt(request, hit, local + external)
            self._take_external(request, external, local + external)
        new = self._extend(request, slots, computed + new_tokens)
        if not delay_registration:
            self.register(request, min(computed + new_tokens, len(request.text.tokens)))
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
        group, row = self.groups[index], self.tables[request.name][index]
        settled = max(0, settled - group.spares) if self.profile.discounts_drafts else settled
        running = self._running(request, index)
        passed, source = states_passed(group, self.spans[index], settled, row, running, self.profile)
        for places, by_hash in (passed, True), (source, False):
            released = [row[place] for place in places]
            for place in places:
                row[place] = NULL
            self._release(released, by_hash=by_hash)

    def _running(self, request: Request, index: int) -> Running:
        return self.running.setdefault(request.name, [Running() for _ in self.groups])[index]

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
            if self.is_fresh(hit.blocks[index], index):
                needed += len(self.pool.blocks) + 1
                continue
            if group.align:
                needed += self._states_needed(request, hit.blocks[index], main, index)
                continue
            required = blocks_for(slots, span)
            cap = admission_cap(group, self.in_flight_tokens, self.max_tokens) if capped else None
            required = required if cap is None else min(required, cap)
            held = len(self.tables[request.name][index]) if request.name in self.tables else 0
            skipped = whole_blocks(skipped_tokens(group, computed), span)
            needed += max(required - max(held + len(hit.blocks[index]), skipped), 0)
            needed += sum(self.pool.is_free(block) for block in hit.blocks[index][skipped:])
        return needed

    def _states_needed(self, request: Request, hit: list[int], main: int, index: int) -> int:
        held = len(hit) + (len(self.tables[request.name][index]) if request.name in self.tables else 0)
        running = self.running[request.name][index] if request.name in self.running else Running()
        lacking = states_needed(self.groups[index], self.spans[index], main, held, running, self.profile)
        return lacking + sum(self.pool.is_free(block) for block in hit)

    @clause
    def is_fresh(self, row: Sequence[int], index: int) -> bool:
        """NEED-2. A Mamba state can't be used in the step that computes it: such a hit needs more blocks
        than there are, so it waits.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_blocks_to_allocate.
        Releases: all.
        """
        if self.groups[index].kind is not Kind.MAMBA or not row:
            return False
        return self.pool.blocks[row[-1]].hash in self.fresh

    @clause
    def _adopt(self, request: Request, hit: Hit, computed: int) -> None:
        """ALLOC-5. A hit is touched in every group before any block is taken, without what is skipped; that
        becomes null.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, add_local_computed_blocks.
        Releases: all.
        """
        rows: list[list[int]] = []
        for index, (group, span) in enumerate(zip(self.groups, self.spans, strict=True)):
            skipped = whole_blocks(skipped_tokens(group, computed), span)
            used = hit.blocks[index][skipped:]
            self.pool.touch(used)
            rows.append([NULL] * skipped + used)
        self.tables[request.name] = rows
        self.passed[request.name] = [len(row) for row in rows]

    @clause
    def _take_external(self, request: Request, external: int, computed: int) -> None:
        """ALLOC-6. External tokens get new blocks, where the next token reads them, to the end of the last
        one's block.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, allocate_external_computed_blocks.
        Releases: all.
        """
        for group, span, row in zip(self.groups, self.spans, self.tables[request.name], strict=True):
            if min(external, computed - skipped_tokens(group, computed)) > 0:
                row += self.pool.allocate(max(0, blocks_for(computed, span) - len(row)))

    @clause
    def _extend(self, request: Request, slots: int, main: int) -> tuple[list[int], ...]:
        """ALLOC-7. Then each group's row is extended by new blocks, group by group, until it has room for
        the slots.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, allocate_new_blocks.
        Releases: all.
        """
        rows = self.tables.setdefault(request.name, [[] for _ in self.groups])
        self.passed.setdefault(request.name, [0] * len(self.groups))
        new = []
        for index, (group, span, row) in enumerate(zip(self.groups, self.spans, rows, strict=True)):
            if group.align:
                new.append(extend_states(self.pool, group, span, main, row, self._running(request, index)))
                continue
            new.append(self.pool.allocate(max(0, blocks_for(slots, span) - len(row))))
            row += new[-1]
        return tuple(new)

    # Registration

    @clause
    def register(self, request: Request, tokens: int) -> None:
        """REG-1. Blocks are registered when they are scheduled to be filled with known tokens, each once:
        drafts may yet be rejected.

        ``tokens`` are the computed and scheduled ones, drafts left out.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.cache_blocks.
        Releases: all.
        """
        if not self.caching:
            return
        for index in range(len(self.groups)):
            end = self._registrable(tokens, index)
            self._register_full(request, end, index)
            self._register_tail(request, end, index)
            self._register_prompt_state(request, end, index)

    def _register_full(self, request: Request, tokens: int, index: int) -> None:
        group, span = self.groups[index], self.spans[index]
        row, passed = self.tables[request.name][index], self.passed[request.name]
        hashed = len(request.text.hashes) * self.hash_tokens
        first, end = passed[index], whole_blocks(min(tokens, hashed), span)
        if first >= end:
            return
        wanted = None
        if self.profile.masks_unreachable:
            boundaries = self._boundaries(request, index)
            drops, blocks = self.drops[index], range(first, end)
            wanted = worth_registering(group, span, self.alignment, drops, self.interval, boundaries, blocks)
        self.pool.register(request.text, row, first, end, span, index, wanted)
        passed[index] = end
        if group.kind is Kind.MAMBA:
            keys = (self.pool.blocks[block].hash for block in row[first:end])
            self.fresh.update(key for key in keys if key is not None)

    @clause
    def _register_tail(self, request: Request, tokens: int, index: int) -> None:
        """REG-5. With blocks of several hash blocks, the full-attention block in which the prompt ends is
        also registered for where it ends.

        That is the prompt's last hash block, once it is among the ``tokens``; it can be hit by what goes on
        after the same prompt, where hits may end inside a block.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py,
        FullAttentionManager._cache_partial_tail_block.
        Releases: 0.26.0 and later.
        """
        span, row = self.spans[index], self.tables[request.name][index]
        if self.groups[index].kind is not Kind.FULL or not self.profile.registers_tails:
            return
        last_token = self.profile.tail_ends_before_last_token and not self.drops[index]
        units = min((request.prompt_tokens - last_token) // self.hash_tokens, len(request.text.hashes))
        end = units * self.hash_tokens
        if 0 < end <= tokens and end % span and end // span < len(row):
            self.pool.register_tail(request.text, row[end // span], end, index)

    @clause
    def _register_prompt_state(self, request: Request, tokens: int, index: int) -> None:
        """REG-6. In align mode, a chunk that ends where a resend of the prompt goes on registers its state,
        unless that is registered already.

        A resend goes on before the prompt's last token; with a draft model, a hash block before its end.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block.
        Releases: 0.32.0 and later.
        """
        if not (self.groups[index].align and self.profile.registers_prompt_states):
            return
        unit, span, row = self.hash_tokens, self.spans[index], self.tables[request.name][index]
        end = request.prompt_tokens // unit * unit - unit
        if not any(self.drops):
            end = (request.prompt_tokens - 1) // unit * unit
        place = blocks_for(tokens, span) - 1
        block = row[place] if 0 < tokens == end and place < len(row) else NULL
        if block == NULL or self.pool.blocks[block].hash_end == tokens:
            return
        key = self.pool.register_tail(request.text, block, tokens, index)
        if key is not None:
            self.fresh.add(key)

    @clause
    def _registrable(self, tokens: int, index: int) -> int:
        """REG-3. With several groups, blocks after the last position at which a hit can end aren't
        registered, but for a draft model's proof.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py,
        HybridKVCacheCoordinator.get_num_cacheable_tokens.
        Releases: 0.22.1 and later.
        """
        if len(self.groups) == 1 or not self.profile.registers_aligned:
            return tokens
        aligned = tokens // self.alignment * self.alignment
        proof = self.spans[index] if self.drops[index] and aligned else 0
        return min(tokens, aligned + proof)

    @clause
    def _boundaries(self, request: Request, index: int) -> list[int]:
        """REG-4. Sparse retention keeps where a resend of the prompt can go on, and where this request
        parted from an earlier one.

        With a draft model, a hit ends a block before the end of the prompt, or of a longer one.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, replay_boundaries.
        Releases: 0.23.0 and later, see ``Profile`` (retains_...).
        """
        prompt, unit = request.prompt_tokens, self.alignment
        kept = [prompt - 1]
        if any(self.drops) and self.profile.retains_two_replays:
            kept = [max(end // unit * unit - unit, 0) for end in (prompt - 1, prompt)]
        if request.shared_prefix:
            kept.append(request.shared_prefix)
            if self.drops[index] and self.profile.retains_before_shared_prefix:
                kept.append(request.shared_prefix - self.spans[index])
        return kept

    @clause
    def new_step(self) -> None:
        """NEED-4. With the next step, what Mamba groups registered in this one can be used.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.new_step_starts.
        Releases: all.
        """
        self.fresh.clear()

    # Giving back

    @clause
    def free(self, request: Request) -> None:
        """FREE-1. A request gives back its blocks group by group, each row from its last block: a prefix
        outlives what follows it.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.free.
        Releases: all.
        """
        self._forget(request)
        for group, row in zip(self.groups, self.tables.pop(request.name, []), strict=False):
            self._release(row[::-1], by_hash=group.kind is Kind.SLIDING_WINDOW)

    def _forget(self, request: Request) -> None:
        self.passed.pop(request.name, None)
        self.running.pop(request.name, None)

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
        self._forget(request)
        return [block for row in self.tables.pop(request.name, []) for block in row if block != NULL]

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
        """INDEX-5."""
        self.pool.evict(blocks)

    def reset(self) -> bool:
        """RESET-1."""
        return self.pool.reset()

    def take_events(self) -> list[Event]:
        """EVENT-1."""
        return self.pool.take_events()


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
    def step_processed(self) -> None:
        """FREE-4. Deferred blocks are released in the order in which they were given up, each request's last
        block of its last group first.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler._drain_deferred_frees.
        Releases: 0.24.0 and later.
        """
        self.processed += 1
        while self.pending and self.pending[0][0] <= self.processed:
            self.cache.pool.free(self.pending.popleft()[1][::-1])
