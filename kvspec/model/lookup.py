"""What a request finds: the longest hit that all groups accept, and the blocks of it.

Not modelled: hits inside a block with several full-attention layouts; the KV connector's own lookup; the reports of
hits (0.26.0 and later) beyond ``BlockPool.tell_hit``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvspec.model.clauses import clause
from kvspec.model.groups import Kind, blocks_for, needed_for_hit, proof_for_eagle
from kvspec.model.keys import Text
from kvspec.model.layout import Layout
from kvspec.model.pool import NULL, BlockPool
from kvspec.model.requests import Hit, Request


class Finder:
    """Looks requests up. It changes nothing."""

    def __init__(self, layout: Layout, pool: BlockPool) -> None:
        self.layout = layout
        self.pool = pool

    @clause
    def lookup(self, request: Request) -> Hit:
        """HIT-3. A lookup never reaches the last token, which must be computed to go on from; it changes
        nothing.

        Nothing is looked up without prefix caching, or for a request that may not read it.

        Source: vLLM 0.33.0, v1/core/kv_cache_manager.py, KVCacheManager.get_computed_blocks.
        Releases: all.
        """
        indices = range(len(self.layout.groups))
        if not (self.pool.caching and request.reads_cache):
            return Hit(tuple([] for _ in indices), 0, 0)
        limit = len(request.text.tokens) - 1
        proof_limit = self.proof_limit_of(request.text, limit)
        tokens = self.longest(request.text, limit, indices, proof_limit)
        blocks = tuple(self._hit_row(request.text, limit, tokens, index) for index in indices)
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
        indices, unit = list(indices), self.layout.hit_tokens
        for tokens in range(limit // unit * unit, 0, -unit):
            if all(self._accepts(text, limit, tokens, proof_limit, index) for index in indices):
                return tokens
        return 0

    def _accepts(self, text: Text, limit: int, tokens: int, proof_limit: int | None, index: int) -> bool:
        group, span = self.layout.groups[index], self.layout.spans[index]
        drops = proof_limit is not None and self.layout.drops[index]
        if self.layout.hit_inside(index):
            margin = self.layout.hit_tokens if drops else 0
            return tokens + margin <= self.reach(text, limit, index, proof_limit)[0]
        if not self._all_found(text, tokens, needed_for_hit(group, span, tokens), index):
            return False
        if proof_limit is None or not drops:
            return True
        proof = proof_for_eagle(group, span, tokens)
        return proof.stop * span <= proof_limit and self._all_found(text, proof.stop * span, proof, index)

    @clause
    def reach(self, text: Text, limit: int, index: int, proof_limit: int | None) -> tuple[int, list[tuple[int, ...]]]:
        """HIT-8. Where hits can end inside blocks, full attention reaches as far as its full blocks go, and then into
        the next one as far as that is registered; all that lies before is a hit too.

        A block that holds more tokens than a hit serves the hit as well: what it has after it is overwritten in a copy.
        A draft model is given the hit that ends a hash block before. Returns tokens, and the blocks of each group that
        is looked up together.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, FullAttentionManager.find_longest_cache_hit.
        Releases: 0.26.0 and later.
        """
        layout, span, unit = self.layout, self.layout.spans[index], self.layout.hit_tokens
        if proof_limit is not None and layout.drops[index]:
            limit = min(limit + unit, proof_limit)
        found: list[tuple[int, ...]] = []
        while (end := (len(found) + 1) * span) <= limit:
            blocks = self._find(text, end, layout.mates[index])
            if blocks is None:
                break
            found.append(blocks)
        start = len(found) * span
        for end in range(min(start + span - unit, limit // unit * unit), start, -unit):
            blocks = self._find(text, end, layout.mates[index])
            if blocks is not None:
                return end, [*found, blocks]
        return start, found

    @clause
    def proof_limit_of(self, text: Text, limit: int) -> int:
        """HIT-5. The block that proves a hit to a draft model ends before the last token too; with several groups,
        anywhere in the text.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit.
        Releases: all; anywhere in the text 0.32.0 and later.
        """
        anywhere = len(self.layout.groups) > 1 and self.layout.profile.eagle_proof_past_last_token
        return len(text.tokens) if anywhere else limit

    def _find(self, text: Text, end: int, indices: list[int]) -> tuple[int, ...] | None:
        """Return the blocks that are registered for what ends at a token, or None."""
        last = end // self.layout.hash_tokens - 1
        return self.pool.find(text.hashes[last], indices) if last < len(text.hashes) else None

    def _all_found(self, text: Text, tokens: int, blocks: range, index: int) -> bool:
        ends = (min((block + 1) * self.layout.spans[index], tokens) for block in blocks)
        return all(self._find(text, end, self.layout.mates[index]) is not None for end in ends)

    @clause
    def _hit_row(self, text: Text, limit: int, tokens: int, index: int) -> list[int]:
        """HIT-6. A hit's row covers exactly the hit in every group: the blocks that it needs, and null
        blocks before them.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit.
        Releases: all.
        """
        span = self.layout.spans[index]
        if self.layout.hit_inside(index):
            _, blocks = self.reach(text, limit, index, self.proof_limit_of(text, limit))
            place = self.layout.mates[index].index(index)
            return [block[place] for block in blocks[: blocks_for(tokens, span)]]
        needed = needed_for_hit(self.layout.groups[index], span, tokens)
        found = [self._find(text, min((block + 1) * span, tokens), [index]) for block in needed]
        return [NULL] * needed.start + [blocks[0] for blocks in found if blocks is not None]

    @clause
    def _parting(self, text: Text, limit: int, tokens: int) -> int:
        """HIT-7. A lookup also says how long the hit of full attention alone is, if that is longer: there
        this text parts from an earlier one.

        Without full attention it is the first group's. 0 if it isn't longer.

        Source: vLLM 0.33.0, v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit.
        Releases: 0.26.0 and later.
        """
        if not self.layout.profile.retains_shared_prefix:
            return 0
        full = [index for index, group in enumerate(self.layout.groups) if group.kind is Kind.FULL]
        alone = self.longest(text, limit, self.layout.mates[[*full, 0][0]], self.proof_limit_of(text, limit))
        return alone if alone > tokens else 0
