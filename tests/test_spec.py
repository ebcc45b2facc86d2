"""The specification's page: it says all that the model says, and what it found in the code is there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvspec.errors import KvspecError
from kvspec.laws import LAWS
from kvspec.model import CLAUSES, KNOWN_ISSUES, RELEASES, SWITCHES
from kvspec.spec import FORMATS, Page, collect, found, render
from kvspec.spec.found import Place, Subject
from kvspec.spec.markup import Paragraph, heading, paragraphs
from kvspec.spec.page import Span, reading_order, span_of


@pytest.fixture(scope="module")
def page() -> Page:
    return collect()


@pytest.fixture(scope="module")
def html(page: Page) -> str:
    return render(page, "html")


# What it says ---------------------------------------------------------------------------------------------------------


def test_every_clause_is_in_the_chapter_of_its_module_in_the_order_of_the_module(page: Page) -> None:
    ids = [part.clause.id for chapter in page.chapters for part in chapter.clauses]
    assert sorted(ids) == sorted(CLAUSES)
    for chapter in page.chapters:
        places = [clause.id for clause in CLAUSES.values() if clause.where.split(".")[2] == chapter.anchor]
        assert [part.clause.id for part in chapter.clauses] == places


def test_chapters_come_in_the_order_that_the_model_recommends(page: Page) -> None:
    modules = [name.rpartition(".")[2] for name in reading_order()]
    assert modules[:2] == ["keys", "pool"]
    assert modules[-1] == "profile"
    anchors = [chapter.anchor for chapter in page.chapters]
    assert anchors == sorted(anchors, key=modules.index)


@pytest.mark.parametrize("format", FORMATS)
def test_every_sentence_of_the_model_and_the_laws_is_on_the_page(page: Page, format: str) -> None:
    plain = re.sub(r"<[^>]+>|[\\`*]|\]\(#[^)]*\)|\[", "", render(page, format))
    plain = " ".join(unescape(plain).split())
    said = [
        *(text for clause in CLAUSES.values() for text in (clause.sentence, clause.source, clause.releases)),
        *(paragraph.text for clause in CLAUSES.values() for paragraph in paragraphs(clause.text)),
        *(paragraph.text for chapter in page.chapters for paragraph in chapter.text),
        *(text for law in LAWS.values() for text in (law.sentence, law.reason)),
        *(switch.sentence for switch in SWITCHES),
        *(issue.sentence for issue in KNOWN_ISSUES),
    ]
    assert [text for text in said if re.sub(r"[`*\[]", "", text) not in plain] == []


def test_what_is_not_modelled_is_said(html: str) -> None:
    assert html.count("Not modelled:") >= 4


def test_a_switch_has_the_release_on_either_side_of_each_change(page: Page) -> None:
    markdown = render(page, "markdown")
    for switch in SWITCHES:
        (row,) = [line for line in markdown.splitlines() if f'id="switch-{switch.name}"' in line]
        for before, first, _ in switch.changes():
            assert f"{before} → {first}: " in row


def test_a_known_issue_says_from_which_release_to_which(page: Page) -> None:
    parts = [part for chapter in page.chapters for part in chapter.clauses]
    issues = {issue.id: issue for part in parts for issue in part.issues}
    assert issues.keys() == {issue.id for issue in KNOWN_ISSUES}
    for issue in KNOWN_ISSUES:
        span = issues[issue.id].span
        assert span is not None
        having = [release for release in RELEASES if issue.affects(release)]
        assert (RELEASES[span.first], RELEASES[span.last]) == (having[0], having[-1])


def test_a_known_issue_of_the_gate_stands_at_its_law_and_says_so_too(page: Page) -> None:
    issues = {issue.id: (part.law.id, issue) for part in page.law_parts for issue in part.issues}
    law, issue = issues["simple-lazy-never-idle"]
    assert (law, issue.releases) == ("PROGRESS-1", "0.30.0 and later")
    assert issue.shown_by == ("tests/bugs/lazy_offload_never_idles.py",)


def test_every_known_issue_is_shown_by_a_test(page: Page) -> None:
    parts = [part for chapter in page.chapters for part in chapter.clauses]
    assert [issue.id for part in parts for issue in part.issues if not issue.shown_by] == []


# What was found in the code -------------------------------------------------------------------------------------------


def test_every_clause_is_compared_and_has_a_planted_defect(page: Page) -> None:
    for part in (part for chapter in page.chapters for part in chapter.clauses):
        assert part.compared, part.clause.id
        assert part.defects, part.clause.id


def test_every_law_is_checked_and_has_a_planted_defect(page: Page) -> None:
    for part in page.law_parts:
        assert "kvspec/world.py" in part.checked, part.law.id
        assert part.defects, part.law.id


def test_importing_the_model_states_every_clause() -> None:
    code = """
