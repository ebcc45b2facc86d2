"""Planted defects: what one is, how a registry of them is loaded, and how one is planted.

A registry is a Python package with a mapping ``DEFECTS``; that of this repository is ``tests/defects``. A defect
replaces functions of an implementation (or, for equalities, of the model) in memory, for a while.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from kvspec.errors import KvspecError

_MODULE = "kvspec_planted_defects"


class Patch(Protocol):
    """Replaces an attribute, and undoes that later. ``pytest.MonkeyPatch`` is one."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        """Replace ``target.name``."""


@dataclass(frozen=True)
class Defect:
    """A defect, and which law or clause must say so."""

    target: str
    """Without a release."""
    kind: str
    """What it is about: pinning, ordering, scaling, cursor, index, reset, preemption, abort, eviction order, …"""
    law: str
    """The law or clause that must be broken by it."""
    sentence: str
    """What goes wrong, in one sentence."""
    plant: Callable[[Patch], None]
    level: str = ""
    """Of an equality: what has to run: ``pool``, ``cache``, ``scheduler``, ``scaling``, ``tier`` or ``index``."""
    in_model: bool = False
    """It changes the model's side of an equality instead of the implementation."""


def load_defects(package: Path) -> Mapping[str, Defect]:
    """Return the registry of a package's directory. KvspecError if there is none."""
    file = package / "__init__.py"
    if not file.is_file():
        raise KvspecError(f"{package} holds no registry of planted defects; run this in a clone of kvspec.")
    if _MODULE not in sys.modules or sys.modules[_MODULE].__file__ != str(file):
        spec = importlib.util.spec_from_file_location(_MODULE, file, submodule_search_locations=[str(package)])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
    defects: Mapping[str, Defect] = sys.modules[_MODULE].DEFECTS
    return defects


def registered(
    target: str, table: Mapping[Callable[[Patch], None], tuple[str, str, str]], prefix: str = "", level: str = ""
) -> dict[str, Defect]:
    """Return the defects of a table, plant -> (kind, law, sentence), by the name of the plant."""
    return {
        f"{prefix}{plant.__name__}": Defect(target, kind, law, sentence, plant, level)
        for plant, (kind, law, sentence) in table.items()
    }


class _Patch:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        self._stack.enter_context(mock.patch.object(target, name, value))


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Plant a defect for the time of the context."""
    with ExitStack() as stack:
        defect.plant(_Patch(stack))
        yield
