"""The machine: bursts of traffic on one engine of a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec import structs
from packaging.version import Version

from kvspec.ops import BACKENDS, AttentionGroup, EngineSetup
from kvspec.targets import Target
from kvspec.world import Outcome, World
from strategies.traffic import SEEDS, Mix, Traffic, drawn, mixes

ADVERSARIES = st.sampled_from(("random", "random", "pct:1", "pct:3", "fair"))

Choices = Mapping[str, Sequence[Any]]
"""Fields of an EngineSetup, and the values to choose from; what is listed twice is drawn twice as often.

A value that is a mapping stands for several fields, whatever its name, and wins over a field's own choice.
"""


FULL = AttentionGroup()
MAMBA = AttentionGroup("mamba")
SHAPES: tuple[dict[str, Any], ...] = (
    *[{}] * 10,
    *[{"ranks": 2}] * 3,
    {"decode_ranks": 2, "interleave": 2},
    {"decode_ranks": 2, "block_size": 2},
    {"decode_ranks": 4, "block_size": 2},
    {"prefill_ranks": 2},
    {"prefill_ranks": 2, "decode_ranks": 2, "block_size": 2, "interleave": 2},
    {"groups": (FULL, AttentionGroup("sliding-window", reach=6))},
    {"groups": (AttentionGroup("sliding-window", reach=5), FULL)},
    {"groups": (AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=5))},
    {"groups": (FULL, AttentionGroup("sliding-window", block_size=8, reach=8))},
    {"groups": (FULL, FULL, AttentionGroup("sliding-window", reach=9))},
    {"groups": (FULL, MAMBA)},
    {"groups": (MAMBA, FULL, MAMBA)},
)
"""Worlds of one rank, of tensor-parallel ranks, of context-parallel ones, and layers in several groups.

Small blocks keep traffic comparable where ranks share them.
"""


MAMBA_SINCE = "0.26.0"
"""The first release in which engines with Mamba are drawn. vLLM runs them from 0.23 on; what they show up to 0.25 isn't
all explained."""


DRAFTERS: tuple[dict[str, Any], ...] = (
    *[{}] * 5,
    {"drafts": 2},
    {"drafts": 1, "eagle": True},
    {"drafts": 3, "eagle": True},
)
"""No drafter, one of n-grams, EAGLE. Three of eight have one; what isn't run with drafts is run without them."""
DRAFT_BLOCKS = 2
"""Blocks of each group that a step's drafts may need, so that engines with them have requests as long as others."""


AHEAD_SINCE = "0.27.1"
"""The first release in which drafts are drawn beside asynchronous scheduling. Before, a scheduler doesn't count the
outputs that a request still has in flight when it is preempted, and drafts among them break its counts for good."""


def setup_of(**chosen: Any) -> EngineSetup:
    """Return the setup that some choices mean. The more groups, and with drafts, the larger the pools."""
    fields = {name: value for name, value in chosen.items() if not isinstance(value, Mapping)}
    for value in chosen.values():
        if isinstance(value, Mapping):
            fields |= value
    setup = EngineSetup(**fields)
    groups, gpu_blocks = len(setup.groups), setup.gpu_blocks + DRAFT_BLOCKS * bool(setup.drafts)
    return structs.replace(setup, gpu_blocks=gpu_blocks * groups, cpu_blocks=setup.cpu_blocks * groups)


def first_setup(choices: Choices) -> EngineSetup:
    """Return the setup of all first choices."""
    return setup_of(**{name: values[0] for name, values in choices.items()})


def setups(choices: Choices) -> st.SearchStrategy[EngineSetup]:
    """Draw an engine."""
    return drawn(setup_of, choices)


def supported(setup: EngineSetup, target: Target, release: str = "") -> EngineSetup:
    """Return the setup; if the target refuses it, with other backends or the other runner, or without drafts, or else
    with one group and without context parallelism. The same for what isn't drawn in a release (an unknown one, empty,
    counts as the newest)."""
    others = BACKENDS[0] if setup.backends else ()
    undrafted = structs.replace(setup, drafts=0, eagle=False)
    for wanted, backends, runner_v2 in product(
        (setup, undrafted), (setup.backends, others), (setup.runner_v2, not setup.runner_v2)
    ):
        candidate = structs.replace(wanted, backends=backends, runner_v2=runner_v2)
        if not target.refusal(candidate) and _draws(candidate, release):
            return candidate
    alone = {"decode_ranks": 1, "prefill_ranks": 1, "interleave": 1, "groups": (AttentionGroup(),)}
    return structs.replace(undrafted, backends=others, **alone)


def _draws(setup: EngineSetup, release: str) -> bool:
    """Whether a setup is drawn in a release, though more run there."""
    mamba, ahead = MAMBA in setup.groups, setup.async_scheduling and setup.drafts > 0
    since = [MAMBA_SINCE] * mamba + [AHEAD_SINCE] * ahead
    return not release or all(Version(release) >= Version(first) for first in since)


class Sink(Protocol):
    """Gets every history that has ended. A machine without one fails with the first violation instead."""

    def __call__(self, world: World, outcome: Outcome) -> None: ...


def hand_over(world: Any, sink: Callable[[Any, Outcome], None] | None) -> None:
    """End a world and give it to the sink; without one, fail with what it has shown."""
    outcome = world.finish()
    if sink is not None:
        sink(world, outcome)
    elif outcome.violations:
        raise AssertionError("\n".join(f"{v.law}: {v.message}" for v in outcome.violations))


class OffloadMachine(RuleBasedStateMachine):
    """Bursts of traffic on one engine. A machine of a connector says which engines, and what must be reached."""

    REQUIRED: ClassVar[frozenset[str]] = frozenset()
    """The events without which a run is hollow."""
    SINCE: ClassVar[Mapping[str, str]] = {"Mamba": MAMBA_SINCE}
    """Required event -> the first release in which it is reached, if kvspec runs older ones: they can't, or such
    engines aren't drawn there."""
    SETUPS: ClassVar[Choices]
    setups: ClassVar[st.SearchStrategy[EngineSetup]]
    target: ClassVar[Target]
    release: ClassVar[str] = ""
    """Of the target; empty if it isn't known."""
    sink: ClassVar[Sink | None] = None
    fair: ClassVar[bool] = False
    """Ablation: a device that always makes progress, instead of the adversary that was drawn."""
    live_prefixes: ClassVar[bool] = True
    """Ablation if false: no prompt is repeated or continued on purpose."""

    world: World | None = None

    @classmethod
    def required(cls, release: str) -> frozenset[str]:
        """Return what a run must reach in a release of vLLM; in an unknown one (empty) everything."""
        beyond = (event for event, first in cls.SINCE.items() if release and Version(release) < Version(first))
        return cls.REQUIRED.difference(beyond)

    @initialize(data=st.data(), mix=mixes(), adversary=ADVERSARIES, seed=SEEDS)
    def start(self, data: st.DataObject, mix: Mix, adversary: str, seed: int) -> None:
        setup = supported(data.draw(self.setups), self.target, self.release)
        self.world = World(self.target, setup, "fair" if self.fair else adversary, seed)
        self.traffic = Traffic(mix if self.live_prefixes else replace(mix, again=0, onward=0), self.world)

    @rule(seed=SEEDS)
    def burst(self, seed: int) -> None:
        assert self.world is not None
        for op in self.traffic.burst(seed):
            self.world.apply(op)

    def teardown(self) -> None:
        if self.world is None:
            return
        hand_over(self.world, self.sink)
