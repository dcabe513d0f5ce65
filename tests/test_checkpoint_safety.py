"""Damaged and hostile checkpoints on the command line, and what a kill at any moment leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lwopt_backend.checkpoint import convert, formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.deepspeed import universal_writer as write_universal
from lwopt_backend.checkpoint.lazy import held
from tests.command_line import files, lwopt, refused, succeeds, torch_dist, torch_format
from tests.hostile import owned as owned_folder

ROOT = Path(__file__).parents[1]
FORMATS = ("torch", "megatron", "universal", "dcp", "safetensors")
PICKLED = ("torch", "megatron", "universal", "dcp")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of all formats, which are not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    found = {"megatron": torch_dist(folder / "megatron"), "torch": torch_format(folder / "torch")}
    for target in ("universal", "dcp", "safetensors"):
        found[target] = folder / target
        succeeds("convert", found["megatron"], found[target], "--to", target)
    return found


@pytest.fixture
def copy(whole: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one that may be harmed."""

    def make(form: str) -> Path:
        return Path(shutil.copytree(whole[form], tmp_path / "from"))

    return make


def assert_refused(source: Path, *words: str) -> str:
    """It is neither converted nor shown; nothing is written anywhere, and what is said names the words."""
    before = files(source.parent)
    said = refused("convert", source, source.parent / "to", "--to", "universal")
    shown = lwopt("inspect", source)
    assert shown.code != 0 and shown.err and "Traceback" not in shown.err
    assert files(source.parent) == before and not (source.parent / "to").exists()
    for word in words:
        assert word in said, said
    return said


def content_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


# Hostile pickles


