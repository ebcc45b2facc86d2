"""What the source says about clauses and laws besides their docstrings; it is read, not run.

* A clause *depends on* a switch if its function reads it, alone or through helpers that aren't clauses; if it is only
  called where an ``if`` asks for the switch; or if what checks it asks for the switch first.
* A function *checks* a clause or a law if it names the id in a string, or the law's name in ``kvspec.laws``. A test
  does so too if it calls the function of the clause or law, or uses a table or a helper that does.

A file that imports this package speaks of the page only.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvspec import laws
from kvspec.model import CLAUSES, KNOWN_ISSUES, SWITCHES

SWITCH_NAMES = frozenset(switch.name for switch in SWITCHES)
MODEL = "kvspec.model"
PAGE = "kvspec.spec"

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Subject(NamedTuple):
    """What a check is about."""

    kind: str
    """``clause``, ``law`` or ``issue``."""
    id: str


class Place(NamedTuple):
    """A function in a file: ``tests/model/test_pool.py``, ``test_hashes_can_move_and_nobody_is_told``."""

    file: str
    function: str


class Found(NamedTuple):
    """Where things are named, and the switches that are asked for first."""

    places: dict[Subject, list[Place]]
    switches: dict[Subject, set[str]]


# Switches -------------------------------------------------------------------------------------------------------------


def switches_in(node: ast.AST) -> frozenset[str]:
    """Return the switches that are read anywhere in a node: ``profile.NAME``, ``self.profile.NAME``."""
    return frozenset(
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and inner.attr in SWITCH_NAMES
        and (getattr(inner.value, "id", None) == "profile" or getattr(inner.value, "attr", None) == "profile")
    )


def guarded(
    node: ast.AST, *, exits: bool, switches: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield every node in a node, with the switches that decide whether it is reached.

    Those are in the test of an ``if`` around it, in the value of its entry in a dictionary, or, with ``exits``, in
    the test of an earlier ``if`` that returns.
    """
    yield node, switches
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield from guarded(key, exits=exits, switches=switches | switches_in(value))
            yield from guarded(value, exits=exits, switches=switches)
        return
    for child in ast.iter_child_nodes(node):
        yield from guarded(child, exits=exits, switches=switches)
        if isinstance(node, ast.If | ast.IfExp) and child is node.test:
            switches |= switches_in(child)
        elif exits and isinstance(child, ast.If) and isinstance(child.body[-1], ast.Return):
            switches |= switches_in(child.test)


def switches_of_clauses(model: Path) -> dict[str, set[str]]:
    """Return clause id -> the switches that the model reads for it. ``model``: the folder of ``kvspec.model``."""
    clauses = {clause.where: clause.id for clause in CLAUSES.values()}
    found: dict[str, set[str]] = {clause_id: set() for clause_id in CLAUSES}
    called: dict[str, list[frozenset[str]]] = defaultdict(list)
    for path in sorted(model.glob("*.py")):
        source = _Source(path, f"{MODEL}.{path.stem}")
        for where, function in source.functions.items():
            if where in clauses:
                found[clauses[where]] |= source.read_by(where, stop=clauses.keys())
            for node, switches in guarded(function, exits=False):
                called[source.called(node, where)].append(switches)
    for where, clause_id in clauses.items():
        found[clause_id] |= frozenset.intersection(*called[where]) if where in called else set()
    return found


def readers(root: Path, folder: str) -> dict[str, list[Place]]:
    """Return switch -> the functions in the Python files under ``root / folder`` that read it."""
    found: dict[str, list[Place]] = defaultdict(list)
    for path in sorted((root / folder).rglob("*.py")):
        for name, definition in _definitions(ast.parse(path.read_text(encoding="utf-8"))):
            for switch in switches_in(definition) if isinstance(definition, ast.FunctionDef) else ():
                found[switch].append(Place(path.relative_to(root).as_posix(), name))
    return found


