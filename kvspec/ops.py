"""The vocabulary: every step of a history, as data.

A history is a setup and a list of ops. Ops are frozen, go to JSON and back, and name requests by the name that the
history gave them; an op on a request that isn't there (any more) does nothing, so any op can be left out.
"""

from __future__ import annotations

import re

import msgspec

from kvspec.errors import refuse_outside

BLOCK_SIZE_MAX = 128
_RANGES = {
    "gpu_blocks": (2, 4096),
    "cpu_blocks": (2, 4096),
    "block_size": (1, BLOCK_SIZE_MAX),
    "step_tokens": (1, 65536),
    "running_max": (1, 256),
    "ranks": (1, 8),
    "decode_ranks": (1, 8),
    "prefill_ranks": (1, 8),
    "interleave": (1, BLOCK_SIZE_MAX),
    "drafts": (0, 8),
}
"""Least and most of each number of a setup; beyond the most an engine takes more memory or time than it is worth."""
GROUPS_MAX = 4
GROUP_KINDS = ("full", "sliding-window", "mamba")
BACKENDS = (("offloading", "simple"), ("simple", "offloading"), ("offloading", "offloading"))


def _tokens(count: int, kind: str = "") -> str:
    return f"{count} {kind}token{'' if count == 1 else 's'}"


class AttentionGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share a block table, also such as keep a state instead of tokens. ValueError: there is no such kind,
    or it has no such reach."""

    kind: str = "full"
    """``full``, ``sliding-window``, or ``mamba``: a state every block, as with vLLM's ``mamba_cache_mode="align"``."""
    block_size: int = 0
    """Tokens per block and rank; 0: the setup's."""
    reach: int = 0
    """Tokens that attention reads, the query's own included; 0 for full attention and Mamba: all of them."""

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise ValueError(f"{self.kind!r} is no kind of group; there are {', '.join(GROUP_KINDS)}")
        refuse_outside("block_size of a group", self.block_size, 0, BLOCK_SIZE_MAX)
        reaches = (1, 4096) if self.kind == "sliding-window" else (0, 0)
        refuse_outside(f"reach of a {self.kind} group", self.reach, *reaches)

    def __str__(self) -> str:
        reach = f" of {_tokens(self.reach)}" if self.reach else ""
        blocks = f" in blocks of {_tokens(self.block_size)}" if self.block_size else ""
        return f"{self.kind}{reach}{blocks}"


class EngineSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine of a history. Blocks, tokens and requests are counts; ``block_size`` is tokens per block and rank.

    ValueError says which value can't be.
    """

    gpu_blocks: int = 11
    """Blocks of the GPU pool, the null block included."""
    cpu_blocks: int = 8
    """Blocks of the CPU pool, the null block included; with OffloadingConnector, chunks (it has no null block)."""
    block_size: int = 4
    step_tokens: int = 16
    """Token budget of one engine step."""
    running_max: int = 4
    """Requests that may run at once."""
    async_scheduling: bool = False
    """Two steps in flight, with the batch queue."""
    runner_v2: bool = True
    """Which model runner's order of calls."""
    ranks: int = 1
    """Tensor-parallel ranks without context parallelism: each keeps every token of its heads."""
    lazy: bool = False
    """SimpleCPUOffload: store what is about to be evicted instead of what has been computed."""
    events: bool = False
    """KV cache events."""
    priority: bool = False
    """Priority scheduling instead of first come, first served."""
    blocks_per_chunk: int = 1
    """OffloadingConnector: GPU blocks that are stored and loaded as one."""
    eviction: str = "lru"
    """OffloadingConnector: ``lru`` or ``arc``."""
    prompt_only: bool = True
    """OffloadingConnector: store what was asked, not what was generated."""
    decode_ranks: int = 1
    """Decode context parallelism: ranks that share the tokens of a block."""
    prefill_ranks: int = 1
    """Prefill context parallelism: ranks that share the work of a prompt, and in some releases the tokens of a block
    too."""
    interleave: int = 1
    """Tokens in a row that one context-parallel rank keeps before it is the next one's turn."""
    backends: tuple[str, ...] = ()
    """MultiConnector: its two connectors, in the order in which they are asked; ``offloading`` or ``simple``."""
    groups: tuple[AttentionGroup, ...] = (AttentionGroup(),)
    drafts: int = 0
    """Speculative decoding: tokens that a drafter proposes in each step, 0 for no drafter."""
    eagle: bool = False
    """The drafter, if there is one, is EAGLE or MTP: it reads hidden states, so prefix hits end a block earlier."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            refuse_outside(name, getattr(self, name), least, most)
        if not 1 <= len(self.groups) <= GROUPS_MAX:
            raise ValueError(f"there are {len(self.groups)} groups; there must be 1 to {GROUPS_MAX}")
        if self.backends and self.backends not in BACKENDS:
            raise ValueError(f"backends are {self.backends}; there are {', '.join(map(str, BACKENDS))}")
        if self.ranks > 1 and self.context_ranks > 1:
            raise ValueError(
                f"ranks is {self.ranks} and there are {self.context_ranks} context-parallel ranks; "
                "one of them must be 1"
            )
        for size in self.block_sizes:
            if size % self.interleave:
                raise ValueError(f"interleave is {self.interleave}; it must divide the block size, {size}")
        if any(max(self.block_sizes) % size for size in self.block_sizes):
            raise ValueError(f"the groups' block sizes are {self.block_sizes}; each must divide the largest")

    @property
    def context_ranks(self) -> int:
        """Context-parallel ranks of both kinds."""
        return self.decode_ranks * self.prefill_ranks

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.ranks * self.context_ranks

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block and rank of each group."""
        return tuple(group.block_size or self.block_size for group in self.groups)


