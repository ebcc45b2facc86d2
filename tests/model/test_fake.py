"""The model as a fake: the example in its own documentation, and a unit test as somebody else would write it."""

from __future__ import annotations

import doctest

import kvspec.model
from kvspec.model import CacheManager, Group, Kind, Request, profile_for


def test_the_example_in_the_documentation_runs() -> None:
    result = doctest.testmod(kvspec.model)
    assert result.attempted > 8
    assert result.failed == 0


class Prefetcher:
    """Somebody's connector: loads what the engine has not got, but never less than a block."""

    def __init__(self, cache: CacheManager, stored: int) -> None:
        self.cache = cache
        self.stored = stored

    def external_tokens(self, request: Request, local: int) -> int:
        limit = min(self.stored, len(request.text.tokens) - 1)
        return max(0, limit // 4 * 4 - local)


def test_a_connector_can_be_tested_without_an_engine() -> None:
    cache = CacheManager([Group(Kind.FULL, 4)], num_blocks=20, profile=profile_for("0.33.0"))
    writer = Request("writer", cache.text(range(8)), prompt_tokens=8)
    cache.allocate(writer, 8)
    reader = Request("reader", cache.text(range(20)), prompt_tokens=20)
    hit = cache.lookup(reader)
    external = Prefetcher(cache, stored=14).external_tokens(reader, hit.tokens)
    assert (hit.tokens, external) == (8, 4)
    assert cache.allocate(reader, 8, hit, external=external) == ([4, 5],)
    assert cache.tables["reader"] == [[1, 2, 3, 4, 5]]
