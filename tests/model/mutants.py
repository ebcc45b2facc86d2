"""How much the equality machines see: mutants of vLLM's own ``block_pool.py``, and how many of them are killed.

    PYTHONPATH=$(kvspec release path 0.33.0) PYTHONHASHSEED=0 python -m tests.model.mutants --ops 4000

A mutant has one small change. Each runs in a process of its own, forked from one that has imported vLLM. It is killed
if a run of the pool or of the cache differs from the model, raises, or doesn't end. Statements that only log, measure
residency, check an assumption or raise because of a wrong type aren't mutated: they change nothing that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import inspect
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

UNSEEN = ("metrics_collector", "logger", "_unexpected_blocks_type", "__len__", "__init__.pool")
"""A statement that names one of these isn't mutated."""

MEMORY_BYTES = 3 << 30
"""What a mutant may use; one that never ends may otherwise take all."""

_SWAPS: dict[type, type] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


@dataclass
class Mutant:
    """A changed module, and what was changed."""

    line: int
    function: str
    before: str
    after: str
    tree: ast.Module


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    """Yield the changes that can be made to a node: a name, and what makes a changed copy of it."""
    match node:
        case ast.Compare(ops=[op], comparators=_) if type(op) in _SWAPS:
            yield "compare", lambda n: _with(n, ops=[_SWAPS[type(n.ops[0])]()])
        case ast.BoolOp():
            yield "boolean", lambda n: _with(n, op=_SWAPS[type(n.op)]())
        case ast.BinOp(op=op) if type(op) in _SWAPS:
            yield "arithmetic", lambda n: _with(n, op=_SWAPS[type(n.op)]())
        case ast.AugAssign(op=op) if type(op) in _SWAPS:
            yield "augmented", lambda n: _with(n, op=_SWAPS[type(n.op)]())
            yield "dropped", lambda n: ast.Pass()
        case ast.UnaryOp(op=ast.Not()):
            yield "not", lambda n: n.operand
        case ast.Constant(value=bool()):
            yield "flag", lambda n: ast.Constant(not n.value)
        case ast.Constant(value=int()):
            yield "number", lambda n: ast.Constant(n.value + 1)
        case ast.If():
            yield "if-always", lambda n: _with(n, test=ast.Constant(True))
            yield "if-never", lambda n: _with(n, test=ast.Constant(False))
        case ast.Expr(value=ast.Call()):
            yield "dropped", lambda n: ast.Pass()
        case ast.Assign(targets=[ast.Attribute()]):
            yield "dropped", lambda n: ast.Pass()
        case ast.Continue():
            yield "passed", lambda n: ast.Pass()
        case ast.Break():
            yield "passed", lambda n: ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "none", lambda n: _with(n, value=ast.Constant(None))


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _mutable(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (function, node) of every node in a method that may be changed."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Assert | ast.Raise | ast.arguments | ast.AnnAssign | ast.arg):
                continue
            if isinstance(child, ast.stmt) and not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.For):
                head = child.test if isinstance(child, ast.If) else child
                if any(name in ast.unparse(head) for name in UNSEEN):
                    continue
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.FunctionDef) and child.name in UNSEEN:
                continue
            if function:
                yield function, child
            yield from walk(child, inside)

    yield from walk(tree, "")


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module's source."""
    tree = ast.parse(source)
    for place, (function, node) in enumerate(_mutable(tree)):
        for name, _ in _changes(node):
            changed = copy.deepcopy(tree)
            target = next(n for i, (_, n) in enumerate(_mutable(changed)) if i == place)
            after = dict(_changes(target))[name](target)
            before = ast.unparse(target)
            _replace(changed, target, after)
            yield Mutant(
                getattr(node, "lineno", 0),
                function,
                before.splitlines()[0],
                f"{name}: {ast.unparse(after).splitlines()[0]}",
                ast.fix_missing_locations(changed),
            )


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                value[:] = [new if item is old else item for item in value]


def install(mutant: Mutant) -> None:
    """Put a mutant in the place of vLLM's ``block_pool`` module in this process."""
    pool = importlib.import_module("vllm.v1.core.block_pool")
    exec(compile(mutant.tree, "block_pool.py", "exec"), vars(pool))
    importlib.import_module("vllm.v1.core.kv_cache_coordinator").BlockPool = pool.BlockPool


def killed(mutant: Mutant, ops: int, timeout_s: int) -> str | None:
    """Run both machines on a mutant in a child process. Return what killed it, None if nothing did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(timeout_s)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        os.write(writer, _verdict(mutant, ops).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        verdict = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"didn't end in {timeout_s} s"
    return verdict or None


def _verdict(mutant: Mutant, ops: int) -> str:
    from strategies import equality

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            install(mutant)
            equality.FINDINGS_MAX = 1
            for level in ("pool", "cache"):
                tally = equality.run(level, ops, seed=1)
                if tally.findings:
                    return f"{level} {tally.findings[0].clause}"
        except BaseException as error:  # a mutant may do anything
            return f"raised {type(error).__name__}"
    return ""


def main() -> int:
    """Run all mutants and print the survivors."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.model.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", type=int, default=6000, help="of each machine")
    parser.add_argument("--timeout", type=int, default=60, help="seconds per mutant")
    parser.add_argument("--every", type=int, default=1, help="only every Nth mutant,")
    parser.add_argument("--start", type=int, default=0, help="from this one on")
    arguments = parser.parse_args()
    from strategies import equality

    for level in ("pool", "cache"):
        equality.run(level, 500, 0)
    source = inspect.getsource(importlib.import_module("vllm.v1.core.block_pool"))
    start, total, dead = time.monotonic(), 0, 0
    for mutant in list(mutants(source))[arguments.start :: arguments.every]:
        why = killed(mutant, arguments.ops, arguments.timeout)
        total, dead = total + 1, dead + bool(why)
        if not why:
            print(f"SURVIVED {mutant.function}:{mutant.line}  {mutant.before}  ->  {mutant.after}", flush=True)
    print(f"{dead} of {total} mutants killed, {arguments.ops} ops of each machine, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
