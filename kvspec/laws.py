"""The laws: what holds for every target and every release, whatever its strategy.

A law is a small named function over observations; it yields one sentence for each way in which it is broken. It
knows nothing of vLLM, and it doesn't say what a target *should* do next (that is the model's part), only what must
never be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple


class Law(NamedTuple):
    """A law's id, the sentence it stands for, and why it must hold."""

    id: str
    sentence: str
    reason: str


class Violation(NamedTuple):
    """A broken law, seen in a history."""

    law: str
    message: str
    op: str
    """Kind of the op during which it was seen: ``step`` in any engine step, ``drain`` for what holds at the end."""
    frame: str
    """Innermost function of the target, ``file:function``, if it raised; else the place that the law names, or
    nothing."""
    op_index: int


class PoolView(NamedTuple):
    """A block pool as it is between two steps.

    ``refs[i]`` counts the references of block i; block ``null`` (-1: none) is never counted.
    """

    name: str
    refs: Sequence[int]
    free: Sequence[int]
    free_count: int
    null: int


LAWS: dict[str, Law] = {}


def _law(id: str, sentence: str, reason: str) -> str:
    LAWS[id] = Law(id, sentence, reason)
    return id


SHADOW = _law(
    "SHADOW-1",
    "Attention reads, for every earlier position of a request, the bytes that the model wrote for exactly that prefix.",
    "Anything else is an answer computed from somebody else's context.",
)
CRASH = _law(
    "CRASH-1",
    "No legal history makes the target raise, except where it documents a refusal.",
    "An exception in the engine's loop ends the server.",
)
DEVICE = _law(
    "DEVICE-1",
    "Every copy stays inside memory that was allocated or registered, and no host waits for what will never happen.",
    "CUDA would answer with an illegal address, or with a hang.",
)
PROGRESS = _law(
    "PROGRESS-1",
    "With a device that makes progress, an engine ends its requests, begins the stores it planned, and goes idle.",
    "Otherwise clients wait for ever while nothing runs, or the engine works for nobody, or stores wait for a client.",
)
CONSERVE = _law(
    "CONSERVE-1",
    "A block without references is in the free queue exactly once, any other not at all; the pool counts them right.",
    "A lost block is a leak; a block that is free twice gets two owners.",
)
OWN = _law(
    "OWN-1",
    "While a copy executes, both of its blocks are held for it, and neither is the null block.",
    "A copy from or to a free block races with its next owner.",
)
INDEX = _law(
    "INDEX-1",
    "A key that can be hit in the CPU tier stands for a block whose bytes are those of its prefix, on every rank.",
    "The next request with that prefix will load them.",
)
STORED = _law(
    "STORED-1",
    "An eager CPU tier that has room stores each full block of a request that ends, if that can be hit on the GPU.",
    "A prefix that was never stored is computed again, and nobody notices.",
)
OFFER = _law(
    "OFFER-1",
    "A lookup offers what the CPU tier has in a row behind the local hit, all but a request's last token; nothing to a "
    "request that reads no cache.",
    "Less is computed again, and nobody notices; the last token has to be computed, for its logits.",
)
GPU_INDEX = _law(
    "INDEX-2",
    "Once all has run, a key that can be hit on the GPU stands for a block with its prefix's bytes, on every rank.",
    "The next request with that prefix will read them.",
)
LOAD = _law(
    "LOAD-1",
    "Every load that was started is reported as finished exactly once by each rank, and nothing else is.",
    "A second report hits a request that isn't loading; a missing one strands it.",
)
RELEASE = _law(
    "RELEASE-1",
    "When the engine has nothing left to do, every block of both tiers is free and nothing is kept for any request.",
    "What is kept for nobody is never given back.",
)
REFUSE = _law(
    "REFUSE-1",
    "The connector refuses to drop its cache only while a transfer is queued or in flight.",
    "A caller that updates weights must be able to clear the cache once transfers have ended.",
)
EVENTS = _law(
    "EVENT-1",
    "The events of a tier, replayed, give exactly the keys that can be hit in it.",
    "Routers decide by these events which engine has a prefix.",
)


