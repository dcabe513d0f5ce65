"""Disks that are full or read-only, and folders that go: one line that names the target; what is there stays."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.command_line import files, lwopt, succeeds, too_large, torch_dist
from tests.faults.test_kills import digest, engine_of, place
from tests.ranks import RankPool

OURS = ("plain", "modules")  # the others' files are written by DeepSpeed and torch: docs/reliability.md
TARGETS = ("universal", "dcp", "safetensors")


@contextlib.contextmanager
def gone(folder: Path) -> Iterator[None]:
    """The folder that is written into is removed once something in it is on the disk."""
    flushed = os.fsync

    def remove(number: int) -> None:
        flushed(number)
        shutil.rmtree(folder, ignore_errors=True)

    with mock.patch.object(os, "fsync", remove):
        yield


def mounted(options: str) -> Callable[[Path], Any]:
    """A separate file system with the folder's content, which only root can make."""

    @contextlib.contextmanager
    def of_its_own(folder: Path) -> Iterator[None]:
        kept = shutil.copytree(folder, folder.with_name("kept"))
        pages = sum(-(-path.stat().st_size // 4096) for path in kept.rglob("*") if path.is_file())
        size = f"size={max(1, pages) * 4096}" if options == "full" else "size=64m"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True).returncode:
            shutil.rmtree(kept)
            pytest.skip("only root mounts file systems")
        try:
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            if options == "ro":
                subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            yield
            shutil.rmtree(kept)
            shutil.copytree(folder, kept)
        finally:
            subprocess.run(["umount", folder], check=True)
            shutil.copytree(kept, folder, dirs_exist_ok=True)

    return of_its_own


DISKS = {"a file too large": too_large, "full": mounted("full"), "read-only": mounted("ro"), "removed": gone}
SAID = {
    "a file too large": "File too large",
    "full": "No space left",
    "read-only": "Read-only file system",
    "removed": "",  # whatever is missed first
}


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("to", TARGETS)
def test_convert_says_in_one_line_what_is_missing_and_leaves_what_is_there(tmp_path: Path, to: str, disk: str) -> None:
    source, other = (torch_dist(tmp_path / name, muon=name == "muon") for name in ("muon", "adamw"))
    folder, words = tmp_path / "disk", ("--to", to)
    folder.mkdir()
    succeeds("convert", other, folder / "other", *words)
    before = files(folder)
    with DISKS[disk](folder):
        run = lwopt("convert", source, folder / "to", *words)
    assert run.code == 2 and not run.out and run.err.count("\n") == 1, run
    assert str(folder / "to") in run.err and SAID[disk] in run.err, run
    assert disk == "removed" or files(folder) == before


def test_convert_writes_onto_another_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted("size")(folder):
        for to in TARGETS:
            source = torch_dist(tmp_path / to)
            succeeds("convert", source, folder / to, "--to", to)
            assert lwopt("diff", source, folder / to, *(["--weights"] if to == "safetensors" else [])).code == 0


def save_on(way: str, folder: str, everywhere: bool) -> tuple[str, str, list[str]]:
    """What was saved first, how a save onto a full disk ends, and what is there then."""
    fails = everywhere or dist.get_rank() == dist.get_world_size() - 1
    target = Path(place(way, folder, 0))
    with engine_of(way) as engine:
        engine.train(range(1))
        engine.save(str(target))
        first = digest(engine)
        engine.train(range(1, 2))
        error = ""
        with too_large() if fails else contextlib.nullcontext():
            try:
                engine.save(place(way, folder, 1))
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        left = sorted(path.name for path in Path(folder).rglob("*"))
    return first, error, left


def load_first(way: str, folder: str) -> str:
    with engine_of(way) as engine:
        engine.load(place(way, folder, 0))
        return digest(engine)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("way", OURS)
def test_a_save_that_fails_leaves_the_one_before(ranks: RankPool, tmp_path: Path, way: str, everywhere: bool) -> None:
    """On all ranks, or on the last one; all of them say so."""
    results = ranks.run(save_on, way, str(tmp_path), everywhere)
    for _, error, left in results:
        assert "\n" not in error and str(tmp_path) in error and "File too large" in error, error
        assert not any(".lwopt-" in name for name in left)
    assert ranks.run(load_first, way, str(tmp_path)) == [first for first, _, _ in results]