import importlib, pkgutil, kvspec.model as model
stated = set(model.CLAUSES)
for module in pkgutil.iter_modules(model.__path__):
    importlib.import_module(f"kvspec.model.{module.name}")
assert set(model.CLAUSES) == stated, set(model.CLAUSES) - stated
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_clause_has_the_id_of_a_law() -> None:
    assert not CLAUSES.keys() & LAWS.keys()


def test_every_test_that_is_named_is_there(page: Page) -> None:
    parts = [*(part for chapter in page.chapters for part in chapter.clauses), *page.law_parts]
    named = {test.partition("[")[0] for part in parts for test in part.tests}
    assert len(named) > 10
    for test in named:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (Path(__file__).parent.parent / file).read_text(encoding="utf-8")


def test_every_switch_is_read_by_something(page: Page) -> None:
    assert [part.switch.name for part in page.switch_parts if not (part.clauses or part.readers)] == []


@pytest.mark.parametrize(
    ("clause", "switches"),
    [
        ("POOL-2", []),
        ("POOL-7", ["free_order", "uncached_reuse"]),  # its function reads them
        ("FREE-1", ["free_order"]),  # a helper of its function does
        ("REG-2", ["masks_unreachable"]),  # it is only called if that is so
        ("PREFIX-6", ["moves_hashes"]),  # it is only compared if that is so
    ],
)
def test_the_switches_of_a_clause_are_found(page: Page, clause: str, switches: list[str]) -> None:
    assert [part.switch.name for part in page.only(clause).switch_parts] == switches


MACHINE = """
from kvspec.model.clauses import agree

class Pair:
    def after_an_exit(self):
        agree("POOL-2", 1, 1)
        if not self.profile.pins:
            return
        agree("POOL-9", 1, 1)

    def inside(self):
        agree("POOL-2" if self.profile.reserve else "POOL-3", 1, 1)
        if self.profile.watermark:
            agree("ALLOC-2", 1, 1)
        else:
            agree("POOL-11", 1, 1)
        agree("POOL-5", 1, 1)

NEEDS = {"PREFIX-6": lambda profile: profile.moves_hashes, "POOL-1": None}
"""


def test_the_switches_that_are_asked_for_first_are_found(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "a.py").write_text(MACHINE)
    switches = {subject.id: asked for subject, asked in found.checks(tmp_path, "machines").switches.items()}
    assert switches == {
        "POOL-1": set(),
        "POOL-2": {"reserve"},
        "POOL-3": {"reserve"},
        "POOL-5": set(),
        "POOL-9": {"pins"},
        "POOL-11": {"watermark"},
        "ALLOC-2": {"watermark"},
        "PREFIX-6": {"moves_hashes"},
    }


TESTS = """
import pytest
from kvspec.model import CLAUSES, scaling
from kvspec.model.scaling import slot

TABLE = {"POOL-2": 1, "POOL-3": 2}
LIST = ["POOL-5"]

def helper():
    agree("POOL-6", 1, 1)

def unused():
    agree("POOL-7", 1, 1)

@pytest.mark.parametrize("clause", TABLE)
def test_each(clause):
    assert TABLE[clause]

@pytest.mark.parametrize("clause", LIST, ids=str)
def test_some(clause): ...

def test_the_table_has_all():
    assert TABLE.keys() == CLAUSES.keys()

def test_helped():
    helper()

def test_itself():
    agree("POOL-8", slot(1), scaling.whole_blocks(1))
"""


def test_the_tests_that_check_something_are_found_through_tables_and_helpers(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "tests" / "test_c.py").write_text(f"from kvspec.spec import render\n{TESTS}")
    places = found.checks(tmp_path, "tests").places
    assert all(place.file == "tests/test_a.py" for some in places.values() for place in some)
    assert {subject.id: [place.function for place in some] for subject, some in places.items()} == {
        "POOL-2": ["test_each[POOL-2]"],
        "POOL-3": ["test_each[POOL-3]"],
        "POOL-5": ["test_some"],
        "POOL-6": ["test_helped"],
        "POOL-7": [],
        "POOL-8": ["test_itself"],
        "SCALE-5": ["test_itself"],
        "SCALE-7": ["test_itself"],
    }


def test_a_law_is_found_by_its_name_and_its_functions_in_tests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    source = "from kvspec import laws\n\ndef test_it():\n    laws.pool_is_conserved(None)\n    assert laws.OWN\n"
    (tmp_path / "tests" / "test_a.py").write_text(source)
    expected = [Place("tests/test_a.py", "test_it")]
    assert found.checks(tmp_path, "tests").places == {
        Subject("law", "CONSERVE-1"): expected,
        Subject("law", "OWN-1"): expected,
    }


