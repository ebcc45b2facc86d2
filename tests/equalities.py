"""What the tests of the equality machines have in common."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from itertools import count

from kvspec import releases
from kvspec.model import CLAUSES, Profile
from kvspec.model.profile import profile_for
from kvspec.targets.vllm import core as target
from strategies import equality


def profile_of_target() -> Profile:
    """Make a vLLM importable, the newest if none is, and return what the model expects of it."""
    if importlib.util.find_spec("vllm") is None:
        sys.path.insert(0, str(releases.ensure(releases.KNOWN_GOOD[-1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.warm_up()
        return profile_for(target.release())


def shown(level: str, ops_max: int, wanted: str) -> set[str]:
    """Return the clauses that break first in random histories, one for each, until the wanted one is among them."""
    seen: set[str] = set()
    ops = 0
    for number in count():
        tally = equality.run(level, 1500, seed=number)
        ops += tally.ops
        seen.update(finding.clause for finding in tally.findings)
        assert seen <= CLAUSES.keys(), tally.findings[0].message
        if wanted in seen or ops >= ops_max:
            return seen
