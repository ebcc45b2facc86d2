"""Where a machine's choices come from in a search: Hypothesis' own source, without what a search doesn't profit from.

Hypothesis makes most test cases by changing the one before: it copies one part of it over another. For a machine whose
draws are seeds that repeats engines and bursts. Nor are small numbers, which it prefers, nearer to a bug. What this
buys is in docs/decisions.md.
"""

from __future__ import annotations

from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

BACKEND = "kvspec"
"""The name for ``hypothesis.settings(backend=...)``."""


class EvenChoices(HypothesisProvider):
    """Draws each history afresh, and integers that have bounds evenly: weights are ignored.

    The seed of the run decides everything. With a backend of one's own Hypothesis mutates nothing, keeps no test case
    small, and doesn't notice a machine that draws differently after the same start. These are internals of Hypothesis,
    there since 6.130; tests/test_choices.py holds a newer one to them.

    Source: Hypothesis 6.170, hypothesis/internal/conjecture/engine.py, ConjectureRunner.generate_new_test_cases.
    """

    def draw_integer(self, min_value: int | None = None, max_value: int | None = None, **hints: Any) -> int:
        if min_value is None or max_value is None:
            return super().draw_integer(min_value, max_value, **hints)
        assert self._random is not None
        return self._random.randint(min_value, max_value)


AVAILABLE_PROVIDERS[BACKEND] = f"{EvenChoices.__module__}.{EvenChoices.__qualname__}"