# How it looks ---------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Checks that elements are closed in order, and keeps ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def test_the_html_is_one_file_in_which_every_link_leads_somewhere(html: str) -> None:
    elements = Elements()
    elements.feed(html)
    assert elements.open == []
    assert len(elements.ids) == len(set(elements.ids))
    assert set(elements.addresses) <= {f"#{id}" for id in elements.ids}
    assert "url(" not in html
    assert "@import" not in html
    assert set(CLAUSES) | {f"law-{law}" for law in LAWS} | {f"switch-{s.name}" for s in SWITCHES} <= set(elements.ids)


def test_the_links_of_the_markdown_lead_somewhere(page: Page) -> None:
    markdown = render(page, "markdown")
    ids = re.findall(r'<a id="([^"]+)">', markdown)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"\]\(#([^)]+)\)", markdown)) <= set(ids)


def test_the_html_has_every_release_to_choose_from_and_what_holds_when(html: str) -> None:
    assert re.findall(r"<option>(.+)</option>", html) == list(RELEASES)
    first = RELEASES.index("0.30.0")
    assert f'<article id="POOL-9" class="clause" data-first="{first}" data-last="{len(RELEASES) - 1}">' in html


@pytest.mark.parametrize("format", FORMATS)
def test_a_page_that_has_seen_no_tests_says_so(page: Page, format: str) -> None:
    note = "kvspec is installed without its tests"
    assert note not in render(page, format)
    assert note in render(replace(page, has_tests=False), format)


def test_a_clause_that_nothing_checks_is_said_to_be_one(page: Page) -> None:
    chapter = page.only("POOL-2").chapters[0]
    bare = replace(chapter, clauses=[replace(chapter.clauses[0], compared={}, defects=[], tests=[])])
    for format in FORMATS:
        assert "Nothing checks it yet." in render(replace(page.only("POOL-2"), chapters=[bare]), format)
        assert "Nothing checks it yet." not in render(page.only("POOL-2"), format)


def test_one_clause_comes_with_its_switches_and_nothing_else(page: Page) -> None:
    text = render(page.only("pool-7"), "markdown")
    assert re.findall("^### (\\S+)\\.", text, re.MULTILINE) == ["POOL-7"]
    assert text.count('id="switch-') == 2
    assert "A *clause* is" not in text


def test_an_id_that_is_not_there_is_answered_with_the_nearest(page: Page) -> None:
    with pytest.raises(KvspecError, match=r"no clause or law 'POOL-77'; there are POOL-1?\d"):
        page.only("pool-77")
    with pytest.raises(KvspecError, match="there are ADMIT-1, "):
        page.only("%")


def test_a_docstring_becomes_paragraphs_and_lists() -> None:
    text = inspect.cleandoc(
        """
        One line
        and more.

        Args:
            first: of ``two``
                lines.
            second: b

        Returns:
            What
            it is.
        """
    )
    assert paragraphs(text) == [
        Paragraph("One line and more."),
        Paragraph("Args:", (("first", "of ``two`` lines."), ("second", "b"))),
        Paragraph("Returns: What it is."),
    ]
    assert paragraphs("") == []
    assert heading("The pool: who, holds what.") == ("The pool", "Who, holds what.")


def test_running_text_is_set_for_each_format(page: Page) -> None:
    text = "*May* ``a < b`` <c_d> [e] ``Profile.pins``, ``Profile.nothing``, see POOL-2."
    page = replace(page, lead=text)
    assert (
        "<em>May</em> <code>a &lt; b</code> &lt;c_d&gt; [e] "
        '<a href="#switch-pins"><code>Profile.pins</code></a>, <code>Profile.nothing</code>, '
        'see <a href="#POOL-2">POOL-2</a>.'
    ) in render(page, "html")
    assert (
        r"*May* `a < b` \<c\_d> \[e] [`Profile.pins`](#switch-pins), `Profile.nothing`, see [POOL-2](#POOL-2)."
    ) in render(page, "markdown")


@pytest.mark.parametrize(
    ("releases", "span", "text"),
    [
        ("all", (0, len(RELEASES) - 1), "all releases"),
        ("all (but one)", (0, len(RELEASES) - 1), "all releases"),
        ("0.24.0 and later (more: 0.30.0)", (4, len(RELEASES) - 1), "0.24.0 and later"),
    ],
)
def test_the_releases_of_a_clause_are_a_span(releases: str, span: tuple[int, int], text: str) -> None:
    assert span_of(releases) == Span(*span)
    assert str(span_of(releases)) == text


def test_a_span_that_ends_is_said_from_and_to() -> None:
    assert str(Span(3, 3)) == "0.23.0"
    assert str(Span(0, 3)) == "0.20.2 to 0.23.0"


def test_releases_that_say_neither_all_nor_since_when_are_refused() -> None:
    with pytest.raises(ValueError, match="'most' begins neither"):
        span_of("most")
