"""The parameters of a checkpoint: names and shapes, whatever the format; the weights are never read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lwopt_backend.checkpoint.contents import LONGEST_NAME, read_as_expected
from lwopt_backend.checkpoint.files.links import check_links
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.model_shapes.by_name import route_by_name
from lwopt_backend.model_shapes.dcp_folder import is_dcp_folder, read_dcp_folder
from lwopt_backend.model_shapes.deepspeed_folder import is_deepspeed_folder, read_deepspeed_folder, read_model_states
from lwopt_backend.model_shapes.json_files import read_json
from lwopt_backend.model_shapes.megatron_folder import is_megatron_folder, read_megatron_folder
from lwopt_backend.model_shapes.safetensors_files import read_safetensors
from lwopt_backend.model_shapes.torch_files import load_without_elements, state_dict_in, stored_tensors
from lwopt_backend.model_shapes.training import Training
from lwopt_backend.model_shapes.types import NOT_IN_MODEL_ORDER, Contents, ModelShapes, Stored, in_natural_order

INDEX = ".index.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
# Files of a Hugging Face folder; the first that is there holds the model, or lists the files that do.
HUGGING_FACE = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Folders that training writes; the first that recognises one reads it.
TRAINED: tuple[tuple[Callable[[Path], bool], Callable[[Path], Contents]], ...] = (
    (is_megatron_folder, read_megatron_folder),
    (is_dcp_folder, read_dcp_folder),
    (is_deepspeed_folder, read_deepspeed_folder),
)
READABLE = (
    "a *.safetensors or torch.save file, a *.index.json of several, a Hugging Face folder, a folder by "
    "torch.distributed.checkpoint, by Megatron or by DeepSpeed"
)
BY_NAME = "routed by name and shape only: a checkpoint has no modules; correct it with include and exclude"


def read_checkpoint(
    path: str | os.PathLike[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    training: Training | None = None,
) -> ModelShapes:
    """Route the model in the checkpoint ``path``: a file, the index of several, or a folder.

    Optimizer state is not listed, nor is anything that is not floating point. ``training`` says by which
    rules, by default ours for ``include`` and ``exclude``. Raises ValueError that names the path, what was expected
    and found.
    """
    path = Path(path)
    contents = read_as_expected(lambda: _read(path), path, "a program that is known", ValueError)
    parameters = [t for t in contents.tensors if t.floating]
    if long := [t.name for t in parameters if len(t.name) > LONGEST_NAME]:
        raise ValueError(f"{path}: a parameter's name has {len(long[0])} characters, {long[0][:50]!r}...; rename it")
    if not parameters:
        raise ValueError(f"{path}: expected a model's weights, found no floating-point tensor; give another checkpoint")
    training = training or Training.routed(include, exclude)
    routes, divided = training.of(route_by_name(parameters, training.config.include, training.config.exclude))
    return ModelShapes(contents.source, routes, divided, (BY_NAME, *contents.notes, *_left_out(contents.tensors)))


def _left_out(tensors: Iterable[Stored]) -> tuple[str, ...]:
    names = [t.name for t in tensors if not t.floating]
    if not names:
        return ()
    return (
        f"left out: {len(names)} tensor(s) that are not floating point, such as {names[0]!r}; if these are quantized "
        "weights, read the model's configuration instead",
    )


def _read(path: Path) -> Contents:
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise ValueError(f"{path}: expected a checkpoint, found nothing there; check the path")
    if path.name.endswith(INDEX):
        return _read_index(path)
    if path.suffix == ".safetensors":
        return Contents(path.name, in_natural_order(read_safetensors(path)), (NOT_IN_MODEL_ORDER,))
    if path.suffix in TORCH_ENDINGS:
        return Contents(path.name, _read_torch(path))
    raise ValueError(f"{path}: expected {READABLE}, found a file ending in {path.suffix!r}; give one of these")


def _read_folder(folder: Path) -> Contents:
    for recognises, read in TRAINED:
        if recognises(folder):
            check_links(folder)  # in Hugging Face's cache, below, all files are links out of the folder
            return read(folder)
    for name in HUGGING_FACE:
        if (folder / name).is_file():
            return _read(folder / name)
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return _read_shards(shards)
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise ValueError(f"{folder}: expected {READABLE}, found {found}; give the folder or file that holds the weights")


def _read_torch(path: Path) -> tuple[Stored, ...]:
    saved = load_without_elements(path)
    if isinstance(saved, dict) and {"module", "param_shapes", "ds_version"} <= saved.keys():
        return read_model_states(saved, path)
    return tuple(stored_tensors(state_dict_in(saved, path, LazyTensor)))


def _read_index(path: Path) -> Contents:
    """The tensors of the files that an index lists, all of which have to be there."""
    index = read_json(path, "an index of checkpoint files")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())):
        raise ValueError(f"{path}: expected a 'weight_map' from names to files, found none; download it again")
    shards = [path.parent / Path(file).name for file in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(
            f"{path}: expected {len(shards)} file(s) beside it, found no {missing[0]} ({len(missing)} missing); "
            "download them"
        )
    contents = _read_shards(shards)
    found = {name for t in contents.tensors for name in (t.name, *t.aliases)}
    lacking = [name for name in weight_map if name not in found]
    if lacking:
        raise ValueError(f"{path}: expected {lacking[0]!r} in {weight_map[lacking[0]]}, found none; download it again")
    return contents


def _read_shards(shards: Sequence[Path]) -> Contents:
    """The tensors of several files that together are one model."""
    homes: dict[str, Path] = {}
    tensors: list[Stored] = []
    for shard in shards:
        for tensor in read_safetensors(shard) if shard.suffix == ".safetensors" else _read_torch(shard):
            if homes.setdefault(tensor.name, shard) != shard:
                raise ValueError(
                    f"{shard}: expected parameters that are in no other file, found {tensor.name!r}, which is also in "
                    f"{homes[tensor.name].name}; give the file, or the {INDEX}, of one model"
                )
            tensors.append(tensor)
    kind = "safetensors" if shards[0].suffix == ".safetensors" else "torch"
    source = f"{len(shards)} {kind} file{'s' * (len(shards) > 1)}"
    return Contents(source, in_natural_order(tensors), (NOT_IN_MODEL_ORDER,))
