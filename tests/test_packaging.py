"""What is published installs: the README's commands, the constraints, the entry points."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvspec import __version__
from kvspec.releases import KNOWN_GOOD, canonical

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
]
CONSTRAINTS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in CONSTRAINTS)}

GPU_PREFIXES = ("cuda-", "nvidia-")
"""A CUDA build of torch brings these; CI's build does not, so constraints.txt has none."""


def required(requirement: Requirement, seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """The names of what an installed requirement needs, with what that needs, on this machine."""
    name = canonicalize_name(requirement.name)
    key = (name, frozenset(requirement.extras))
    if key in seen or name.startswith(GPU_PREFIXES):
        return
    seen.add(key)
    yield name
    for text in importlib.metadata.requires(name) or []:
        needed = Requirement(text)
        extras = requirement.extras or {""}
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            yield from required(needed, seen)


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^<!-- ci:test -->\n```\w*\n(.+?)\n```$", readme, re.MULTILINE | re.DOTALL)
    assert readme.count("<!-- ci:test -->") == len(blocks) == 1
    assert blocks[0].startswith("python3 -m venv .venv && ")
    assert "-c constraints.txt" in blocks[0]
    assert ".venv/bin/pytest" in blocks[0]
    assert "<!-- ci:test -->" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_constraints_pin_a_version_that_the_project_accepts(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_constraints_cover_what_the_dependencies_need_themselves() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    needed = {name for requirement in REQUIREMENTS for name in required(requirement, seen)}
    assert len(needed) > len(REQUIREMENTS)
    assert needed - set(PINS) == set()


def test_constraints_are_exact_pins_without_hosts_paths_or_builds() -> None:
    assert len(PINS) == len(CONSTRAINTS)
    for name, version in PINS.items():
        assert Version(version).local is None, name
    assert PINS[canonicalize_name("torch")] == "2.13.0"


def test_entry_points_name_modules_that_exist() -> None:
    targets = [*PROJECT["scripts"].values(), *PROJECT["entry-points"]["pytest11"].values()]
    for target in targets:
        assert importlib.util.find_spec(target.partition(":")[0]) is not None, target


def test_the_wheel_has_every_file_of_both_packages() -> None:
    files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in ("kvspec", "strategies")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == wanted
    assert {"kvspec/spec/templates/page.html", "kvspec/known_issues.toml"} <= files


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == __version__


def test_known_releases_are_full_versions_in_order() -> None:
    assert [canonical(version) for version in KNOWN_GOOD] == list(KNOWN_GOOD)
    assert sorted(KNOWN_GOOD, key=Version) == list(KNOWN_GOOD)


def test_releases_are_managed_without_importing_torch_or_vllm() -> None:
    code = "import sys, kvspec.cli_release; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
