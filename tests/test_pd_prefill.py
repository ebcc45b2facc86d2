"""P/D prefill: a request that a remote engine will decode leaves its whole prompt with the backend, as named cases.

In releases 0.20.2 to 0.22.1 ``kv_transfer_params["do_remote_decode"]`` asks for that; later ones ask the manager when
the request arrives. The cases run in a process of each release, all at once (``pd_prefill``). Two releases are enough
for CI; another one with the parameter is run by hand:

    KVSPEC_PD_RELEASE=0.20.2 python -m pytest tests/test_pd_prefill.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pd_prefill import HAND_OVERS, PARAMS

from kvspec.gate import prepare

WITH_PARAMETER = os.environ.get("KVSPEC_PD_RELEASE", "0.22.1")
LATER = "0.33.0"

pytestmark = pytest.mark.slow

Seen = dict[str, dict[str, Any]]


def seen_in(release: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Return what is seen in a release, from the one run that all workers of pytest-xdist share."""
    directory = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        directory = directory.parent
    result = directory / f"pd-prefill-{release}.json"
    with FileLock(f"{result}.lock"):
        if not result.exists():
            script = Path(__file__).with_name("pd_prefill.py")
            environment = prepare(f"vllm-simple@{release}").environment
            environment["PYTHONPATH"] += f"{os.pathsep}{script.parent}"
            ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr[-2000:]
            result.write_text(ran.stdout)
    seen: Seen = json.loads(result.read_text())
    return seen


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return seen_in(WITH_PARAMETER, tmp_path_factory)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return seen_in(LATER, tmp_path_factory)


both_schedulers = pytest.mark.parametrize("how", ["sync", "async"])
WANTED = [name for name, params in PARAMS.items() if params and params.get("do_remote_decode")]
NOT_WANTED = [name for name in PARAMS if name not in WANTED]


# With the parameter ---------------------------------------------------------------------------------------------------


@both_schedulers
def test_a_prefill_stores_every_chunk_from_the_first_on_what_it_has_loaded_included(how: str, earlier: Seen) -> None:
    assert earlier[f"two_chunks {how} forwarding true"] == {
        "first": [[0]],
        "loaded": [[0]],
        "offered": [2],
        "stored": [[0, 1]],
    }


@both_schedulers
def test_a_prefill_offers_all_but_the_cpu_tier_takes_only_what_it_lacks(how: str, earlier: Seen) -> None:
    seen = earlier[f"two_chunks {how} cpu true"]
    assert seen["offered"] == [2]
    assert seen["stored"] == [[1]]


@both_schedulers
def test_a_prefill_stores_what_it_has_found_on_the_gpu_too(how: str, earlier: Seen) -> None:
    assert earlier[f"three_after_one {how} forwarding true"] == {
        "loaded": [[1, 2]],
        "offered": [4],
        "stored": [[0, 1, 2, 3]],
    }


@both_schedulers
def test_a_prefill_in_small_steps_stores_every_chunk_once(how: str, earlier: Seen) -> None:
    seen = earlier[f"in_small_steps {how} forwarding true"]
    assert seen["loaded"] == [[0, 1]]
    assert sorted(chunk for store in seen["stored"] for chunk in store) == [0, 1, 2, 3, 4]
    assert seen["stored"][0][:2] == [0, 1]


@both_schedulers
@pytest.mark.parametrize("params", WANTED)
def test_any_true_value_asks_for_the_whole_prompt(params: str, how: str, earlier: Seen) -> None:
    assert earlier[f"two_chunks {how} forwarding {params}"]["stored"] == [[0, 1]]


# Without it -----------------------------------------------------------------------------------------------------------


@both_schedulers
@pytest.mark.parametrize("backend", ["cpu", "forwarding"])
@pytest.mark.parametrize("params", NOT_WANTED)
def test_without_it_or_with_a_false_value_only_new_chunks_are_offered(
    params: str, backend: str, how: str, earlier: Seen
) -> None:
    seen = earlier[f"two_chunks {how} {backend} {params}"]
    assert seen == {"first": [[0]], "loaded": [[0]], "offered": [1], "stored": [[1]]}


