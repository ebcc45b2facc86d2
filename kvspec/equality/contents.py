"""What requests depend on besides their tokens, out of so few names that kinds of content meet under one name."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from itertools import product

from kvspec.model.keys import Content, Image

_ADAPTERS = (None, ("x", "/x"), ("x", "/y"), ("y", "/x"))
_SALTS = (None, "x", "/x")
_IMAGES = ((), (Image("x", 3, 6),), (Image("y", 3, 6),), (Image("x", 1, 1), Image("y", 3, 6)))
_ALL = [Content(*parts) for parts in product(_ADAPTERS, _IMAGES, _SALTS)]
_OF_ONE_KIND = [content for content in _ALL if sum(map(bool, (content.adapter, content.images, content.salt))) == 1]
CONTENTS = _ALL + 4 * _OF_ONE_KIND


def content_of(number: int, avoid: Set[str]) -> Content | None:
    """Return the content that a number means, if it means one; those of one kind have several numbers.

    ``avoid`` names the known issues that it must keep out of the way.
    """
    if not 0 <= number < len(CONTENTS):
        return None
    content = CONTENTS[number]
    if content.adapter and "core-adapter-path-not-in-key" in avoid:
        content = replace(content, adapter=(content.adapter[0], f"/{content.adapter[0]}"))
    if content.adapter and "core-hash-key-collision" in avoid:
        content = replace(content, adapter=(f"adapter {content.adapter[0]}", content.adapter[1]))
    if "core-images-after-resume" in avoid:
        content = replace(content, images=content.images[:1])
    return content
