"""A target of a few lines, for tests of what is around targets: ``toy:suite``.

It has a door that must be opened before it is passed. TOY lists its defects, separated by commas:

    bug       a request with 3 tokens of its own, then a reset with the connector, then a step: DOOR-1
    crash     the process dies in its 40th history
    random    traces differ from run to run
    vanish    a violation that isn't there when the history is run again
    hollow    the required event is never reached
    slow      every history takes 20 ms
    hang      like slow, and the 40th history never ends
    raise     the machine itself is broken
"""

import hashlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvspec.ops import Add, EngineSetup, History, Op, Reset, Step
from kvspec.search import Suite

DEFECTS = set(filter(None, os.environ.get("TOY", "").split(",")))
WORLDS = Counter()


class Violation(NamedTuple):
    law: str
    message: str
    op: str
    frame: str
    op_index: int


@dataclass
class Outcome:
    violations: list[Violation] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    stores: int = 0
    loads: int = 0
    engine_seconds: float = 0.001
    trace: str = ""
    schedules: list[str] = field(default_factory=list)


class World:
    def __init__(self, setup: EngineSetup) -> None:
        self.ops: list[Op] = []
        self.setup = setup
        self.outcome = Outcome()
        self._stage = 0

    def apply(self, op: Op) -> None:
        self.ops.append(op)
        self.outcome.schedules.append("c0." if isinstance(op, Step) else "")
        match op, self._stage:
            case Add(), 0 if op.tail >= 3:
                self._stage = 1
            case Reset(connector=True), 1:
                self._stage = 2
            case Step(), 2:
                self._stage = 3
                self.outcome.reached["door"] += "hollow" not in DEFECTS
                if "bug" in DEFECTS:
                    self._break("the door was never opened")
        if isinstance(op, Step):
            self.outcome.steps += op.count
        self.outcome.stores += isinstance(op, Add)

    def _break(self, message: str) -> None:
        violation = Violation("DOOR-1", message, "step", "toy.py:pass_door", len(self.ops) - 1)
        self.outcome.violations.append(violation)

    def finish(self) -> Outcome:
        WORLDS["finished"] += 1
        self._misbehave(WORLDS["finished"])
        self.outcome.reached = +self.outcome.reached
        self.outcome.schedules.append("")
        salt = os.urandom(4) if "random" in DEFECTS else b""
        self.outcome.trace = hashlib.sha256(repr(self.ops).encode() + salt).hexdigest()
        return self.outcome

    def _misbehave(self, number: int) -> None:
        if DEFECTS & {"slow", "hang"}:
            time.sleep(0.02)
        if "vanish" in DEFECTS and number == 7:
            self._break("seen once")
        if "crash" in DEFECTS and number == 40:
            print("the toy's last words", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        while "hang" in DEFECTS and number == 40:
            time.sleep(0.1)

    def history(self) -> History:
        return History(target="toy:suite", setup=self.setup, ops=tuple(self.ops), adversary="random", seed=5)


class ToyMachine(RuleBasedStateMachine):
    REQUIRED = frozenset({"door"})
    fair, live_prefixes = False, True  # what ablations change; a toy has no device and repeats no prompt
    sink = None

    def __init__(self) -> None:
        super().__init__()
        self.world = World(EngineSetup(ranks=2))

    @rule(tail=st.integers(1, 5), seed=st.integers(0, 9))
    def add(self, tail: int, seed: int) -> None:
        if "raise" in DEFECTS:
            raise ZeroDivisionError("the machine is broken")
        self.world.apply(Add(f"r{seed}", shared=seed, tail=tail))

    @rule(connector=st.booleans(), running=st.booleans())
    def reset(self, connector: bool, running: bool) -> None:
        self.world.apply(Reset(connector=connector, running=running))

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        self.world.apply(Step(count=count))

    def teardown(self) -> None:
        outcome = self.world.finish()
        if self.sink is not None:
            self.sink(self.world, outcome)


def run(history: History) -> Outcome:
    world = World(history.setup)
    for op in history.ops:
        world.apply(op)
    return world.finish()


suite = Suite(machine=ToyMachine, run=run, events={"door": "somebody passed the door"}, rules_max=12)
not_a_suite = 7