@both_schedulers
def test_without_it_neither_a_loaded_chunk_nor_one_on_the_gpu_is_offered(how: str, earlier: Seen) -> None:
    seen = earlier[f"three_after_one {how} forwarding absent"]
    assert seen == {"loaded": [[1, 2]], "offered": [1], "stored": [[3]]}


@both_schedulers
def test_without_it_a_prefill_in_small_steps_stores_only_new_chunks(how: str, earlier: Seen) -> None:
    seen = earlier[f"in_small_steps {how} forwarding absent"]
    assert seen == {"loaded": [[0, 1]], "stored": [[2], [3], [4]]}


@both_schedulers
@pytest.mark.parametrize("params", ["true", "absent"])
def test_where_nothing_is_loaded_the_parameter_changes_nothing(params: str, how: str, earlier: Seen) -> None:
    assert earlier[f"on_the_gpu {how} forwarding {params}"] == {"loaded": [], "stored": [[0, 1]]}
    assert earlier[f"on_the_gpu {how} cpu {params}"] == {"loaded": [], "stored": [[1]]}


# Several backends -----------------------------------------------------------------------------------------------------


@both_schedulers
def test_no_backend_stores_again_what_it_has(how: str, earlier: Seen) -> None:
    assert earlier[f"two_backends {how} kept true"] == {
        "loaded by 0": [[0]],
        "loaded by 1": [],
        "stored by 0": [[1]],
        "stored by 1": [[1]],
    }


@both_schedulers
def test_a_backend_that_has_nothing_gets_the_whole_prompt(how: str, earlier: Seen) -> None:
    seen = earlier[f"two_backends {how} lost true"]
    assert seen["stored by 0"] == [[1]]
    assert seen["stored by 1"] == [[0, 1]]


# Later releases -------------------------------------------------------------------------------------------------------


@both_schedulers
@pytest.mark.parametrize("params", PARAMS)
def test_later_releases_do_not_read_the_parameter(params: str, how: str, later: Seen) -> None:
    for backend in ("cpu", "forwarding"):
        assert later[f"two_chunks {how} {backend} {params}"] == later[f"two_chunks {how} {backend} absent"]
    assert later[f"two_chunks {how} forwarding {params}"]["stored"] == [[1]]


@both_schedulers
def test_in_later_releases_a_manager_that_asks_for_whole_requests_gets_them(how: str, later: Seen) -> None:
    seen = later[f"two_chunks {how} whole"]
    assert seen["loaded"] == [[0]]
    assert seen["stored"] == [[0, 1]]


@both_schedulers
def test_in_later_releases_no_backend_stores_again_what_it_has(how: str, later: Seen) -> None:
    seen = later[f"two_backends {how} kept true"]
    assert (seen["stored by 0"], seen["stored by 1"]) == ([[1]], [[1]])


# Two engines ----------------------------------------------------------------------------------------------------------

seeds = pytest.mark.parametrize("seed", range(HAND_OVERS))


def is_served_whole(seen: dict[str, Any]) -> bool:
    """Whether the decode engine has found every whole chunk of the prompt, and no engine has read a wrong byte."""
    assert seen["loaded"] > 0
    return seen["found"] == seen["prompt"] and not seen["broken in prefill"] and not seen["broken in decode"]


@seeds
def test_a_decode_engine_reads_exactly_the_bytes_of_the_whole_prompt(seed: int, earlier: Seen) -> None:
    assert is_served_whole(earlier[f"hand_over true {seed}"]), earlier[f"hand_over true {seed}"]


@seeds
def test_without_the_parameter_a_decode_engine_lacks_what_was_loaded(seed: int, earlier: Seen) -> None:
    seen = earlier[f"hand_over absent {seed}"]
    assert seen["loaded"] > 0
    assert seen["found"] == 0
    assert not seen["broken in decode"]


@seeds
def test_in_later_releases_a_whole_request_reaches_the_decode_engine(seed: int, later: Seen) -> None:
    assert is_served_whole(later[f"hand_over whole {seed}"]), later[f"hand_over whole {seed}"]


def test_a_byte_that_changes_on_the_way_is_noticed(earlier: Seen, later: Seen) -> None:
    for seen in (earlier, later):
        assert "SHADOW-1" in seen["hand_over damaged"]["broken in decode"]
