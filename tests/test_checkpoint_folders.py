"""Folders are written whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import folders
from lwopt_backend.checkpoint.files.folders import read_pointer, recover, write_folder

FILES = ("a.pt", "zero/b.pt", "zero/deep/c.pt")


def fill(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return write


def content(folder: Path) -> dict[str, str]:
    """Every file in it, what is temporary too."""
    return {str(f.relative_to(folder)): f.read_text() for f in sorted(folder.rglob("*")) if f.is_file()}


def all_of(text: str) -> dict[str, str]:
    return dict.fromkeys(FILES, text)


@pytest.fixture(params=["exchange", "move aside"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On file systems that exchange two names, and on those that do not."""
    if request.param == "move aside":
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    return request.param


def test_a_folder_and_then_its_pointer_are_written(tmp_path: Path) -> None:
    write_folder(tmp_path / "new" / "step1", fill("1"), pointers={"latest_universal": "step1"})
    found = content(tmp_path)
    assert found == {"new/latest_universal": "step1", **{f"new/step1/{name}": "1" for name in FILES}}
    assert read_pointer(tmp_path / "new" / "latest_universal") == tmp_path / "new" / "step1"


def test_an_existing_target_is_an_error_and_stays_as_it_was(tmp_path: Path) -> None:
    write_folder(tmp_path / "step1", fill("1"))
    with pytest.raises(CheckpointError, match="step1 is there already; .*--force"):
        write_folder(tmp_path / "step1", fill("2"), pointers={"latest": "step1"})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file is there already"):
        write_folder(tmp_path / "file", fill("2"))
    assert content(tmp_path) == {"file": "mine", **{f"step1/{name}": "1" for name in FILES}}


