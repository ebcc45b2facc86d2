"""OffloadingConnector's scheduler side: what a request finds in the CPU tier, what it stores there, and when a
transfer must have ended.

A *chunk* is a fixed number of GPU blocks of a group, in the order of a request's block table; it is the unit of the
CPU tier (``tiers``). Each request has a *store index* for each group: the next chunk to offer. A request is looked up
and admitted by the engine; then, in each step that schedules it, its chunks that have become full are offered to the
tier. Transfers are *jobs*: planned in one step, reported by the workers in a later one.

Not modelled: Mamba and chunked-local groups, partial tails (0.28.0 and later), sparse retention, loads within a step
(0.33.0), tier filters, ``max_load_tokens``; metrics; the contents of events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvspec.model.clauses import clause
from kvspec.model.groups import Group, Kind, blocks_for, worth_registering
from kvspec.model.keys import Key, Text
from kvspec.model.pool import NULL
from kvspec.model.profile import DraftTail, Profile, StoreMask, WindowWait
from kvspec.model.tiers import Access, Answer, Tier


@dataclass(eq=False)
class OffloadRequest:
    """A request, as the connector knows it."""

    name: str
    text: Text
    prompt_tokens: int
    params: Mapping[str, Any] | None = None
    """Its ``kv_transfer_params``."""
    reads_cache: bool = True
    whole: bool = False
    """Whether the tier wants all of it, what it has loaded included (``Profile.offload_policies``)."""
    computed: int = 0
    """Tokens computed before the step."""
    ended: bool = False
    aborted: bool = False
    closed: bool = False
    """Whether it has ended, and its last chunks have been offered."""
    local: int = 0
    """Tokens found on the GPU by the last lookup."""
    keys: list[list[Key]] = field(default_factory=list)
    table: list[list[int]] = field(default_factory=list)
    """Block ids per group, as told by the steps; the engine may have given some to others since."""
    next_stored: list[int] = field(default_factory=list)
    """The store index."""
    hit_chunks: list[int] | None = None
    """Chunks per group that the lookup found, those on the GPU included."""
    jobs: set[int] = field(default_factory=set)
    positions: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.access: Access[Key] = Access(self.positions)


class Job(NamedTuple):
    """A transfer that workers haven't reported."""

    request: OffloadRequest
    keys: list[Key]
    store: bool
    window_blocks: tuple[int, ...] = ()
    """Source blocks that the request may give up while it runs."""
    other_blocks: tuple[int, ...] = ()
    """Source blocks that it holds until it ends."""


class Transfer(NamedTuple):
    """A planned transfer: slots of the tier, and blocks of the GPU, group by group."""

    job: int
    request: str
    slots: list[int]
    blocks: list[int]
    sizes: list[int]
    firsts: list[int]
    """Per group, which block of the request's table the first one is."""


class Row(NamedTuple):
    """What a step says of a request's block table: ``blocks`` per group, all of them (``whole``) or only new ones."""

    request: str
    blocks: Sequence[Sequence[int]] | None
    whole: bool
    new: bool = False
    """Whether the request is new in the batch."""


class Plan(NamedTuple):
    """What a step tells the workers. Flushed jobs must end before the step writes to the GPU."""

    loads: list[Transfer]
    stores: list[Transfer]
    flushed: set[int]


