"""Writes the page with Jinja: one template for each format, and how running text looks in it."""

from __future__ import annotations

import re
from collections.abc import Callable

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kvspec.model import CLAUSES
from kvspec.spec.found import SWITCH_NAMES
from kvspec.spec.page import Page

FORMATS = ("html", "markdown")

_CODE = re.compile(r"``(.+?)``")
_EMPHASIS = re.compile(r"\*(\S[^*]*)\*")
_BLANK_LINES = re.compile(r"\n{3,}")
_CLAUSE = re.compile(rf"\b({'|'.join(CLAUSES)})\b(?!-)")
_NAME = re.compile(r"\bv1/[\w/]+\.py|\b[A-Za-z]\w*\.\w+|\b\w*_\w+|\b(?:[A-Z][a-z]+){2,}\b")
_MARKDOWN = re.compile(r"([\\_<\[|])")


def render(page: Page, format: str) -> str:
    """Return the page in one of FORMATS."""
    environment = Environment(
        loader=PackageLoader("kvspec.spec"),
        autoescape=format == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["inline"] = _html if format == "html" else _markdown
    environment.filters["names"] = lambda source: _NAME.sub(r"``\g<0>``", source)
    text = environment.get_template(f"page.{format}").render(page=page)
    return _BLANK_LINES.sub("\n\n", text)


def _html(text: str) -> Markup:
    def prose(piece: str) -> str:
        piece = _EMPHASIS.sub(r"<em>\1</em>", str(escape(piece)))
        return _CLAUSE.sub(r'<a href="#\1">\1</a>', piece)

    def code(piece: str) -> str:
        element = f"<code>{escape(piece)}</code>"
        switch = _switch(piece)
        return f'<a href="#switch-{switch}">{element}</a>' if switch else element

    return Markup(_set(text, prose, code))


def _markdown(text: str) -> str:
    def prose(piece: str) -> str:
        return _CLAUSE.sub(r"[\1](#\1)", _MARKDOWN.sub(r"\\\1", piece))

    def code(piece: str) -> str:
        switch = _switch(piece)
        return f"[`{piece}`](#switch-{switch})" if switch else f"`{piece}`"

    return _set(text, prose, code)


def _set(text: str, prose: Callable[[str], str], code: Callable[[str], str]) -> str:
    """Set running text: what is between two backquotes is code."""
    return "".join((code if number % 2 else prose)(piece) for number, piece in enumerate(_CODE.split(text)))


def _switch(code: str) -> str | None:
    owner, _, name = code.partition(".")
    return name if owner == "Profile" and name in SWITCH_NAMES else None
