"""Couples a target with its device and the laws: ops in, what they broke out.

A world lives from the start of an engine until it has nothing left to do. Laws that the target can survive (wrong
bytes in the CPU tier, say) are noted and the history goes on; an exception or a stall ends it.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvspec import laws
from kvspec.device.adversary import (
    Adversary,
    FairAdversary,
    PctAdversary,
    RandomAdversary,
    ReplayAdversary,
    SlowAdversary,
)
from kvspec.device.simulated import DeviceFault, SimulatedEvent, SimulatedStream
from kvspec.engine.shadow import ShadowMismatch
from kvspec.engine.text import words
from kvspec.errors import KvspecError
from kvspec.laws import Violation
from kvspec.ops import Abort, Add, Advance, EngineSetup, Finish, History, Op, Reset, Settle, Step
from kvspec.targets import CopiedBlock, Engine, Plan, Target

OFFLOADING_EVENTS = {
    "deferred lookup": "the connector asked to be asked again",
    "chunk behind a local hit": "a load began inside a chunk, behind the blocks of it that the GPU had",
    "preemption with a store in flight": "a request was preempted whose blocks were being stored",
    "re-admission before the report": "a preempted request was looked up before its stores were reported",
    "flush": "workers were told to finish a store before its blocks are reused",
    "LRU eviction": "the LRU policy gave up a chunk",
    "ARC eviction": "the ARC policy gave up a chunk",
    "store refused": "the CPU tier had no room for a store: all of it was pinned",
    "kernel copy": "a load was done by a kernel instead of a copy engine",
    "prompts only": "the connector stored the blocks of prompts only, not what the model said",
}
"""What only OffloadingConnector does, or tells of."""

MULTI_EVENTS = {
    "load by the first backend": "a load was started by the connector that is asked first",
    "load by the second backend": "a load was started by the connector that is asked second",
    "store by both backends": "in one schedule both connectors planned stores",
}
"""What only MultiConnector does."""

EVENTS = {
    **OFFLOADING_EVENTS,
    **MULTI_EVENTS,
    "context parallelism": "the engine's ranks shared blocks or prompts",
    "several groups": "the engine's layers were in several groups",
    "unequal groups": "the engine's attention groups had blocks of unequal sizes",
    "Mamba": "the engine had Mamba layers beside those of attention",
    "store": "blocks were stored in the CPU tier",
    "load": "a load from the CPU tier was started",
    "load finished": "a load ended and its request went on",
    "partial hit": "a request took a local prefix hit and loaded the blocks behind it",
    "CPU eviction": "a key left the CPU tier to make room",
    "preemption": "a running request was preempted for lack of blocks",
    "resumption": "a preempted request was scheduled again",
    "victim of its own step": "a request was preempted in the schedule that had scheduled it, and what it would have "
    "computed stays registered",
    "same-step reuse": "blocks of a victim were given to another request in the schedule that preempted it",
    "lookup without allocation": "a request was looked up again before anything was allocated for it",
    "abort while waiting": "a waiting request was aborted",
    "abort while loading": "a request was aborted while its load was in flight",
    "abort while running": "a running request was aborted",
    "abort in step": "an abort arrived between a forward and its update",
    "abort of a preempted request": "a preempted request was aborted",
    "stop token": "a request ended before its token limit",
    "reset": "the GPU prefix cache was dropped",
    "reset with transfers in flight": "a reset with the connector was asked for while transfers were in flight",
    "reset refused": "a reset was refused",
    "connector reset": "the connector dropped its cache",
    "finish with stores in flight": "a request ended while blocks were being stored",
    "idle": "the engine went idle",
    "rank skew": "ranks reported the same load in different steps",
    "step without a forward": "a step had no tokens to compute",
    "abort before any schedule": "a request was aborted that had never been scheduled",
    "draft accepted": "the model said what the drafter had proposed",
    "draft rejected": "the model said something else, and what a draft had left in the KV cache was void",
}

_ABORTS = {
    "waiting": "abort while waiting",
    "loading": "abort while loading",
    "running": "abort while running",
    "preempted": "abort of a preempted request",
}

STALL_STEPS = 12
"""Steps without any change after which an engine is said to be stuck: more than any batch queue is deep."""

DRAIN_STEPS_MAX = 2000
"""Steps in which any history of this size ends; beyond it, requests run without ever getting done."""

_OWN_FILES = str(Path(__file__).parent)

KICKS_MAX = 3
"""Requests sent to an engine that sleeps with transfers in flight, so that it polls them."""


@dataclass
class Outcome:
    """What a finished history has shown."""

    violations: list[Violation] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    stores: int = 0
    """Blocks stored."""
    loads: int = 0
    """Blocks loaded."""
    engine_seconds: float = 0.0
    """Wall seconds inside the engine's step function, the simulated device included."""
    trace: str = ""
    schedules: list[str] = field(default_factory=list)


