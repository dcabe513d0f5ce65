"""Mutants of the core: change one line, run the tests that execute it, and show what no test kills.

    python scripts/mutants.py --count 60 --seed 1                   drawn evenly over folders and kinds of change
    python scripts/mutants.py --count 60 --seed 1 --first 31        the same, from the 31st on
    python scripts/mutants.py lwopt_backend/runtime/step.py:345     all of a line, or of a file
    python scripts/mutants.py --list lwopt_backend/runtime/step.py  show them, run nothing
    python scripts/mutants.py --note --tests tests/unit             note what these tests execute, no more

The first run notes, for every test that passes, which statements of the package it executes, on all of its processes.
This takes as long as the tests, and is kept under .make/mutants, a file for each test file: a run that is interrupted
goes on where it was, and a later one notes only test files that have changed since. Lines of the package may move
meanwhile: a line that was not there has the tests of its function, a line outside of functions those of its file.

One process imports what the tests import from elsewhere, and is forked for every mutant. The fork imports the package,
with the change, and runs pytest; the process that ranks are forked from is a fork of this fork. Tests run quickest
first, those of a new test function before more cases of a known one. A mutant is killed by a test that fails with it
and passes without it, and hangs in one that takes ten times as long as it did and half a minute. It survives what
passes; with --limit seconds over, the rest is left out and said.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing.util
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import mutations
import psutil
import pytest
from mutations import ROOT, Mutant

FOLDERS = ("engines", "runtime", "plan", "groups", "routing", "rules", "checkpoint")
NOTES = ROOT / ".make" / "mutants"
LEFT_OUT = ("tests/peers/", "tests/faults/", "tests/gpu/")
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
BATCHES = (5.0, 60.0, float("inf"))  # seconds that the tests of the first fork take together, of the second, the rest
BOOT = 300.0  # seconds until the first test begins
FATES = ("killed", "hangs", "survives", "not executed", "undecided")
Event = dict[str, Any]
Tell = Callable[[Event], object]


class Told:
    """A plugin for pytest in the fork. Tells what happens; runs the chosen tests and no others, in their order."""

    def __init__(self, tell: Tell, tests: Sequence[str] | None = None) -> None:
        self.tell = tell
        self.order = None if tests is None else {test: number for number, test in enumerate(tests)}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tell({"failed": report.nodeid})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if (order := self.order) is not None:
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell({"starts": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.tell({"failed": report.nodeid})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tell({"ends": nodeid})


class Noted(Told):
    """Tells in addition the marks of each test that passed, with those of the wider fixtures that it uses."""

    def __init__(self, tell: Tell, marks: Any) -> None:
        super().__init__(tell)
        self.marks, self.of_fixtures, self.passed, self.began = marks, defaultdict[str, int](int), False, 0.0

    def taken(self) -> int:
        """The marks since the last call, one byte each."""
        taken = int.from_bytes(self.marks[:], "little")
        self.marks[:] = bytes(len(self.marks))
        return taken

    def pytest_collection_finish(self) -> None:
        self.tell({"noted": "", "seconds": 0.0, "marks": self.packed(self.taken())})

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        before = self.taken()
        try:
            return (yield)
        finally:
            self.of_fixtures[fixturedef.argname] = own = self.taken()
            marks = (before | own).to_bytes(len(self.marks), "little")
            self.marks[:] = marks

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.taken()
        self.passed, self.began = False, time.monotonic()
        done = yield
        marks = self.taken()
        for name in item.fixturenames:
            marks |= self.of_fixtures[name]
        if self.passed:
            seconds = round(time.monotonic() - self.began, 3)
            self.tell({"noted": item.nodeid, "seconds": seconds, "marks": self.packed(marks)})
        return done

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        self.passed = report.passed if report.when == "call" else self.passed and report.passed

    def packed(self, marks: int) -> str:
        return base64.b85encode(zlib.compress(marks.to_bytes(len(self.marks), "little"))).decode()


class Fork:
    """pytest in a fork of this process, in which the package is not imported yet, and all that it starts."""

    def __init__(
        self,
        arguments: Sequence[str],
        plugin: Callable[[Tell, Any], Any],
        mutant: Mutant | None = None,
        marks: Path | None = None,
        compiled: dict[str, CodeType] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lwopt-"))
        self.events, writer = os.pipe()
        self.received = b""
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        code = 70
        try:
            os.setpgid(0, 0)
            os.close(self.events)
            for file, to in ((os.devnull, (0,)), (self.folder / "output", (1, 2))):
                opened = os.open(file, os.O_RDWR | os.O_CREAT)
                for each in to:
                    os.dup2(opened, each)
            os.environ["TMPDIR"], tempfile.tempdir = str(self.folder), None
            mutations.told(self.folder, mutant, marks)
            memory = mutations.follow(compiled)
            multiprocessing.util.spawnv_passfds = functools.partial(started, multiprocessing.util.spawnv_passfds)
            tell: Tell = lambda event: os.write(writer, json.dumps(event).encode() + b"\n")  # noqa: E731
            code = int(pytest.main([*OPTIONS, *arguments], plugins=[plugin(tell, memory)]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def next(self, seconds: float) -> Event | None:
        """None where there are no more. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            if not select.select([self.events], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            if not (more := os.read(self.events, 1 << 20)):
                return None
            self.received += more
        line, _, self.received = self.received.partition(b"\n")
        event: Event = json.loads(line)
        return event

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def end(self) -> int:
        """Its exit status; what is left of its processes is killed."""
        left = []
        with suppress(psutil.NoSuchProcess):
            left = psutil.Process(self.pid).children(recursive=True)
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in left:  # some begin sessions of their own
            with suppress(psutil.NoSuchProcess):
                process.kill()
        os.close(self.events)
        if not ended:
            _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)


