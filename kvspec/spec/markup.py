"""Docstrings as text to set: paragraphs, and lists of terms such as ``Args:``."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import NamedTuple

_SECTION = re.compile(r"(?P<title>[A-Z]\w*:)\n(?P<body> .*)", re.DOTALL)
_TERM = re.compile(r"^(\w+): (.+?)(?=^\w|\Z)", re.DOTALL | re.MULTILINE)


class Paragraph(NamedTuple):
    """Running text, on one line; ``code`` is between two backquotes."""

    text: str
    terms: tuple[tuple[str, str], ...] = ()
    """What follows it as a list: term, explanation."""


def paragraphs(text: str) -> list[Paragraph]:
    """Return the paragraphs of a docstring whose indentation is already gone."""
    return [_paragraph(part) for part in re.split(r"\n\s*\n", text.strip()) if part]


def _paragraph(part: str) -> Paragraph:
    section = _SECTION.fullmatch(part)
    if section is None:
        return Paragraph(_line(part))
    body = dedent(section["body"])
    if terms := _TERM.findall(body):
        return Paragraph(section["title"], tuple((term, _line(text)) for term, text in terms))
    return Paragraph(f"{section['title']} {_line(body)}")


def heading(text: str) -> tuple[str, str]:
    """Split a module's first sentence, ``The block pool: which blocks …``, into a title and the rest."""
    title, rest = re.split(r"[:,] ", text, maxsplit=1)
    return title, rest[0].upper() + rest[1:]


def _line(text: str) -> str:
    return " ".join(text.split())
