"""OffloadingConnector as a target: for every law a planted defect that breaks it; what its copies may do; what it
leaves behind."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hunt import defects_of, hunt

from kvspec.defects import planted
from kvspec.device.adversary import FairAdversary, ReplayAdversary
from kvspec.device.cuda_names import use
from kvspec.device.simulated import DeviceFault, SimulatedDevice
from kvspec.known import known_as, load_known
from kvspec.laws import LAWS
from kvspec.ops import Add, AttentionGroup, EngineSetup, History, Op, Reset, Settle, Step
from kvspec.search import implementation_version, violation_key
from kvspec.targets import CopiedBlock, Target, load_target
from kvspec.targets.vllm.flaws import INCOMPLETE, PARTLY_STORED, Flaws
from kvspec.world import EVENTS, Outcome, run_history

pytestmark = pytest.mark.filterwarnings("ignore")  # the target's warnings are its own affair

HISTORIES = 300
CLEAN_HISTORIES = 60


@pytest.fixture(scope="module")
def offloading(target: Target) -> Target:
    """Return the target with the release that this run checks."""
    return load_target(f"vllm-offloading{target.name[len('vllm-simple') :]}")


def run(target: Target, setup: EngineSetup, *ops: Op) -> Outcome:
    return run_history(target, History(target.name, setup, ops, "fair"))


# Planted defects ------------------------------------------------------------------------------------------------------

DEFECTS = defects_of("vllm-offloading")


def test_every_law_that_binds_this_target_has_a_defect_of_it() -> None:
    """STORED-1 doesn't: what this connector stores is the model's to say."""
    assert {defect.law for defect in DEFECTS.values()} == LAWS.keys() - {"STORED-1"}


@pytest.mark.parametrize("name", [name for name, defect in DEFECTS.items() if defect.kind != "states"])
def test_the_defect_breaks_its_law(name: str, offloading: Target) -> None:
    law = DEFECTS[name].law
    with planted(DEFECTS[name]):
        where = "groups" if DEFECTS[name].kind == "groups" else "anywhere"
        catch = hunt(offloading, number=1, histories=HISTORIES, until=law, but_known=True, where=where)
    assert law in catch.violations, f"{sorted(catch.violations)} broken in {catch.histories} histories"


def test_the_clean_target_breaks_no_law(offloading: Target) -> None:
    catch = hunt(offloading, number=1, histories=CLEAN_HISTORIES, but_known=True)
    assert not catch.violations
    assert catch.histories == CLEAN_HISTORIES


def test_a_store_of_a_window_after_a_reset_says_so_if_its_block_is_not_held(offloading: Target) -> None:
    groups = (AttentionGroup(), AttentionGroup("sliding-window", reach=12), AttentionGroup("sliding-window", reach=6))
    setup = EngineSetup(gpu_blocks=21, cpu_blocks=8, step_tokens=6, runner_v2=True, groups=groups)
    first, second = Add("A", shared=5, tail=1, max_tokens=9), Add("B", shared=2, tail=1, max_tokens=9)
    outcome = run(offloading, setup, first, second, Step(count=8), Reset(connector=True))
    frames = {violation.frame for violation in outcome.violations if violation.law == "OWN-1"}
    assert frames == {"sliding-window, after a reset"}


def test_wrong_bytes_of_a_window_beside_larger_blocks_are_the_known_issue_of_unaligned_hits(offloading: Target) -> None:
    """Once the second chunk of the window is evicted, a hit of 8 tokens reads the block that the first one lacks."""
    groups = (AttentionGroup(block_size=8), AttentionGroup("sliding-window", reach=12))
    setup = EngineSetup(groups=groups, blocks_per_chunk=2, gpu_blocks=14, cpu_blocks=5)
    if reason := offloading.refusal(setup):
        pytest.skip(reason)
    prompt = Add("A", shared=16, tail=0)
    again, other = Add("C", shared=16), Add("E", shared=16, trunk=1)
    ops = (prompt, Add("B", continues="A"), Settle(), Reset(), again, Settle(), other, Settle(), Reset())
    outcome = run(offloading, setup, *ops, Add("D", shared=16), Settle())
    release, known = implementation_version(offloading.name), load_known()
    issues = {v.law: known_as(known, violation_key(offloading.name, v), release) for v in outcome.violations}
    assert issues.keys() >= {"INDEX-1", "SHADOW-1"}
    assert {issue and issue.id for issue in issues.values()} == {"offloading-window-unaligned-hit"}


@pytest.mark.parametrize(
    ("defect", "laws"),
    [
        ("stores_swap_their_destinations", {"INDEX-1", "SHADOW-1"}),
        ("loads_swap_their_destinations", {"SHADOW-1", "INDEX-2"}),
    ],
)
def test_wrong_bytes_of_a_window_that_was_stored_whole_are_no_known_issue(
    defect: str, laws: set[str], offloading: Target
) -> None:
    """Two chunks are filled, or read, in the wrong order, but neither is incomplete."""
    groups = (AttentionGroup(), AttentionGroup("sliding-window", reach=16))
    setup = EngineSetup(groups=groups, blocks_per_chunk=2, gpu_blocks=40, cpu_blocks=20)
    with planted(DEFECTS[f"offloading_{defect}"]):
        outcome = run(offloading, setup, Add("A", shared=17), Settle(), Reset(), Add("B", shared=17), Settle())
    release, known = implementation_version(offloading.name), load_known()
    windows = [violation for violation in outcome.violations if "sliding-window" in violation.frame]
    assert {violation.law for violation in windows} >= laws
    assert not any(known_as(known, violation_key(offloading.name, violation), release) for violation in windows)


def copied(gpu: int, chunk: int, *, to_gpu: bool, job: int) -> CopiedBlock:
    return CopiedBlock(0, gpu, chunk, to_gpu, job)


def flaws_of(blocks_per_chunk: int) -> tuple[Flaws, Any]:
    memory: Any = SimpleNamespace(
        forward=lambda batch: None,
        zero=lambda blocks: None,
        copy_blocks=lambda copies: None,
        begun=lambda blocks, states: () if states else blocks,
    )
    return Flaws([memory], blocks_per_chunk), memory


def test_a_chunk_is_incomplete_from_its_first_block_to_the_last_that_its_store_has_left_out() -> None:
    flaws, _ = flaws_of(3)
    for gpu, place in ((1, 0), (2, 1), (3, 2)):
        flaws.copied(copied(gpu, 7, to_gpu=False, job=1), range(place, place + 1), partly=False)
    assert not flaws.of_chunk(0, 7, 0)
    flaws.copied(copied(4, 7, to_gpu=False, job=2), range(1), partly=False)  # the chunk's next owner
    flaws.copied(copied(5, 7, to_gpu=False, job=2), range(2, 3), partly=False)
    flaws.copied(copied(2, 7, to_gpu=False, job=1), range(1, 2), partly=False)  # late, and no longer the chunk's
    assert [flaws.of_chunk(0, 7, place) for place in range(3)] == [INCOMPLETE, INCOMPLETE, ""]
    assert not flaws.of_chunk(0, 8, 0)  # nothing is known of it
    flaws.copied(copied(5, 7, to_gpu=False, job=3), None, partly=False)  # no transfer asks for that
    assert not flaws.of_chunk(0, 7, 0)


def test_a_flaw_goes_where_the_bytes_go() -> None:
    flaws, memory = flaws_of(2)
    flaws.copied(copied(1, 7, to_gpu=False, job=1), range(1, 2), partly=False)
    flaws.copied(copied(2, 8, to_gpu=False, job=1), range(2), partly=True)
    for gpu, chunk, places in ((3, 7, range(1)), (4, 7, range(1, 2)), (5, 8, range(2)), (6, 7, None)):
        flaws.copied(copied(gpu, chunk, to_gpu=True, job=2), places, partly=False)
    assert [flaws.of_block(0, gpu) for gpu in (3, 4, 5, 6)] == [INCOMPLETE, "", PARTLY_STORED, ""]
    flaws.copied(copied(3, 9, to_gpu=False, job=3), range(2), partly=False)
    assert flaws.of_chunk(0, 9, 0) == INCOMPLETE
    memory.copy_blocks([(3, 10), (4, 5)])
    assert [flaws.of_block(0, gpu) for gpu in (10, 5)] == [INCOMPLETE, ""]
    memory.zero([10])
    memory.forward([3])
    assert not flaws.of_block(0, 10)
    assert not flaws.of_block(0, 3)


def test_the_target_tells_only_of_events_that_are_listed() -> None:
    from kvspec.targets.vllm import observe, offloading

    text = inspect.getsource(offloading) + inspect.getsource(observe)
    told = set(re.findall(r'saw\("([^"]+)"\)', text))
    assert len(told) > 5
    assert told <= EVENTS.keys()
    assert {"LRU eviction", "ARC eviction"} <= EVENTS.keys()


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Any:
    made = SimulatedDevice(0, FairAdversary(), [])
    before = use(made)
    yield made
    use(before)


def bytes_of(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def descriptors(source: torch.Tensor, destination: torch.Tensor) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in (source.data_ptr(), destination.data_ptr(), source.nbytes)]


def register(device: SimulatedDevice, source: torch.Tensor, destination: torch.Tensor) -> None:
    device.host_register(source.data_ptr(), source.nbytes)
    device.add_device_memory(destination.data_ptr(), destination.nbytes)


def test_a_copy_engine_reads_its_descriptors_during_the_call(device: SimulatedDevice) -> None:
    from kvspec.targets.vllm.copies import swap_blocks_batch

    device.adversary = ReplayAdversary("")
    source, destination = bytes_of(b"01234567"), bytes_of(b"........")
    register(device, source, destination)
    lists = descriptors(source, destination)
    swap_blocks_batch(*lists)
    lists[2].zero_()
    assert bytes(destination) == b"........"
    device.synchronize()
    assert bytes(destination) == b"01234567"


@pytest.mark.parametrize("registered", [True, False])
def test_a_kernel_reads_its_descriptors_when_it_runs(device: SimulatedDevice, registered: bool) -> None:
    from kvspec.targets.vllm.copies import SwapKernel, tensor_to

    device.adversary = ReplayAdversary("")
    source, destination, other = bytes_of(b"01234567"), bytes_of(b"........"), bytes_of(b"abcdefgh")
    register(device, source, destination)
    if registered:
        device.host_register(other.data_ptr(), other.nbytes)
    lists = descriptors(source, destination)
    SwapKernel()[(1,)](*(tensor_to(each, "cuda", non_blocking=True) for each in lists), 1, BYTES_PER_CHUNK=8)
    lists[0][0] = other.data_ptr()
    if registered:
        device.synchronize()
        assert bytes(destination) == b"abcdefgh"
    else:
        with pytest.raises(DeviceFault, match="isn't registered"):
            device.synchronize()


# What is left behind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_world_gives_its_shared_memory_back(offloading: Target, ranks: int) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(
            list(Path("/dev/shm").glob(f"vllm_offload_kvspec-{os.getpid()}-*"))
        )

    setup = EngineSetup(ranks=ranks)
    run(offloading, setup)
    before = held()
    for _ in range(3):
        run(offloading, setup, Add("a", shared=9), Settle())
    assert held() == before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("runner_v2", [False, True])
def test_chunks_are_stored_and_loaded_whole_on_every_rank(
    offloading: Target, ranks: int, blocks_per_chunk: int, runner_v2: bool
) -> None:
    setup = EngineSetup(
        ranks=ranks, blocks_per_chunk=blocks_per_chunk, runner_v2=runner_v2, step_tokens=48, gpu_blocks=12
    )
    prompt = Add("a", shared=28, tail=1)
    outcome = run(offloading, setup, prompt, Settle(), Reset(), Add("b", shared=28, tail=1), Step(2), Settle())
    assert not outcome.violations
    blocks = 7 // blocks_per_chunk * blocks_per_chunk
    assert (outcome.stores, outcome.loads) == (blocks, blocks)
