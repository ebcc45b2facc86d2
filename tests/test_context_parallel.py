"""Context parallelism on three releases: in 0.24 and 0.25 ranks of both kinds share blocks, later decode ranks do.

The checks are in ``context_parallel.py``; each release runs them in one process, the release of this session in this
one. 0.24.0 is the first release that has the feature, and forgets the factor in places: vllm#46394.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import context_parallel as checks
import pytest
from filelock import FileLock

from kvspec.gate import prepare
from kvspec.targets import Target, parse_target

pytestmark = pytest.mark.slow

RELEASES = ("0.24.0", "0.25.1", "0.33.0")
ISSUE = "vllm#46394: some conversions between tokens and blocks leave out the context-parallel ranks"
Report = Callable[[str, str], str | None]


@pytest.fixture(scope="session")
def what_is_wrong(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return what a check said on a release. Each release is run once, whatever the number of test processes."""
    here = parse_target(target.name)[1]
    directory = tmp_path_factory.getbasetemp()
    directory = directory.parent if directory.name.startswith("popen-") else directory
    reports: dict[str, dict[str, str | None]] = {}

    def report(release: str, check: str) -> str | None:
        if release not in reports:
            file = directory / f"context-parallel-{release}.json"
            with FileLock(f"{file}.lock"):
                if not file.exists():
                    file.write_text(json.dumps(dict(checks.run(target))) if release == here else _run_apart(release))
            reports[release] = json.loads(file.read_text())
        return reports[release][check]

    return report


def _run_apart(release: str) -> str:
    prepared = prepare(f"vllm-simple@{release}")
    command = [sys.executable, str(Path(checks.__file__)), prepared.target]
    ran = subprocess.run(command, env=prepared.environment, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()[-1]


def expect(wrong: str | None, known: str | None) -> None:
    """Nothing is wrong; or, where the release has the issue, what is wrong says ``known``."""
    if known is None:
        assert wrong is None, wrong
        return
    assert wrong is not None
    assert known in wrong
    pytest.xfail(ISSUE)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("prefill", "decode", "block"), [*product(checks.SIZES, checks.SIZES, checks.BLOCK_SIZES)])
def test_a_block_spans_as_many_tokens_everywhere_as_its_ranks_keep_of_it(
    release: str, prefill: int, decode: int, block: int, what_is_wrong: Report
) -> None:
    forgotten = f"'offload manager, full attention': {block}," if release == "0.24.0" and prefill * decode > 1 else None
    expect(what_is_wrong(release, checks.span_check(prefill, decode, block)), forgotten)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("world", "interleave"), [*product(checks.WORLDS, checks.INTERLEAVES)])
def test_every_rank_gets_its_bytes_back_after_a_store_and_a_reset(
    release: str, world: tuple[int, int], interleave: int, what_is_wrong: Report
) -> None:
    expect(what_is_wrong(release, checks.round_trip_check(*world, interleave)), None)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("world", "local"), [*product(checks.WORLDS, range(1, checks.PROMPT_SPANS))])
def test_a_load_behind_a_local_hit_goes_to_the_blocks_behind_it(
    release: str, world: tuple[int, int], local: int, what_is_wrong: Report
) -> None:
    overwritten = "SHADOW-1" if release == "0.24.0" and world != (1, 1) and local > 1 else None
    expect(what_is_wrong(release, checks.partial_hit_check(*world, local)), overwritten)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("world", "extra"), [*product(checks.WORLDS, (0, 1))])
def test_a_prompt_that_ends_at_a_span_edge_hits_one_span_less_than_one_with_a_token_more(
    release: str, world: tuple[int, int], extra: int, what_is_wrong: Report
) -> None:
    expect(what_is_wrong(release, checks.edge_check(*world, extra)), None)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("groups", checks.GROUPS)
def test_lazy_offload_keeps_twice_the_blocks_of_a_step_free(release: str, groups: str, what_is_wrong: Report) -> None:
    expect(what_is_wrong(release, checks.lazy_check(groups)), None)