class Payload:
    """What runs a command where it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def payloads(mark: Path) -> dict[str, Any]:
    """Each makes the file ``mark`` if it is run."""
    return {
        "system": Payload(os.system, f"touch {mark}"),
        "eval": {"iteration": 3, "args": Payload(eval, f"open({str(mark)!r}, 'w')")},
        "popen": [torch.ones(2), Payload(subprocess.check_call, ["touch", str(mark)])],
        "getattr": Payload(getattr, Payload(__import__, "os"), "getcwd"),
        "open": {"param": Payload(open, str(mark), "w")},
    }


@pytest.mark.parametrize("kind", payloads(Path("mark")))
@pytest.mark.parametrize("form", PICKLED)
def test_code_in_a_file_is_not_run(copy: Callable[[str], Path], tmp_path: Path, form: str, kind: str) -> None:
    source, mark = copy(form), tmp_path / "mark"
    payload = payloads(mark)[kind]
    pickled = [path for path in content_files(source) if path.suffix == ".pt" or path.name == ".metadata"]
    chosen = {path.name: path for path in pickled if not path.name.startswith("zero_pp")}  # one of each name
    assert chosen
    for path in chosen.values():
        kept = path.read_bytes()
        if path.name == ".metadata":
            path.write_bytes(pickle.dumps(payload))
        else:
            torch.save(payload, path)
        assert_refused(source, path.name)
        assert not mark.exists()
        path.write_bytes(kept)
    assert lwopt("inspect", source).code == 0


def test_such_a_payload_would_run_elsewhere(tmp_path: Path) -> None:
    """So that the test above tests something."""
    for kind in ("system", "eval", "popen", "open"):
        mark = tmp_path / kind
        torch.save(payloads(mark)[kind], tmp_path / "file.pt")
        torch.load(tmp_path / "file.pt", weights_only=False)
        assert mark.exists()


def test_code_in_an_object_of_a_distributed_checkpoint_is_not_run(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """In the files of tensors, under a key that the metadata gives."""
    source, mark = copy("dcp"), tmp_path / "mark"
    metadata = pickle.loads((source / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "arguments")
    info = metadata.storage_data[index]
    torch.save({"args": Payload(os.system, f"touch {mark}")}, tmp_path / "payload.pt")
    payload = (tmp_path / "payload.pt").read_bytes()
    file = source / info.relative_path
    start = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(payload)
    info.offset, info.length = start, len(payload)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    said = assert_refused(source, "system", "made to run code")
    assert not mark.exists() and file.name in said


def test_the_command_itself_prints_no_traceback(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """In a process of its own, as users start it."""
    source = copy("universal")
    torch.save(payloads(tmp_path / "mark")["system"], source / "global_step7" / "mp_rank_00_model_states.pt")
    words = [sys.executable, "-c", "from lwopt_backend.cli import main; main()"]
    words += ["convert", str(source), str(tmp_path / "to"), "--to", "dcp"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and run.stdout == "" and run.stderr.startswith("error: ")
    assert "Traceback" not in run.stderr and "mp_rank_00_model_states.pt" in run.stderr
    assert not (tmp_path / "mark").exists() and not (tmp_path / "to").exists()


# Damage

# What a checkpoint is whole without: what names the newest, what is for other loaders, and what is only told apart by.
SPARE = ("latest", "zero_pp_rank_0_mp_rank_00_model_states.pt", "metadata.json")


def is_spare(path: Path) -> bool:
    return path.name.startswith(SPARE)


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_or_missing_file_is_noticed(copy: Callable[[str], Path], form: str) -> None:
    source = copy(form)
    harmed = [path for path in content_files(source) if not is_spare(path)]
    chosen = random.Random(0).sample(harmed, min(8, len(harmed)))
    for path in chosen:
        kept = path.read_bytes()
        for size in (len(kept) // 2, len(kept) - 1, 0, None):
            path.unlink() if size is None else path.write_bytes(kept[:size])
            said = assert_refused(source)
            assert path.name in said or path.parent.name in said or str(source) in said, said
            path.write_bytes(kept)
    assert lwopt("inspect", source).code == 0


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_file_of_a_rank_is_named(copy: Callable[[str], Path], form: str) -> None:
    source = copy(form)
    named = {"torch": "layer_wise_optimizer_1.pt", "megatron": "__0_0.distcp", "dcp": "__0_0.distcp"}
    name = named.get(form) or ("exp_avg.pt" if form == "universal" else "model.safetensors")
    path = next(path for path in content_files(source) if path.name == name)
    path.unlink()
    said = {"torch": "expected layer_wise_optimizer_*.pt of data parallel ranks [0, 1], found those of [0]"}
    assert_refused(source, said.get(form, name if form != "safetensors" else "is no checkpoint that is known"))


@pytest.mark.parametrize("form", PICKLED)
def test_a_flipped_bit_is_noticed_or_is_of_no_consequence(
    copy: Callable[[str], Path], whole: dict[str, Path], form: str
) -> None:
    """Never does another checkpoint come out of it. Bytes between records are not checked, and not used."""
    source, generator = copy(form), random.Random(1)
    harmed = [path for path in content_files(source) if path.suffix in (".pt", ".distcp") and not is_spare(path)]
    noticed = 0
    for _ in range(48):
        path = generator.choice(harmed)
        kept = path.read_bytes()
        at = generator.randrange(len(kept))
        path.write_bytes(kept[:at] + bytes([kept[at] ^ 1 << generator.randrange(8)]) + kept[at + 1 :])
        run = lwopt("diff", whole[form], source)
        assert run.code in (0, 2) and "Traceback" not in run.err, (path, at, run)
        noticed += run.code == 2
        path.write_bytes(kept)
    assert noticed >= 16


@pytest.mark.parametrize("form", PICKLED)
def test_a_flipped_bit_of_a_tensor_is_noticed_and_nothing_is_written(copy: Callable[[str], Path], form: str) -> None:
    source = copy(form)
    param = list(formats.read(source).params.values())[3]
    data = param.best.read().view(torch.uint8).reshape(-1)[:12].numpy().tobytes()
    path, at = next((path, path.read_bytes().find(data)) for path in content_files(source) if data in path.read_bytes())
    kept = path.read_bytes()
    path.write_bytes(kept[: at + 5] + bytes([kept[at + 5] ^ 16]) + kept[at + 6 :])
    assert_refused(source, path.name, "copy")


def test_a_flipped_bit_of_a_header_of_safetensors_is_noticed(copy: Callable[[str], Path]) -> None:
    """The format has no checksums: of the header's length, sizes, places and dtypes, each tells on the others."""
    source = copy("safetensors")
    path = source / "model.safetensors"
    kept = path.read_bytes()
    for what in (b'"shape": [', b'"data_offsets": [', b'"dtype": "B'):
        at = kept.index(what) + len(what)
        for changed in (at, 0, 2):
            path.write_bytes(kept[:changed] + bytes([kept[changed] ^ 1]) + kept[changed + 1 :])
            assert_refused(source, path.name, "damaged")


def test_random_bytes_are_refused_in_plain_words(copy: Callable[[str], Path]) -> None:
    generator = random.Random(2)
    for form in FORMATS:
        source = copy(form)
        for path in generator.sample([path for path in content_files(source) if not is_spare(path)], 1):
            path.write_bytes(generator.randbytes(200))
            assert_refused(source)
        shutil.rmtree(source)


# Paths that lead out of the folder


