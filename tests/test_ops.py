"""Histories as data, both ways, and in words. Not checked here: that an op does what its words say (test_world.py)."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec.ops import (
    ADVERSARY,
    GROUPS_MAX,
    HISTORY_FORMAT,
    SCHEDULE,
    Abort,
    Add,
    Advance,
    AttentionGroup,
    EngineSetup,
    Finish,
    History,
    Op,
    Reset,
    Settle,
    Step,
    history_from_json,
    history_to_json,
    in_words,
)

FIXED = settings(derandomize=True, database=None, deadline=None)

OPS: tuple[type[Op], ...] = get_args(Op)
COUNTS = st.integers(-(2**63), 2**64 - 1)  # what JSON readers that aren't Python's take for a number
NAMES = st.text()
FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    int: COUNTS,
    str: NAMES,
    bool: st.booleans(),
    str | None: st.none() | NAMES,
}


SCHEDULES = st.none() | st.from_regex(SCHEDULE, fullmatch=True)
"""The one field whose text has a form of its own."""


def drawn(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any value of any field; a type of field that is new in the vocabulary has to be added to FIELDS."""
    fields = msgspec.structs.fields(kind)
    values = {field.name: SCHEDULES if field.name == "schedule" else FIELDS[field.type] for field in fields}
    return st.builds(kind, **values)


@st.composite
def drawn_setups(draw: st.DrawFn) -> EngineSetup:
    """Any setup that there can be."""
    sizes = st.sampled_from([4, 8, 16])
    windows = st.builds(AttentionGroup, kind=st.just("sliding-window"), block_size=sizes, reach=st.integers(1, 4096))
    others = st.builds(AttentionGroup, kind=st.sampled_from(["full", "mamba"]), block_size=sizes)
    groups = st.lists(windows | others, min_size=1, max_size=GROUPS_MAX)
    ranks = st.integers(1, 8)
    context = draw(st.booleans())
    return EngineSetup(
        gpu_blocks=draw(st.integers(2, 4096)),
        cpu_blocks=draw(st.integers(2, 4096)),
        block_size=draw(sizes),
        step_tokens=draw(st.integers(1, 65536)),
        running_max=draw(st.integers(1, 256)),
        drafts=draw(st.integers(0, 8)),
        ranks=1 if context else draw(ranks),
        decode_ranks=draw(ranks) if context else 1,
        prefill_ranks=draw(ranks) if context else 1,
        interleave=draw(st.sampled_from([1, 2, 4])),
        groups=tuple(draw(groups)),
        **{field.name: draw(st.booleans()) for field in msgspec.structs.fields(EngineSetup) if field.type is bool},
    )


ANY_OP: st.SearchStrategy[Op] = st.one_of(*(drawn(kind) for kind in OPS))
ANY_HISTORY = st.builds(
    History,
    target=NAMES,
    setup=drawn_setups(),
    ops=st.lists(ANY_OP, max_size=8).map(tuple),
    adversary=st.from_regex(ADVERSARY, fullmatch=True),
    seed=COUNTS,
)


def as_data(*ops: Op, **fields: Any) -> dict[str, Any]:
    """What a file with these ops holds, to be spoilt."""
    history = History(target="t", setup=EngineSetup(), ops=ops, **fields)
    data: dict[str, Any] = json.loads(history_to_json(history))
    return data


def simplest(kind: type[Op]) -> Op:
    """The op of this kind that is at its defaults."""
    return kind(*("a" for field in msgspec.structs.fields(kind) if field.required))


def refusal(data: object) -> str:
    with pytest.raises(ValueError, match=r"^(not a history: |history format )") as refused:
        history_from_json(data if isinstance(data, bytes) else json.dumps(data).encode())
    return str(refused.value)


@pytest.mark.parametrize("schedule", ["hello world", "c", "0c", "c0 ", "C0"])
def test_a_schedule_that_is_none_is_refused(schedule: str) -> None:
    data = as_data(Step(schedule="c0."))
    data["ops"][0]["schedule"] = schedule
    with pytest.raises(ValueError, match=r"op 0: .* is no schedule"):
        history_from_json(json.dumps(data).encode())