def started(own: Callable[..., int], path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
    """What multiprocessing starts, except for the process that ranks are forked from: that is a fork of this one, not
    an interpreter that would import everything."""
    if not str(arguments[-1]).startswith("from multiprocessing.forkserver import main"):
        return own(path, arguments, fds)
    if pid := os.fork():
        return pid
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, nowhere, *fds}:
            with suppress(OSError):  # not closed, for what has a number would close or write to what gets it next
                os.fstat(fd)
                os.dup2(nowhere, fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))  # not pytest's
        exec(arguments[-1], {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def is_ours(module: Any) -> bool:
    """Whether a module is of this project, and none of these scripts."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None) or ""
    if module in (sys.modules["__main__"], mutations):
        return False
    return Path(file).is_relative_to(ROOT) and not Path(file).is_relative_to(sys.prefix)


def warm() -> None:
    """Import what the tests import and is not of this project, in the order in which it was imported in a fork."""

    class Names:
        def __init__(self, tell: Tell) -> None:
            self.tell = tell

        def pytest_collection_finish(self) -> None:
            for name in importlib.import_module("tests.support.ranks").IMPORTED:
                importlib.import_module(name)
            self.tell({"names": [name for name, module in sys.modules.items() if not is_ours(module)]})

    fork = Fork(["--collect-only"], lambda tell, _: Names(tell))
    event = fork.next(3 * BOOT)
    if event is None:
        raise SystemExit(f"pytest does not collect the tests:\n{fork.output()}")
    fork.end()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in event["names"]:
            with suppress(Exception):  # a name that a module gave to another one
                importlib.import_module(name)
    assert not any(map(is_ours, sys.modules.values()))
    gc.collect()
    gc.freeze()
    import torch

    torch.set_num_threads(1)


class Notes(NamedTuple):
    """Of a file of tests: what each test executes. The marks under "" are those of the import."""

    file: str
    layout: dict[str, int]
    sources: dict[str, str]
    tests: dict[str, tuple[float, str]]

    def marks(self, test: str) -> bytes:
        return zlib.decompress(base64.b85decode(self.tests[test][1]))

    def places(self, mutant: Mutant, whole_file: bool) -> list[int]:
        """Where the marks are whose tests are a mutant's: of its line; of its function, if the line is new; or of its
        file."""
        if mutant.path not in self.layout:
            return []
        known, first = lines_then(mutant.path, self.sources[mutant.path]), self.layout[mutant.path]
        if mutant.function is None or whole_file:
            return [first + line for line in known.values()]
        if (then := known.get(mutant.statement)) is not None:
            return [first + then]
        return [first + known[line] for line in range(*mutant.function) if line in known]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def lines_then(path: str, source: str) -> dict[int, int]:
    """The number that each line of a file had when it was a ``source``, if it was there."""
    new, old = (ROOT / path).read_text(), (NOTES / "sources" / source).read_text()
    if new == old:
        return {line: line for line in range(1, new.count("\n") + 2)}
    blocks = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_matching_blocks()
    return {block.b + at + 1: block.a + at + 1 for block in blocks for at in range(block.size)}


def test_files(chosen: Sequence[str]) -> list[str]:
    """All, or those below some files and folders."""
    every = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    below = [Path(each).resolve().relative_to(ROOT).as_posix() for each in chosen]
    kept = [file for file in every if not file.startswith(LEFT_OUT)]
    return [file for file in kept if not below or any(f"{file}/".startswith(f"{each}/") for each in below)]


def note(files: Sequence[str]) -> list[Notes]:
    """What the tests of files execute. Runs those of which it is not known."""
    (NOTES / "sources").mkdir(parents=True, exist_ok=True)
    compiled, layout = dict[str, CodeType](), mutations.layout()
    found = []
    for number, file in enumerate(files):
        kept, fingerprint = NOTES / f"{file.replace('/', '.')}.json", digest((ROOT / file).read_text())
        if not kept.exists() or json.loads(kept.read_text())["fingerprint"] != fingerprint:
            if not compiled:
                for path in mutations.sources():
                    tree = mutations.marked((ROOT / path).read_text(), layout[path])
                    compiled[path] = mutations.code_of(path, tree)
            made = noted(file, layout, compiled)
            kept.with_suffix(".part").write_text(json.dumps({"fingerprint": fingerprint, **made._asdict()}))
            os.replace(kept.with_suffix(".part"), kept)
            print(f"noted {number + 1}/{len(files)} {file}: {len(made.tests) - 1} tests", flush=True)
        read = json.loads(kept.read_text())
        found.append(Notes(*(read[name] for name in Notes._fields)))
    return found


def noted(file: str, layout: dict[str, int], compiled: dict[str, CodeType]) -> Notes:
    sources = {}
    for path in mutations.sources():
        text = (ROOT / path).read_text()
        sources[path] = digest(text)
        (NOTES / "sources" / sources[path]).write_text(text)
    with tempfile.NamedTemporaryFile(prefix="lwopt-marks-") as memory:
        memory.truncate(layout[""])
        fork = Fork([file], Noted, marks=Path(memory.name), compiled=compiled)
        tests, failed = dict[str, tuple[float, str]](), list[str]()
        while event := fork.next(24 * 3600):
            if "noted" in event:
                tests[event["noted"]] = (event["seconds"], event["marks"])
            failed += [event["failed"]] if "failed" in event else []
        if failed or "" not in tests:
            print(f"without a mutant fails: {', '.join(failed) or file}\n{fork.output()[-4000:]}", flush=True)
        fork.end()
    tests.setdefault("", (0.0, base64.b85encode(zlib.compress(bytes(layout[""]))).decode()))
    return Notes(file, layout, sources, tests)


def tests_of(mutants: Sequence[Mutant], notes: Sequence[Notes]) -> dict[Mutant, dict[str, float]]:
    """The tests of each mutant, and the seconds that each took."""
    found: dict[Mutant, dict[str, float]] = {mutant: {} for mutant in mutants}
    at_import = set[Mutant]()
    for whole_file in (False, True):
        asked = [mutant for mutant in mutants if not whole_file or (mutant in at_import and not found[mutant])]
        for of_file in notes if asked else []:
            places = {mutant: of_file.places(mutant, whole_file) for mutant in asked}
            for test, (seconds, _) in of_file.tests.items():
                marks = of_file.marks(test)
                for mutant in asked:
                    if any(marks[place] for place in places[mutant]):
                        if test:
                            found[mutant][test] = seconds
                        else:
                            at_import.add(mutant)
    return found


def in_batches(tests: dict[str, float]) -> Iterator[list[str]]:
    """Quickest first, where a function's second case counts twice, its third three times; those of a batch by file."""
    cases = defaultdict[str, list[str]](list)
    for test in sorted(tests, key=lambda test: tests[test]):
        cases[test.partition("[")[0]].append(test)
    order = sorted(tests, key=lambda test: tests[test] * (1 + cases[test.partition("[")[0]].index(test)))
    for limit in BATCHES:
        batch, seconds = list[str](), 0.0
        while order and (not batch or seconds + tests[order[0]] <= limit):
            seconds += tests[order[0]]
            batch.append(order.pop(0))
        if batch:
            yield sorted(batch, key=lambda test: test.partition("::")[0])


class Trial:
    """Runs tests on mutants, and remembers which tests fail without one."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.passes: dict[str, bool] = {}

    def fate(self, mutant: Mutant, tests: dict[str, float]) -> tuple[str, str]:
        """One of FATES, and by what."""
        if not tests:
            return "not executed", "by no test"
        deadline, ran = time.monotonic() + self.limit, 0
        for batch in in_batches(tests):
            while batch:
                how, test, passed = self.run(batch, tests, mutant, deadline)
                ran += len(passed)
                if how == "late":
                    return "undecided", f"{ran} of {len(tests)} tests pass"
                if how != "passed" and self.passes_without(test, tests[test]):
                    return how, f"{'by' if how == 'killed' else 'in'} {test}"
                batch = [each for each in batch if each not in passed and each != test] if test else []
        return "survives", f"{len(tests)} tests"

    def passes_without(self, test: str, seconds: float) -> bool:
        if test not in self.passes:
            how, _, passed = self.run([test], {test: seconds}, None, float("inf"))
            self.passes[test] = how == "passed" and test in passed
        return self.passes[test]

    def run(
        self, batch: Sequence[str], tests: dict[str, float], mutant: Mutant | None, deadline: float
    ) -> tuple[str, str, list[str]]:
        """How it ended (passed, killed, hangs, late), the test that did not pass, and those that did before."""
        files = list(dict.fromkeys(test.partition("::")[0] for test in batch))
        fork = Fork([*files, "-x"], lambda tell, _: Told(tell, batch), mutant)
        current, until, passed = "", time.monotonic() + BOOT, list[str]()
        try:
            while True:
                try:
                    event = fork.next(min(until, deadline) - time.monotonic())
                except TimeoutError:
                    return ("hangs" if until <= deadline else "late"), current or batch[0], passed
                if event is None:
                    code = fork.end()
                    fork = None  # type: ignore[assignment]
                    crashed = code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
                    return ("killed", current or batch[0], passed) if crashed else ("passed", "", passed)
                if failed := event.get("failed"):
                    of_file = [test for test in batch if test == failed or test.startswith(f"{failed}::")]
                    return "killed", (of_file or batch)[0], passed
                if "starts" in event:
                    current, until = event["starts"], time.monotonic() + 30 + 10 * tests[event["starts"]]
                if "ends" in event:
                    passed.append(event["ends"])
        finally:
            if fork:
                fork.end()


def folder_of(path: str) -> str:
    """Of the core; otherwise the nearest one."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "integrations" else parts[1]


def core(places: Sequence[str]) -> list[Mutant]:
    """All mutants of the core, or of ``places``: files, and lines of files."""
    asked = dict[str, set[int]]()
    for place in places:
        path, _, line = place.partition(":")
        asked.setdefault(path, set()).update([int(line)] if line else [])
    of_core = [path for path in mutations.sources() if folder_of(path) in (*FOLDERS, "integrations/deepspeed")]
    if unknown := asked.keys() - set(mutations.sources()):
        raise SystemExit(f"no such file of the package: {', '.join(sorted(unknown))}")
    return [
        mutant
        for path in asked or of_core
        for mutant in mutations.mutants(path, (ROOT / path).read_text())
        if not asked.get(path) or mutant.line in asked[path]
    ]


def drawn(every: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Of each folder and kind in turn, in an order that is drawn."""
    random_ = random.Random(seed)
    pairs = defaultdict[tuple[str, str], list[Mutant]](list)
    for mutant in random_.sample(every, len(every)):
        pairs[folder_of(mutant.path), mutant.kind].append(mutant)
    found = list[Mutant]()
    while len(found) < min(count, len(every)):
        left = sorted(pair for pair, mutants in pairs.items() if mutants)
        found += [pairs[pair].pop() for pair in random_.sample(left, len(left))]
    return found[:count]


def main() -> None:
    head, _, _ = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("places", nargs="*", help="FILE or FILE:LINE; default: draw")
    parser.add_argument("--count", type=int, default=60, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="go on with the Nth, where a run ended")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one mutant")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="only these; default: all")
    parser.add_argument("--note", action="store_true", help="only note what the tests execute")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.note:
        warm()
        note(test_files(given.tests))
        return
    every = core(given.places)
    chosen = every if given.places else drawn(every, given.count, given.seed)
    if given.list:
        print("\n".join(map(str, chosen)))
        return
    warm()
    tests, trial, fates = tests_of(chosen, note(test_files(given.tests))), Trial(given.limit), {}
    for number, mutant in [*enumerate(chosen, 1)][given.first - 1 :]:
        began = time.monotonic()
        fates[mutant] = fate, by = trial.fate(mutant, tests[mutant])
        print(f"{number}/{len(chosen)} {mutant}\n    {fate} {by}; {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{'':24}{''.join(fate.rjust(14) for fate in FATES)}")
    for name in dict.fromkeys(sorted(folder_of(mutant.path) for mutant in fates)):
        counts = Counter(fate for mutant, (fate, _) in fates.items() if folder_of(mutant.path) == name)
        print(f"{name:24}{''.join(str(counts[fate]).rjust(14) for fate in FATES)}")
    for mutant, (fate, by) in fates.items():
        if fate not in ("killed", "hangs"):
            print(f"{mutant}\n    {fate} {by}")


if __name__ == "__main__":
    main()
