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

from tests.support.command_line import files, lwopt, succeeds, too_large, torch_dist

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
def test_convert_on_a_full_disk(tmp_path: Path, to: str, disk: str) -> None:
    """Convert says in one line what is missing, and leaves what is there."""
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