@pytest.mark.parametrize("form", ["torch", "megatron", "universal"])
@pytest.mark.parametrize("text", ["../other", "/etc", "..", "iter_0000007/../../other", ""])
def test_a_pointer_that_leads_elsewhere_is_refused(copy: Callable[[str], Path], form: str, text: str) -> None:
    source = copy(form)
    name = "latest_universal" if form == "universal" else "latest_checkpointed_iteration.txt"
    shutil.copytree(source, source.parent / "other")
    (source / name).write_text(text)
    assert_refused(source, name)


@pytest.mark.parametrize("form", ["megatron", "dcp"])
@pytest.mark.parametrize("kind", ["above", "absolute", "windows"])
def test_metadata_that_leads_out_of_the_folder_is_refused(copy: Callable[[str], Path], form: str, kind: str) -> None:
    source = copy(form)
    (path,) = (path for path in content_files(source) if path.name == ".metadata")
    metadata = pickle.loads(path.read_bytes())
    info = next(iter(metadata.storage_data.values()))
    outside = source.parent / "outside.distcp"
    shutil.copy(path.parent / info.relative_path, outside)
    leads = {"above": os.path.relpath(outside, path.parent), "absolute": str(outside), "windows": "C:\\outside.distcp"}
    info.relative_path = leads[kind]
    path.write_bytes(pickle.dumps(metadata))
    assert_refused(source, ".metadata", "outside the folder")


@pytest.mark.parametrize("place", ["params", "files"])
def test_names_in_a_universal_checkpoint_that_lead_out_are_refused(copy: Callable[[str], Path], place: str) -> None:
    source = copy("universal")
    path = source / "global_step7" / "zero" / "optimizer_state.pt"
    common = torch.load(path, weights_only=True)
    name = next(iter(common["lwopt"]["params"]))
    outside = source.parent / "outside"
    shutil.copytree(source / "global_step7" / "zero" / name, outside)
    climbing = os.path.relpath(outside, source / "global_step7" / "zero")
    if place == "params":
        common["lwopt"]["params"] = {climbing: 0, **common["lwopt"]["params"]}
        common["lwopt"]["files"] = {climbing: ["fp32"], **common["lwopt"]["files"]}
    else:
        common["lwopt"]["files"][name] = [f"../{climbing}/fp32"]
    torch.save(common, path)
    run = lwopt("convert", source, source.parent / "to", "--to", "dcp", "--json")
    if run.code == 0:  # a name that is only listed is no path: nothing of it may be read
        assert climbing not in run.out
        assert set(formats.read(source.parent / "to").params) == set(formats.read(source).params)
        assert climbing not in formats.read(source).params
    else:
        assert "Traceback" not in run.err and not (source.parent / "to").exists()


@pytest.mark.parametrize("target", ["../../outside/{*}", "/outside/{*}", "a/{*}"])
def test_a_map_of_names_cannot_lead_out_of_the_new_folder(copy: Callable[[str], Path], target: str) -> None:
    source = copy("megatron")
    (source.parent / "map.json").write_text(
        json.dumps({"target": "mine", "rules": [{"source": "{*}", "target": target}]})
    )
    before = files(source.parent)
    said = refused("convert", source, source.parent / "to", "--to", "universal", "--names", source.parent / "map.json")
    assert "leads elsewhere" in said and files(source.parent) == before and not (source.parent / "to").exists()
    assert not list(source.parent.glob(".*lwopt*"))


@pytest.mark.parametrize("form", PICKLED)
def test_a_link_that_leads_out_of_the_folder_is_refused(copy: Callable[[str], Path], form: str) -> None:
    source = copy(form)
    path = next(path for path in content_files(source) if path.suffix in (".pt", ".distcp"))
    outside = source.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)
    assert_refused(source, path.name, "a link that leads out of the folder")
    planned = refused("plan", "--checkpoint", source, "--world-size", 2)
    assert "a link that leads out of the folder" in planned and path.name in planned
    path.unlink()
    path.symlink_to(path)  # to itself
    assert_refused(source)


def test_links_within_the_folder_and_to_it_are_none_of_that(copy: Callable[[str], Path]) -> None:
    source = copy("universal")
    (source / "global_step7").rename(source / "kept")
    (source / "global_step7").symlink_to("kept")
    (source.parent / "link").symlink_to(source)
    succeeds("convert", source.parent / "link", source.parent / "to", "--to", "dcp")


def test_a_target_that_is_a_link_is_replaced_itself(copy: Callable[[str], Path]) -> None:
    source = copy("megatron")
    precious = source.parent / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    target = source.parent / "to"
    target.symlink_to(precious)
    assert "is there already" in refused("convert", source, target, "--to", "dcp")
    succeeds("convert", source, target, "--to", "dcp", "--force")
    assert not target.is_symlink() and files(precious) == {"file": b"mine"}
    assert succeeds("diff", source, target)


