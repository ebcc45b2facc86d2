"""The model as a fake: the examples of its documentation run, and it needs nothing but Python."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvspec.model
from kvspec.model import CacheManager

PAGE = Path(__file__).parents[2] / "docs" / "model.md"
BLOCKS = re.findall(r"^```python\n(.+?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SESSION = "".join(block for block in BLOCKS if block.startswith(">>>"))
CODE = "".join(block for block in BLOCKS if not block.startswith(">>>"))
TESTS = re.findall(r"^def (test_\w+)\(\)", CODE, re.MULTILINE)


def test_the_example_in_the_documentation_runs() -> None:
    result = doctest.testmod(kvspec.model)
    assert result.attempted > 8
    assert result.failed == 0


def test_the_session_in_the_page_runs_as_it_is_shown() -> None:
    said: list[str] = []
    example = doctest.DocTestParser().get_doctest(SESSION, {}, PAGE.name, str(PAGE), 0)
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.failed == 0, "".join(said)
    assert result.attempted > 15


@pytest.mark.parametrize("name", TESTS)
def test_a_unit_test_in_the_page_passes(name: str) -> None:
    names: dict[str, object] = {}
    exec(compile(CODE, str(PAGE), "exec"), names)
    unit_test = names[name]
    assert callable(unit_test)
    unit_test()


def test_the_page_has_a_test_of_a_scheduler_and_tests_of_a_connector() -> None:
    assert len(TESTS) == 3


def test_a_test_in_the_page_fails_when_the_model_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "free", lambda self, request: None)
    with pytest.raises(AssertionError):
        test_a_unit_test_in_the_page_passes(TESTS[0])


def test_what_the_page_says_that_the_model_has_it_has() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| vLLM |")[2].partition("\n\n")[0]
    names = re.findall(r"`cache\.(\w+)", table)
    cache = CacheManager(
        [kvspec.model.Group(kvspec.model.Kind.FULL, 4)], num_blocks=2, profile=kvspec.model.profile_for("0.33.0")
    )
    assert len(names) > 8
    assert [name for name in names if not hasattr(cache, name)] == []


def test_the_model_needs_nothing_but_python() -> None:
    code = (
        "import sys; before = set(sys.modules); import kvspec.model; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvspec']"
