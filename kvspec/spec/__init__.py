"""The specification as a page: the clauses of the model and the laws, in their own words, as HTML or Markdown.

``collect`` puts together what the page says, ``render`` writes it. Nothing on it is written by hand twice: sentences
and texts are docstrings of ``kvspec.model``, and what depends on what is found by reading source.
"""

from kvspec.spec.page import Page, collect
from kvspec.spec.render import FORMATS, render

__all__ = ["FORMATS", "Page", "collect", "render"]
