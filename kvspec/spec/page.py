"""What the page says: chapters of clauses, the laws, the switches, and what was found about each."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import kvspec
from kvspec import laws, model
from kvspec.defects import Defect, load_defects
from kvspec.errors import KvspecError
from kvspec.known import Issue, load_known
from kvspec.laws import Law
from kvspec.model import CLAUSES, KNOWN_ISSUES, RELEASES, SWITCHES, Clause
from kvspec.model import profile as profile_module
from kvspec.model.profile import KnownIssue, Switch
from kvspec.ops import EQUALITIES
from kvspec.spec import found
from kvspec.spec.found import Place, Subject
from kvspec.spec.markup import Paragraph, heading, paragraphs

READING = (
    Paragraph(
        "A *clause* is one sentence about the KV cache of vLLM's engine that an implementation can break. One function "
        "of the executable model ``kvspec.model`` computes it, and its sentence and text here are that function's "
        "docstring. A *law* is what must hold for every target and release, whatever it decides. This page is written "
        "by ``kvspec spec`` from the code."
    ),
    Paragraph(
        "Under each clause:",
        (
            ("Source", "where the released code does it, as it was read in the release that is named"),
            ("Releases", "which releases have it"),
            ("Model", "the function that computes it"),
            (
                "Switches",
                "what it depends on that differs between releases on purpose: fields of ``Profile`` that its function "
                "reads, that its text names, or that its checks ask for first",
            ),
            (
                "Compared by",
                "what holds the model and vLLM's own objects side by side in histories that are drawn at random, and "
                "names the clause when they differ",
            ),
            (
                "Planted defects",
                "changes of the model or of vLLM, made in memory, that tests see break this clause",
            ),
            ("Tests", "other tests that name the clause or call its function"),
            ("Known issues", "releases that are wrong by their own intent, and what shows it"),
        ),
    ),
)
"""How to read the page."""


class Span(NamedTuple):
    """From which release to which one something holds, as indices of RELEASES."""

    first: int
    last: int

    def __str__(self) -> str:
        first, last = RELEASES[self.first], RELEASES[self.last]
        if self.last == len(RELEASES) - 1:
            return "all releases" if self.first == 0 else f"{first} and later"
        return first if first == last else f"{first} to {last}"


class Value(NamedTuple):
    """What a switch is over some releases."""

    text: str
    span: Span


class Planted(NamedTuple):
    """A planted defect."""

    name: str
    sentence: str


class Known(NamedTuple):
    """A known issue, where the releases have it, and what shows it."""

    id: str
    sentence: str
    releases: str
    span: Span | None
    """None if the releases aren't one span of RELEASES."""
    shown_by: tuple[str, ...]
    """Scripts, and tests as pytest names them."""


@dataclass(frozen=True)
class ClausePart:
    """A clause, and what was found about it."""

    clause: Clause
    text: list[Paragraph]
    span: Span
    switches: list[str]
    compared: dict[str, list[str]]
    """File -> the functions that compare it."""
    defects: list[Planted]
    tests: list[str]
    issues: list[Known]

    @property
    def anchor(self) -> str:
        return self.clause.id


@dataclass(frozen=True)
class LawPart:
    """A law, and what was found about it."""

    law: Law
    checked: dict[str, list[str]]
    """File -> the functions that hold a target to it."""
    defects: list[Planted]
    tests: list[str]
    issues: list[Known]

    @property
    def anchor(self) -> str:
        """Three laws have the id of a clause, so all have a prefix."""
        return f"law-{self.law.id}"


@dataclass(frozen=True)
class SwitchPart:
    """A switch, its values, and the clauses that depend on it."""

    switch: Switch
    values: list[Value]
    clauses: list[str]
    readers: dict[str, list[str]]
    """Where no clause does: file -> the functions that read it."""


@dataclass(frozen=True)
class Chapter:
    """A module: its docstring, and what it states."""

    anchor: str
    title: str
    lead: str
    text: list[Paragraph]
    clauses: list[ClausePart]


