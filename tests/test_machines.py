"""The machines on a real target: ``pytest --kvspec-target vllm-simple@0.33.0 -m machine -n 2``."""

from collections.abc import Callable

import pytest

pytestmark = [
    pytest.mark.machine,
    pytest.mark.filterwarnings("ignore"),  # the target's warnings are its own affair
]


def test_no_history_breaks_a_law(kvspec_shard: Callable[[], None]) -> None:
    kvspec_shard()
