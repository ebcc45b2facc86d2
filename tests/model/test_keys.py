"""What a block holds, and so when two blocks are the same."""

from __future__ import annotations

import pytest

from kvspec.model.keys import Content, Image, Text


def test_only_whole_hash_blocks_have_a_hash_and_it_comes_with_the_last_token() -> None:
    text = Text(list(range(7)), 4)
    assert len(text.hashes) == 1
    text.append([7])
    assert len(text.hashes) == 2
    assert text.hashes[1].parent is text.hashes[0]


def test_with_lookahead_a_hash_waits_for_the_tokens_after_its_block_and_depends_on_them() -> None:
    text, other = Text(list(range(5)), 4, lookahead=2), Text([0, 1, 2, 3, 4, 9], 4, lookahead=2)
    assert text.hashes == []
    text.append([5])
    assert text.hashes[0].lookahead == (4, 5)
    assert text.hashes[0] != other.hashes[0]


def test_equal_tokens_after_different_ones_are_different_blocks() -> None:
    assert Text([1, 2, 3, 4], 2).hashes[1] != Text([9, 2, 3, 4], 2).hashes[1]
    assert Text([1, 2, 3, 4], 2).hashes == Text([1, 2, 3, 4, 5], 2).hashes


@pytest.mark.parametrize(
    "content",
    [
        Content(salt="x"),
        Content(adapter=("x", "/a")),
        Content(adapter=("x", "/b")),
        Content(adapter=("y", "/a")),
        Content(images=(Image("x", 0, 2),)),
        Content(images=(Image("x", 1, 2),)),
        Content(images=(Image("y", 0, 2),)),
    ],
)
def test_content_of_another_kind_never_gives_an_equal_hash(content: Content) -> None:
    others = [Content(), Content(salt="x"), Content(adapter=("x", "/a")), Content(images=(Image("x", 0, 2),))]
    hashes = [Text([1, 2, 3, 4], 2, other).hashes for other in others if other != content]
    assert Text([1, 2, 3, 4], 2, content).hashes[0] not in [chain[0] for chain in hashes]


def test_the_salt_is_in_the_first_block_only_and_so_in_all_by_their_parents() -> None:
    salted = Text([1, 2, 3, 4], 2, Content(salt="s"))
    assert salted.hashes[0].extras == (("salt", "s"),)
    assert salted.hashes[1].extras == ()
    assert salted.hashes[1] != Text([1, 2, 3, 4], 2).hashes[1]


def test_an_image_counts_in_every_block_that_it_reaches_into_with_its_place() -> None:
    content = Content(images=(Image("cat", 1, 4), Image("dog", 5, 1)))
    extras = [block.extras for block in Text([0] * 8, 2, content).hashes]
    assert extras == [
        (("image", "cat", 1),),
        (("image", "cat", -1),),
        (("image", "cat", -3), ("image", "dog", 1)),
        (),
    ]


def test_a_block_of_several_hash_blocks_is_its_last_one() -> None:
    text = Text(list(range(14)), 2)
    assert text.view(2) == text.hashes
    assert text.view(6) == [text.hashes[2], text.hashes[5]]


def test_a_hash_prints_as_the_text_that_it_stands_for() -> None:
    assert repr(Text([1, 2, 3, 4], 2, Content(salt="s")).hashes[1]) == "<1,2 ('salt', 's') | 3,4>"