@dataclass(frozen=True)
class Page:
    """Everything."""

    lead: str
    chapters: list[Chapter]
    laws: Chapter
    law_parts: list[LawPart]
    switches: Chapter
    switch_parts: list[SwitchPart]
    has_tests: bool
    """Whether kvspec's tests were there to be read."""
    is_whole: bool = True
    """Whether nothing was left out; else there are no introductions either."""
    reading: tuple[Paragraph, ...] = READING
    releases: tuple[str, ...] = RELEASES
    version: str = kvspec.__version__

    @property
    def counts(self) -> str:
        """How much there is, in a sentence."""
        clauses = [part for chapter in self.chapters for part in chapter.clauses]
        issues = sum(len(part.issues) for part in clauses) + sum(len(part.issues) for part in self.law_parts)
        return (
            f"{len(clauses)} clauses, {len(self.law_parts)} laws, {len(self.switch_parts)} switches, {issues} known "
            f"issues; {len(self.releases)} releases of vLLM, from {self.releases[0]} to {self.releases[-1]}. kvspec "
            f"{self.version}."
        )

    def switches_of(self, part: ClausePart) -> list[SwitchPart]:
        """Return the switches that a clause depends on."""
        return [switch for switch in self.switch_parts if switch.switch.name in part.switches]

    def only(self, wanted: str) -> Page:
        """Return a page with the clause and the law of an id, in any case. KvspecError if there is neither."""
        wanted = wanted.upper()
        ids = [*CLAUSES, *laws.LAWS]
        if wanted not in ids:
            near = dict.fromkeys(get_close_matches(wanted, ids, n=4) or ids)
            raise KvspecError(f"There is no clause or law {wanted!r}; there are {', '.join(sorted(near))}.")
        chapters = [
            replace(chapter, clauses=[part for part in chapter.clauses if part.clause.id == wanted])
            for chapter in self.chapters
        ]
        return replace(
            self,
            is_whole=False,
            chapters=[chapter for chapter in chapters if chapter.clauses],
            law_parts=[part for part in self.law_parts if part.law.id == wanted],
            switch_parts=[part for part in self.switch_parts if wanted in part.clauses],
        )


def collect() -> Page:
    """Read the model, the laws, what checks them, and the known issues."""
    root = Path(kvspec.__file__).parent.parent
    machines = _folder("strategies")
    has_tests = (root / "pyproject.toml").exists() and (root / "tests").is_dir()
    registry = load_defects(root / "tests" / "defects") if has_tests else {}
    facts = _Facts(
        in_model=found.switches_of_clauses(Path(model.__file__).parent),
        machines=found.checks(machines.parent, machines.name, "kvspec/equality"),
        tests=found.checks(root, "tests") if has_tests else found.Found({}, {}),
        package=found.checks(root, "kvspec"),
        defects={
            _subject(defect): [
                Planted(name, other.sentence) for name, other in registry.items() if _subject(other) == _subject(defect)
            ]
            for defect in registry.values()
        },
        scripts=[path.relative_to(root).as_posix() for path in (root / "tests" / "bugs").glob("*.py")]
        if has_tests
        else [],
    )
    chapters = [_chapter(name, facts) for name in reading_order()]
    parts = [part for chapter in chapters for part in chapter.clauses]
    folders = (root, "kvspec/model"), (root, "kvspec/equality"), (machines.parent, machines.name)
    readers = [found.readers(*folder) for folder in folders]
    return Page(
        lead=paragraphs(inspect.getdoc(model) or "")[0].text,
        chapters=[chapter for chapter in chapters if chapter.clauses],
        laws=_introduction(laws.__name__, []),
        law_parts=[_law(law, facts) for law in laws.LAWS.values()],
        switches=_introduction(profile_module.__name__, []),
        switch_parts=[_switch(switch, parts, readers) for switch in SWITCHES],
        has_tests=has_tests,
    )


def _subject(defect: Defect) -> Subject:
    is_equality = defect.in_model or defect.target in EQUALITIES
    return Subject("clause" if is_equality else "law", defect.law)


def reading_order() -> list[str]:
    """Return the modules of the model in the order that its docstring recommends."""
    text = next(part.text for part in paragraphs(inspect.getdoc(model) or "") if part.text.startswith("To be read"))
    return [f"{model.__name__}.{name}" for name in re.findall(r"``(\w+)``", text)]


class _Facts(NamedTuple):
    in_model: dict[str, set[str]]
    machines: found.Found
    tests: found.Found
    package: found.Found
    defects: dict[Subject, list[Planted]]
    scripts: list[str]

    def tests_of(self, kind: str, subject_id: str) -> list[str]:
        places = self.tests.places.get(Subject(kind, subject_id), [])
        return [f"{place.file}::{place.function}" for place in places]

    def switches_of(self, clause: Clause) -> list[str]:
        subject = Subject("clause", clause.id)
        named = set(re.findall(r"``Profile\.(\w+)``", clause.text))
        asked = self.machines.switches.get(subject, set()) | self.tests.switches.get(subject, set())
        wanted = self.in_model[clause.id] | named | asked
        return [switch.name for switch in SWITCHES if switch.name in wanted]


