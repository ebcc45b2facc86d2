from pathlib import Path

import pytest

from kvspec.errors import KvspecError
from kvspec.findings import Key
from kvspec.known import Issue, known_as, load_known

KEY = Key(target="vllm-simple@0.25.1", law="SHADOW-1", op="step", frame="v1/core/pool.py:free")
ENTRY = {
    "id": "one",
    "title": "Wrong bytes.",
    "reference": "vllm#45704",
    "target": "vllm-simple",
    "law": "SHADOW-1",
}


def issue(**fields: object) -> Issue:
    return Issue(**(ENTRY | fields))


def toml(*entries: dict[str, object]) -> str:
    return "\n".join("[[issue]]\n" + "\n".join(f"{k} = {v!r}" for k, v in entry.items()) for entry in entries)


@pytest.mark.parametrize(
    ("fields", "release", "matches"),
    [
        ({}, "0.25.1", True),
        ({}, "", True),
        ({"law": "SHADOW-*"}, "0.25.1", True),
        ({"law": "POOL-1"}, "0.25.1", False),
        ({"target": "vllm-offloading"}, "0.25.1", False),
        ({"target": ["vllm-offloading", "vllm-simple"]}, "0.25.1", True),
        ({"target": "my_package.my_suite:suite"}, "0.25.1", False),
        ({"target": ["vllm-offloading", "vllm-multi"]}, "0.25.1", False),
        ({"op": "drain"}, "0.25.1", False),
        ({"frame": "v1/core/*:free"}, "0.25.1", True),
        ({"frame": "v1/core/*:allocate"}, "0.25.1", False),
        ({"releases": ">=0.24,<0.31"}, "0.25.1", True),
        ({"releases": ">=0.24,<0.31"}, "0.31.0", False),
        ({"releases": ">=0.24,<0.31"}, "0.30.1.dev12+gabc", True),
        ({"releases": ">=0.24,<0.31"}, "", False),
        ({"releases": ["0.24.0", "0.25.1"]}, "0.25.1", True),
        ({"releases": ["0.24.0"]}, "0.25.1", False),
    ],
)
def test_an_issue_matches_by_key_and_release(fields: dict[str, object], release: str, matches: bool) -> None:
    assert issue(**fields).matches(KEY, release) is matches


def test_the_first_issue_that_matches_names_a_finding() -> None:
    issues = [issue(id="other", law="POOL-1"), issue(id="first"), issue(id="second")]
    found = known_as(issues, KEY, "0.25.1")
    assert found is not None
    assert found.id == "first"
    assert known_as(issues[:1], KEY, "0.25.1") is None


def test_a_file_of_ones_own_is_added(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(toml(ENTRY))
    assert load_known(file) == [*load_known(), issue()]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (toml(ENTRY | {"law": 3}), r"issue 1 \('one'\): Expected `str`, got `int`: field `law`"),
        (toml(ENTRY, ENTRY | {"id": "two", "laws": "x"}), r"issue 2 \('two'\): .*unknown field `laws`"),
        (toml({"id": "one"}), r"issue 1 \('one'\): .*missing required field `title`"),
        (toml(ENTRY | {"releases": "0.24 to 0.31"}), "field 'releases': Invalid specifier"),
        (toml(ENTRY | {"releases": ["new"]}), "field 'releases': Invalid version"),
        (toml(ENTRY | {"reference": "https://x.y/1"}), "field 'reference' is a URL"),
        (toml(ENTRY | {"target": "vllm-simple@0.33.0"}), "field 'target' has a release"),
        (toml(ENTRY | {"target": ["vllm-multi", "vllm-simple@0.33.0"]}), "field 'target' has a release"),
        (toml(ENTRY | {"target": "vllm-smiple"}), "field 'target' has 'vllm-smiple'; it may be vllm-core, "),
        (toml(ENTRY | {"target": []}), "field 'target' is empty"),
        (toml(ENTRY | {"target": ["vllm-multi", ""]}), "field 'target' is empty"),
        (toml(ENTRY | {"law": ""}), "field 'law' is empty"),
        (toml(ENTRY, ENTRY), "two known issues with the id 'one'"),
        ("[issue]\n", "only a list of"),
        ("[[issues]]\n", "only a list of"),
        ("id =", "isn't TOML"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "known.toml"
    file.write_text(text)
    with pytest.raises(KvspecError, match=problem):
        load_known(file)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(KvspecError, match=r"known.toml can't be read"):
        load_known(tmp_path / "known.toml")
