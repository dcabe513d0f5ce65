"""Drop each wait, join, event and record of the package in turn, and show what the sanitizer of streams finds.

    python scripts/drop_waits.py                       every place; the exit code is 1 if one is not found
    python scripts/drop_waits.py runtime/exchange.py   those of some files

In place of a call such as ``work.wait()`` stands ``work``; copies do not wait; memory is not pinned. A process for each
place runs the scenarios of tests/unit/planner/test_streams.py until one has a fault.
"""

from __future__ import annotations

import ast
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch  # and not yet the package, which every process imports without one of its places

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lwopt_backend"
CALLS = re.compile(
    r"\.(wait|join|follow|synchronize|record|discard)\(\)$|\.(wait_stream|record_stream|_writers\.note)\(|"
    r"(presence|self)\.finish\(\)$"
)
KEYWORDS = {"non_blocking": ast.Constant(True), "pin_memory": ast.Constant(False)}
ELSEWHERE = {  # what is no place, with the reason
    "work.wait()": "an all-gather of gloo, which has no streams",
    "self._meeting.discard()": "forgets gradients",
    "way.wait()": "the side stream waits as well; the caller's does so that it may be given the memory that was sent",
    "back.wait()": "the task's finally waits as well",
}


def places(tree: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """The line, what is there, and what drops it."""
    for node in ast.walk(tree):
        what, new = "", None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found = isinstance(node.value.func, ast.Attribute) and CALLS.search(ast.unparse(node))
            what, new = (ast.unparse(node), node.value.func.value) if found else ("", None)
        elif isinstance(node, ast.keyword) and not isinstance(node.value, ast.Constant):
            what, new = ast.unparse(node), KEYWORDS.get(str(node.arg))
        if new is not None and what not in ELSEWHERE:
            line = node.value.end_lineno or 0
            yield line, what, partial(setattr, node, "value", ast.copy_location(new, node.value))


def tried(place: tuple[Path, int, str]) -> str:
    """The first fault without a place, and its scenario. Called in a process of its own."""
    path, number, _ = place
    own, tree = SourceFileLoader.get_code, ast.parse(path.read_text())
    [*places(tree)][number][2]()
    changed = compile(tree, str(path), "exec")
    new: Any = lambda loader, name: changed if loader.path == str(path) else own(loader, name)  # noqa: E731
    SourceFileLoader.get_code = new  # type: ignore[method-assign]
    from tests.unit.planner.test_streams import SCENARIOS, faults_of

    warnings.simplefilter("ignore")
    names = [name for first in range(4) for name in [*SCENARIOS][first::4]]  # so that each engine is among the first
    with tempfile.TemporaryDirectory() as folder:
        of_all = ((name, faults_of(name, Path(folder) / "shapes.json")) for name in names)
        return next((f"{name}: {fault}" for name, faults in of_all for fault in faults), "")


def main(files: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    of_files = [(path, path.relative_to(PACKAGE).as_posix()) for path in sorted(PACKAGE.rglob("*.py"))]
    every = [
        (path, number, f"{name}:{line} {what}")
        for path, name in of_files
        for number, (line, what, _) in enumerate(places(ast.parse(path.read_text())))
        if not files or name in files
    ]
    missed = 0
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for (_, _, what), fault in zip(every, pool.imap(tried, every)):
            missed += not fault
            print(f"{what}\n    {fault or 'NOT FOUND'}", flush=True)
    print(f"{len(every)} places, {missed} not found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
