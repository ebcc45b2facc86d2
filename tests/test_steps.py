"""The scheduler level of ``vllm-core``: the model agrees with it, and a defect breaks each clause that is compared.

It runs against the vLLM that is importable, else against the newest release that kvspec knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equalities import profile_of_target, shown

from kvspec.defects import Patch, load_defects
from kvspec.equality import compare, follow, steps
from kvspec.model import CacheManager, Profile, Text
from kvspec.model.lookup import Finder
from kvspec.model.pool import BlockPool
from kvspec.model.steps import Steps
from strategies import equality

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

REGISTRY = load_defects(Path(__file__).parent / "defects")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of_target()


def test_model_and_scheduler_agree_on_all_counts_with_steps_in_flight(profile: Profile) -> None:
    tally = equality.run("scheduler", 6000, seed=7)
    assert not tally.findings, tally.findings[0].message
    assert not equality.hollow(tally, "scheduler", profile)


def test_what_a_preemption_finds_behind_a_dropped_step_is_dropped_with_it(profile: Profile) -> None:
    requests = Steps(profile, drafts=0, draft_model=False)
    requests.arrive("A", 3)
    for drop in (True, False):  # a reset; then blocks run out while a step from before the reset is in flight
        requests.admit("A", 0)
        requests.grant("A", 3)
        requests.schedule("A", 0)
        requests.preempt("A", drop)
    requests.process("A", 1)
    requests.process("A", 1)
    assert requests.requests["A"].length == 3


def turned_after(method: Callable[..., Any], pool: Callable[[Any], BlockPool]) -> Callable[..., Any]:
    """Return a method after which the free queue of the model stands the other way round."""

    def turned(self: Any, *arguments: Any) -> Any:
        result = method(self, *arguments)
        pool(self).queue.reverse()
        return result

    return turned


def tells_the_key_before(original: Any) -> Any:
    told: list[Any] = []

    def tell(self: Any, block: int, keys: list[Any]) -> None:
        told.extend(keys)
        original(self, block, told[-2:-1] or keys)

    return tell


def shorter_hits(original: Any) -> Any:
    return lambda self, *arguments: max(0, original(self, *arguments) - self.layout.alignment)


HERE: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "HIT-3": (Finder, "lookup", lambda method: turned_after(method, lambda finder: finder.pool)),
    "HIT-4": (Finder, "longest", shorter_hits),
    "KEY-1": (Text, "view", lambda view: lambda self, tokens: view(self, tokens)[:-1]),
    "KEY-2": (Text, "view", lambda view: lambda self, tokens: view(self, tokens)[:1] * len(view(self, tokens))),
    "NEED-4": (CacheManager, "new_step", lambda method: turned_after(method, lambda cache: cache.pool)),
    "TELL-3": (BlockPool, "_tell_removed", tells_the_key_before),
}
"""Clauses whose defect in the registry needs what schedulers here don't have -> another defect of the model."""

OF_THE_REGISTRY = (
    *("ALLOC-5", "ALLOC-7", "TELL-1", "TELL-2", "FREE-1", "FREE-2", "FREE-3", "FREE-4", "REG-1", "RESET-1"),
    *("SCALE-4", "STEP-1", "STEP-2", "STEP-3", "STEP-4", "STEP-5"),
)
NEEDS: dict[str, Callable[[Profile], bool]] = {
    **dict.fromkeys(("FREE-2", "FREE-3", "FREE-4"), lambda profile: profile.deferred_frees),
    "POOL-5": lambda profile: profile.null_has_no_references,
}
"""Clauses that not every release compares."""

COMPARED = (*HERE, *OF_THE_REGISTRY, "POOL-5")


def is_compared(clause: str, profile: Profile) -> bool:
    return NEEDS.get(clause, lambda profile: True)(profile)


def counts_the_null_block(patch: Patch) -> None:
    from vllm.v1.core.block_pool import BlockPool as RealPool

    real = RealPool.touch

    def touch(self: Any, blocks: Any) -> None:
        real(self, blocks)
        self.null_block.ref_cnt += 1

    patch.setattr(RealPool, "touch", touch)


def test_every_clause_that_is_compared_has_a_defect(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: set[str] = set()
    for module in (compare, follow, steps):
        agree = vars(module)["agree"]

        def noted(clause: str, *sides: object, agree: Any = agree) -> None:
            compared.add(clause)
            agree(clause, *sides)

        monkeypatch.setattr(module, "agree", noted)
    equality.run("scheduler", 2000, seed=5)
    assert compared == {clause for clause in COMPARED if is_compared(clause, profile)}


@pytest.mark.parametrize("clause", COMPARED)
def test_a_defect_breaks_the_clause(clause: str, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compared(clause, profile):
        pytest.skip("this release hasn't got what the clause is about")
    monkeypatch.setattr(equality, "FINDINGS_MAX", 1)
    if clause in HERE:
        owner, name, wrap = HERE[clause]
        monkeypatch.setattr(owner, name, wrap(vars(owner)[name]))
    elif clause in OF_THE_REGISTRY:
        REGISTRY[f"model_breaks_{clause}"].plant(monkeypatch)
    else:
        counts_the_null_block(monkeypatch)
    assert clause in shown("scheduler", 12_000, clause)
