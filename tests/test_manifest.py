"""What we write proves itself: a file that is flipped, cut, swapped, copied, lost or of another save is named."""

import json
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lwopt_backend.checkpoint import convert, formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, held
from lwopt_backend.checkpoint.dcp import reader as read_dcp
from lwopt_backend.checkpoint.dcp import saving
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.runtime.collectives import Collectives
from tests.command_line import files, lwopt, refused, succeeds
from tests.megatron_torch import SCHEDULE

TARGETS = ("universal", "dcp", "safetensors")
SHAPES = {"embedding.word_embeddings.weight": (32, 8), "output_layer.weight": (32, 8)}


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
    convert.write(found, target, convert.place_of(found, target, folder), **more)
    return folder


class Threads(Collectives):
    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, values: dict[int, Any]) -> None:
        self.rank, self.world_size, self._barrier, self._values = rank, world_size, barrier, values

    def gather_objects(self, value: Any) -> list[Any]:
        self._barrier.wait(60)
        self._values[self.rank] = value
        self._barrier.wait(60)
        return [self._values[rank] for rank in range(self.world_size)]

    def gather_objects_to_first(self, value: Any) -> list[Any] | None:
        gathered = self.gather_objects(value)
        return gathered if self.rank == 0 else None


def by_ranks(folder: Path, step: int, world_size: int = 2) -> Path:
    """What several ranks save together, as owned storage does: each half of every tensor."""
    barrier, values = threading.Barrier(world_size), dict[int, Any]()

    def of_rank(rank: int) -> None:
        shards = saving.Shards()
        for name in ("a", "b"):
            part = torch.full((4, 64), float(10 * step + rank))
            for path in (("model", name), ("optimizer", "state", name, "exp_avg")):
                shards.tensors[path] = saving.Boxes((8, 64), {(4 * rank, 0): held(part, name)})
        shards.objects["optimizer", "param_groups", rank, "params"] = ["ab"[rank]]
        saving.save(folder, shards, Threads(rank, world_size, barrier, values), step=step)

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {target: saved(tmp_path_factory.mktemp(target) / "save", target, 7) for target in TARGETS}
    return {**found, "ranks": by_ranks(tmp_path_factory.mktemp("ranks") / "save", 7)}


def flip(folder: Path) -> Path:
    tensor = next(iter(formats.read(folder).params.values())).best.read()
    part = tensor.view(torch.uint8).flatten()[-12:].numpy().tobytes()
    path = next(path for path in sorted(folder.rglob("*")) if path.is_file() and part in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(part) + 6] ^= 16
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("form", [*TARGETS, "ranks"])
def test_a_manifest_lists_every_file_of_a_save(made: dict[str, Path], form: str) -> None:
    listed = manifest.read(next(made[form].rglob(manifest.NAME)).parent)
    assert listed is not None and listed.step == 7 and listed.world == (2 if form == "ranks" else 1)
    assert len(listed.files) + 1 == len([name for name in files(made[form]) if "latest" not in name])


def test_more_files_are_no_error(made: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made["universal"], tmp_path / "from"))
    (folder / "global_step7" / "zero_to_fp32.py").write_text("print()")
    assert json.loads(succeeds("inspect", folder, "--json"))["step"] == 7
    (folder / "global_step7" / manifest.NAME).unlink()
    harmed = flip(folder)
    found = lwopt("inspect", folder, "--json")
    assert found.code == 1 and harmed.name in found.out
    assert "found nothing" in refused("inspect", tmp_path / "nothing")


def test_a_manifest_that_is_damaged_or_leads_out_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made["dcp"], tmp_path / "from"))
    path = folder / manifest.NAME
    kept = json.loads(path.read_text())
    for wrong in ({"step": 9}, {"files": {"../x": kept["files"]["__0_0.distcp"]}}, {"world": "1"}, {"files": 3}):
        content = {**kept, **wrong}
        del content["crc32"]
        if "step" not in wrong:
            content["crc32"] = f"{zlib.crc32(json.dumps(content).encode()):08x}"
        path.write_text(json.dumps({**content, "crc32": content.get("crc32", kept["crc32"])}))
        assert manifest.NAME in refused("inspect", folder)


def test_a_save_in_place_of_another_has_its_own_manifest(tmp_path: Path) -> None:
    for step in (1, 2):
        by_ranks(tmp_path, step)
        found = manifest.check_files(tmp_path)
        assert found is not None and (found.step, found.world) == (step, 2)
        assert {entry.rank for entry in found.files.values()} == {0, 1}
        assert len(found.files) == 3
        column = read_dcp.DcpFolder(tmp_path).tensor("model.a").read()[:, 0]
        assert column.tolist() == [10.0 * step] * 4 + [10.0 * step + 1] * 4
    (tmp_path / manifest.NAME).unlink()
    read_dcp.DcpFolder(tmp_path)


def test_a_manifest_that_is_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is damaged"):
        (tmp_path / manifest.NAME).write_text("[" * 100_000)
        manifest.read(tmp_path)