@pytest.mark.parametrize("adversary", ["unfair", "pct", "pct:x", ""])
def test_an_adversary_that_there_is_not_is_refused(adversary: str) -> None:
    data = as_data(Add("a"), adversary="fair") | {"adversary": adversary}
    with pytest.raises(ValueError, match="is no adversary"):
        history_from_json(json.dumps(data).encode())


# There and back -------------------------------------------------------------------------------------------------------


@FIXED
@given(ANY_HISTORY)
def test_any_history_goes_to_json_and_back(history: History) -> None:
    assert history_from_json(history_to_json(history)) == history


@pytest.mark.parametrize("kind", OPS)
def test_each_kind_of_op_can_be_told_from_the_others_in_json(kind: type[Op]) -> None:
    op = simplest(kind)
    (written,) = as_data(op)["ops"]
    assert written["op"] == kind.__name__.lower()
    assert history_from_json(json.dumps(as_data(op)).encode()).ops == (op,)


@FIXED
@given(ANY_HISTORY)
def test_json_says_everything_even_what_is_at_its_default(history: History) -> None:
    """A default that changes in a later release of kvspec doesn't change what a recorded history means."""
    data = json.loads(history_to_json(history))
    assert data.keys() == {"level", *History.__struct_fields__}
    assert data["setup"].keys() == set(EngineSetup.__struct_fields__)
    for op, written in zip(history.ops, data["ops"], strict=True):
        assert written.keys() == {"op", *op.__struct_fields__}


@FIXED
@given(ANY_HISTORY)
def test_json_is_indented_text_that_ends_with_a_newline(history: History) -> None:
    lines = history_to_json(history).decode().split("\n")
    assert lines[0] == "{"
    assert lines[-2:] == ["}", ""]
    assert all(line.startswith(" ") for line in lines[1:-2])


def test_what_has_a_default_may_be_left_out() -> None:
    text = b'{"format": 1, "target": "t", "setup": {}, "ops": [{"op": "step"}, {"op": "add", "request": "a"}]}'
    assert history_from_json(text) == History("t", EngineSetup(), (Step(), Add("a")))


# What isn't a history -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "place"),
    [((), ""), (("setup",), "$.setup"), (("ops", 0), "$.ops[0]"), (("ops", 1), "$.ops[1]")],
    ids=["history", "setup", "first op", "second op"],
)
def test_an_unknown_field_is_refused_by_name_and_place(path: tuple[Any, ...], place: str) -> None:
    data = as_data(Step(), Abort("a"))
    spoilt: Any = data
    for key in path:
        spoilt = spoilt[key]
    spoilt["surprise"] = 1
    message = refusal(data)
    assert "unknown field `surprise`" in message
    assert place in message or not place


WRONG = {int: [2], str: ["c0"], bool: [True], None: [None], "never": [[], {}, 1.5]}
TAKES = {int: {int}, str: {str}, bool: {bool}, str | None: {str, None}}