@pytest.mark.parametrize("form", ["torch", "universal"])
def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(copy: Callable[[str], Path], form: str) -> None:
    source = copy(form)
    os.mkfifo(source / "pipe")
    assert "pipe is neither a file nor a folder" in refused("inspect", source)


# A full disk


@pytest.mark.parametrize("target", ["universal", "megatron", "dcp", "owned", "safetensors"])
def test_a_file_that_cannot_be_written_is_one_error_that_names_the_target(tmp_path: Path, target: str) -> None:
    """The system says that a file is too large where it would else say that the disk is full."""
    source = owned_folder(tmp_path / "source")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = ["convert", source, tmp_path / "to" / "new", "--to", target]
    if target == "megatron":
        source = torch_dist(tmp_path / "megatron")
        words = ["convert", source, tmp_path / "to" / "new", "--to", target, "--heads", 4]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    try:
        said = refused(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert said.count("\n") == 1 and f"{tmp_path / 'to' / 'new'}" in said and "File too large" in said
    assert not (tmp_path / "to").exists() and not list(tmp_path.rglob(".*lwopt*"))


# Kills


def tiny(folder: Path, value: float) -> Path:
    """A universal checkpoint of two parameters."""
    params = {
        name: Param(held(torch.full((2, 3), value), name), {"exp_avg": held(torch.full((2, 3), value), name)}, 1.0, 0)
        for name in ("a", "b")
    }
    (folder / "global_step4").mkdir(parents=True)
    write_universal.write(Checkpoint("made here", "", "model", params, ({},), iteration=4), folder / "global_step4")
    (folder / "latest_universal").write_text("global_step4")
    return folder


POSSIBLE = {
    "new": {"nothing", "new"},
    "deep": {"nothing", "new"},
    "empty": {"nothing", "new without pointer", "new"},
    "force": {"old", "new"},
    "aside": {"old", "new"},
}


@pytest.mark.parametrize("way", POSSIBLE)
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(tmp_path: Path, way: str) -> None:
    """``aside``: as on file systems where two names cannot be exchanged; there the next command brings back the old."""
    source, old = tiny(tmp_path / "source", 1.0), tiny(tmp_path / "old", 2.0)
    words = [sys.executable, "-m", "tests.killed", source, old, tmp_path / "in", way]
    run = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    moments = [json.loads(line) for line in run.stdout.splitlines()]
    killed = [moment for moment in moments if moment["ended"] < 0]
    # Threads make the number of calls vary a little, so that a few moments come too late to kill.
    assert len(killed) >= 8 and len({moment["found"] for moment in killed}) > 1
    for moment in moments:
        if way == "aside" and moment["found"].startswith("half"):  # between two renames there is only the pointer
            assert moment["found"] == "half: ['to/latest_universal']" and moment["recovered"] == "old", moment
        else:
            assert moment["found"] in POSSIBLE[way], moment
        assert moment["inspected"] == (0 if moment["recovered"] in ("old", "new") else 2), moment
        assert way not in ("force", "aside") or moment["inspected"] == 0, moment
        assert moment["again"] == 0 and moment["finally"] == "new" and moment["left over"] == [], moment


@pytest.mark.parametrize("target", ["to", "to/", "./to", "a/b/to", "there", "there/.", "."])
def test_a_target_may_be_spelled_in_many_ways(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """The folders above it need not be there; one that is there keeps what is in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    words = ["convert", str(whole["megatron"]), target, "--to", "universal"]
    succeeds(*words)
    made = tmp_path / target
    assert (made / "latest_universal").read_text() == "global_step7"
    assert succeeds("diff", whole["megatron"], made)
    assert (tmp_path / "there" / "file").read_text() == "mine"
    assert "is there already" in refused(*words)
    assert not list(tmp_path.rglob(".*lwopt*"))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("latest_universal")}
    assert found == {str(Path(target) / "latest_universal")}


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, there: bool) -> None:
    checkpoint = formats.read(tiny(tmp_path / "source", 1.0))

    def fail() -> Tensor:
        raise OSError("no space left")

    param = dataclasses.replace(
        checkpoint.params["b"], weight=dataclasses.replace(held(torch.ones(2, 3), "b"), read=fail)
    )
    harmed = dataclasses.replace(param, states={"fp32": param.weight})
    checkpoint = dataclasses.replace(checkpoint, params={**checkpoint.params, "b": harmed})
    if there:
        (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is as it was, nothing is written: no space left"):
        convert.write(checkpoint, "universal", convert.place_of(checkpoint, "universal", tmp_path / "a" / "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == (["a", "source"] if there else ["source"])
    assert not there or list((tmp_path / "a" / "b").iterdir()) == []
