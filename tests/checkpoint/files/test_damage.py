"""Damaged and hostile checkpoints on the command line: in any format, harmed in any way, each is an error in words that
name the file, or the same checkpoint; nothing in it is run, and nothing is written elsewhere."""

import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lwopt_backend.checkpoint import convert, formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, held
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import NEW
from tests.support import hostile
from tests.support.command_line import files, lwopt, refused, succeeds, too_large
from tests.support.damage import (
    RANDOM,
    Changes,
    Data,
    Kind,
    contents,
    deleted,
    doubled,
    harmed,
    random_damage,
    save,
    swapped,
)
from tests.support.hostile import Payload
from tests.support.megatron_torch import SCHEDULE
from tests.support.ranks import RankPool

PICKLED = ("torch", "megatron", "universal", "dcp")
NATIVE = ("zero 2", "zero 3", "owned 1")
TARGETS = ("universal", "dcp", "safetensors")
SEALED = {f"{target}, with a manifest": target for target in TARGETS}
SHAPES = {"embedding.word_embeddings.weight": (32, 8), "output_layer.weight": (32, 8)}
FORMS = (*PICKLED, "safetensors", "stage0", *NATIVE, *SEALED)
Made = dict[str, tuple[Path, Path]]
Copy = Callable[[str], Path]
RAN = "ran"  # a folder that code in a file makes in the current one


def saved(folder: Path, target: str, step: int) -> Path:
    torch.manual_seed(step)
    params = {}
    for name, shape in SHAPES.items():
        master, *moments = (held(torch.randn(shape), name) for _ in range(3))
        states = {"fp32": master, **dict(zip(("exp_avg", "exp_avg_sq"), moments))}
        params[name] = Param(master.to(torch.bfloat16), states, float(step), 0)
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    arguments = {"num_attention_heads": 2, "num_layers": 0, "global_batch_size": 1}
    counts: dict[str, Any] = {"iteration": step, "samples": step, "scheduler": SCHEDULE}
    found = Checkpoint("made here", "", "megatron-core", params, (options,), arguments, **counts)
    more = {"file_bytes": 600} if target == "safetensors" else {}
    convert.write(found, target, convert.destination_of(found, target, folder), **more)
    return folder


@pytest.fixture(scope="module")
def made(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """By form, a checkpoint and, where it has a manifest, another save with files of the same names."""
    folder = tmp_path_factory.mktemp("made")
    found = {form: (path, path) for form, path in hostile.samples(folder / "samples").items()}
    for form in NATIVE:
        rank_pools[2].run(save, form, str(folder / form), 0)
        found[form] = folder / form, folder / form
    for form, target in SEALED.items():
        first, other = (saved(folder / f"{target} {step}" / "save", target, step) for step in (7, 8))
        for path in [*other.glob("global_step8"), *other.glob("iter_0000008")]:
            path.rename(path.with_name(path.name.replace("8", "7")))
        found[form] = first, other
    return found


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Copy:
    return lambda form: Path(shutil.copytree(made[form][0], tmp_path / "from"))


def assert_refused(source: Path, *words: str) -> str:
    """It is neither converted nor shown; nothing is written anywhere, and what is said names the words."""
    before = files(source.parent)
    said = refused("convert", source, source.parent / "to", "--to", "universal")
    shown = lwopt("inspect", source)
    assert shown.code != 0 and shown.err and "Traceback" not in shown.err
    assert files(source.parent) == before and not (source.parent / "to").exists()
    assert all(word in said for word in words), said
    return said


def needed(folder: Path) -> list[Path]:
    """Files but what names the newest, what is for other loaders, and what is only told apart by."""
    spare = ("latest", "zero_pp_rank_0_mp_rank_00_model_states.pt", "metadata.json", manifest.NAME)
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(spare) and path.suffix != ".py"
    ]


# The manifest
@pytest.mark.parametrize("form", SEALED)
def test_manifest_lists_every_file_of_a_save(made: Made, copy: Copy, form: str) -> None:
    """More files are no error."""
    listed = manifest.read(next(made[form][0].rglob(manifest.NAME)).parent)
    assert listed is not None and listed.step == 7
    assert len(listed.files) + 1 == len([name for name in files(made[form][0]) if "latest" not in name])
    source = copy(form)
    (next(source.rglob(manifest.NAME)).parent / "zero_to_fp32.py").write_text("print()")
    succeeds("inspect", source)


