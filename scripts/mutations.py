"""Changes of one line, and marks of the lines that run: how scripts/mutants.py has the package imported.

``follow`` makes this process import a mutant, and mark each statement of a function just before it runs, in memory
that all processes of a test share. Processes that are forked inherit both; a fresh interpreter reads two environment
variables, which ``told`` sets together with a sitecustomize that calls ``follow``. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import copy
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lwopt_backend", "integrations")
MUTANT, MARKS = "LWOPT_MUTANT", "LWOPT_MARKS"  # number:path; the file that is shared memory
MARKED = "__lwopt_marks__"  # among the builtins
SITE = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import mutations; mutations.follow()\n"

COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
ARITHMETIC = {ast.Add: ast.Sub, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd}
OPPOSITE = {
    old: new for table in (COMPARISONS, ARITHMETIC) for pair in table.items() for old, new in (pair, pair[::-1])
}
OPPOSITE |= ARITHMETIC | {ast.And: ast.Or, ast.Or: ast.And}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
DTYPES = {"float32": "bfloat16", "float64": "float32", "bfloat16": "float32", "float16": "bfloat16"}
DTYPES |= {"int64": "int32", "int32": "int64", "uint8": "int8", "bool": "uint8", "float": "bfloat16", "long": "int32"}
COPIES = ("clone", "detach", "contiguous", "copy", "float", "double", "to")
WAITS = (
    "wait",
    "join",
    "synchronize",
    "finish",
    "follow",
    "settle",
    "wait_stream",
    "record_stream",
    "record",
    "barrier",
)
RANKS = ("rank", "owner", "member", "holder", "peer")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BY_KIND = {ast.Compare: "comparison", ast.BinOp: "arithmetic", ast.AugAssign: "arithmetic", ast.BoolOp: "and, or"}


@dataclass(frozen=True)
class Mutant:
    """The change with that number in a file; ``statement``: the line at which the innermost statement begins;
    ``function``: the first and last line of what runs with it, which is the innermost function, or none."""

    path: str
    number: int
    line: int
    statement: int
    function: tuple[int, int] | None
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.kind}: {self.what}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The kind of each change of a node, and what then stands in its place."""
    match node:
        case ast.Compare():
            for at, operator in enumerate(node.ops):
                ops = [*node.ops[:at], OPPOSITE[type(operator)](), *node.ops[at + 1 :]]
                yield BY_KIND[type(node)], ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp(left=left, op=operator, right=right):
            if type(operator) in OPPOSITE and not any(_is_text(side) for side in (left, right)):
                yield BY_KIND[type(node)], ast.BinOp(left, OPPOSITE[type(operator)](), right)
        case ast.BoolOp(op=operator):
            yield BY_KIND[type(node)], ast.BoolOp(OPPOSITE[type(operator)](), node.values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.UnaryOp):
            negated = copy.copy(node)
            negated.test = ast.UnaryOp(ast.Not(), node.test)
            yield "not", negated
        case ast.Constant(value=bool(value)):
            yield "True, False", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in NAMES:
            kept = keywords if NAMES[name] != "list" else []
            yield "order", ast.Call(ast.Name(NAMES[name], ast.Load()), args, kept)
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)) if name in COPIES:
            yield "copy", receiver
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in DTYPES:
            yield "dtype", ast.Attribute(node.value, DTYPES[name], ast.Load())
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) if name in RANKS:
            yield "rank", ast.BinOp(node, ast.BitXor(), ast.Constant(1))
        case ast.Expr(value=ast.Call(func=function)):
            waits = isinstance(function, ast.Attribute) and function.attr in WAITS
            yield "wait" if waits else "line", ast.Pass()
        case ast.AugAssign(target=target, op=operator, value=value):
            yield "line", ast.Pass()
            if type(operator) in OPPOSITE and not _is_text(value):
                yield BY_KIND[type(node)], ast.AugAssign(target, OPPOSITE[type(operator)](), value)
        case ast.Assign(targets=targets) if all(isinstance(each, (ast.Subscript, ast.Attribute)) for each in targets):
            yield "line", ast.Pass()
        case ast.Delete():
            yield "line", ast.Pass()
        case ast.Continue() | ast.Break():
            yield "line", ast.Break() if isinstance(node, ast.Continue) else ast.Continue()