def make_adversary(name: str, seed: int) -> Adversary:
    """Return ``fair``, ``random`` or ``pct:D``. ValueError for another name."""
    kind, _, depth = name.partition(":")
    if name == "fair":
        return FairAdversary()
    if name == "random":
        return RandomAdversary()
    if kind == "pct" and depth.isdigit():
        return PctAdversary(seed, int(depth))
    raise ValueError(f"{name!r} is no adversary; there are fair, random and pct:D (D change points)")


class World:
    """One engine of a target, from its start to its end."""

    def __init__(self, target: Target, setup: EngineSetup, adversary: str = "random", seed: int = 0) -> None:
        self.ops: list[Op] = []
        self.alive = True
        self._target = target
        self._setup = setup
        self._adversary_name = adversary
        self._seed = seed
        self._adversary = make_adversary(adversary, seed)
        self._outcome = Outcome()
        self._finished = False
        self._op_schedule = ""
        self._trace = hashlib.blake2b(digest_size=16)
        self._kind = "start"
        self._loads_due: Counter[tuple[str, int]] = Counter()
        self._first_report: dict[str, int] = {}
        self._lookups_open: set[str] = set()
        self._admitted: set[str] = set()
        self._local_hit: dict[str, int] = {}
        self._names: dict[str, None] = {}
        self._preempted: set[str] = set()
        self._reset_victims: set[str] = set()
        self._uncomputed = False
        """Whether something was ever registered and not computed, as its request was a victim of its own step."""
        self._connector_reset = False
        self._cpu_index: dict[bytes, int] = {}
        self._cpu_keys: set[bytes] = set()
        """All that were ever in the CPU tier, since the last reset of it."""
        self._to_be_stored: dict[bytes, str] = {}
        """Key that must get there -> place of the violation if it doesn't."""
        self._shortages: dict[str, int] = {}
        """Request -> shortages of CPU blocks before its admission; -1 if it lived through a reset: none is as many."""
        self._seen: set[tuple[str, str, str]] = set()
        self._tables: dict[str, set[int]] = {}
        self._engine: Engine
        self.longest_request = 0
        """Tokens, prompt and output, of the longest request that the engine can run; longer ones aren't added."""
        with ExitStack() as context:
            context.enter_context(target.activated())
            self._guard(lambda: self._start(setup))
            self._context = context.pop_all()

    def _start(self, setup: EngineSetup) -> None:
        """Start the engine. SetupRefused: the target doesn't run the setup; anything else that it raises is a crash."""
        self._reach_kind(setup)
        self._engine = self._target.start(setup, self._adversary, self)
        self.longest_request = self._engine.longest_request

    def _reach_kind(self, setup: EngineSetup) -> None:
        if setup.context_ranks > 1:
            self._reach("context parallelism")
        if len(setup.groups) > 1:
            self._reach("several groups")
        if len(set(setup.block_sizes)) > 1:
            self._reach("unequal groups")
        if self._has_states():
            self._reach("Mamba")

    # Ops --------------------------------------------------------------------------------------------------------------

    def apply(self, op: Op) -> None:
        """Let one op happen, and check after each engine step what must hold at any time; ``finish`` checks the rest.
        Does nothing once the world is dead."""
        if not self.alive or self._finished:
            return
        self.ops.append(op)
        self._kind = type(op).__name__.lower()
        self._adversary.begin_op(getattr(op, "seed", 0))
        with self._replaying(getattr(op, "schedule", None)):
            self._guard(lambda: self._perform(op))
        self._end_op()

    def _perform(self, op: Op) -> None:
        match op:
            case Add():
                self._add(op)
            case Step():
                for _ in range(op.count):
                    if not self._step():
                        break
            case Abort():
                self._abort(op)
            case Finish():
                if self._engine.status(op.request):
                    self._engine.finish_next(op.request)
            case Reset():
                self._reset(op)
            case Advance():
                self._adversary.yield_to(self._engine.actors)
            case Settle():
                self._settle(op.count)

    def _add(self, op: Add) -> None:
        own = op.tail if op.continues else op.shared + op.tail
        if op.request in self._names or own + op.max_tokens > self.longest_request:
            return  # before so many tokens are made
        prompt = self._prompt(op)
        if prompt is None:
            return
        if len(prompt) + op.max_tokens > self.longest_request:
            return
        self._names[op.request] = None
        self._engine.add(op, prompt, arrival=len(self._names))

    def _prompt(self, op: Add) -> list[int] | None:
        tail = words(1000 + op.branch, 0, op.tail)
        if op.continues is None:
            return (words(op.trunk, 0, op.shared) + tail) or None
        said = self._engine.said(op.continues)
        return None if said is None else said + tail

    def _abort(self, op: Abort) -> None:
        status = self._engine.status(op.request)
        if status is None:
            return
        self._reach(_ABORTS[status])
        if op.request not in self._admitted:
            self._reach("abort before any schedule")
        if op.in_step:
            self._reach("abort in step")
        self._engine.abort(op.request, op.in_step)

    def _reset(self, op: Reset) -> None:
        outstanding, queued = self._engine.transfers_outstanding(), self._engine.stores_queued()
        if outstanding and op.connector:
            self._reach("reset with transfers in flight")
        self._reset_victims |= (
            {name for name in self.live() if self._engine.status(name) == "running"} if op.running else set()
        )
        answer = self._engine.reset(op.running, op.connector)
        self._trace.update(repr(answer).encode())
        if answer.connector_refused and not (outstanding or queued):
            self._break(
                laws.REFUSE,
                ["the connector refuses to drop its cache, and no transfer is queued or in flight"],
            )
        if answer.done:
            self._reach("reset")
            if op.connector:
                self._reach("connector reset")
        else:
            self._reach("reset refused")
        self._shortages = dict.fromkeys(self.live(), -1)
        self._to_be_stored.clear()
        if op.connector:
            self._connector_reset = True
            self._cpu_index = dict(self._engine.cpu_index())
            self._cpu_keys = set(self._cpu_index)

    def _settle(self, steps: int) -> None:
        """A device that makes progress, and an engine that steps until it is idle."""
        drawn = self._adversary
        self._use(FairAdversary())
        for _ in range(steps):
            self._adversary.yield_to(self._engine.actors)
            if not self._step():
                break
        self._adversary.yield_to(self._engine.actors)
        self._use(drawn)

    # Steps ------------------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Let the engine make one step and check the laws; False if it is idle."""
        engine = self._engine
        if not engine.has_work():
            self._reach("idle")
            return False
        kind, self._kind = self._kind, "step"
        started = time.perf_counter()
        try:
            ran = engine.step()
        finally:
            self._outcome.engine_seconds += time.perf_counter() - started
        self._outcome.steps += 1
        if not ran:
            self._reach("step without a forward")
        batch = engine.last_batch()
        if batch is not None:
            self._trace.update(repr((batch.rows, batch.sampled)).encode())
            if batch.accepted:
                self._reach("draft accepted")
            if batch.rejected:
                self._reach("draft rejected")
        self._check_pools()
        self._check_cpu_index()
        self._kind = kind
        return True

    def _check_pools(self) -> None:
        for pool in self._engine.pools():
            self._break(laws.CONSERVE, laws.pool_is_conserved(pool), place=pool.name)

    def _check_cpu_index(self) -> None:
        """Compare the bytes of every key that is new in the CPU tier."""
        index = dict(self._engine.cpu_index())
        if index == self._cpu_index:
            return
        if self._cpu_index.keys() - index.keys():
            self._reach("CPU eviction")
        self._cpu_keys |= index.keys()
        for key, block in index.items():
            if self._cpu_index.get(key) != block:
                self._check_bytes(laws.INDEX, key, block, "CPU")
        self._cpu_index = index

    def _place_of(self, group: int, flaw: str) -> str:
        """Name the place of wrong bytes: what is peculiar to a group's blocks, nothing for full attention; the flaw of
        their store, and whether there was a victim of its own step."""
        kind, has_states = self._setup.groups[group].kind, self._has_states()
        blocks = self._setup.blocks_per_chunk
        parts: dict[str, bool] = {}
        if kind != "full" or has_states:
            parts = {
                kind: True,
                f"{blocks} blocks a chunk": blocks > 1,
                "after a reset": self._connector_reset,
                "unequal blocks": len(set(self._setup.block_sizes)) > 1,
                "beside mamba": has_states and kind != "mamba",
                "runner V2": has_states and self._setup.runner_v2,
            }
        parts |= {flaw: bool(flaw), "after a victim of its own step": self._uncomputed}
        return ", ".join(part for part, holds in parts.items() if holds)

    def _place_of_copy(self, block: CopiedBlock, gpu_refs: int, cpu_refs: int) -> str:
        """Name the place of a store of which only the source isn't held: a window, after a reset; else nothing."""
        if not self._connector_reset or block.to_gpu or block.gpu <= 0 or gpu_refs > 0 or cpu_refs <= 0:
            return ""
        group = self._engine.group_of_copy(block)
        is_window = group is not None and self._setup.groups[group].kind == "sliding-window"
        return "sliding-window, after a reset" if is_window else ""

    def _has_states(self) -> bool:
        """Whether there is a Mamba group. Then runners write blocks outside the forward: they zero some, and copy
        states."""
        return any(group.kind == "mamba" for group in self._setup.groups)

    def _check_bytes(self, law: str, key: bytes, block: int, tier: str) -> None:
        """Compare the bytes of a key on every rank. Of a rank's wrong bytes, name the first whose store has no flaw."""
        engine, group, what = self._engine, self._engine.group_of(key), self._engine.describe_key(key)
        for rank in range(self._setup.world_size):
            expected = engine.expected_tags(key, rank)
            if expected is None:
                message = f"{tier} block {block} can be hit under a key that no request has: {what}"
                self._break(law, [message], place=self._place_of(group, flaw=""))
                return
            read = engine.cpu_tags if tier == "CPU" else engine.gpu_tags
            found = read(key, rank, block)[:, : len(expected)]
            wrong = np.argwhere(np.ma.filled(found != expected, False))
            if not len(wrong):
                continue
            flaws = [self._flaw_of(key, rank, block, tier, offset) for _, offset in wrong.tolist()]
            flaw = min(flaws)
            layer, offset = wrong[flaws.index(flaw)].tolist()
            tag = engine.describe_tag(key, rank, layer, int(found[layer, offset]))
            message = (
                f"{tier} block {block} can be hit as {what}, but on rank {rank}, layer {layer}, token {offset} "
                f"of the block, it holds {tag}"
            )
            self._break(law, [message], place=self._place_of(group, flaw))

    def _flaw_of(self, key: bytes, rank: int, block: int, tier: str, entry: int) -> str:
        if tier == "GPU":
            return self._engine.flaw_of_gpu_block(rank, block)
        return self._engine.flaw_of_cpu_block(key, rank, block, entry)

    # What the target tells (the Probe) --------------------------------------------------------------------------------

    def looked_up(self, request: str, local_tokens: int, external_tokens: int | None) -> None:
        if request in self._lookups_open:
            self._reach("lookup without allocation")
        self._lookups_open.add(request)
        if external_tokens is None:
            self._reach("deferred lookup")
        else:
            self._check_offer(request, local_tokens, external_tokens)
        self._local_hit[request] = local_tokens

    def _check_offer(self, request: str, local_tokens: int, external_tokens: int) -> None:
        reads_cache = self._engine.reads_cache(request)
        due = self._engine.held_tokens(request, local_tokens) if reads_cache else 0
        if due is not None:
            found = laws.offer_is_due(external_tokens, due, local_tokens)
            self._break(laws.OFFER, found, place="" if reads_cache else "reads no cache")

    def allocated(self, request: str, external_tokens: int) -> None:
        self._lookups_open.discard(request)
        self._admitted.add(request)
        self._shortages.setdefault(request, self._engine.cpu_shortages())
        if external_tokens <= 0:
            return
        self._reach("load")
        self._first_report.pop(request, None)
        if self._local_hit.get(request):
            self._reach("partial hit")
        for rank in range(self._setup.world_size):
            self._loads_due[request, rank] += 1

    def scheduled(self, plan: Plan) -> None:
        self._trace.update(plan.trace.encode())
        self._outcome.stores += plan.stores
        self._outcome.loads += plan.loads
        if plan.stores:
            self._reach("store")
        if plan.preempted:
            self._note_preemption(plan)
        if plan.uncomputed:
            self._reach("victim of its own step")
            self._uncomputed = True
        for request, blocks in plan.new_blocks.items():
            if request in self._preempted and request not in plan.preempted:
                self._reach("resumption")
                self._preempted.discard(request)
                self._tables[request] = set()
            self._tables.setdefault(request, set()).update(blocks)

    def _note_preemption(self, plan: Plan) -> None:
        if plan.preempted - self._reset_victims:
            self._reach("preemption")
        self._reset_victims.clear()
        self._preempted |= plan.preempted
        for victim in plan.preempted:
            given_up = self._tables.pop(victim, set())
            others = (set(blocks) for request, blocks in plan.new_blocks.items() if request != victim)
            if any(given_up & blocks for blocks in others):
                self._reach("same-step reuse")

    def loaded(self, rank: int, requests: Iterable[str]) -> None:
        requests = list(requests)
        self._break(laws.LOAD, laws.report_is_due(self._loads_due, requests, rank))
        for request in requests:
            self._reach("load finished")
            if self._first_report.setdefault(request, self._outcome.steps) != self._outcome.steps:
                self._reach("rank skew")

    def ended(self, request: str, stopped: bool) -> None:
        if stopped:
            self._reach("stop token")
        if self._engine.blocks_in_stores()[0]:
            self._reach("finish with stores in flight")
        if self._engine.cpu_shortages() == self._shortages[request]:
            self._note_full_blocks(request)

    def _note_full_blocks(self, request: str) -> None:
        """Note the keys that must get into the CPU tier: those under which the request's own blocks are registered."""
        confirmed, own = self._engine.confirmed_tokens(request), self._tables.get(request, set())
        for block in self._engine.full_blocks(request):
            if own.isdisjoint(block.gpu_blocks):
                continue
            place = "a running request" if block.stop <= confirmed else "the end of a request"
            self._to_be_stored.setdefault(block.key, place)

    def copied(self, block: CopiedBlock) -> None:
        gpu_refs, cpu_refs = self._engine.copy_refs(block)
        null = self._engine.cpu_null_block
        if gpu_refs <= 0 or cpu_refs <= 0 or block.gpu <= 0 or block.cpu < 0 or block.cpu == null:
            self._break(
                laws.OWN,
                laws.copy_is_owned(block.gpu, block.cpu, gpu_refs, cpu_refs, block.to_gpu, block.rank, null),
                op="step",
                place=self._place_of_copy(block, gpu_refs, cpu_refs),
            )

    def mismatch(self, mismatch: ShadowMismatch) -> None:
        flaw = self._engine.flaw_of_gpu_block(mismatch.rank, mismatch.block)
        self._break(laws.SHADOW, [str(mismatch)], place=self._place_of(mismatch.group, flaw), op="step")

    def saw(self, event: str) -> None:
        self._reach(event)

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """Let everything end, check what must hold then, and return the outcome.

        The device makes progress between steps and while the host waits, at no other time: an engine that goes idle
        must not count on transfers that are faster than its last step.
        """
        if not self._finished:
            self._finished = True
            self._kind = "drain"
            with self._context:
                if self.alive:
                    self._use(SlowAdversary())
                    self._guard(self._drain)
            self._end_op()
            self._outcome.trace = self._trace.hexdigest()
        return self._outcome

    def _drain(self) -> None:
        self._run_to_idle()
        if self.alive:
            self._break(laws.PROGRESS, laws.stores_were_started(self._engine.stores_unstarted()), place="stores")
        for kick in range(KICKS_MAX if self.alive else 0):
            if self._engine.polls_when_idle or not self._engine.transfers_outstanding():
                break
            self._engine.add(Add(f"kick{kick}", max_tokens=1), words(2000 + kick, 0, 1), arrival=1000 + kick)
            self._run_to_idle()
        if not self.alive:
            return
        self._check_release()
        self._break(laws.LOAD, laws.reports_were_made(self._loads_due))
        for key, block in self._engine.gpu_index().items():
            self._check_bytes(laws.GPU_INDEX, key, block, "GPU")
        for tier, index in (("CPU", self._engine.cpu_index()), ("GPU", self._engine.gpu_index())):
            replayed = self._engine.events(tier)
            if replayed is not None:
                found = laws.events_replay(tier, replayed, index, self._engine.describe_key)
                self._break(laws.EVENTS, found, place=f"{tier} after a reset" if self._connector_reset else tier)

    def _check_release(self) -> None:
        """An engine that sleeps with stores in flight (SimpleCPUOffload up to 0.29) may hold their blocks, and no
        others."""
        asleep = not self._engine.polls_when_idle and self._engine.transfers_outstanding()
        in_transfer = self._engine.blocks_in_stores() if asleep else (frozenset(), frozenset())
        for pool, excused in zip(self._engine.pools(), in_transfer, strict=True):
            self._break(laws.RELEASE, laws.nothing_is_held(pool, excused), place=pool.name)
        if not asleep:
            self._check_stored()
            self._break(laws.RELEASE, laws.nothing_is_kept(self._engine.kept()), place="bookkeeping")

    def _check_stored(self) -> None:
        for place in sorted(set(self._to_be_stored.values())):
            missing = [key for key, of in self._to_be_stored.items() if of == place and key not in self._cpu_keys]
            self._break(laws.STORED, laws.blocks_were_stored(missing, self._engine.describe_key), place=place)

    def _run_to_idle(self) -> None:
        """Let the device run dry and step, until the engine is idle; a violation of PROGRESS-1 if it never is."""
        unchanged = stores = 0
        before = ""
        kept: Counter[str] = Counter()
        for _ in range(DRAIN_STEPS_MAX):
            self._adversary.run_dry(self._engine.actors)
            if not self._step():
                return
            state = self._engine.state()
            if state != before:
                unchanged, stores, before, kept = 0, self._outcome.stores, state, Counter()
                continue
            unchanged += 1
            kept += Counter(self._engine.kept())  # adding drops what is zero
            stores_on = self._outcome.stores > stores
            if unchanged >= self._stall_steps(stores_on):
                what = "and the engine goes on storing" if stores_on else "and nothing is in flight"
                self._stuck(f"for {unchanged} steps no request changes, {what}", kept, stores_on)
                return
        self._stuck(f"not idle after {DRAIN_STEPS_MAX} steps", kept, stores_on=False)

    def _stall_steps(self, stores_on: bool) -> int:
        """Return after how many steps without any change of a request the engine is stuck. It may still store all that
        its prefix cache has, a block every other step, and a request may have to wait for that."""
        may_store = stores_on or not self._engine.waiting_requests()
        return STALL_STEPS + (2 * self._setup.gpu_blocks if may_store else 0)

    def _stuck(self, how: str, kept: Iterable[str], stores_on: bool) -> None:
        requests = self._engine.waiting_requests()
        if requests:
            self._die(laws.PROGRESS, f"{how}: {', '.join(requests)}", self._stall_place(stores_on))
        else:
            self._die(
                laws.PROGRESS,
                f"{how}; no request is left, and the engine goes on stepping",
                f"awake: {', '.join(sorted(kept))}",
            )

    def _stall_place(self, stores_on: bool) -> str:
        """Return what known issues tell a stall from others by."""
        setup = self._setup
        kinds = sorted({group.kind for group in setup.groups})
        groups = f"groups: {', '.join(kinds)}" if len(setup.groups) > 1 else ""
        drafter = f"with {'EAGLE' if setup.eagle else 'n-grams'}" + " and priorities" * setup.priority
        parts = (groups, drafter * bool(setup.drafts), "while stores go on" * stores_on)
        return ", ".join(part for part in parts if part)

    def live(self) -> list[str]:
        """Return the requests that the engine still has, in the order of their arrival."""
        return [name for name in self._names if self._engine.status(name) is not None] if self.alive else []

    def loading(self) -> list[str]:
        """Return those of the live requests that wait for a load."""
        return [name for name in self.live() if self._engine.status(name) == "loading"]

    def history(self) -> History:
        """Return what has happened, as data."""
        return History(
            target=self._target.name,
            setup=self._setup,
            ops=tuple(self.ops),
            adversary=self._adversary_name,
            seed=self._seed,
        )

    # Bookkeeping ------------------------------------------------------------------------------------------------------

    def _use(self, adversary: Adversary) -> None:
        self._flush_schedule()
        self._adversary = adversary
        self._engine.set_adversary(adversary)

    def _flush_schedule(self) -> None:
        self._op_schedule += self._adversary.take_schedule()

    def _end_op(self) -> None:
        self._flush_schedule()
        self._outcome.schedules.append(self._op_schedule)
        self._trace.update(self._op_schedule.encode())
        self._op_schedule = ""

    def _replaying(self, schedule: str | None) -> ExitStack:
        """Replace the adversary by a schedule for the time of one op."""
        stack = ExitStack()
        if schedule is not None:
            drawn = self._adversary
            self._use(ReplayAdversary(schedule))
            stack.callback(lambda: self._use(drawn))
        return stack

    def _reach(self, event: str) -> None:
        self._outcome.reached[event] += 1

    def _break(self, law: str, messages: Iterable[str], place: str = "", op: str = "") -> None:
        """Note each message. ``op``: given by what a device does, perhaps after the engine's step has returned."""
        for message in messages:
            self._note(law, message, place, op or self._kind)

    def _note(self, law: str, message: str, frame: str, op: str) -> None:
        """Keep the first violation of each law, op and place."""
        key = (law, op, frame)
        if key not in self._seen:
            self._seen.add(key)
            self._outcome.violations.append(Violation(law, message, op, frame, self._op_index()))

    def _op_index(self) -> int:
        return len(self.ops) - (0 if self._finished else 1)

    def _die(self, law: str, message: str, frame: str = "") -> None:
        self.alive = False
        self._note(law, message, frame, self._kind)

    def _guard(self, run: Callable[[], None]) -> None:
        """Run target code; an exception of the target is a violation, one of kvspec isn't."""
        try:
            run()
        except DeviceFault as fault:
            self._die(laws.DEVICE, str(fault), innermost_frame(fault, self._target.own_files) or "")
        except Exception as error:
            if missing := _not_simulated(error):
                raise KvspecError(missing) from error
            frame = innermost_frame(error, self._target.own_files)
            if frame is None:
                raise
            self._die(laws.CRASH, f"{type(error).__name__}: {error}", frame)