class _Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag=str.lower):
    pass


class Add(_Op, frozen=True):
    """Add a request. Its prompt is ``shared`` tokens of the text ``trunk``, then ``tail`` tokens of the text
    ``branch``.

    With ``continues`` the prompt begins with everything that the named request has said so far, in place of the trunk.
    """

    request: str
    shared: int = 0
    tail: int = 1
    max_tokens: int = 1
    trunk: int = 0
    branch: int = 0
    continues: str | None = None
    salt: int = 0
    """Cache salt, 0 for none: equal prompts with different salts share nothing."""
    reads_cache: bool = True
    """False: prompt log-probabilities are asked for, so no prefix hit may be used."""
    priority: int = 0


class Step(_Op, frozen=True):
    """Let the engine make ``count`` steps (fewer if it goes idle), the device at the adversary's mercy."""

    count: int = 1
    seed: int = 0
    schedule: str | None = None
    """The adversary's moves, if they are to be repeated instead of drawn from ``seed``."""


class Abort(_Op, frozen=True):
    """The client goes away: between steps, or (``in_step``) after the next step's forward and before its update."""

    request: str
    in_step: bool = False


class Finish(_Op, frozen=True):
    """The next token that the model samples for the request is the stop token."""

    request: str


class Reset(_Op, frozen=True):
    """``reset_prefix_cache``, between steps."""

    running: bool = False
    """Preempt what runs, so that the GPU prefix cache can be dropped."""
    connector: bool = False
    """Drop the connector's cache too."""


class Advance(_Op, frozen=True):
    """Time passes on the device and in the ranks, but the engine makes no step."""

    seed: int = 0
    schedule: str | None = None


class Settle(_Op, frozen=True):
    """Everything asynchronous completes, then the engine steps until it goes idle (at most ``count`` steps)."""

    count: int = 40


Op = Add | Step | Abort | Finish | Reset | Advance | Settle

HISTORY_FORMAT = 1

SCHEDULE = re.compile(r"(?:[a-z]\d+|[.+-])*")
ADVERSARY = re.compile(r"fair|random|pct:\d+")


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="level", tag="engine"):
    """What happened to one engine, from its start until it has nothing left to do. Enough to let it happen again."""

    target: str
    """``vllm-simple@0.33.0``; without a release, the vLLM that was importable."""
    setup: EngineSetup
    ops: tuple[Op, ...]
    adversary: str = "random"
    """``fair``, ``random``, or ``pct:D`` with D change points."""
    seed: int = 0
    """What the adversary keeps for the whole history: the priorities of ``pct``."""
    format: int = HISTORY_FORMAT


def history_to_json(history: msgspec.Struct) -> bytes:
    """Return a history, this one or that of another level, as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(history), indent=1) + b"\n"


def history_from_json(data: bytes) -> History:
    """Read a history. ValueError that says what is wrong, and where, if it isn't one of this format."""
    try:
        refuse_other_format(data, HISTORY_FORMAT)
        history = msgspec.json.decode(data, type=History)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a history: {error}") from error
    for i, op in enumerate(history.ops):
        schedule = getattr(op, "schedule", None)
        if schedule and not SCHEDULE.fullmatch(schedule):
            raise ValueError(
                f"op {i}: {schedule!r} is no schedule; it is made of moves like 'c0', and of '.', '+' and '-'"
            )
    if not ADVERSARY.fullmatch(history.adversary):
        raise ValueError(f"{history.adversary!r} is no adversary; there are fair, random and pct:D (D change points)")
    return history


def refuse_other_format(data: bytes, reads: int) -> None:
    """Raise ValueError if a history has another format than the one that is read, MsgspecError if it has none."""
    version = msgspec.json.decode(data, type=_Versioned).format
    if version != reads:
        raise ValueError(f"history format {version}; this kvspec reads format {reads}")


class _Versioned(msgspec.Struct):
    format: int


EQUALITIES = {"vllm-core": "core", "vllm-offload-index": "offload"}
"""Targets that are compared with the model, call by call -> the level of their histories.

The ids of their known issues begin with it too.
"""


def level_of(data: bytes) -> str:
    """Return what a history is one of: ``engine``, or another level. ValueError if the data is no JSON object."""
    try:
        return msgspec.json.decode(data, type=_Levelled).level
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a history: {error}") from error


class _Levelled(msgspec.Struct):
    level: str = "engine"


def in_words(op: Op) -> str:
    """Say an op in plain English, for a person who reads a finding."""
    match op:
        case Add():
            start = f"{_tokens(op.shared)} of text {op.trunk}"
            if op.continues is not None:
                start = f"everything {op.continues} said"
            extras = [
                f"salt {op.salt}" if op.salt else "",
                "" if op.reads_cache else "not reading the prefix cache",
                f"priority {op.priority}" if op.priority else "",
            ]
            extra = "".join(f", {text}" for text in extras if text)
            tail = f" and {op.tail} of its own (branch {op.branch})" if op.tail else ""
            most = _tokens(op.max_tokens, "output ")
            return f"add request {op.request}: prompt {start}{tail}, at most {most}{extra}"
        case Step():
            return f"{op.count} engine step{'s' if op.count != 1 else ''}"
        case Abort():
            return f"abort {op.request} " + (
                "during the next step, before its update" if op.in_step else "between steps"
            )
        case Finish():
            return f"{op.request} samples the stop token next"
        case Reset():
            what = ", ".join(name for name, on in (("running requests", op.running), ("connector", op.connector)) if on)
            return "reset the prefix cache" + (f" with {what}" if what else "")
        case Advance():
            return "time passes on the device"
        case Settle():
            return f"everything in flight completes, and the engine steps until it is idle (at most {op.count} steps)"