def test_a_manifest_that_is_damaged_or_leads_out_is_refused(copy: Copy) -> None:
    source = copy("dcp, with a manifest")
    path = source / manifest.NAME
    kept = json.loads(path.read_text())
    for wrong in ({"step": 9}, {"files": {"../x": kept["files"][".metadata"]}}, {"files": {"x": {}}}, {"files": 3}):
        content = {**kept, **wrong}
        del content["crc32"]
        crc32 = kept["crc32"] if "step" in wrong else f"{zlib.crc32(json.dumps(content).encode()):08x}"
        path.write_text(json.dumps({**content, "crc32": crc32}))
        assert_refused(source, manifest.NAME)
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        manifest.read(source)


# Every form and every damage
def in_a_record(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    """A flipped bit in the largest record of what torch saved, or else near the end, where tensors are."""
    content = bytearray(data[path])
    place = len(content) - 6
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entry = max(archive.infolist(), key=lambda entry: entry.file_size)
        lengths = struct.unpack_from("<2H", content, entry.header_offset + 26)  # of its name, and of more
        place = entry.header_offset + 30 + sum(lengths) + entry.file_size // 2
    content[place] ^= 4
    return {path: bytes(content)}


def becomes(change: Callable[[bytes], bytes]) -> Kind:
    return lambda generator, path, data, other: {path: change(data[path])}


def as_torch_saves(value: Any) -> bytes:
    torch.save(value, written := io.BytesIO())
    return written.getvalue()


HARM, OTHER = {"param": Payload(os.mkdir, RAN)}, {"something": torch.ones(3)}
CUT, NOT_READ = "is damaged: File is not a zip file", "is damaged: |ends early|cannot be unpickled"
ELSE, NO_FILE = (
    "holds no|expected|cannot be read as|is not what DCP writes",
    "expected a file of torch.save, found another",
)
GONE = "is missing|has no |expected .* (files?|of|rank|folder)|of a known format"
DAMAGE: dict[str, tuple[Kind, str, str]] = {  # what is said of files of torch.save, and of others
    "a flipped bit": (in_a_record, "is damaged: ", "is damaged: "),
    "half": (becomes(lambda data: data[: len(data) // 2]), CUT, NOT_READ),
    "all but a byte": (becomes(lambda data: data[:-1]), CUT, NOT_READ),
    "empty": (becomes(lambda data: b""), NO_FILE, NOT_READ),
    "gone": (deleted, GONE, GONE),
    "noise": (becomes(lambda data: random.Random(0).randbytes(200)), NO_FILE, NOT_READ),
    "code": (becomes(lambda data: pickle.dumps(HARM)), NO_FILE, f"{ELSE}|{NOT_READ}"),
    "code in torch's": (becomes(lambda data: as_torch_saves(HARM)), ELSE, f"{ELSE}|{NOT_READ}"),
    "something else": (becomes(lambda data: as_torch_saves(OTHER)), ELSE, f"{ELSE}|{NOT_READ}"),
    "another of its files": (doubled, "", ""),
    "one for the other": (swapped, "", ""),
    "another save's": (lambda generator, path, data, other: {path: other.get(path)}, "", ""),  # under its own name
}
OF_OTHERS = ("another of its files", "one for the other", "another save's")


def is_noticed(form: str, damage: str, path: Path) -> bool:
    """Files of tensors of one shape are told apart by manifests, and only torch's have checksums without one."""
    if form in SEALED:
        return True
    if damage == "a flipped bit":
        return path.suffix in (".pt", ".distcp")
    if damage in ("something else", "code in torch's"):  # of Megatron's common.pt anything may be missing
        return form != "megatron"
    return damage not in OF_OTHERS


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_an_error_that_names_it(
    made: Made, copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """One file of each name, in each way; code in it is not run."""
    source, generator = copy(form), random.Random(0)
    data, of_other = contents(source), contents(made[form][1])
    monkeypatch.chdir(tmp_path)
    for path in {path.name: path.relative_to(source) for path in needed(source)}.values():
        for damage, (change, of_torchs, of_others) in DAMAGE.items():
            changes = change(generator, path, data, of_other) if is_noticed(form, damage, path) else {}
            if all(data[changed] == new for changed, new in changes.items()):
                continue
            with harmed(source, changes, data):
                run = lwopt("inspect", source)
                found = run.out + run.err if form in SEALED else assert_refused(source)
            named = [changed.name for changed in changes]
            if form not in SEALED or "of a known format" in found:
                named += [*(changed.parent.name for changed in changes), str(source)]
            assert run.code and any(name in "".join(found.split()) for name in named if name), (damage, found)
            said = "" if form in SEALED else of_torchs if path.suffix == ".pt" else of_others
            assert re.search(said, " ".join(found.split())), (path, damage, found)
            assert not (tmp_path / RAN).exists(), (path, damage)
    succeeds("inspect", source)


@pytest.mark.parametrize("form", PICKLED)
def test_a_flipped_bit_is_noticed_or_is_of_no_consequence(made: Made, tmp_path: Path, form: str) -> None:
    """Never does another checkpoint come out of it. Bytes between records are not checked, and not used."""
    source = made[form][0]
    noticed, _ = random_damage(source, source, tmp_path, 1, 48, kinds=RANDOM[:1], suffixes=(".pt", ".distcp"))
    assert noticed >= 16


def test_code_in_a_distributed_checkpoint_is_not_run(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code in an object of a distributed checkpoint is not run. In the files of tensors, under a key that the metadata
    gives."""
    source = copy("dcp")
    monkeypatch.chdir(tmp_path)
    metadata, payload = pickle.loads((source / ".metadata").read_bytes()), as_torch_saves(HARM)
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "arguments")
    file = source / info.relative_path
    info.offset, info.length = file.stat().st_size, len(payload)
    file.write_bytes(file.read_bytes() + payload)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    succeeds("convert", source, tmp_path / "to", "--to", "universal")
    assert formats.read(tmp_path / "to").arguments["param"] == f"mkdir({RAN})" and not (tmp_path / RAN).exists()


# Paths that lead out of the folder
@pytest.mark.parametrize("form", ["torch", "megatron", "universal", "stage0"])
def test_a_pointer_that_leads_elsewhere_is_refused(copy: Copy, form: str) -> None:
    source = copy(form)
    name = {"universal": "latest_universal", "stage0": "latest"}.get(form, "latest_checkpointed_iteration.txt")
    step = next(source.glob("*3" if form == "stage0" else "*7"))
    shutil.copytree(step, source.parent / step.name)
    (source / name).write_text(f"../{step.name}")
    assert_refused(source, name)


@pytest.mark.parametrize("form", ["megatron", "dcp"])
def test_metadata_that_leads_out_of_the_folder_is_refused(copy: Copy, form: str) -> None:
    source = copy(form)
    (path,) = source.rglob(".metadata")
    metadata = pickle.loads(path.read_bytes())
    info, outside = next(iter(metadata.storage_data.values())), source.parent / "outside.distcp"
    shutil.copy(path.parent / info.relative_path, outside)
    for leads in (os.path.relpath(outside, path.parent), str(outside), "C:\\outside.distcp"):
        info.relative_path = leads
        path.write_bytes(pickle.dumps(metadata))
        assert_refused(source, ".metadata", "outside of it")


def test_owned_storage_that_deepspeed_converted_is_refused(copy: Copy) -> None:
    """It has kept the description of what it converted, and not what owners keep."""
    source = copy("universal")
    file = source / "global_step7" / "zero" / "optimizer_state.pt"
    torch.save({**torch.load(file, weights_only=True), "lwopt.owned": {"members": []}}, file)
    assert_refused(source, "global_step7", "found a conversion by DeepSpeed")


@pytest.mark.parametrize("target", ["../../outside/", "/outside/", "a/"])
def test_a_map_of_names_cannot_lead_out_of_the_new_folder(copy: Copy, tmp_path: Path, target: str) -> None:
    source = copy("megatron")
    (tmp_path / "own.py").write_text(f"def mine(name, tensor, model): return {{'{target}' + name: tensor}}")
    before = files(source.parent)
    own = ("--map", f"{tmp_path / 'own.py'}:mine")
    said = refused("convert", source, source.parent / "to", "--to", "universal", *own)
    assert "leads elsewhere" in said and files(source.parent) == before
    assert {path.name for path in source.parent.iterdir()} == {"from", "own.py"}


@pytest.mark.parametrize("form", PICKLED)
def test_links_are_followed(copy: Copy, form: str) -> None:
    """Those beside what is read are left alone. Files are links in the hub's cache; a run's folder has its data and its
    other steps, some on another disk."""
    source = copy(form)
    disk = source.parent / "disk"
    disk.mkdir()
    (disk / "file").write_text("mine")
    for number, path in enumerate(needed(source)):
        shutil.move(path, disk / str(number))
        path.symlink_to(disk / str(number))
    if any((source / format.pointer).is_file() for format in formats.FORMATS.values() if format.pointer):
        step = next(path for path in source.iterdir() if path.is_dir())
        shutil.move(step, disk / step.name)
        step.symlink_to(disk / step.name)
    for folder in {source, *(path for path in source.iterdir() if path.is_dir())}:
        (folder / "data").symlink_to(disk)
        (folder / "config.json").symlink_to(disk / "file")
        (folder / "nowhere").symlink_to(disk / "gone")
        os.mkfifo(folder / "pipe")
    succeeds("convert", source, source.parent / "to", "--to", "universal")
    shutil.rmtree(source.parent / "to")
    links = (path for path in source.parent.rglob("*") if path.is_symlink())
    path = next(path for path in links if path.suffix in (".pt", ".distcp"))
    path.unlink()
    path.symlink_to(path)  # to itself
    assert_refused(source)
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    assert_refused(source, path.name)


def on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    """What is in a folder, with its inode, size and times of changes."""
    found = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found.items()}


@pytest.mark.parametrize("form", PICKLED)
def test_looking_changes_nothing_on_the_disk(copy: Copy, made: Made, form: str) -> None:
    """Not even next to the folder, where a killed program left folders under temporary names."""
    source = copy(form)
    for folder, ending in itertools.product((source, source.parent), (".lwopt-old", NEW)):
        shutil.copytree(made[form][0], folder / f".gone.0123{ending}")
    before = on_disk(source.parent)
    for words in (("inspect", source), ("diff", source, source)):
        lwopt(*words)
        assert on_disk(source.parent) == before, words
    refused("inspect", source.parent / "gone")
    assert on_disk(source.parent) == before


def test_a_target_has_many_spellings(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders above it need not be there; one that is there keeps its other steps."""
    for number, target in enumerate(("to", "to/", "./to", "a/b/to", "there", "there/.", ".")):
        root = tmp_path / str(number)
        (root / "there" / "global_step3").mkdir(parents=True)
        (root / "there" / "global_step3" / "file").write_text("mine")
        (root / "there" / "latest_universal").write_text("global_step3")
        monkeypatch.chdir(root)
        words = ("convert", made["megatron"][0], target, "--to", "universal")
        succeeds(*words)
        found, pointer = files(root), str(Path(target) / "latest_universal")
        other_step = {"there/global_step3/file", "there/latest_universal"}
        assert {name for name in found if "global_step7/" not in name} == {*other_step, pointer}
        assert found["there/global_step3/file"] == b"mine" and found[pointer] == b"global_step7"
        assert succeeds("diff", made["megatron"][0], target)
        assert "already exists" in refused(*words) and files(root) == found
        assert not list(root.rglob(".*lwopt*"))


# A full disk
@pytest.mark.parametrize("target", ["universal", "universal, into a folder", "dcp", "safetensors"])
def test_file_that_cannot_be_written_is_one_error(tmp_path: Path, target: str) -> None:
    """The error names the target."""
    source = hostile.stage0(tmp_path / "from")
    place, (target, *there) = tmp_path / "to" / "new", target.split(", ")
    if there:
        place.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with too_large():
        said = refused("convert", source, place, "--to", target)
    assert said.count("\n") == 1 and str(place) in said and "File too large" in said
    assert sorted(tmp_path.rglob("*")) == before
