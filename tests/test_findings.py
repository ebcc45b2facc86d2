from pathlib import Path

import pytest
from msgspec.structs import replace

from kvspec.errors import KvspecError
from kvspec.findings import Finding, FindingStore, Key, Record, load_finding, load_history
from kvspec.ops import Add, EngineSetup, History, Step

KEY = Key(target="vllm-simple@0.33.0", law="SHADOW-1", op="step", frame="v1/core/pool.py:free")


def history(length: int) -> History:
    return History(target=KEY.target, setup=EngineSetup(), ops=(Add("A"), *[Step()] * (length - 1)))


def finding(length: int = 2, message: str = "wrong bytes", first_seen: str = "2026-01-01T00:00:00Z") -> Finding:
    record = Record(key=KEY, message=message, release="0.33.0", kvspec="0.1.0", seed=7, first_seen=first_seen)
    return Finding(record=record, history=history(length), original=history(9))


@pytest.fixture
def store(tmp_path: Path) -> FindingStore:
    return FindingStore(tmp_path / "a" / "findings")


def test_a_saved_finding_is_read_back(store: FindingStore) -> None:
    directory = store.save(finding())
    assert load_finding(directory) == finding()
    assert store.of_target(KEY.target) == ([finding()], [])
    assert store.of_target("vllm-simple") == ([], [])


def test_the_directory_is_named_by_the_key_alone(store: FindingStore) -> None:
    assert store.save(finding()).name == KEY.slug
    assert KEY.slug.startswith("shadow-1-step-")
    assert replace(KEY, frame="").slug != KEY.slug


def test_the_story_says_what_broke_and_how(store: FindingStore) -> None:
    story = (store.save(finding()) / "story.txt").read_text()
    assert "vllm-simple@0.33.0: SHADOW-1 during step in v1/core/pool.py:free\nwrong bytes\n" in story
    assert "1. add request A" in story


def test_the_shorter_history_and_the_first_date_stay(store: FindingStore) -> None:
    store.save(finding(length=4))
    store.save(finding(length=3, message="shorter", first_seen="2026-06-06T00:00:00Z"))
    directory = store.save(finding(length=8, message="longer"))
    stored = load_finding(directory)
    assert len(stored.history.ops) == 3
    assert (stored.record.message, stored.record.first_seen) == ("shorter", "2026-01-01T00:00:00Z")


def test_a_finding_that_is_gone_says_since_when_and_opens_again_with_the_new_history(
    store: FindingStore,
) -> None:
    store.save(finding(length=2))
    store.mark_gone(finding().record)
    assert store.of_target(KEY.target)[0][0].record.gone_since is not None
    store.save(finding(length=5))
    [stored], _ = store.of_target(KEY.target)
    assert stored.record.gone_since is None
    assert len(stored.history.ops) == 5


def test_no_temporary_file_is_left(store: FindingStore) -> None:
    directory = store.save(finding())
    names = sorted(file.name for file in directory.iterdir())
    assert names == ["finding.json", "history.json", "original.json", "story.txt"]


def test_a_history_that_does_not_repeat_is_kept_once(store: FindingStore) -> None:
    first, second = (store.save_nondeterminism(history(3)) for _ in range(2))
    assert first == second
    assert load_history(first) == history(3)
    assert store.of_target(KEY.target) == ([], [])


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KvspecError, match=r"can't be used .* choose another one with --findings DIR"):
        FindingStore(tmp_path / "file" / "findings").check_writable()


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": 99}'])
def test_a_damaged_finding_is_named_until_it_is_found_again(store: FindingStore, damage: bytes) -> None:
    directory = store.save(finding())
    (directory / "finding.json").write_bytes(damage)
    found, (sentence,) = store.of_target(KEY.target)
    assert not found
    assert f"{KEY.slug} can't be read as a finding" in sentence
    store.save(finding())
    assert store.of_target(KEY.target) == ([finding()], [])


def test_a_file_that_is_no_history_is_named(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text('{"format": 99}')
    with pytest.raises(KvspecError, match=r"h.json can't be read: history format 99"):
        load_history(tmp_path / "h.json")
    with pytest.raises(KvspecError, match="No such file"):
        load_history(tmp_path / "nothing.json")
