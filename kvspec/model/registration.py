"""What a request registers for others to find: which of its blocks, when, and for how many tokens.

Not modelled: what ``groups`` and ``states`` leave out; multi-module drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvspec.model.checkpoints import Checkpoint, checkpoint_end
from kvspec.model.clauses import clause
from kvspec.model.groups import Kind, blocks_for, worth_registering
from kvspec.model.keys import Key
from kvspec.model.layout import Layout
from kvspec.model.pool import NULL, BlockPool
from kvspec.model.profile import CheckpointEnd, PromptState
from kvspec.model.requests import Request
from kvspec.model.scaling import whole_blocks
from kvspec.model.states import Running


@dataclass
class Held:
    """What a request holds, group by group."""

    rows: list[list[int]]
    """Its block table."""
    passed: list[int]
    """The blocks from the start on that needn't be considered for registration any more."""
    running: list[Running]
    """See ``states``."""


class Registrar:
    """Registers blocks.

    Args:
        layout: the groups.
        pool: their blocks.
        interval: sparse retention, see ``worth_registering``; None for none.
        junctions: whether states are asked for where requests part, see ``_ends_at_junction``.
    """

    def __init__(self, layout: Layout, pool: BlockPool, interval: int | None, junctions: bool = False) -> None:
        self.layout = layout
        self.pool = pool
        self.interval = interval
        self.junctions = junctions
        self.proves = True
        """Whether the block that proves a hit to a draft model is registered."""
        self.fresh: set[Key] = set()
        """What Mamba groups have registered in this step."""

    @clause
    def register(self, request: Request, tokens: int, held: Held, *, whole_chunk: bool = True) -> None:
        """REG-1. Blocks are registered when they are scheduled to be filled with known tokens, each once:
        drafts may yet be rejected.

        ``tokens`` are the computed and scheduled ones, drafts left out; ``whole_chunk`` says that there are no drafts.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager.cache_blocks.
        Releases: all.
        """
        if not self.pool.caching:
            return
        for index in range(len(self.layout.groups)):
            end = self._registrable(tokens, index)
            considered = self._register_full(request, end, index, held)
            self._register_tail(request, end, index, held.rows[index])
            checkpoint = held.running[index].checkpoint
            if checkpoint and self.layout.profile.checkpoint_end is not CheckpointEnd.BLOCK:
                self._register_checkpoint(request, end, index, held.rows[index], checkpoint)
            elif whole_chunk or end < len(request.text.tokens):
                self._register_prompt_state(request, end, index, held)
            if self.layout.groups[index].kind is Kind.MAMBA:
                keys = (self.pool.blocks[block].hash for block in held.rows[index][considered.start : considered.stop])
                self.fresh.update(key for key in keys if key is not None)

    def _register_full(self, request: Request, tokens: int, index: int, held: Held) -> range:
        """Register full blocks. Returns the places in the row that were considered."""
        layout, row = self.layout, held.rows[index]
        group, span = layout.groups[index], layout.spans[index]
        hashed = len(request.text.hashes) * layout.hash_tokens
        first, end = held.passed[index], whole_blocks(min(tokens, hashed), span)
        if first >= end:
            return range(0)
        wanted = None
        if layout.profile.masks_unreachable:
            boundaries, drops = self._boundaries(request, index), self.proves and layout.drops[index]
            unit = layout.hit_tokens if layout.profile.masks_by_hash_block else layout.alignment
            sparse = group.kind is not Kind.MAMBA or layout.profile.retains_states_sparsely
            interval = self.interval if sparse else None
            wanted = worth_registering(group, span, unit, drops, interval, boundaries, range(first, end))
        checkpoint = held.running[index].checkpoint
        if checkpoint and checkpoint.begin % span and first <= checkpoint.begin // span < end:
            wanted = wanted or [True] * (end - first)
            wanted[checkpoint.begin // span - first] = False
        self.pool.register(request.text, row, first, end, span, index, wanted)
        held.passed[index] = end
        return range(first, end)

    @clause
    def _register_tail(self, request: Request, tokens: int, index: int, row: Sequence[int]) -> None:
        """REG-5. With blocks of several hash blocks, the full-attention block in which the prompt ends is
        also registered for where it ends.

        That is the prompt's last hash block, once it is among the ``tokens``; it can be hit by what goes on
        after the same prompt, where hits may end inside a block.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py,
        FullAttentionManager._cache_partial_tail_block.
        Releases: 0.26.0 and later.
        """
        layout = self.layout
        span, unit = layout.spans[index], layout.hash_tokens
        if layout.groups[index].kind is not Kind.FULL or not layout.profile.registers_tails:
            return
        last_token = layout.profile.tail_ends_before_last_token and not layout.drops[index]
        end = min((request.prompt_tokens - last_token) // unit, len(request.text.hashes)) * unit
        if 0 < end <= tokens and end % span and end // span < len(row):
            self.pool.register_tail(request.text, row[end // span], end, index)

    @clause
    def _register_prompt_state(self, request: Request, tokens: int, index: int, held: Held) -> None:
        """REG-6. In align mode, a chunk that ends where a resend of the prompt goes on registers its state,
        unless that is registered already.

        A resend goes on before the prompt's last token; with a draft model, a hash block before its end. If that is
        inside a block, the state is copied before the next step changes it (``STATE-4``), and the block is considered
        again when it is full.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block.
        Releases: 0.26.0 and later, differently (``Profile.prompt_state``).
        """
        span, row = self.layout.spans[index], held.rows[index]
        ends = tokens == self.prompt_state_end(request, index) or self._ends_at_junction(request, tokens)
        if not (self.layout.groups[index].align and tokens > 0 and ends):
            return
        if self.layout.profile.prompt_state is not PromptState.ANYWHERE and tokens % span == 0:
            return
        place = blocks_for(tokens, span) - 1
        block = row[place] if place < len(row) else NULL
        if block == NULL or self.pool.blocks[block].hash_end == tokens:
            return
        key = self.pool.register_tail(request.text, block, tokens, index)
        if key is not None:
            self.fresh.add(key)
        if tokens % span:
            held.running[index].shared = place
            held.passed[index] = place

    @clause
    def _register_checkpoint(
        self, request: Request, tokens: int, index: int, row: Sequence[int], checkpoint: Checkpoint
    ) -> None:
        """REG-8. A checkpoint's block is registered for where the checkpoint ends, and for nothing else; the state
        inside a block that its chunk begins with isn't registered for the block's end, which the chunk passes over.

        A checkpoint that isn't wanted takes the place of a block's end as well. No release leaves the block that the
        chunk begins in out yet (known issue ``core-started-state-registered``).

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block.
        Releases: 0.30.0 and later (0.29.0: a checkpoint ends where its block does).
        """
        block = row[checkpoint.place]
        if not self._wants_checkpoint(request, tokens, index, checkpoint):
            self.pool.evict([block])
        elif self.pool.blocks[block].hash_end != checkpoint.end:
            key = self.pool.register_tail(request.text, block, checkpoint.end, index, replace=True)
            if key is not None:
                self.fresh.add(key)

    @clause
    def _wants_checkpoint(self, request: Request, tokens: int, index: int, checkpoint: Checkpoint) -> bool:
        """REG-9. A checkpoint is registered if it is where a resend of the prompt goes on, where the request parts from
        an earlier one, or if it is a block's end whose state is registered anyway.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block.
        Releases: 0.30.0 and later; 0.30.0 and 0.31.0 register all, unless sparse retention keeps resends only.
        """
        layout, span = self.layout, self.layout.spans[index]
        if checkpoint.end in (checkpoint_end(layout, index, request.prompt_tokens), request.shared_prefix):
            return True
        if layout.profile.registers_inner_checkpoints:
            return self.interval != 0 or tokens >= request.prompt_tokens
        if checkpoint.end % span:
            return False
        block = checkpoint.end // span - 1
        group, drops = layout.groups[index], layout.drops[index]
        kept = worth_registering(group, span, layout.hit_tokens, drops, self.interval, (), range(block, block + 1))
        return kept is None or kept[0]

    @clause
    def _ends_at_junction(self, request: Request, tokens: int) -> bool:
        """REG-7. Where it is asked for, a chunk of the prompt that ends where the request parts from an earlier one
        registers its state too: others may part there.

        Only with a draft model, and where hits are looked for inside blocks. Decoding never registers one: its state
        changes in place.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.__init__ (mamba_shared_prefix_checkpoint);
        v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block.
        Releases: 0.30.0 and later.
        """
        asked = self.junctions and self.layout.ends_inside and any(group.eagle for group in self.layout.groups)
        return asked and tokens == request.shared_prefix and request.computed < tokens <= request.prompt_tokens

    def prompt_state_end(self, request: Request, index: int) -> int:
        """Return where the state of a prompt is registered, in tokens; 0 for nowhere."""
        unit = self.layout.hash_tokens
        last = request.prompt_tokens // unit * unit
        match self.layout.profile.prompt_state:
            case PromptState.NOWHERE:
                return 0
            case PromptState.INSIDE:
                return last
            case PromptState.INSIDE_BEFORE_OWN_DRAFTS:
                return last - unit * self.layout.drops[index]
            case PromptState.INSIDE_BEFORE_DRAFTS:
                return last - unit * any(self.layout.drops)
            case PromptState.ANYWHERE:
                return last - unit if any(self.layout.drops) else (request.prompt_tokens - 1) // unit * unit

    @clause
    def _registrable(self, tokens: int, index: int) -> int:
        """REG-3. With several groups, blocks after the last position at which a hit can end aren't
        registered, but for a draft model's proof.

        Where hits are looked for inside blocks, none is left out.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py,
        HybridKVCacheCoordinator.get_num_cacheable_tokens.
        Releases: 0.22.1 and later.
        """
        layout = self.layout
        if len(layout.groups) == 1 or not layout.profile.registers_aligned:
            return tokens
        if layout.ends_inside:
            return tokens
        aligned = tokens // layout.alignment * layout.alignment
        proof = layout.spans[index] if self.proves and layout.drops[index] and aligned else 0
        return min(tokens, aligned + proof)

    @clause
    def _boundaries(self, request: Request, index: int) -> list[int]:
        """REG-4. Sparse retention keeps where a resend of the prompt can go on, and where this request
        parted from an earlier one.

        With a draft model, a hit ends a block before the end of the prompt, or of a longer one.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, replay_boundaries.
        Releases: 0.23.0 and later, see ``Profile`` (retains_...).
        """
        layout, prompt = self.layout, request.prompt_tokens
        kept = [prompt - 1]
        if any(layout.drops) and layout.profile.retains_two_replays:
            unit = layout.alignment
            kept = [max(end // unit * unit - unit, 0) for end in (prompt - 1, prompt)]
        if request.shared_prefix:
            kept.append(request.shared_prefix)
            if layout.drops[index] and layout.profile.retains_before_shared_prefix:
                kept.append(request.shared_prefix - layout.spans[index])
        return kept

    @clause
    def is_fresh(self, row: Sequence[int], index: int) -> bool:
        """NEED-2. A Mamba state can't be used in the step that computes it: such a hit needs more blocks
        than there are, so it waits.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_blocks_to_allocate.
        Releases: all.
        """
        if self.layout.groups[index].kind is not Kind.MAMBA or not row:
            return False
        return self.pool.blocks[row[-1]].hash in self.fresh

    @clause
    def new_step(self) -> None:
        """NEED-4. With the next step, what Mamba groups registered in this one can be used.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, MambaManager.new_step_starts.
        Releases: all.
        """
        self.fresh.clear()