class _Source:
    """A module of the model: its functions by where they are, and where the names in it come from."""

    def __init__(self, path: Path, module: str) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.module = module
        self.names = _imported(tree)
        self.functions = {
            f"{module}.{name}": definition
            for name, definition in _definitions(tree)
            if isinstance(definition, ast.FunctionDef)
        }

    def called(self, node: ast.AST, where: str) -> str:
        """Return where the function is that a node calls, by its name or as a method of self; else nothing."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self.names.get(name, f"{self.module}.{name}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return f"{where.rpartition('.')[0]}.{name}"
        return ""

    def read_by(self, where: str, stop: Iterable[str]) -> set[str]:
        """Return the switches that a function reads, or that those read that it calls here; but not via ``stop``."""
        function = self.functions[where]
        found = set(switches_in(function))
        for node in ast.walk(function):
            called = self.called(node, where)
            if called in self.functions and called not in stop and called != where:
                found |= self.read_by(called, stop)
        return found


# Checks ---------------------------------------------------------------------------------------------------------------


def checks(root: Path, *folders: str) -> Found:
    """Return which functions in the Python files under some folders of ``root`` check what.

    In ``tests`` that are test functions: one that is parametrised by a table is named with the table's key,
    ``test_x[POOL-2]``, and helpers stand for the tests that use them.
    """
    places: dict[Subject, list[Place]] = defaultdict(list)
    switches: dict[Subject, set[str]] = defaultdict(set)
    is_tests = folders == ("tests",)
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        reader = _Reader(tree, calls=is_tests)
        uses = {name: _Use.of(node) for name, node in _definitions(tree)} if reader.names_something else {}
        for name, use in uses.items():
            for node, guards in guarded(use.node, exits=True):
                for subject in reader.named_by(node):
                    switches[subject] |= guards
                    functions = _tests(name, subject.id, uses) if is_tests else [name]
                    places[subject] += [Place(path.relative_to(root).as_posix(), function) for function in functions]
    return Found({subject: _unique(found) for subject, found in places.items()}, switches)


class _Reader:
    """Knows what the nodes of a file name."""

    def __init__(self, tree: ast.Module, calls: bool) -> None:
        self._names = _imported(tree)
        self._strings: dict[str, Subject] = {}
        self._objects: dict[str, Subject] = {}
        if any(name.startswith(PAGE) for name in self._names.values()):
            return
        for kind, ids in (("law", laws.LAWS), ("clause", CLAUSES), ("issue", [issue.id for issue in KNOWN_ISSUES])):
            self._strings |= {id: Subject(kind, id) for id in ids}
        self._objects |= {f"kvspec.laws.{name}": Subject("law", law) for name, law in _law_names(calls).items()}
        if calls:
            self._objects |= {clause.where: Subject("clause", clause.id) for clause in CLAUSES.values()}

    @property
    def names_something(self) -> bool:
        """Whether the file can name anything."""
        return bool(self._strings)

    def named_by(self, node: ast.AST) -> Iterator[Subject]:
        """Yield what a node names."""
        match node:
            case ast.Constant(value=str(text)) if text in self._strings:
                yield self._strings[text]
            case ast.Name(id=name) if (full := self._names.get(name, "")) in self._objects:
                yield self._objects[full]
            case ast.Attribute(value=ast.Name(id=name), attr=attr):
                if (full := f"{self._names.get(name, '')}.{attr}") in self._objects:
                    yield self._objects[full]


def _law_names(functions: bool) -> dict[str, str]:
    """Return the names in ``kvspec.laws`` -> the law that each stands for: constants, and functions if asked for."""
    found: dict[str, str] = {}
    for name, value in vars(laws).items():
        text = (value.__doc__ or "") if functions and callable(value) else value
        law = str(text).partition(". ")[0].partition(",")[0].rstrip(".")
        if not name.startswith("_") and law in laws.LAWS:
            found[name] = law
    return found


class _Use(NamedTuple):
    """A definition, and the names that it uses."""

    node: Definition
    names: set[str]
    decorated_with: set[str]

    @classmethod
    def of(cls, node: Definition) -> _Use:
        return cls(node, _names_in([node]), _names_in(getattr(node, "decorator_list", [])))

    def is_parametrised_by(self, table: str) -> bool:
        """Whether each key of a table is the id of a case of this test."""
        return any(
            isinstance(decorator, ast.Call) and not decorator.keywords and table in map(ast.unparse, decorator.args)
            for decorator in getattr(self.node, "decorator_list", [])
        )


def _tests(name: str, key: str, uses: dict[str, _Use], seen: tuple[str, ...] = ()) -> list[str]:
    """Return the tests that a name in a file of tests stands for: itself, or those that use it."""
    if name.startswith("test_"):
        return [name]
    users = [user for user, use in uses.items() if user not in (name, *seen) and name in use.names]
    found = []
    for user in [user for user in users if name in uses[user].decorated_with] or users:
        if uses[user].is_parametrised_by(name):
            found.append(f"{user}[{key}]")
        else:
            found += _tests(user, key, uses, (*seen, name))
    return found


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return local name -> what it is imported as, wherever in the file that is done."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield the functions, methods (``Class.method``) and tables of a module by name."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name):
                yield name, node
            case ast.ClassDef(name=name, body=body):
                yield from ((f"{name}.{inner.name}", inner) for inner in body if isinstance(inner, ast.FunctionDef))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node


def _unique(places: list[Place]) -> list[Place]:
    """Drop repetitions, and a test without its key if it is there with one."""
    keyed = {place.function.partition("[")[0] for place in places if "[" in place.function}
    return [place for place in dict.fromkeys(places) if place.function not in keyed]
