"""What requests say and the tags that stand for it. Not checked here: collisions of 64-bit hashes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvspec.engine.text import FIRST_WORD, STOP_TOKEN, VOCABULARY, Origins, Text, mix, words

FIXED = settings(derandomize=True, database=None, deadline=None)

TOKENS = st.integers(0, 3) | st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12)
CONTEXTS = st.integers(-2, 3) | st.integers(-(2**63), 2**63 - 1)
STEMS_APART = VOCABULARY - FIRST_WORD


def text(*prompt: int, name: str = "a", context: int = 0, origins: Origins | None = None) -> Text:
    return Text.of_prompt(name, list(prompt), context, origins or Origins())


def tags_of(said: Text) -> list[int]:
    return [int(tag) for tag in said.tags(0, len(said.tokens))]


# Tags -----------------------------------------------------------------------------------------------------------------


@FIXED
@example([(-1, [3, 7]), (3, [7])])
@given(st.lists(st.tuples(CONTEXTS, PROMPTS), min_size=1, max_size=6))
def test_positions_have_equal_tags_exactly_if_they_have_equal_prefixes(said: list[tuple[int, list[int]]]) -> None:
    """Token, salt and position all count: among all positions of all texts, tags and prefixes map one to one."""
    meaning: dict[int, tuple[int, tuple[int, ...]]] = {}
    tag_of: dict[tuple[int, tuple[int, ...]], int] = {}
    for context, prompt in said:
        for position, tag in enumerate(tags_of(text(*prompt, context=context))):
            prefix = (context, tuple(prompt[: position + 1]))
            assert meaning.setdefault(tag, prefix) == prefix
            assert tag_of.setdefault(prefix, tag) == tag


@FIXED
@given(PROMPTS, st.data())
def test_a_token_that_differs_changes_its_own_tag_and_all_later_ones(prompt: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = list(prompt)
    other[at] = data.draw(TOKENS.filter(lambda token: token != prompt[at]))
    before, after = tags_of(text(*prompt)), tags_of(text(*other))
    assert [one == two for one, two in zip(before, after, strict=True)] == [p < at for p in range(len(prompt))]


@FIXED
@given(PROMPTS, CONTEXTS, CONTEXTS)
def test_another_salt_changes_every_tag(prompt: list[int], one: int, other: int) -> None:
    shared = set(tags_of(text(*prompt, context=one))) & set(tags_of(text(*prompt, context=other)))
    assert bool(shared) == (one == other)


@FIXED
@given(PROMPTS, CONTEXTS, st.integers(0, 80))
def test_what_was_sampled_has_the_tags_that_it_would_have_in_a_prompt(
    prompt: list[int], context: int, sampled: int
) -> None:
    said = text(*prompt, context=context)
    for _ in range(sampled):
        said.sample(len(said.tokens))
    assert tags_of(said) == tags_of(text(*said.tokens, context=context))
    assert said.prompt_tokens == len(prompt)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 500])
def test_a_text_of_any_length_keeps_the_tags_that_it_had(length: int) -> None:
    prompt = words(5, 0, length)
    said = text(prompt[0])
    for position, token in enumerate(prompt[1:], 1):
        before = tags_of(said)
        said._append(token)
        assert tags_of(said)[:position] == before
    assert len(set(tags_of(said))) == length


@FIXED
@given(PROMPTS, st.data())
def test_tags_are_given_out_for_any_stretch(prompt: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(prompt)))
    stop = data.draw(st.integers(start, len(prompt)))
    said = text(*prompt)
    assert [int(tag) for tag in said.tags(start, stop)] == tags_of(said)[start:stop]


def test_tags_of_tokens_that_are_not_determined_yet_are_refused() -> None:
    said = text(7, 7)
    with pytest.raises(IndexError, match="a has 2 tokens, not 3"):
        said.tags(0, 3)
    said.sample(2)
    assert len(said.tags(0, 3)) == 3


@FIXED
@given(st.sets(st.tuples(st.integers(0, 2**64 - 1), st.integers(-1, 2**32)), max_size=50))
def test_a_mix_is_a_number_of_64_bits_that_depends_on_both(pairs: set[tuple[int, int]]) -> None:
    mixed = [mix(value, word) for value, word in pairs]
    assert all(0 <= number < 2**64 for number in mixed)
    assert len(set(mixed)) == len(pairs)


# Sampling -------------------------------------------------------------------------------------------------------------


@FIXED
@given(PROMPTS, CONTEXTS, st.integers(1, 12), st.integers(0, 12))
def test_the_same_prefix_has_the_same_continuation(
    prompt: list[int], context: int, sampled: int, as_prompt: int
) -> None:
    """Also if a part of it was sampled by one request and is the prompt of another."""
    first = text(*prompt, context=context)
    answer = [first.sample(len(first.tokens)) for _ in range(sampled)]
    cut = min(as_prompt, sampled)
    second = text(*prompt, *answer[:cut], name="b", context=context)
    assert [second.sample(len(second.tokens)) for _ in range(sampled - cut)] == answer[cut:]


@FIXED
@given(PROMPTS, CONTEXTS)
def test_the_model_never_stops_of_its_own_accord_and_stays_in_its_vocabulary(prompt: list[int], context: int) -> None:
    said = text(*prompt, context=context)
    answer = [said.sample(len(said.tokens)) for _ in range(20)]
    assert all(FIRST_WORD <= token < VOCABULARY for token in answer)
    assert STOP_TOKEN < FIRST_WORD


def test_different_prefixes_are_continued_differently() -> None:
    answers = {text(stem).sample(1) for stem in range(FIRST_WORD, VOCABULARY)}
    assert len(answers) > STEMS_APART // 2


def test_the_stop_token_comes_next_and_only_once() -> None:
    said = text(30, 31)
    said.stop_next = True
    assert said.sample(2) == STOP_TOKEN
    assert said.sample(3) != STOP_TOKEN
    assert said.tokens[2] == STOP_TOKEN


def test_a_token_that_was_sampled_is_the_same_when_it_is_computed_again() -> None:
    said = text(30, 31)
    first, second = said.sample(2), said.sample(3)
    said.stop_next = True
    assert (said.sample(2), said.sample(3)) == (first, second)
    assert said.stop_next, "the stop token is still to come"
    assert said.sample(4) == STOP_TOKEN


def test_a_token_is_not_sampled_before_its_prefix_is_known() -> None:
    said = text(30, 31)
    with pytest.raises(IndexError, match="token 3 of a is sampled before token 2"):
        said.sample(3)
    assert said.tokens == [30, 31]


# Origins --------------------------------------------------------------------------------------------------------------


def test_a_tag_is_named_by_the_first_request_and_position_that_had_it() -> None:
    origins = Origins()
    first = text(40, 41, 42, name="a", origins=origins)
    second = text(40, 41, 50, name="b", origins=origins)
    second.sample(3)
    assert [origins.describe(tag) for tag in tags_of(first)] == [f"token {p} of a" for p in range(3)]
    assert [origins.describe(tag) for tag in tags_of(second)] == [
        "token 0 of a",
        "token 1 of a",
        "token 2 of b",
        "token 3 of b",
    ]


def test_memory_that_was_never_written_and_bytes_of_nobody_are_named_as_that() -> None:
    origins = Origins()
    said = text(40, origins=origins)
    assert origins.describe(0) == "bytes that nothing has written"
    assert origins.describe(int(said.tags(0, 1)[0]) ^ 1).startswith("unknown bytes 0x")
    assert origins.describe(0xBEEF) == "unknown bytes 0x000000000000beef"


# Words ----------------------------------------------------------------------------------------------------------------


@FIXED
@given(st.integers(0, 10**6), st.integers(1, STEMS_APART - 1), st.integers(0, 10**6))
def test_texts_of_different_stems_differ_at_every_position(stem: int, apart: int, position: int) -> None:
    (one,), (other,) = words(stem, position, position + 1), words(stem + apart, position, position + 1)
    assert one != other


@FIXED
@given(st.integers(0, 5000), st.integers(0, 50), st.integers(0, 50))
def test_a_stretch_of_a_text_is_that_part_of_the_whole(stem: int, start: int, length: int) -> None:
    whole = words(stem, 0, start + length)
    assert words(stem, start, start + length) == whole[start:]
    assert all(FIRST_WORD <= token < VOCABULARY for token in whole)


def test_texts_that_a_history_can_name_side_by_side_never_share_a_word() -> None:
    """Trunks, branches and the requests that wake an engine; see ``World._prompt``."""
    stems = [*range(3), *range(1000, 1002), *range(2000, 2003)]
    for position in range(64):
        said = [words(stem, position, position + 1)[0] for stem in stems]
        assert len(set(said)) == len(said)


# Drafts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_any_number_of_drafts_is_accepted_and_equal_prefixes_accept_equal_numbers(drafts: int) -> None:
    said, again = text(*words(1, 0, 90)), text(*words(1, 0, 60), name="b")
    accepted = [said.accepted(position, drafts) for position in range(1, 90)]
    assert set(accepted) == set(range(drafts + 1))
    assert [again.accepted(position, drafts) for position in range(1, 60)] == accepted[:59]


def test_what_rejected_drafts_leave_is_like_nothing_else_and_says_what_it_is() -> None:
    origins = Origins()
    said = text(*words(1, 0, 9), origins=origins)
    left = {stop: said.tags_with_drafts(stop, 9 - stop).tolist() for stop in range(1, 10)}
    assert all(tags[:stop] == tags_of(said)[:stop] for stop, tags in left.items())
    wrong = [tag for stop, tags in left.items() for tag in tags[stop:]]
    assert len(set(wrong)) == len(wrong) == 36
    assert not set(wrong) & set(tags_of(said))
    assert origins.describe(left[4][6]) == "a rejected draft of token 6 of a"
    assert origins.describe(left[7][6]) == "token 6 of a"