def innermost_frame(error: BaseException, own_files: Iterable[str]) -> str | None:
    """Return ``file:function`` of the target's innermost frame; None if kvspec's own code, called further in, raised.

    ``own_files`` are the directories of the target's files.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for directory in own_files:
            if frame.filename.startswith(directory):
                return f"{frame.filename[len(directory) :].lstrip('/')}:{frame.name}"
        if frame.filename.startswith(_OWN_FILES) and not isinstance(error, DeviceFault):
            return None
    return None


def _not_simulated(error: Exception) -> str | None:
    """Say what the target asked of CUDA that the device doesn't have, if that is what the error is about."""
    if isinstance(error, AttributeError) and isinstance(error.obj, SimulatedEvent | SimulatedStream):
        kind = "events" if isinstance(error.obj, SimulatedEvent) else "streams"
        return f"The target calls {error.name!r} of CUDA {kind}, which the simulated device doesn't have yet."
    where = traceback.extract_tb(error.__traceback__)[-1]
    if "/torch/cuda/" in where.filename.replace("\\", "/"):
        return f"The target calls CUDA in a way that the simulated device doesn't have yet: {where.name} raised {error}"
    return None


def run_history(target: Target, history: History) -> Outcome:
    """Let a recorded history happen again."""
    world = World(target, history.setup, history.adversary, history.seed)
    for op in history.ops:
        world.apply(op)
    return world.finish()
