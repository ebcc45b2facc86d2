"""Every release that kvspec supports runs with every connector: what stands for CUDA fits its code.

The round trip is in ``one_round_trip.py``; each release makes it in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import one_round_trip
import pytest

from kvspec.gate import prepare
from kvspec.model import RELEASES
from kvspec.targets import FIRST_RELEASES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("release", RELEASES)
def test_what_was_stored_is_loaded_again_and_no_law_is_broken(release: str) -> None:
    supported = RELEASES.index(release)
    first = {name: RELEASES.index(FIRST_RELEASES.get(name, RELEASES[0])) for name in one_round_trip.TARGETS}
    targets = [name for name, index in first.items() if index <= supported]
    command = [sys.executable, str(Path(one_round_trip.__file__)), release, *targets]
    environment = prepare(f"vllm-simple@{release}").environment
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]


REPEATED = """
    import sys
    from pathlib import Path

    from kvspec.ops import history_from_json
    from kvspec.search import load_suite

    history = history_from_json(Path(sys.argv[1]).read_bytes())
    suite = load_suite(history.target)
    traces, kept = set(), []
    for number in range(16):
        kept.append([object() for _ in range(300 * (number % 5))])
        traces.add(suite.run(history).trace)
    assert len(traces) == 1, traces
"""


def test_a_history_runs_alike_wherever_its_objects_lie() -> None:
    """A load ends between two questions of what has finished. 0.23.0 keeps those whom it asks in a set of objects."""
    history = Path(__file__).with_name("copies_end_between_questions.json")
    command = [sys.executable, "-c", textwrap.dedent(REPEATED), str(history)]
    environment = prepare("vllm-offloading@0.23.0").environment
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