@pytest.mark.parametrize("kind", [*OPS, EngineSetup])
def test_a_field_takes_its_own_type_and_no_other(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        if field.name in ("groups", "backends"):
            continue
        is_setup = kind is EngineSetup
        data = as_data(Settle(), *([] if is_setup else [simplest(kind)]))
        holder = data["setup"] if is_setup else data["ops"][1]
        for type_of_value, values in WRONG.items():
            for value in values:
                holder[field.name] = value
                if type_of_value in TAKES[field.type]:
                    history_from_json(json.dumps(data).encode())
                    continue
                message = refusal(data)
                assert message.startswith("not a history: Expected `")
                assert message.endswith(f"`$.{'setup' if is_setup else 'ops[1]'}.{field.name}`")


REFUSED_SETUPS = [
    ({"gpu_blocks": -5}, "gpu_blocks is -5; it must be 2 to 4096"),
    ({"gpu_blocks": 1}, "gpu_blocks is 1; it must be 2 to 4096"),
    ({"cpu_blocks": 10**12}, "cpu_blocks is 1000000000000; it must be 2 to 4096"),
    ({"block_size": 0}, "block_size is 0; it must be 1 to 128"),
    ({"step_tokens": 0}, "step_tokens is 0; it must be 1 to 65536"),
    ({"running_max": 0}, "running_max is 0; it must be 1 to 256"),
    ({"ranks": 0}, "ranks is 0; it must be 1 to 8"),
    ({"decode_ranks": 9}, "decode_ranks is 9; it must be 1 to 8"),
    ({"prefill_ranks": -1}, "prefill_ranks is -1; it must be 1 to 8"),
    ({"interleave": 0}, "interleave is 0; it must be 1 to 128"),
    (
        {"backends": ["simple", "simple"]},
        "backends are ('simple', 'simple'); there are ('offloading', 'simple'), ('simple', 'offloading'), "
        "('offloading', 'offloading')",
    ),
    ({"interleave": 3}, "interleave is 3; it must divide the block size, 4"),
    ({"interleave": 8, "block_size": 4}, "interleave is 8; it must divide the block size, 4"),
    (
        {"ranks": 2, "decode_ranks": 2},
        "ranks is 2 and there are 2 context-parallel ranks; one of them must be 1",
    ),
    ({"groups": []}, "there are 0 groups; there must be 1 to 4"),
    ({"groups": [{"kind": "linear"}]}, "'linear' is no kind of group; there are full, sliding-window, mamba"),
    ({"groups": [{"kind": "full", "reach": 4}]}, "reach of a full group is 4; it must be 0"),
    ({"groups": [{"kind": "sliding-window"}]}, "reach of a sliding-window group is 0; it must be 1 to 4096"),
    ({"groups": [{"block_size": 200}]}, "block_size of a group is 200; it must be 0 to 128"),
    ({"groups": [{"block_size": 6}, {}]}, "the groups' block sizes are (6, 4); each must divide the largest"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED_SETUPS, ids=[str(fields) for fields, _ in REFUSED_SETUPS])
def test_a_setup_that_can_not_be_is_refused_with_a_sentence_and_its_place(
    fields: dict[str, Any], sentence: str
) -> None:
    message = refusal({"format": 1, "target": "t", "setup": fields, "ops": []})
    assert message.startswith(f"not a history: {sentence} - at `$.setup")


def test_a_history_of_an_older_kvspec_means_one_rank_and_one_full_attention_group() -> None:
    setup = EngineSetup()
    assert (setup.world_size, setup.groups, setup.block_sizes) == (1, (AttentionGroup("full"),), (4,))


@pytest.mark.parametrize("field", ["target", "setup", "ops"])
def test_a_history_without_a_required_field_is_refused_by_its_name(field: str) -> None:
    data = as_data()
    del data[field]
    assert f"missing required field `{field}`" in refusal(data)


def test_an_op_without_its_request_is_refused_with_its_place() -> None:
    data = as_data(Step(), Finish("a"))
    del data["ops"][1]["request"]
    message = refusal(data)
    assert "`request`" in message
    assert "$.ops[1]" in message


@pytest.mark.parametrize("kind", ["steps", "", "Step", 1, None])
def test_an_op_of_an_unknown_kind_is_refused_with_its_place(kind: object) -> None:
    data = as_data(Step())
    data["ops"][0]["op"] = kind
    assert "$.ops[0].op" in refusal(data)


@FIXED
@given(COUNTS.filter(lambda version: version != HISTORY_FORMAT))
def test_another_format_is_refused_by_its_number_and_the_one_that_is_read(version: int) -> None:
    message = refusal(as_data() | {"format": version})
    assert message == f"history format {version}; this kvspec reads format {HISTORY_FORMAT}"


def test_another_format_is_named_as_such_even_where_it_has_other_fields() -> None:
    assert refusal({"format": 2, "journal": [{"op": "sleep"}]}).startswith("history format 2;")


@pytest.mark.parametrize("version", [None, "1", 1.5, [1]])
def test_a_format_that_is_no_number_is_refused_with_its_place(version: object) -> None:
    assert "$.format" in refusal(as_data() | {"format": version})


def test_a_history_without_a_format_is_refused() -> None:
    data = as_data()
    del data["format"]
    assert "`format`" in refusal(data)


@FIXED
@given(st.binary(max_size=40))
def test_any_bytes_that_are_no_history_are_a_value_error(data: bytes) -> None:
    refusal(data)


@pytest.mark.parametrize("data", [b"\xff\xfe", b'"\xff"', b'{"\xff": 1}', b"[" * 100_000, b'{"a":' * 100_000])
def test_bytes_that_are_hard_to_read_are_a_value_error_too(data: bytes) -> None:
    refusal(data)


def test_a_history_that_was_cut_short_anywhere_is_refused() -> None:
    text = history_to_json(History("t", EngineSetup(), (Add("ä"), Step(schedule="c0.")))).rstrip()
    for end in range(len(text)):
        refusal(text[:end])


@FIXED
@given(ANY_HISTORY, st.data())
def test_json_with_one_byte_changed_is_a_history_or_a_value_error(history: History, data: st.DataObject) -> None:
    text = bytearray(history_to_json(history))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = history_from_json(bytes(text))
    except ValueError:
        return
    assert isinstance(again, History)


# In words -------------------------------------------------------------------------------------------------------------

UNSAID = {"seed", "schedule"}
"""Choices of the adversary: a report shows them beside the sentence."""


def is_used(op: Op, field: str) -> bool:
    """Whether the field has a part in what the op does."""
    match field:
        case "shared" | "trunk":
            return getattr(op, "continues", None) is None
        case "branch":
            return getattr(op, "tail", 0) != 0
    return field not in UNSAID


@FIXED
@given(ANY_OP, st.data())
def test_the_words_change_with_every_field_that_is_used_and_with_no_other(op: Op, data: st.DataObject) -> None:
    for field in msgspec.structs.fields(type(op)):
        value = data.draw(FIELDS[field.type], field.name)
        changed = msgspec.structs.replace(op, **{field.name: value})
        same = value == getattr(op, field.name) or not is_used(op, field.name)
        assert (in_words(changed) == in_words(op)) == same


@FIXED
@given(ANY_OP)
def test_the_words_hold_every_name_and_number_that_is_used(op: Op) -> None:
    words = in_words(op)
    for field in op.__struct_fields__:
        value = getattr(op, field)
        if is_used(op, field) and not isinstance(value, bool) and value not in (None, 0):
            assert str(value) in words


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (
            Add("a", shared=8, tail=3, max_tokens=5),
            "add request a: prompt 8 tokens of text 0 and 3 of its own (branch 0), at most 5 output tokens",
        ),
        (Add("b", continues="a", tail=0), "add request b: prompt everything a said, at most 1 output token"),
        (
            Add("c", shared=1, tail=0, max_tokens=2, trunk=3, salt=4, reads_cache=False, priority=-1),
            "add request c: prompt 1 token of text 3, at most 2 output tokens, salt 4, not reading the prefix cache, "
            "priority -1",
        ),
        (Step(), "1 engine step"),
        (Step(3, seed=9), "3 engine steps"),
        (Abort("a"), "abort a between steps"),
        (Abort("a", in_step=True), "abort a during the next step, before its update"),
        (Finish("a"), "a samples the stop token next"),
        (Reset(), "reset the prefix cache"),
        (Reset(running=True, connector=True), "reset the prefix cache with running requests, connector"),
        (Advance(), "time passes on the device"),
        (
            Settle(count=7),
            "everything in flight completes, and the engine steps until it is idle (at most 7 steps)",
        ),
    ],
)
def test_the_words_are_plain_english(op: Op, words: str) -> None:
    assert in_words(op) == words