class Offloader:
    """The scheduler side of the connector.

    Args:
        groups: of one rank; full attention and sliding windows.
        tier: the CPU tier.
        profile: what differs between releases.
        chunk_blocks: GPU blocks of a chunk.
        caching: whether the GPU has a prefix cache.
        prompt_only: whether only prompts are stored (``Profile.offload_policies``).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        tier: Tier[Key],
        profile: Profile,
        *,
        chunk_blocks: int = 1,
        caching: bool = True,
        prompt_only: bool = False,
    ) -> None:
        self.groups = groups
        self.tier = tier
        self.profile = profile
        self.chunk_blocks = chunk_blocks
        self.caching = caching
        self.prompt_only = prompt_only
        self.chunk_tokens = [group.block_tokens * chunk_blocks for group in groups]
        self.tracked: dict[str, OffloadRequest] = {}
        self.jobs: dict[int, Job] = {}
        self.fences: dict[int, set[int]] = {}
        """Block -> jobs that read it, and that its holder doesn't protect."""
        self.loading: set[Key] = set()
        self._next_job = 0
        self.first_job = 0
        """Jobs before this one are from before a reset."""
        self._flushed_by_reset: set[int] = set()
        self._loads: list[Transfer] = []
        self._flush: set[int] = set()
        self._given: set[int] = set()
        self.dropped = 0
        """Blocks that were given away before they were stored, in the last step."""

    # Keys and sizes

    @clause
    def refresh_keys(self, request: OffloadRequest) -> None:
        """STORE-1. A chunk has a key as soon as its last token has a hash: what the text is up to there, and the
        group.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        RequestOffloadState.update_offload_keys.
        Releases: all.
        """
        for group, (tokens, keys) in enumerate(zip(self.chunk_tokens, request.keys, strict=True)):
            for block_hash in request.text.view(tokens)[len(keys) :]:
                keys.append(Key(block_hash, group))
                request.positions[keys[-1]] = len(keys) * tokens

    def window_chunks(self, group: int, tokens: int) -> int | None:
        """Return how many chunks up to ``tokens`` a group needs for a hit that ends there; None for all."""
        if self.groups[group].kind is Kind.FULL:
            return None
        size, reach = self.chunk_tokens[group], self.groups[group].reach
        padding = -tokens % size
        return max(blocks_for(reach, size), blocks_for(reach - 1 + padding, size))

    def arrive(self, request: OffloadRequest) -> None:
        """A request has been added to the engine."""
        request.keys = [[] for _ in self.groups]
        request.table = [[] for _ in self.groups]
        request.next_stored = [0 for _ in self.groups]
        request.access.resets = self.tier.resets
        self.tracked[request.name] = request

    # Looking up

    @clause
    def lookup(self, request: OffloadRequest, local: int) -> int | None:
        """LOOKUP-1. A request that may not read the prefix cache finds nothing; one with transfers in flight is asked
        again later.

        Returns the tokens beyond ``local``, those found on the GPU, that can be loaded; None to ask again. Up to
        0.20.2, where transfers have no number, a load doesn't wait for stores.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.get_num_new_matched_tokens.
        Releases: all.
        """
        request.table = [[] for _ in self.groups]
        self._restart(request)
        if request.jobs and self.profile.jobs_by_number:
            return None
        self.refresh_keys(request)
        request.local = local
        hit = self._hit(request, local) if request.reads_cache else 0
        self._note_hit(request, local + (hit or 0))
        self._touch(request)
        return hit

    def _hit(self, request: OffloadRequest, local: int) -> int | None:
        hit = self._agreed_hit(request, local)
        return None if hit and self._is_being_loaded(request, local, local + hit) else hit

    @clause
    def _restart(self, request: OffloadRequest) -> None:
        """STORE-2. A request that is looked up again begins at its first token, so all of its chunks are offered
        again.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.get_num_new_matched_tokens.
        Releases: 0.33.0 and later.
        """
        if self.profile.offers_again_after_preemption:
            request.next_stored = [0 for _ in self.groups]

    @clause
    def _agreed_hit(self, request: OffloadRequest, local: int) -> int | None:
        """LOOKUP-2. The hit is the longest that all groups agree on: full attention first, then the windows, the
        largest first; a group that shortens it has those looked up before it asked again.

        With windows the last token is left out. A hit that gives no group a whole chunk is none. If a group's answer
        is to ask again, the others can still make it a miss.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._lookup_complete_chunks.
        Releases: all.
        """
        windows = [group for group, some in enumerate(self.groups) if some.kind is not Kind.FULL]
        windows.sort(key=lambda group: -blocks_for(self.groups[group].reach, self.chunk_tokens[group]))
        order = [group for group in range(len(self.groups)) if group not in windows] + windows
        end = len(request.text.tokens) - bool(windows)
        agreed, ask_again, turn = 0, False, order
        proven: set[int] = set()
        while turn:
            after: list[int] = []
            for place, group in enumerate(turn):
                size = self.chunk_tokens[group]
                end = min(end, len(request.keys[group]) * size)
                if end - local < size:
                    return 0
                proves = self._needs_proof(group) and group not in proven
                found = self._found(request, group, local, end, proves)
                if found == 0:
                    return 0
                ask_again |= found is None
                if proves and found is not None:
                    proven.add(group)
                end = end if found is None else min(end, found)
                if end - local < size:
                    return 0
                if end - local < agreed:
                    if not self._needs_proof(group):
                        proven.clear()
                    if ask_again:
                        ask_again, after = False, order
                    elif not after and any(seen in windows for seen in turn[:place]):
                        after = windows
                agreed = end - local
            turn = after
        return None if ask_again else agreed

    @clause
    def _needs_proof(self, group: int) -> bool:
        """LOOKUP-6. A hit of a group with draft layers needs one chunk more than it is long: what these keep of a
        token depends on the next one.

        Groups are those that are marked; if none is, none (0.24.0 to 0.29.0 take all, a known issue).
        The chunk may lie one behind what other groups have found; full attention's too, with
        ``Profile.full_groups_look_further``. A group has shown it until one without draft layers shortens the hit.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._lookup_complete_chunks.
        Releases: 0.24.0 and later.
        """
        return self.groups[group].eagle and self.profile.draft_tail is not DraftTail.NOWHERE

    def _found(self, request: OffloadRequest, group: int, local: int, end: int, proves: bool) -> int | None:
        """Return up to which token a group has a hit between ``local`` and ``end``; 0 for none, None to ask again."""
        size, is_full = self.chunk_tokens[group], self.groups[group].kind is Kind.FULL
        first, stop = local // size, blocks_for(end, size)
        if proves and (self.profile.full_groups_look_further or not is_full):
            stop = min(blocks_for(end + size, size), len(request.keys[group]))
        keys = request.keys[group][first:stop]
        if is_full:
            count = self._prefix(keys)
        else:
            at_end = self.window_chunks(group, min(end, (stop - proves) * size)) or 0
            count = self._window(keys, blocks_for(self.groups[group].reach, size) + proves, at_end + proves)
        return count and size * (first + count - proves)

    @clause
    def _prefix(self, keys: Sequence[Key]) -> int | None:
        """LOOKUP-3. Full attention finds the chunks up to the first that isn't there; if one of them is being stored,
        the answer is to ask again.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._maximal_prefix_lookup.
        Releases: all.
        """
        answers = []
        for key in keys:
            answers.append(self.tier.lookup(key))
            if answers[-1] is Answer.MISS:
                return None if Answer.PENDING in answers else len(answers) - 1
        return None if Answer.PENDING in answers else len(answers)

    @clause
    def _window(self, keys: Sequence[Key], need: int, need_at_end: int) -> int | None:
        """LOOKUP-4. A window finds the last run of as many chunks as it covers, or one that begins where the GPU's hit
        ends; if a chunk of the run is being stored, the answer is to ask again.

        At the very end one chunk more may be needed, as the hit can end inside a chunk. Which chunks make it ask again
        is ``Profile.window_wait``.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._sliding_window_lookup.
        Releases: all.
        """
        wait = self.profile.window_wait
        run, needed, pending = 0, need_at_end, False
        for index in reversed(range(len(keys))):
            match self.tier.lookup(keys[index]):
                case Answer.HIT:
                    run += 1
                case Answer.PENDING if wait is not WindowWait.BREAKS:
                    run, pending = run + 1, True
                case answer:
                    pending = wait is not WindowWait.IN_RUN and (pending or answer is Answer.PENDING)
                    run, needed = 0, need
            if run == needed:
                return None if pending else index + run
        return None if pending else run

    @clause
    def _is_being_loaded(self, request: OffloadRequest, local: int, end: int) -> bool:
        """LOOKUP-5. A hit of which a chunk is being loaded by another request has to wait: soon it is on the GPU.

        Only with a prefix cache on the GPU.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._lookup_complete_chunks.
        Releases: all.
        """
        for group, size in enumerate(self.chunk_tokens):
            keys = request.keys[group][local // size : blocks_for(end, size)]
            window = self.window_chunks(group, end)
            if self.caching and not self.loading.isdisjoint(keys if window is None else keys[-window:]):
                return True
        return False

    def _note_hit(self, request: OffloadRequest, tokens: int) -> None:
        if request.hit_chunks is None or self.profile.offload_policies:
            request.hit_chunks = [tokens // size for size in self.chunk_tokens]

    @clause
    def _touch(self, request: OffloadRequest) -> None:
        """TOUCH-1. A lookup, and every store, counts all chunks of the request as used; of a window, those that the
        request itself would need again.

        Source: vLLM 0.30.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._touch.
        Releases: all up to 0.30.0; later ones count what a request has used when it ends.
        """
        if self.profile.tier_counts_requests:
            return
        for group, keys in enumerate(request.keys):
            skipped = 0
            if self.groups[group].kind is not Kind.FULL and request.hit_chunks is not None:
                window = blocks_for(self.groups[group].reach, self.chunk_tokens[group])
                skipped = max(0, request.hit_chunks[group] - window)
            self.tier.touch(keys[skipped:])

    # Admission

    @clause
    def admit(
        self, request: OffloadRequest, rows: Sequence[Sequence[int]], found: Sequence[Sequence[bool]], external: int
    ) -> None:
        """ADMIT-1. An admitted request loads what lies between its GPU hit and the end of its external tokens: per
        group from the first block there that is neither null nor found on the GPU on, with the chunks around them.

        ``rows`` are its blocks, ``found`` whether each is null or can be found on the GPU. With no external tokens
        nothing happens.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.update_state_after_alloc.
        Releases: all.
        """
        if external == 0:
            return
        end = request.local + external
        keys: list[Key] = []
        blocks: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        for group, (row, known) in enumerate(zip(rows, found, strict=True)):
            span = self.groups[group].block_tokens
            last = blocks_for(end, span)
            first = next((i for i in range(blocks_for(request.local, span), last) if not known[i]), last)
            if first < last:
                chunks = request.keys[group][first // self.chunk_blocks : blocks_for(end, self.chunk_tokens[group])]
                keys += chunks
            blocks += row[first:last]
            sizes.append(last - first)
            firsts.append(first)
        self._skip_loaded(request, end)
        self._given.update(block for row in rows for block in row if self.profile.fences_whole_table)
        self._given.update(blocks)
        job = self._open(Job(request, keys, store=False))
        self._loads.append(
            Transfer(job, request.name, self.tier.prepare_load(keys, request.access), blocks, sizes, firsts)
        )
        self.loading.update(keys)

    @clause
    def _skip_loaded(self, request: OffloadRequest, end: int) -> None:
        """STORE-3. What a request has loaded, or found on the GPU before that, it doesn't offer: its store index
        becomes the chunk after what it has.

        Unless all of it is wanted.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.update_state_after_alloc.
        Releases: all.
        """
        if not self._wants_all(request):
            request.next_stored = [blocks_for(end, size) for size in self.chunk_tokens]

    @clause
    def _wants_all(self, request: OffloadRequest) -> bool:
        """STORE-4. All of a request is wanted if its parameters say ``do_remote_decode``, with any true value; a
        remote engine will decode it, and needs what was loaded too. From 0.23.0 on the tier decides, when the request
        arrives.

        Absent parameters, and an absent or false value, mean no. The CPU tier never wants it.

        Source: vLLM 0.22.1, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.update_state_after_alloc.
        Releases: all; the parameter up to 0.22.1, the tier's decision later.
        """
        if self.profile.offload_policies:
            return request.whole
        return bool((request.params or {}).get("do_remote_decode"))

    # A step

    def step(
        self,
        rows: Sequence[Row],
        scheduled: Mapping[str, int],
        preempted: Collection[str] = (),
        ended: Collection[str] = (),
    ) -> Plan:
        """Return what a step tells the workers.

        ``scheduled`` are tokens by request, in the order in which the engine has scheduled them; ``ended`` requests
        have ended since the last step.
        """
        self._take_rows(rows)
        self._flush_preempted(preempted)
        self._flush_reused()
        self._flush_last()
        turns = self._turns(rows, scheduled)
        stores = [job for name in turns if (job := self._offer(self.tracked.get(name), scheduled[name]))]
        if self.profile.stores_at_end:
            stores += [job for name in ended if (job := self._offer(self.tracked.get(name), 0))]
            self._forget_ended(ended)
        self._end_flushed(preempted)
        plan = Plan(self._loads, stores, self._flush)
        self._loads, self._flush, self._given = [], set(), set()
        return plan

    @clause
    def _turns(self, rows: Sequence[Row], scheduled: Mapping[str, int]) -> list[str]:
        """STORE-15. Requests offer their chunks in the order in which they were scheduled, those that have ended last.

        Up to 0.22.1 those that are new in the batch come first.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_store_jobs.
        Releases: all, differently.
        """
        new = {row.request for row in rows if row.new}
        first = [] if self.profile.offload_policies else [name for name in scheduled if name in new]
        return first + [name for name in scheduled if name not in first]

    def flushes(self) -> bool:
        """Whether a reset has jobs flushed that no step has been told of yet."""
        return bool(self._flush)

    def _take_rows(self, rows: Iterable[Row]) -> None:
        self.dropped = 0
        before = {name: [len(row) for row in request.table] for name, request in self.tracked.items()}
        for row in rows:
            request = self.tracked[row.request]
            self.refresh_keys(request)
            if row.whole:
                request.table = [[] for _ in self.groups]
                before[row.request] = [0 for _ in self.groups]
            for table, blocks in zip(request.table, row.blocks or (), strict=False):
                table.extend(blocks)
                self._given.update(block for block in blocks if block != NULL)
        for name, request in self.tracked.items():
            self._drop_reused(request, before[name])

    @clause
    def _drop_reused(self, request: OffloadRequest, ends: Sequence[int]) -> None:
        """STORE-5. A block that has left a window, and has been given to somebody since, isn't stored as the request's.

        Blocks in the table of a request that is admitted in the step count as given, even those that it has found.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._update_req_states.
        Releases: all.
        """
        for group, some in enumerate(self.groups):
            if some.kind is not Kind.FULL:
                row = request.table[group]
                for index in range(request.next_stored[group] * self.chunk_blocks, ends[group]):
                    if row[index] != NULL and row[index] in self._given:
                        row[index] = NULL
                        self.dropped += 1

    @clause
    def _flush_preempted(self, preempted: Iterable[str]) -> None:
        """FENCE-1. A preempted request doesn't hold its blocks any more: its stores must end before the step writes.

        A load that was planned in this very step isn't with the workers yet.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_connector_meta.
        Releases: all.
        """
        planned = {load.job for load in self._loads}
        for name in preempted:
            if name in self.tracked:
                self._flush |= self.tracked[name].jobs - planned

    @clause
    def _flush_reused(self) -> None:
        """FENCE-2. A store must end before a block that it reads is written by somebody else: if nobody holds the
        block for it any more, it is flushed when the block is given away.

        Nobody does once the request has ended; blocks of a window may be given up at any time.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_connector_meta.
        Releases: 0.21.0 and later (before, the engine kept the blocks of an ended request).
        """
        for block in self._given:
            self._flush |= self.fences.get(block, set())

    @clause
    def _flush_last(self) -> None:
        """FENCE-3. Once all requests have ended, all jobs are flushed, as there may be no further step.

        Source: vLLM 0.23.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.build_connector_meta.
        Releases: 0.22.1 to 0.23.0; later ones keep the engine stepping.
        """
        known = self.tracked.values()
        if self.profile.flushes_when_idle and known and all(request.ended for request in known):
            self._flush |= self.jobs.keys()

    @clause
    def offloadable(self, request: OffloadRequest, scheduled: int) -> int:
        """STORE-6. Of a running request the tokens that are computed after the step, and known, may be stored; of one
        that has ended, those that were computed: the last token that it said never was.

        ``prompt_only`` and the parameter ``max_offload_tokens``, a whole number from 0 on, are upper limits.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_store_jobs, _calc_num_offloadable_tokens.
        Releases: all; the limits 0.23.0 and later.
        """
        known = len(request.text.tokens)
        if not request.ended:
            known = min(known, request.computed + scheduled)
        elif request.aborted:
            known = min(known, request.computed)
        else:
            known = max(request.prompt_tokens, known - 1)
        return min(known, self.limit(request))

    def limit(self, request: OffloadRequest) -> int:
        """Return how many tokens of a request may be stored at all."""
        limits = [len(request.text.tokens)]
        if self.profile.offload_policies:
            asked = (request.params or {}).get("max_offload_tokens")
            limits += [asked] if type(asked) is int and asked >= 0 else []
            limits += [request.prompt_tokens] if self.prompt_only else []
        return min(limits)

    @clause
    def storable(self, request: OffloadRequest, group: int, tokens: int) -> int:
        """STORE-7. Only whole chunks are stored, and only those that have a key and all their blocks: a key or a block
        that isn't there yet ends the range.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        RequestOffloadState.storable_chunks.
        Releases: all.
        """
        blocks = len(request.table[group]) // self.chunk_blocks
        chunks = tokens // self.chunk_tokens[group] - self.is_held_back(request, group, tokens)
        return max(0, min(chunks, blocks, len(request.keys[group])))

    @clause
    def is_held_back(self, request: OffloadRequest, group: int, tokens: int) -> bool:
        """STORE-16. The last chunk of a group with draft layers isn't stored yet, as a draft that is rejected could
        change it; how long that is so is ``Profile.draft_tail``. Which groups: see LOOKUP-6.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        RequestOffloadState.storable_chunks.
        Releases: 0.24.0 and later.
        """
        tail = self.profile.draft_tail
        if tail is DraftTail.NOWHERE or not self.groups[group].eagle:
            return False
        decoding = tail is DraftTail.ALWAYS or tokens > request.prompt_tokens
        return decoding and not (tail is DraftTail.RUNNING and request.ended)

    def _offer(self, request: OffloadRequest | None, scheduled: int) -> Transfer | None:
        """Offer a request's new chunks to the tier; return the store, if there is one."""
        if request is None:
            return None
        tokens = self.offloadable(request, scheduled)
        ranges = [self._range(request, group, tokens) for group in range(len(self.groups))]
        keys = [
            request.keys[group][chunk]
            for group, chunks in enumerate(ranges)
            for chunk in chunks
            if self._is_worth_it(request, group, chunk, chunks, tokens)
        ]
        placed = self.tier.prepare_store(keys, request.access) if keys else None
        if self._is_refused(keys, placed):
            return None
        if placed is None or not placed.keys:
            self._advance(request, tokens)
            return None
        self._touch(request)
        transfer = self._store(request, placed.keys, placed.slots, ranges)
        self._advance(request, tokens)
        return transfer

    @clause
    def _is_refused(self, keys: list[Key], placed: object) -> bool:
        """STORE-8. If the tier has no room the store index stays where it is, and the same chunks are offered with the
        next step.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_store_jobs.
        Releases: all.
        """
        return bool(keys) and placed is None

    @clause
    def _advance(self, request: OffloadRequest, tokens: int) -> None:
        """STORE-9. What was offered is passed, in all groups, whether it was stored, was there already or wasn't worth
        it. The store index never moves back.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        RequestOffloadState.advance_stored_idx.
        Releases: all (0.25.1 and older move it back when a preempted request has fewer tokens again).
        """
        ends = [self.storable(request, group, tokens) for group in range(len(self.groups))]
        if self.profile.store_index_stays:
            ends = [max(pair) for pair in zip(ends, request.next_stored, strict=True)]
        request.next_stored = ends

    @clause
    def _range(self, request: OffloadRequest, group: int, tokens: int) -> range:
        """STORE-10. Chunks are offered from the store index on.

        At the end of a request the last segment of a window is looked at again, where the end of the text wasn't yet
        known (``Profile.store_mask``), but for groups with draft layers.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_store_jobs.
        Releases: all; the latter 0.30.0 and later.
        """
        end = self.storable(request, group, tokens)
        first = request.next_stored[group]
        if self._looks_again(request, group, tokens):
            segment = self._alignment() // self.groups[group].block_tokens
            blocks = end * self.chunk_blocks
            first = min(first, (blocks - blocks % segment) // self.chunk_blocks)
        return range(first, end)

    def _looks_again(self, request: OffloadRequest, group: int, tokens: int) -> bool:
        some, alignment = self.groups[group], self._alignment()
        return (
            self.profile.store_mask is StoreMask.REGISTRATION
            and request.ended
            and some.kind is not Kind.FULL
            and not some.eagle
            and alignment > 0
            and alignment % some.block_tokens == 0
            and self.storable(request, group, tokens) != self._prompt_chunks(request, group)
        )

    def _prompt_chunks(self, request: OffloadRequest, group: int) -> int:
        return min(request.prompt_tokens, self.limit(request)) // self.chunk_tokens[group]

    def _alignment(self) -> int:
        """Return the tokens at multiples of which hits end, as far as full attention says so; 0 if it doesn't."""
        sizes = {size for size, group in zip(self.chunk_tokens, self.groups, strict=True) if group.kind is Kind.FULL}
        if not sizes and self.profile.store_mask is StoreMask.REGISTRATION:
            return max(self.chunk_tokens)
        return sizes.pop() if len(sizes) == 1 else 0

    @clause
    def _is_worth_it(self, request: OffloadRequest, group: int, chunk: int, chunks: range, tokens: int) -> bool:
        """STORE-11. A chunk isn't stored if its last block has left the window, or if no later hit can need it; nor if
        a block of it has left the window that a hit would need.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_store_jobs.
        Releases: all, the latter 0.33.0 and later (``Profile.skips_chunks_with_holes``).
        """
        first = chunk * self.chunk_blocks
        blocks = range(first, first + self.chunk_blocks)
        row = request.table[group]
        if row[blocks[-1]] == NULL:
            return False
        if self.profile.store_mask is not StoreMask.REGISTRATION:
            return self._is_in_tail(group, chunk, chunks.stop)
        again = self._looks_again(request, group, tokens) and chunk < request.next_stored[group]
        prompt_end = self._prompt_chunks(request, group) * self.chunk_blocks
        if again and any(self._wanted(group, blocks, prompt_end)):
            return False
        wanted = self._wanted(group, blocks, self._horizon(request, group, chunks.stop))
        hole = any(want and row[i] == NULL for want, i in zip(wanted, blocks, strict=True))
        return any(wanted) and not (hole and self.profile.skips_chunks_with_holes)

    @clause
    def _is_in_tail(self, group: int, chunk: int, end: int) -> bool:
        """STORE-12. Of a window whose chunks are shorter than full attention's, only those are stored that lie within
        a window before the end of one of these.

        The end of what has been computed counts too from 0.27.1 on, and draft layers need one chunk more. Where several
        groups of full attention differ in size, all are stored.

        Source: vLLM 0.29.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        is_store_reachable_swa_chunk.
        Releases: 0.22.1 to 0.29.0, differently; later see STORE-13.
        """
        size, alignment = self.chunk_tokens[group], self._alignment()
        if self.groups[group].kind is Kind.FULL or self.profile.store_mask is StoreMask.ALL or alignment <= size:
            return True
        tail, length = blocks_for(self.groups[group].reach, size), alignment // size
        tail += self.groups[group].eagle and self.profile.store_mask is StoreMask.PARTIAL_SEGMENT
        if tail >= length:
            return True
        place = chunk % length
        if self.profile.store_mask is StoreMask.PARTIAL_SEGMENT:
            length = min(length, end - (chunk - place))
        return place >= length - tail

    def _horizon(self, request: OffloadRequest, group: int, end: int) -> int | None:
        """Return at which block the text's last segment ends, as far as that is known."""
        if self.groups[group].eagle:
            return None
        prompt = self._prompt_chunks(request, group)
        if request.ended:
            return end * self.chunk_blocks
        return prompt * self.chunk_blocks if end <= prompt else None

    @clause
    def _wanted(self, group: int, blocks: range, horizon: int | None) -> list[bool]:
        """STORE-13. Of a window the blocks are worth storing that the GPU's prefix cache would register (REG-2), and
        those that a hit needs which ends at the end of the prompt, or of the text once that is known; of draft layers
        only the former.

        Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py, SlidingWindowManager.reachable_block_mask.
        Releases: 0.30.0 and later.
        """
        some, alignment = self.groups[group], self._alignment()
        span = some.block_tokens
        if some.kind is Kind.FULL or not alignment or alignment % span:
            return [True for _ in blocks]
        mask = worth_registering(some, span, alignment, some.eagle, None, (), blocks)
        if mask is None:
            return [True for _ in blocks]
        tail = range(0)
        if horizon is not None:
            segment = horizon - horizon % (alignment // span)
            tail = range(max(segment, horizon - blocks_for(some.reach - 1, span)), horizon)
        return [want or block in tail for want, block in zip(mask, blocks, strict=True)]

    def _store(self, request: OffloadRequest, keys: list[Key], slots: list[int], ranges: Sequence[range]) -> Transfer:
        """Plan a store of chunks, all blocks of which are its source but null ones."""
        wanted = set(keys)
        rows: list[list[int]] = []
        firsts: list[int] = []
        for group, chunks in enumerate(ranges):
            indices = [
                index
                for chunk in chunks
                if request.keys[group][chunk] in wanted
                for index in range(chunk * self.chunk_blocks, (chunk + 1) * self.chunk_blocks)
                if request.table[group][index] != NULL
            ]
            rows.append([request.table[group][index] for index in indices])
            firsts.append(indices[0] if indices else 0)
        job = self._open(self._fenced(Job(request, keys, store=True), rows))
        blocks = [block for row in rows for block in row]
        return Transfer(job, request.name, slots, blocks, [len(row) for row in rows], firsts)

    @clause
    def _fenced(self, job: Job, rows: Sequence[list[int]]) -> Job:
        """FENCE-4. Blocks of a window are fenced from the start of a store on, all others from the end of the request
        on.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._build_store_jobs.
        Releases: 0.21.0 and later.
        """
        by_kind: dict[bool, list[int]] = {True: [], False: []}
        for group, row in zip(self.groups, rows, strict=True):
            by_kind[group.kind is Kind.FULL] += row
        return job._replace(window_blocks=tuple(by_kind[False]), other_blocks=tuple(by_kind[True]))

    # Jobs

    @clause
    def _end_flushed(self, preempted: Collection[str]) -> None:
        """JOB-6. Up to 0.20.2 transfers have no number: the stores of a preempted request count as ended with the step
        that flushes them.

        All others end when the workers report the request: its load, or, after its end, all of its stores.

        Source: vLLM 0.20.2, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.build_connector_meta.
        Releases: 0.20.2 only.
        """
        if not self.profile.jobs_by_number:
            for name in preempted:
                for number in sorted(self.tracked[name].jobs if name in self.tracked else ()):
                    self.reported(number)

    @clause
    def _open(self, job: Job) -> int:
        """JOB-1. A request has one load, or any number of stores; jobs are numbered in the order in which they are
        planned.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler._generate_job_id.
        Releases: 0.21.0 and later; before, transfers have no number, and are reported by request.
        """
        number = self._next_job
        self._next_job += 1
        job.request.jobs.add(number)
        self.jobs[number] = job
        if self.profile.jobs_by_number:
            self._fence(number, job.window_blocks)
            if job.request.ended:
                self._fence(number, job.other_blocks)
                if not self._given.isdisjoint(job.other_blocks):
                    self._flush.add(number)
        return number

    def _fence(self, number: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.fences.setdefault(block, set()).add(number)

    @clause
    def reported(self, number: int, order: Sequence[Key] | None = None) -> None:
        """JOB-2. Once all workers have reported a job its chunks are ready, or not pinned any more, and its fences are
        gone; a request that has ended is forgotten with its last job.

        ``order`` is that in which the keys are gone through; any is right.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.update_connector_output.
        Releases: all.
        """
        if self.is_stale(number):
            return
        job = self.jobs.pop(number)
        keys = job.keys if order is None else order
        if job.store:
            self.tier.complete_store(keys)
        else:
            self.tier.complete_load(keys)
            self.loading.difference_update(keys)
        for block in [block for block, jobs in self.fences.items() if number in jobs]:
            self.fences[block].remove(number)
            if not self.fences[block]:
                del self.fences[block]
        job.request.jobs.remove(number)
        if not job.request.jobs and (job.request.closed or (job.request.ended and not self.profile.stores_at_end)):
            del self.tracked[job.request.name]

    @clause
    def is_stale(self, number: int) -> bool:
        """JOB-3. Reports of jobs from before a reset are passed over.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.update_connector_output.
        Releases: 0.22.1 and later.
        """
        self._flushed_by_reset.discard(number)
        return number < self.first_job

    @clause
    def keeps_stepping(self) -> bool:
        """JOB-4. The engine must go on stepping while a job hasn't been reported.

        Even one that a reset has made stale, from 0.33.0 on.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.has_pending_push_work.
        Releases: 0.24.0 and later.
        """
        waits = self._flushed_by_reset if self.profile.waits_for_stale_jobs else ()
        return self.profile.offload_keeps_stepping and bool(self.jobs or waits)

    # The end of a request

    @clause
    def finish(self, request: OffloadRequest, *, aborted: bool = False) -> None:
        """JOB-5. A request that ends is known until its jobs have been reported, and its last chunks been offered with
        the next step.

        The latter from 0.26.0 on; older releases never offer them.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.request_finished.
        Releases: all.
        """
        request.ended, request.aborted = True, aborted
        if self.profile.stores_at_end:
            self.refresh_keys(request)
        if self.profile.jobs_by_number:
            for number in request.jobs:
                self._fence(number, self.jobs[number].other_blocks)
        if not self.profile.stores_at_end and not request.jobs:
            self.tracked.pop(request.name, None)

    def _forget_ended(self, ended: Iterable[str]) -> None:
        for name in ended:
            request = self.tracked.get(name)
            if request is not None:
                request.closed = True
                self.tier.request_finished(request.access)
                if not request.jobs:
                    del self.tracked[name]

    @clause
    def reset(self) -> None:
        """STORE-14. A reset empties the tier and sets every store index to 0, so that what is on the GPU is offered
        again; jobs in flight are flushed with the next step, and stale from then on.

        Requests that have ended are forgotten.

        Source: vLLM 0.33.0, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
        OffloadingConnectorScheduler.reset_cache.
        Releases: 0.22.1 and later.
        """
        self._flush |= self.jobs.keys()
        self._flushed_by_reset |= self.jobs.keys()
        for request in [request for request in self.tracked.values() if request.ended]:
            del self.tracked[request.name]
        self.tier.reset()
        for request in self.tracked.values():
            request.next_stored = [0 for _ in self.groups]
            request.jobs.clear()
        self.first_job = self._next_job
        self.jobs.clear()
        self.fences.clear()
        self.loading.clear()
