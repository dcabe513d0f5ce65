"""Hostile and damaged files given to readers and to engines in training: nothing runs, nothing is written elsewhere."""

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import ROOT, SEED, count
from tests.faults.test_kills import Modules, digest
from tests.support import hostile
from tests.support.command_line import succeeds
from tests.support.engines import Cell, Engine, ExactLM, running
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(3600)  # hundreds of attacks in one test
MORE_ADDRESSES = 4 << 30  # bytes beyond those of a process with an engine
# What this package reads itself. DeepSpeed and torch unpickle whatever they are given: docs/limits.md.
LOADS = {"plain": Cell("plain"), "modules": Cell("modules")}
LOADS |= {f"universal, {name}": Cell(name) for name in ("zero 0", "zero 2", "zero 3", "owned 1")}


def harms(folder: Path, seed: int, number: int) -> Iterator[hostile.Harm]:
    """So many, a third of them pickles, some of which would make the folder ``ran`` next to this one."""
    found = {"this": folder}
    bombs = list(hostile.bombs(found, 1))
    yield from bombs[seed % 7 :: max(1, len(bombs) * 3 // number)]
    for path in filter(hostile.pickled, sorted(folder.rglob("*"))):
        data = pickle.dumps({"param": hostile.Payload(os.mkdir, str(folder.parent / "ran"))}, protocol=2)
        yield "code", folder, path, hostile.with_pickle(path, data)
    yield from hostile.flips(found, seed, number - number // 3)


@contextlib.contextmanager
def loading(way: str, folder: Path) -> Iterator[tuple[Engine, Path]]:
    """An engine, and the folder of a checkpoint of it that it can load."""
    if way == "modules":
        engine: Engine = Modules()
        engine.train(range(1))
        engine.save(str(folder))
        yield engine, folder
        return
    cell = LOADS[way]
    with running(cell, ExactLM()) as saved:
        saved.train(range(1))
        saved.save(str(folder))
    if way != "plain":
        succeeds("convert", folder, folder.with_name("universal"), "--to", "universal")
        folder = folder.with_name("universal")
    with running(cell, ExactLM(seed=5), converted=way != "plain") as engine:
        yield engine, folder


def attacked(way: str, folder: Path, seed: int, number: int) -> tuple[dict[str, int], list[str]]:
    """How loads ended, and what was wrong with any."""
    signal.signal(signal.SIGPROF, hostile.too_long)
    endings, wrong = Counter[str](), []
    with loading(way, folder / "saved") as (engine, source):
        engine.load(str(source))
        truth = digest(engine)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MORE_ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        for what, _, path, data in harms(source, seed, number):
            engine.train(range(1, 2))
            before = digest(engine)
            with hostile.replaced(path, data):
                ending, said = load(engine, source)
            if ending == "loaded" and digest(engine) != truth:
                ending, said = "another", "other weights came of it"
            elif ending == "refused" and digest(engine) != before:
                said = f"refused, but weights have changed: {said}"
            endings[ending] += 1
            if said:
                wrong.append(f"{what} in {path}: {said}"[:600])
            if (folder / "ran").exists():
                wrong.append(f"{what} in {path}: it was run")
                (folder / "ran").rmdir()
    return dict(endings), wrong


def load(engine: Engine, source: Path) -> tuple[str, str]:
    """How it ended, and what is wrong with what was said."""
    signal.setitimer(signal.ITIMER_PROF, hostile.SECONDS)
    try:
        engine.load(str(source))
    except (ValueError, OSError, RuntimeError) as error:  # the latter in a sentence on other modules' ranks
        told = f"{type(error).__name__}: {error}"
        return "refused", "" if str(source) in told else f"names no file: {told}"
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "loaded", ""


@pytest.mark.parametrize("way", LOADS)
def test_engines_refuse_hostile_and_damaged_files(tmp_path: Path, way: str) -> None:
    """Engines refuse hostile and damaged files in words, and keep what they had."""
    pool = RankPool(1)
    try:
        endings, wrong = pool.run(attacked, way, tmp_path, SEED, count(300), timeout=3000.0)[0]
    finally:
        pool.close()
    print(f"{way}: {endings}, seed {SEED}")
    assert not wrong, "\n".join([f"seed {SEED}", *wrong])
    assert {path.name for path in tmp_path.iterdir()} <= {"saved", "universal"}


def test_readers_refuse_hostile_and_damaged_files_in_words(tmp_path: Path) -> None:
    """Every payload in every place of every format, and damages given to every command."""
    apart = max(1, 300 // count(300))
    words = [sys.executable, "-m", "tests.support.hostile", str(tmp_path), str(apart), str(SEED), str(count(300))]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    *wrong, last = map(json.loads, run.stdout.splitlines())
    assert not wrong, (SEED, wrong, last)
    print(f"{last['runs']} runs, seed {SEED}")