def _is_text(node: ast.AST) -> bool:
    """Text and lists, which have one operator that means anything."""
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _nodes(
    node: ast.AST, statement: ast.stmt | None = None, function: ast.AST | None = None
) -> Iterator[tuple[ast.AST, ast.stmt, ast.AST | None, Callable[[ast.AST], object]]]:
    """Each node that may change, its statement, its function, and what puts another one in its place. Nothing in
    annotations, decorators, assertions, and the messages of errors."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "exc"):
            continue
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Assert, ast.JoinedStr)):
                continue
            put = partial(value.__setitem__, at) if isinstance(value, list) else partial(setattr, node, field)
            own = child if isinstance(child, ast.stmt) else statement
            assert own is not None
            yield child, own, function, put
            yield from _nodes(child, own, child if isinstance(child, FUNCTIONS) else function)


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.stmt, ast.AST | None, str, ast.AST, Callable[[], object]]]:
    for node, statement, function, put in [*_nodes(tree)]:
        if function is None and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            continue  # a union of types
        for kind, new in changes(node):
            yield node, statement, function, kind, new, partial(put, ast.copy_location(new, node))


def mutants(path: str, text: str) -> list[Mutant]:
    """All of a file, whose path is relative to the root."""
    found = []
    for number, (node, statement, function, kind, new, _) in enumerate(_changes(ast.parse(text))):
        lines = (function.lineno, function.end_lineno or 0) if isinstance(function, FUNCTIONS) else None
        whole = isinstance(node, (ast.If, ast.While))
        old, changed = (ast.unparse(part.test if whole else part) for part in (node, new))  # type: ignore[attr-defined]
        what = old if isinstance(new, ast.Pass) else f"{old} -> {changed}"
        line = getattr(node, "lineno", statement.lineno)
        found.append(Mutant(path, number, line, statement.lineno, lines, kind, " ".join(what.split())))
    return found


def mutated(text: str, number: int) -> ast.Module:
    tree = ast.parse(text)
    next(apply for at, (*_, apply) in enumerate(_changes(tree)) if at == number)()
    return ast.fix_missing_locations(tree)


def marked(text: str, first: int) -> ast.Module:
    """The file, with a mark at ``first`` plus its line before each statement of a function."""
    tree = ast.parse(text)
    functions = (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    parts = {id(node): node for function in functions for node in ast.walk(function)}
    for node in parts.values():
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [*_with_marks(statements, first)])
    return ast.fix_missing_locations(tree)


def _with_marks(statements: list[ast.stmt], first: int) -> Iterator[ast.stmt]:
    for at, statement in enumerate(statements):
        if at or not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            (mark,) = ast.parse(f"{MARKED}[{first + statement.lineno}] = 1").body
            for node in ast.walk(mark):
                ast.copy_location(node, statement)
            yield mark
        yield statement


def sources() -> list[str]:
    """The package's files, relative to the root."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path.relative_to(ROOT).as_posix() for path in found]


def layout() -> dict[str, int]:
    """Where in the shared memory each file's lines begin, and under "" where they end."""
    first, firsts = 0, {}
    for path in sources():
        firsts[path] = first
        first += (ROOT / path).read_text().count("\n") + 2
    return firsts | {"": first}


def imported_as(change: Callable[[str], CodeType | None]) -> None:
    """From now on this process imports what ``change`` makes of a file of the package, unless that is None."""
    own, known = SourceFileLoader.get_code, {str(ROOT / path): path for path in sources()}

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = known.get(str(loader.path))
        return (change(path) if path else None) or own(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def code_of(path: str, tree: ast.Module) -> CodeType:
    code = compile(tree, str(ROOT / path), "exec")
    assert isinstance(code, CodeType)
    return code


def told(folder: Path, mutant: Mutant | None, marks: Path | None) -> None:
    """Tell ``follow`` in this process and in all that it starts. ``folder`` is a temporary one."""
    (folder / "sitecustomize.py").write_text(SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.pop(MUTANT, None)
    os.environ.pop(MARKS, None)
    if mutant:
        os.environ[MUTANT] = f"{mutant.number}:{mutant.path}"
    if marks:
        os.environ[MARKS] = str(marks)


def follow(compiled: dict[str, CodeType] | None = None) -> Any:
    """Do what ``told`` has told; returns the shared memory, if there is. ``compiled``: the package's code with marks,
    if it is at hand."""
    if place := os.environ.get(MUTANT):
        number, _, changed = place.partition(":")
        imported_as(
            lambda path: code_of(path, mutated((ROOT / path).read_text(), int(number))) if path == changed else None
        )
    if not (file := os.environ.get(MARKS)):
        return None
    with open(file, "r+b") as opened:
        marks = mmap.mmap(opened.fileno(), 0)
    setattr(builtins, MARKED, marks)
    firsts = layout()
    imported_as(
        lambda path: (compiled or {}).get(path) or code_of(path, marked((ROOT / path).read_text(), firsts[path]))
    )
    return marks
