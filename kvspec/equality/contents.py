"""What requests depend on besides their tokens, out of so few names that kinds of content meet under one name."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from itertools import product

from kvspec.model.keys import PLAIN, Content, Image

_ADAPTERS = (None, ("x", "/x"), ("x", "/y"), ("y", "/x"))
_SALTS = (None, "x", "/x")
_IMAGES = ((), (Image("x", 3, 6),), (Image("y", 3, 6),), (Image("x", 1, 1), Image("y", 3, 6)))
_CONTENTS = [Content(*parts) for parts in product(_ADAPTERS, _IMAGES, _SALTS)]

CONTENTS = len(_CONTENTS)
"""How many different contents there are, the plain one included."""


def content_of(number: int, avoid: Set[str]) -> Content:
    """Return the content that a number means; the plain one for all numbers beyond the contents.

    ``avoid`` names the known issues that it must keep out of the way.
    """
    content = _CONTENTS[number] if 0 <= number < CONTENTS else PLAIN
    if content.adapter and "core-adapter-path-not-in-key" in avoid:
        content = replace(content, adapter=(content.adapter[0], f"/{content.adapter[0]}"))
    if content.adapter and "core-hash-key-collision" in avoid:
        content = replace(content, adapter=(f"adapter {content.adapter[0]}", content.adapter[1]))
    if "core-images-after-resume" in avoid:
        content = replace(content, images=content.images[:1])
    return content
