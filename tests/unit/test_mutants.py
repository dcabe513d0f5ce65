"""`make mutants`: a mutant differs in one place, a mark stands before what runs, a draw is even. Changes are compared
with lists written by hand, marks with the lines that Python's own tracing sees."""

import ast
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import mutants
import mutations

CHANGES = {
    "if a < b and not c: x = 1": [
        "if not (a < b and (not c)): x = 1",
        "if a < b or not c: x = 1",
        "if a <= b and not c: x = 1",
        "if a < b and c: x = 1",
        "if a < b and not c: x = 2",
    ],
    "x = y[0].detach() if y is None else y": [
        "x = y[0].detach() if not y is None else y",
        "x = y[0].detach() if y is not None else y",
        "x = y[0] if y is None else y",
        "x = y[1].detach() if y is None else y",
    ],
    "x = f(rank, dtype=torch.int64) * max(2, self.owner)": [
        "x = f(rank, dtype=torch.int64) // max(2, self.owner)",
        "x = f(rank ^ 1, dtype=torch.int64) * max(2, self.owner)",
        "x = f(rank, dtype=torch.int32) * max(2, self.owner)",
        "x = f(rank, dtype=torch.int64) * min(2, self.owner)",
        "x = f(rank, dtype=torch.int64) * max(3, self.owner)",
        "x = f(rank, dtype=torch.int64) * max(2, self.owner ^ 1)",
    ],
    "work.wait()": ["pass"],
    "x.flag = True": ["pass", "x.flag = False"],
    "total += 'a' + part": ["pass", "total -= 'a' + part"],
    "assert a < 1, 2": [],
    "raise ValueError(f'{a + 1} of {1}')": [],
    "x: list[0] = list(sorted(a, key=f))": ["x: list[0] = list(list(a))"],
}


@pytest.mark.parametrize("line", CHANGES)
def test_every_mutant_of_a_line_differs_in_one_place(line: str) -> None:
    text = f"def f(a):\n    'Text 1.'\n    {line}\n"
    found = mutations.mutants("f.py", text)
    changed = [ast.unparse(mutations.mutated(text, mutant.number)) for mutant in found]
    assert changed == [ast.unparse(ast.parse(text.replace(line, each))) for each in CHANGES[line]]
    assert all((mutant.line, mutant.statement, mutant.function) == (3, 3, (1, 3)) for mutant in found)


MARKED = '''
def f(n: int) -> int:
    """Not a statement that runs."""
    total = 0
    for i in range(n):
        if i == 1:
            total += 2
        elif i == 2:
            continue
        else:
            total -= 1
    try:
        with open("/no/such file"):
            total = 100
    except OSError:
        total += (
            5 if n else 6
        )
    else:
        return 0
    def g() -> int:
        return total
    class C:
        x = 1
    return g() + C.x if n else 0
'''


@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_marks_are_set_for_the_statements_that_run(n: int) -> None:
    space: dict[str, Any] = {mutations.MARKED: bytearray(2 + MARKED.count("\n") + 5)}
    exec(compile(mutations.marked(MARKED, 5), "f.py", "exec"), space)
    plain: dict[str, Any] = {}
    exec(compile(MARKED, "f.py", "exec"), plain)
    seen = set[int]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename == "f.py":
            seen.add(frame.f_lineno) if event == "line" else None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = plain["f"](n)
    finally:
        sys.settrace(before)
    assert space["f"](n) == result and space["f"].__doc__ == "Not a statement that runs."
    marks = {place - 5 for place, mark in enumerate(space[mutations.MARKED]) if mark}
    statements = {node.lineno for node in ast.walk(ast.parse(MARKED)) if isinstance(node, ast.stmt)}
    assert marks == seen & statements


def test_draw_is_even_and_follows_from_its_seed() -> None:
    every = mutants.core([])
    pairs = Counter((mutants.folder_of(mutant.path), mutant.kind) for mutant in every)
    assert {folder for folder, _ in pairs} == {*mutants.FOLDERS, "integrations/deepspeed"}
    chosen = mutants.drawn(every, len(pairs) + 20, 1)
    counts = Counter((mutants.folder_of(mutant.path), mutant.kind) for mutant in chosen)
    assert set(counts) == set(pairs) and max(counts.values()) == 2 and len(set(chosen)) == len(pairs) + 20
    assert chosen == mutants.drawn(every, len(pairs) + 20, 1) != mutants.drawn(every, len(pairs) + 20, 2)


def test_quick_tests_come_first() -> None:
    tests = {"a.py::f[1]": 1.0, "a.py::f[2]": 2.5, "b.py::g": 3.0, "a.py::h": 2.0, "b.py::slow": 500.0}
    assert [*mutants.in_batches(tests)] == [["a.py::f[1]", "a.py::h"], ["a.py::f[2]", "b.py::g"], ["b.py::slow"]]
