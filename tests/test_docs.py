"""What the documents say is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import kvspec
from kvspec.laws import LAWS
from kvspec.spec import collect, render
from kvspec.targets import TARGETS
from kvspec.world import EVENTS
from strategies.machines import MACHINES

ROOT = Path(__file__).parent.parent


def test_the_readme_lists_every_law_in_its_own_words() -> None:
    rows = re.findall(r"^\| ([A-Z]+-\d) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [(law.id, law.sentence) for law in LAWS.values()]


def test_the_readme_lists_every_target() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"| `{target}` |" in text for target in TARGETS)


def test_the_architecture_page_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    package = Path(kvspec.__file__).parent
    names = {path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    missing = {
        name
        for name in names - {"__init__.py", "errors.py", "cli_bench.py", "cli_release.py", "cli_types.py"}
        if name not in text
    }
    assert not missing


def test_every_required_event_is_an_event() -> None:
    assert all(EVENTS.keys() >= machine.REQUIRED for machine in MACHINES.values())


def test_the_changelog_is_about_this_version() -> None:
    assert f"## {kvspec.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_specification_in_the_repository_is_what_the_code_says() -> None:
    page = collect()
    stale = [
        f"kvspec spec --output docs/{file}"
        for file, format in (("specification.html", "html"), ("specification.md", "markdown"))
        if (ROOT / "docs" / file).read_text(encoding="utf-8") != render(page, format)
    ]
    assert not stale, f"out of date; run: {' && '.join(stale)}"
