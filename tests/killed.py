"""Converts a checkpoint again and again in processes that are killed, each at another moment; run by itself.

python -m tests.killed SOURCE OLD FOLDER WAY     prints, line by line in JSON, what was found after each
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint import convert
from lwopt_backend.checkpoint.files import folders
from tests.command_line import lwopt

SPREAD, LAST = 10, 14  # calls all over writing, and those at its end
TIMES = 4  # moments by the clock, within calls too


def state(folder: Path) -> dict[str, str]:
    """Files by their contents, without temporary ones."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(folders.is_temporary(part) for part in path.relative_to(folder).parts)
    }


def kind(found: dict[str, str], before: dict[str, str], after: dict[str, str]) -> str:
    """Which of the states it is; a new folder that no pointer names yet is none that a reader takes."""
    unnamed = {name: content for name, content in after.items() if not name.endswith("latest_universal")}
    known = {"nothing": {}, "old": before, "new": after, "new without pointer": unnamed}
    return next((name for name, content in known.items() if found == content), f"half: {sorted(found)}")


def in_child(work: Callable[[], int]) -> int:
    """Do it in a copy of this process; how that ended: its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 99
        with contextlib.suppress(BaseException):
            code = work()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def counted(arguments: list[Any], at: int | None, told: Path) -> int:
    """Convert, and be killed at the call number ``at`` from the one on that begins to write; how many there were goes
    to the file ``told``."""
    write, calls = folders.write_folder, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(*given: Any, **options: Any) -> None:
        sys.setprofile(count)
        try:
            write(*given, **options)
        finally:
            sys.setprofile(None)

    convert.write_folder = watched
    run = lwopt(*arguments)
    told.write_text(str(calls))
    print(run.err, end="", file=sys.stderr)
    return run.code


def timed(arguments: list[Any], seconds: float) -> int:
    """Convert, and be ended after that time, wherever it is then: no handler runs, as with a kill."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return lwopt(*arguments).code


def main(source: Path, old: Path, folder: Path, way: str) -> None:
    """``way``: "new" without anything there; "deep" without the folders above it either; "empty" into a folder that is
    there; "force" over ``old``; "aside" the same where names cannot be exchanged."""
    if way == "aside":
        folders.exchange = lambda one, other: False
    over = way in ("force", "aside")
    target = folder / "further" / "in" / "to" if way == "deep" else folder / "to"
    anew = ["convert", source, f"{target}/", "--to", "universal", "--force"]
    arguments = anew if over else anew[:-1]
    told = folder.with_name("calls")

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if over:
            shutil.copytree(old, target)
        if way == "empty":
            target.mkdir()

    prepare()
    before = state(folder)
    for _ in range(2):  # so that all is imported and cached, and calls are the same in all children
        prepare()
        assert lwopt(*arguments).code == lwopt("inspect", target).code == lwopt(*anew).code == 0
    prepare()
    began = time.monotonic()
    assert in_child(lambda: counted(arguments, None, told)) == 0
    took, calls, after = time.monotonic() - began, int(told.read_text()), state(folder)
    numbers = {1 + calls * number // SPREAD for number in range(SPREAD)} | set(range(calls - LAST + 1, calls + 1))
    moments = [(f"call {n} of {calls}", lambda n=n: counted(arguments, n, told)) for n in sorted(numbers)]
    times = [took * (number + 1) / (TIMES + 1) for number in range(TIMES)]
    moments += [(f"{seconds:.3f} s", lambda seconds=seconds: timed(arguments, seconds)) for seconds in times]
    for name, work in moments:
        prepare()
        ended, found = in_child(work), state(folder)
        inspected = lwopt("inspect", target, "--no-check")
        recovered = state(folder)
        again = lwopt(*anew)
        said = {
            **{"moment": name, "ended": ended, "inspected": inspected.code, "again": again.code, "error": again.err},
            **{"found": kind(found, before, after), "recovered": kind(recovered, before, after)},
            "finally": kind(state(folder), before, after),
            "left over": [str(path) for path in sorted(folder.rglob("*")) if folders.is_temporary(path.name)],
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4])