def test_a_target_that_appears_meanwhile_is_an_error_and_stays(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        fill("2")(folder)
        (tmp_path / "step1").mkdir()
        fill("1")(tmp_path / "step1")

    with pytest.raises(CheckpointError, match="step1 is there already"):
        write_folder(tmp_path / "step1", slow)
    assert content(tmp_path) == {f"step1/{name}": "1" for name in FILES}


def test_force_replaces_all_of_it(tmp_path: Path, way: str) -> None:
    write_folder(tmp_path / "step1", fill("1"))
    (tmp_path / "step1" / "more").write_text("1")
    write_folder(tmp_path / "step1", fill("2"), force=True)
    assert content(tmp_path) == {f"step1/{name}": "2" for name in FILES}


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path: Path, way: str) -> None:
    write_folder(tmp_path / "step1", fill("1"), pointers={"latest": "step1"})

    def fail(folder: Path) -> None:
        fill("2")(folder)
        raise CheckpointError("the source is damaged")

    for force, target in ((True, "step1"), (False, "step2")):
        with pytest.raises(CheckpointError, match="the source is damaged"):
            write_folder(tmp_path / target, fail, force=force, pointers={"latest": target})
    assert content(tmp_path) == {"latest": "step1", **{f"step1/{name}": "1" for name in FILES}}


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "step1", fill("1"))
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if path.name.endswith(folders.NEW):
            raise OSError("no space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(CheckpointError, match="step1 is as it was, nothing is written: no space left"):
        write_folder(tmp_path / "step1", fill("2"), force=True)
    assert content(tmp_path) == {f"step1/{name}": "1" for name in FILES}


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../step1", "/etc", "a\\b", f".step1.host.1.x{folders.OLD}"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "step1").mkdir()
    pointer = tmp_path / "root" / "latest"
    pointer.write_text(name)
    with pytest.raises(CheckpointError, match="leads elsewhere"):
        read_pointer(pointer)
    with pytest.raises(CheckpointError, match="leads elsewhere"):
        write_folder(tmp_path / "root" / "step1", fill("1"), pointers={name: "step1"})
    assert content(tmp_path) == {"root/latest": name}


def test_a_pointer_to_nothing_or_of_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step9")
    with pytest.raises(CheckpointError, match="found 'step9'"):
        read_pointer(tmp_path / "latest")
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pointer(tmp_path / "latest")


def test_files_and_folders_are_on_the_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Seen from below: what is flushed, and when names change."""
    write_folder(tmp_path / "step1", fill("1"))
    events: list[tuple[str, str]] = []
    flush, rename, exchange = folders._flush, Path.rename, folders.exchange

    def flushed(path: Path) -> None:
        events.append(("flush", _shown(path, tmp_path)))
        flush(path)

    def renamed(path: Path, target: Path) -> Path:
        events.append(("rename", _shown(target, tmp_path)))
        return rename(path, target)

    def exchanged(one: Path, other: Path) -> bool:
        done = exchange(one, other)
        events.extend([("rename", _shown(other, tmp_path))] * done)
        return done

    monkeypatch.setattr(folders, "_flush", flushed)
    monkeypatch.setattr(folders, "exchange", exchanged)
    monkeypatch.setattr(Path, "rename", renamed)
    write_folder(tmp_path / "step1", fill("2"), force=True)
    place = events.index(("rename", "step1"))
    assert {what for _, what in events[:place]} >= {"new", *(f"new/{name}" for name in (*FILES, "zero", "zero/deep"))}
    assert events[place + 1] == ("flush", ".")


def _shown(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return str(Path(*("new" if part.endswith(folders.NEW) else part for part in parts)))


# A kill at any moment

WATCHED = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir", "shutil.rmtree"}


def killed(root: Path, place: int, force: bool) -> bool:
    """Write in a child that is killed before the ``place``-th thing that it does to ``root``; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            _write_and_die(root, place, force)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFSIGNALED(status)


def _write_and_die(root: Path, place: int, force: bool) -> None:
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == place:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(
        lambda event, args: count() if event in WATCHED and str(root) in " ".join(map(str, args)) else None
    )
    for name in ("exchange", "_flush"):  # what the interpreter does not tell of
        setattr(folders, name, _after(count, getattr(folders, name)))
    write_folder(root / "step1", fill("2"), force=force, pointers={"latest": "step1"})


def _after(count: Callable[[], None], original: Callable[..., object]) -> Callable[..., object]:
    def counted(*args: Path) -> object:
        count()
        return original(*args)

    return counted


@pytest.mark.parametrize("force", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(tmp_path: Path, way: str, force: bool) -> None:
    moments, found = 0, set()
    while True:
        root = tmp_path / str(moments)
        old: dict[str, str] = {}
        if force:
            write_folder(root / "step1", fill("1"), pointers={"latest": "step1"})
            old = all_of("1")
        if not killed(root, moments + 1, force):
            break
        moments += 1
        there = (root / "step1").exists()
        assert there or not force or way == "move aside"
        recover(root / "step1")
        state = content(root / "step1")
        assert state in (old, all_of("2"))
        assert there or state == old
        found.add(str(state))
        if (root / "latest").exists():
            assert read_pointer(root / "latest") == root / "step1"
            assert state
        left = [path.name for path in root.iterdir()] if root.exists() else []
        assert all(folders.is_temporary(name) for name in set(left) - {"step1", "latest"})
        write_folder(root / "step1", fill("3"), force=True, pointers={"latest": "step1"})
        assert content(root) == {"latest": "step1", **{f"step1/{name}": "3" for name in FILES}}
    assert moments > 20 and len(found) == 2


def test_what_a_running_program_writes_is_left_alone(tmp_path: Path) -> None:
    """And what is of another folder, whose name begins alike."""
    others = [folders._aside(tmp_path / name, folders.NEW) for name in ("step1", "step1.more")]
    for other in others:
        other.mkdir()
    write_folder(tmp_path / "step1", fill("1"))
    assert {path.name for path in tmp_path.iterdir()} == {"step1", *(other.name for other in others)}