def pool_is_conserved(pool: PoolView) -> Iterator[str]:
    """CONSERVE-1."""
    free = pool.free
    if len(free) != pool.free_count:
        yield f"the {pool.name} pool counts {pool.free_count} free blocks and its queue holds {len(free)}"
    refs = pool.refs
    unreferenced = sum(1 for i, count in enumerate(refs) if count <= 0 and i != pool.null)
    if len(free) == unreferenced == len(set(free)) and not any(refs[block] for block in free) and pool.null not in free:
        return
    queued = Counter(free)
    for block, count in enumerate(refs):
        expected = 1 if count == 0 and block != pool.null else 0
        if queued[block] != expected:
            yield (
                f"{pool.name} block {block} with {count} references is {queued[block]} times in the free queue"
                + (" (it is the null block)" if block == pool.null else "")
            )
        elif count < 0 and block != pool.null:
            yield f"{pool.name} block {block} has {count} references"


def nothing_is_held(pool: PoolView, excused: Set[int] = frozenset()) -> Iterator[str]:
    """RELEASE-1, the pools' part. ``excused``: blocks of transfers that nobody has asked about yet."""
    held = {
        block: count
        for block, count in enumerate(pool.refs)
        if count != 0 and block != pool.null and block not in excused
    }
    if held:
        yield f"idle, but {pool.name} blocks are still referenced (block: references): {held}"


def nothing_is_kept(kept: Mapping[str, int]) -> Iterator[str]:
    """RELEASE-1, the bookkeeping's part. ``kept``: name of a map, number of entries."""
    left = {name: count for name, count in kept.items() if count}
    if left:
        yield f"idle, but the connector still keeps (map: entries): {left}"


def stores_were_started(unstarted: int) -> Iterator[str]:
    """PROGRESS-1, of an engine that has just gone idle."""
    if unstarted:
        yield f"idle, but {unstarted} planned stores were never begun: the engine waits for its next request"


def blocks_were_stored(missing: Iterable[bytes], name: Callable[[bytes], str]) -> Iterator[str]:
    """STORED-1. ``missing``: keys that the CPU tier should have had."""
    if left := sorted(name(key) for key in missing):
        yield f"idle, and the CPU tier, which had room, never had: {', '.join(left)}"


def offer_is_due(offered: int, due: int, local: int) -> Iterator[str]:
    """OFFER-1. All in tokens; ``local``: the local hit."""
    if offered != due:
        yield f"a lookup offers {offered} tokens behind a local hit of {local}, and {due} are due"


def copy_is_owned(
    gpu: int, cpu: int, gpu_refs: int, cpu_refs: int, to_gpu: bool, rank: int, cpu_null: int | None = 0
) -> Iterator[str]:
    """OWN-1. ``gpu`` and ``cpu`` are block ids, -1 if the address is in no block; ``cpu_null`` None: no null block."""
    what = (
        f"load of CPU block {cpu} into GPU block {gpu}" if to_gpu else f"store of GPU block {gpu} into CPU block {cpu}"
    )
    if gpu == 0 or cpu == cpu_null:
        yield f"{what} on rank {rank} touches the null block"
    if gpu < 0 or cpu < 0:
        yield f"{what} on rank {rank} touches memory that is in no block"
    if gpu > 0 and gpu_refs <= 0:
        yield f"{what} executes on rank {rank} while GPU block {gpu} is free"
    if cpu >= 0 and cpu != cpu_null and cpu_refs <= 0:
        yield f"{what} executes on rank {rank} while CPU block {cpu} is free"


def report_is_due(due: Counter[tuple[str, int]], requests: Iterable[str], rank: int) -> Iterator[str]:
    """LOAD-1, while it runs. ``due`` counts the reports still owed per request and rank; it is updated."""
    for request in requests:
        if due[request, rank] <= 0:
            yield f"rank {rank} reports the load of {request} as finished, which it doesn't owe"
        else:
            due[request, rank] -= 1


def reports_were_made(due: Counter[tuple[str, int]]) -> Iterator[str]:
    """LOAD-1, at the end."""
    owed = sorted(key for key, count in due.items() if count > 0)
    if owed:
        yield f"idle, but these loads were never reported (request, rank): {owed}"


def events_replay(
    tier: str, replayed: Mapping[bytes, int], index: Iterable[bytes], name: Callable[[bytes], str]
) -> Iterator[str]:
    """EVENT-1. ``replayed``: stored minus removed per key; ``index``: the keys that can be hit."""
    present = {key for key, count in replayed.items() if count > 0}
    actual = set(index)
    if missing := sorted(name(key) for key in actual - present):
        yield f"{tier}: in the index, but no event says so: {', '.join(missing)}"
    if stale := sorted(name(key) for key in present - actual):
        yield f"{tier}: the events leave it stored, but it isn't in the index: {', '.join(stale)}"
    if negative := sorted(name(key) for key, count in replayed.items() if count < 0):
        yield f"{tier}: removed more often than stored: {', '.join(negative)}"