def _folder(package: str) -> Path:
    """Return where a package is, without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _chapter(name: str, facts: _Facts) -> Chapter:
    import_module(name)
    clauses = [clause for clause in CLAUSES.values() if clause.where.startswith(f"{name}.")]
    return _introduction(name, [_clause(clause, facts) for clause in clauses])


def _introduction(name: str, clauses: list[ClausePart]) -> Chapter:
    first, *rest = paragraphs(inspect.getdoc(sys.modules[name]) or "")
    title, lead = heading(first.text)
    return Chapter(name.rpartition(".")[2], title, lead, rest, clauses)


def _clause(clause: Clause, facts: _Facts) -> ClausePart:
    return ClausePart(
        clause=clause,
        text=paragraphs(clause.text),
        span=span_of(clause.releases),
        switches=facts.switches_of(clause),
        compared=_by_file(facts.machines.places.get(Subject("clause", clause.id), [])),
        defects=facts.defects.get(Subject("clause", clause.id), []),
        tests=facts.tests_of("clause", clause.id),
        issues=[_known(issue, facts) for issue in KNOWN_ISSUES if issue.clause == clause.id],
    )


def _law(law: Law, facts: _Facts) -> LawPart:
    return LawPart(
        law=law,
        checked=_by_file(facts.package.places.get(Subject("law", law.id), [])),
        defects=facts.defects.get(Subject("law", law.id), []),
        tests=facts.tests_of("law", law.id),
        issues=[
            _known_of_gate(issue)
            for issue in load_known()
            if not set(issue.targets) & EQUALITIES.keys() and fnmatchcase(law.id, issue.law)
        ],
    )


def _switch(switch: Switch, parts: list[ClausePart], readers: list[dict[str, list[Place]]]) -> SwitchPart:
    firsts = [RELEASES.index(release) for release in switch.since]
    lasts = [*(first - 1 for first in firsts[1:]), len(RELEASES) - 1]
    values = [
        Value(_said(value), Span(first, last))
        for value, first, last in zip(switch.since.values(), firsts, lasts, strict=True)
    ]
    clauses = [part.clause.id for part in parts if switch.name in part.switches]
    places = [] if clauses else [place for found_in in readers for place in found_in.get(switch.name, [])]
    return SwitchPart(switch, values, clauses, _by_file(places))


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value.value) if isinstance(value, Enum) else str(value)


def span_of(releases: str) -> Span:
    """Return what a clause's ``Releases:`` begins with: "all", "0.24.0 and later", "all up to 0.30.0", "0.22.1 to
    0.23.0" or "0.20.2 only".
    """
    match = re.match(
        r"all up to (?P<last>\d[\d.]*\d)|all\b|(?P<first>[\d.]+) and later"
        r"|(?P<begin>[\d.]+) to (?P<end>\d[\d.]*\d)|(?P<one>[\d.]+) only",
        releases,
    )
    if match is None:
        raise ValueError(
            f"{releases!r} begins neither with 'all' or 'all up to 0.30.0' nor with '0.24.0 and later', "
            "'0.22.1 to 0.23.0' or '0.20.2 only'"
        )
    first = match["first"] or match["begin"] or match["one"] or RELEASES[0]
    last = match["last"] or match["end"] or match["one"] or RELEASES[-1]
    return Span(RELEASES.index(first), RELEASES.index(last))


def _known(issue: KnownIssue, facts: _Facts) -> Known:
    last = RELEASES.index(issue.fixed) - 1 if issue.fixed else len(RELEASES) - 1
    span = Span(RELEASES.index(issue.bad), last)
    scripts = [path for path in facts.scripts if Path(path).stem == issue.id.replace("-", "_")]
    return Known(issue.id, issue.sentence, str(span), span, (*scripts, *facts.tests_of("issue", issue.id)))


def _known_of_gate(issue: Issue) -> Known:
    releases = issue.releases if isinstance(issue.releases, str) else ", ".join(issue.releases)
    covered = [index for index, release in enumerate(RELEASES) if issue.covers(release)]
    span = Span(covered[0], covered[-1]) if covered and covered[-1] - covered[0] < len(covered) else None
    return Known(issue.id, issue.title, str(span or releases), span, (issue.reference,))


def _by_file(places: list[Place]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for place in places:
        files.setdefault(place.file, []).append(place.function)
    return files
