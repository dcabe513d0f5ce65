"""A checkpoint's parameters by name and shape, without reading weights, and their routes."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lwopt_backend.checkpoint import safetensors
from lwopt_backend.checkpoint.contents import LONGEST_NAME, LazyTensor, read_as_expected
from lwopt_backend.checkpoint.dcp import reader as dcp
from lwopt_backend.checkpoint.dcp.reader import Entry
from lwopt_backend.checkpoint.deepspeed.files import MODEL, model_files, names_in, read_model_states, tag_of
from lwopt_backend.checkpoint.deepspeed.universal import state_in
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.megatron import dist as megatron_dist
from lwopt_backend.checkpoint.megatron import fsdp as megatron_fsdp
from lwopt_backend.checkpoint.megatron import torch as megatron_torch
from lwopt_backend.planner import shapes
from lwopt_backend.planner.shapes import Contents, ModelShapes, Stored, Training, in_natural_order
from lwopt_backend.routing.models import ADAPTERS, LORA, adapter_in, without_peft
from lwopt_backend.routing.output_heads import HEAD_NAMES, HEAD_NAMES_OUTSIDE_BLOCKS, NOT_A_VOCABULARY
from lwopt_backend.routing.routing import (
    BY_NAME,
    BY_WORD,
    Kind,
    Route,
    by_glob,
    check_all_globs,
    lora_factor,
    named_as_stack,
    stacked,
    vector,
)

# Folders that training writes. Converting reads all their files; this reads only those with names and shapes.

IN_MEGATRON = {megatron_torch: "torch", megatron_dist: "torch_dist", megatron_fsdp: "fsdp_dtensor"}
POINTERS = ("latest", "latest_universal")  # DeepSpeed's
# Keys under which training scripts, DeepSpeed, Lightning and torch's examples save the model's state dict.
CONTAINERS = ("app", "model", "module", "state_dict", "model_state_dict")
OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers"})

T = TypeVar("T")


def _read_trained(folder: Path) -> Contents | None:
    """The parameters in a folder of Megatron, DCP or DeepSpeed; None if none of them wrote it. Raises ValueError."""
    megatron = next((reader for reader in IN_MEGATRON if reader.recognises(folder)), None)
    if megatron is not None:  # tested first, because its folders also look like DCP's
        params = megatron.read_weights(folder)
        tensors = tuple(_stored(name, param.best) for name, param in params.items())
        return Contents(f"Megatron's {IN_MEGATRON[megatron]} checkpoint {folder.name}", tensors)
    if dcp.recognises(folder):
        return Contents(f"torch.distributed.checkpoint folder {folder.name}", _in_dcp(folder))
    pointer = next((name for name in POINTERS if (folder / name).is_file()), None)
    if pointer or any(map(MODEL.fullmatch, names_in(folder))) or any(folder.glob("zero/*/fp32.pt")):
        tag = tag_of(folder, pointer or POINTERS[0])
        if any(map(MODEL.fullmatch, names_in(tag))) or not (tag / "zero").is_dir():
            return Contents(f"DeepSpeed checkpoint {tag.name}", parameters_in(model_files(tag)))
        files = tag.glob("zero/*/fp32.pt")
        stored = [_stored(file.parent.name, state_in(torch_files.load(file, tag), None, file)) for file in files]
        return _unordered(f"DeepSpeed universal checkpoint {tag.name}", stored)
    return None


def _in_dcp(folder: Path) -> tuple[Stored, ...]:
    """The model's whole tensors, in the order of the saved state dict."""
    found = dcp.DcpFolder(folder, metadata_only=True)
    names = dict.fromkeys((*(name for name in found.paths if name in found.tensors), *found.tensors))
    tensors = {name: Stored(name, found.tensors[name].shape, _floating(found.tensors[name])) for name in names}
    tree = dcp.by_paths({found.paths.get(name, (name,)): tensor for name, tensor in tensors.items()}, folder)
    named = state_dict_in(tree, folder / dcp.METADATA, Stored)
    return tuple(replace(tensor, name=name) for name, tensor in named.items())


def parameters_in(files: list[Path]) -> tuple[Stored, ...]:
    """The parameters in files of model states; those that were not trained are frozen, which stage 0 does not save."""
    states = read_model_states(files)
    trained = {name: shape for group in states.shapes or () for name, shape in group.items()}
    shapes = {name: tensor.shape for name, tensor in {**states.module, **states.frozen}.items()} | trained
    return tuple(
        Stored(
            name,
            tuple(shapes[name]),
            _floating(tensor),
            frozen=states.shapes is not None and name not in trained,
            aliases=tuple(alias for alias, other in states.tied.items() if other == name),
        )
        for name, tensor in states.module.items()
        if name not in states.buffers and name not in states.tied
    )


def _stored(name: str, tensor: LazyTensor, aliases: Sequence[str] = ()) -> Stored:
    return Stored(name, tensor.shape, _floating(tensor), aliases=tuple(aliases))


def _floating(tensor: LazyTensor | Entry) -> bool:
    return tensor.dtype.is_floating_point


def _unordered(source: str, tensors: Sequence[Stored]) -> Contents:
    return Contents(source, in_natural_order(tensors), (shapes.NOT_IN_MODEL_ORDER,))


def state_dict_in(saved: Any, where: Path, leaf: type[T]) -> dict[str, T]:
    """The model's state dict in what was saved: at the top, or under one of CONTAINERS. ``leaf`` is a tensor's type.

    Other branches, such as an optimizer's, are ignored. Raises ValueError if there is no state dict.
    """
    tree = saved
    while isinstance(tree, Mapping):
        inner = next((tree[key] for key in CONTAINERS if isinstance(tree.get(key), Mapping)), None)
        if inner is None:
            break
        tree = inner
    named = {} if not isinstance(tree, Mapping) else {k: v for k, v in tree.items() if isinstance(v, leaf)}
    named = {k: v for k, v in named.items() if isinstance(k, str) and k.partition(".")[0] not in OPTIMIZERS}
    if not named:
        keys = f"the keys {list(tree)[:8]}" if isinstance(tree, Mapping) else f"an object of {type(tree).__name__}"
        raise ValueError(
            f"{where}: expected a state dict at the top or under one of {', '.join(CONTAINERS)}, found {keys}; "
            "save it so: torch.save(model.state_dict(), path)"
        )
    return named


# Files, the index of several, and folders of them.

INDEX = ".index.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
# Of a Hugging Face folder; the first that is there holds the model, or lists the files that do.
HUGGING_FACE = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in (INDEX, ""))
READABLE = (
    "a *.safetensors or torch.save file, a *.index.json of several, a Hugging Face folder, a folder by "
    "torch.distributed.checkpoint, by Megatron or by DeepSpeed"
)
BY_NAME_ONLY = "routed by name and shape only: a checkpoint has no modules; correct it with include and exclude"


def read_checkpoint(path: str | os.PathLike[str], training: Training | None = None) -> ModelShapes:
    """Route the model in the checkpoint ``path``: a file, the index of several, or a folder.

    Leaves out optimizer state and tensors that are not floating point. ``training`` has the rules, by default ours.
    Raises ValueError with the path, what was expected and what was found.
    """
    path = Path(path)
    contents = read_as_expected(lambda: _read(path), path, "a program that is known", ValueError)
    parameters = [t for t in contents.tensors if t.floating]
    others = [t.name for t in contents.tensors if not t.floating]
    if long := [t.name for t in parameters if len(t.name) > LONGEST_NAME]:
        raise ValueError(f"{path}: a parameter's name has {len(long[0])} characters, {long[0][:50]!r}...; rename it")
    if not parameters:
        raise ValueError(f"{path}: expected a model's weights, found no floating-point tensor; give another checkpoint")
    training = training or Training()
    routes, divided = training.of(route_by_name(parameters, training.config.include, training.config.exclude))
    notes = [BY_NAME_ONLY, *contents.notes]
    if others:
        notes.append(
            f"left out: {len(others)} tensor(s) that are not floating point, such as {others[0]!r}; if these are "
            "quantized weights, read the model's configuration instead"
        )
    return ModelShapes(contents.source, routes, divided, tuple(notes))


def _read(path: Path) -> Contents:
    if path.is_dir():
        if (trained := _read_trained(path)) is not None:
            return trained
        for name in HUGGING_FACE:  # in whose cache all files are links out of the folder
            if (path / name).is_file():
                return _read(path / name)
        if files := sorted(path.glob("*.safetensors")):
            return _read_files(files)
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ValueError(f"{path}: expected {READABLE}, found {found}; give the folder or file that holds the weights")
    if not path.is_file():
        raise ValueError(f"{path}: expected a checkpoint, found nothing there; check the path")
    if path.name.endswith(INDEX):
        return _read_index(path)
    if path.suffix == ".safetensors":
        return _unordered(path.name, _read_safetensors(path))
    if path.suffix in TORCH_ENDINGS:
        return Contents(path.name, _read_torch(path))
    raise ValueError(f"{path}: expected {READABLE}, found a file ending in {path.suffix!r}; give one of these")


def _read_safetensors(path: Path) -> tuple[Stored, ...]:
    """The tensors of one file, in its order, which is by dtype and name."""
    floating = ("F", "BF")  # F32, BF16, F8_E4M3, ...; others are I, U, BOOL and C
    return tuple(Stored(each.name, each.shape, each.dtype.startswith(floating)) for each in safetensors.entries(path))


def _read_torch(path: Path) -> tuple[Stored, ...]:
    """The tensors of a file by torch.save; names that share elements (tied weights) are aliases of the first name."""
    if not zipfile.is_zipfile(path):  # files of the format before torch 1.6 would be loaded whole
        raise ValueError(
            f"{path}: expected a file by torch.save of torch 1.6 or newer, which is a zip archive, found another; "
            "download it again, or load and save it with a newer torch"
        )
    saved = torch_files.load(path, path.resolve().parent)  # in Hugging Face's cache it is a link
    if isinstance(saved, dict) and {"module", "param_shapes", "ds_version"} <= saved.keys():
        return parameters_in(model_files(path.parent) if MODEL.fullmatch(path.name) else [path])
    named = state_dict_in(saved, path, LazyTensor)
    names: dict[Any, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault((tensor.place, tensor.shape, tensor.stride) if tensor.numel else name, []).append(name)
    return tuple(_stored(first, named[first], others) for first, *others in names.values())


def _read_index(path: Path) -> Contents:
    """The tensors of the files that an index lists, all of which must exist."""
    index = shapes.read_json(path, "an index of checkpoint files")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())):
        raise ValueError(f"{path}: expected a 'weight_map' from names to files, found none; download it again")
    files = [path.parent / Path(file).name for file in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{path}: expected {len(files)} file(s) beside it, found no {missing[0]} ({len(missing)} missing); "
            "download them"
        )
    contents = _read_files(files)
    found = {name for t in contents.tensors for name in (t.name, *t.aliases)}
    if lacking := [name for name in weight_map if name not in found]:
        raise ValueError(f"{path}: expected {lacking[0]!r} in {weight_map[lacking[0]]}, found none; download it again")
    return contents


def _read_files(files: Sequence[Path]) -> Contents:
    """The tensors of several files that together are one model."""
    homes: dict[str, Path] = {}
    tensors: list[Stored] = []
    kind = "safetensors" if files[0].suffix == ".safetensors" else "torch"
    for file in files:
        for tensor in _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file):
            if homes.setdefault(tensor.name, file) != file:
                raise ValueError(
                    f"{file}: expected parameters that are in no other file, found {tensor.name!r}, which is also in "
                    f"{homes[tensor.name].name}; give the file, or the {INDEX}, of one model"
                )
            tensors.append(tensor)
    return _unordered(f"{len(files)} {kind} file{'s' * (len(files) > 1)}", tensors)


# Routing without modules: by the names and shapes that a checkpoint has. The words are routing's and output_heads'.
#
# This is weaker than ``routing.route``, which sees the class of every module: an embedding called ``lookup`` is a
# matrix here. ``include`` and ``exclude`` correct it.

# Modules that are embeddings by a name that is not made of BY_WORD's words: GPT-2's two, and T5's and BART's one.
EMBEDDING_MODULES = frozenset({"wte", "wpe", "shared"})
PROJECTION = re.compile(r"(^|_)(proj|map)")  # embed_proj, embedding_hidden_mapping_in: a linear behind an embedding
NORM = re.compile(r"norm|(^|_)ln(\d|_|$)", re.IGNORECASE)
SCALE = re.compile(r"(^|_)scales?(_inv)?$")  # of a quantized matrix, one per block of it


def route_by_name(tensors: Sequence[Stored], include: Sequence[str], exclude: Sequence[str]) -> tuple[Route, ...]:
    """Route ``tensors``, in order. Raises ValueError for a glob that matches nothing to which it could apply."""
    known = _as_the_model_has_it(tensors)
    own = list(known.values())
    tables = {t.name for t in own if len(t.shape) == 2 and _word_of(t) == BY_WORD["embedding"]}
    widths = frozenset(t.shape[0] for t in own if t.name in tables and not NOT_A_VOCABULARY.search(t.name))
    named = _named_heads(own, widths)
    routes = []
    for tensor in tensors:
        kind, reason = _route_of(tensor, known, named, widths)
        if kind != "frozen":
            kind, reason = by_glob(tensor.shape, (tensor.name, *tensor.aliases), include, exclude) or (kind, reason)
        stack = named_as_stack(tensor.name, tensor.shape)
        routes.append(Route(tensor.name, tensor.shape, kind, reason, tensor.aliases, stack))
    check_all_globs(include, exclude, routes)
    return tuple(routes)


def _as_the_model_has_it(tensors: Sequence[Stored]) -> Mapping[str, Stored]:
    """By tensor name, the model's own tensor without PEFT; for LoRA's factors, the weight that they change."""
    by_name, known = {tensor.name: tensor for tensor in tensors}, {}
    for tensor in tensors:
        found = adapter_in(tensor.name)
        if found is None:
            known[tensor.name] = replace(tensor, name=without_peft(tensor.name))
        elif found[1] in LORA:
            layer, attribute = found
            factors = (
                ".".join(factor if part == attribute else part for part in tensor.name.split("."))
                for factor in sorted(LORA)
            )
            a, b = (by_name.get(name, tensor) for name in factors)
            shape = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 else tensor.shape
            known[tensor.name] = replace(tensor, name=f"{layer}.weight", shape=shape)
    return known


def _route_of(
    tensor: Stored, known: Mapping[str, Stored], named: Mapping[str, str], widths: frozenset[int]
) -> tuple[Kind, str]:
    found = adapter_in(tensor.name)
    if found is None or tensor.frozen:
        return _by_name(known.get(tensor.name, tensor), named, widths)
    layer, attribute = found
    if attribute in ADAPTERS:
        return "elementwise", ADAPTERS[attribute]
    said, weight = lora_factor(attribute, layer), known[tensor.name]
    kind, reason = _by_name(weight, named, widths) if len(tensor.shape) == 2 else ("elementwise", _dimensions(tensor))
    if kind == "matrix" and vector(tensor.shape) is not None:
        kind, reason = "elementwise", "rank 1"
    return kind, said if kind == "matrix" else f"{said}: {reason}"


def _by_name(tensor: Stored, named: Mapping[str, str], widths: frozenset[int]) -> tuple[Kind, str]:
    if tensor.frozen:
        return "frozen", "frozen in the checkpoint"
    if len(tensor.shape) != 2:
        return "elementwise", _dimensions(tensor)
    if tensor.name in named:
        return "elementwise", named[tensor.name]
    word = _word_of(tensor)
    if word is not None:
        return "elementwise", word
    if tensor.shape[0] in widths and not _in_a_block(tensor.name.rpartition(".")[0]):
        return "elementwise", "output head, as wide as an embedding has rows"
    if 0 in tensor.shape:
        return "elementwise", "no elements"
    one = vector(tensor.shape)
    return ("matrix", "2-D weight") if one is None else ("elementwise", one)


def _dimensions(tensor: Stored) -> str:
    if named_as_stack(tensor.name, tensor.shape) and vector(tensor.shape) is not None:
        return f"{stacked(tensor.shape)} of {vector(tensor.shape)}"
    return f"{len(tensor.shape)}-D"


def _word_of(tensor: Stored) -> str | None:
    """The reason that a word in a parameter's or its module's name gives for a 2-D weight, or None."""
    owner, _, key = tensor.name.rpartition(".")  # "layers.0.q_proj", "weight"
    module = owner.rpartition(".")[2]
    if NORM.search(module):
        return "norm"
    if key in BY_NAME:
        return BY_NAME[key]
    if SCALE.search(key):
        return "scale by name"
    if module in EMBEDDING_MODULES:
        return BY_WORD["embedding"]
    words = key.split("_") if PROJECTION.search(module) else key.split("_") + module.split("_")
    return next((BY_WORD[word] for word in words if word in BY_WORD), None)


def _named_heads(tensors: Sequence[Stored], widths: frozenset[int]) -> dict[str, str]:
    """The last weight of every module named like a head, unless it keeps the width: see output_heads."""
    last: dict[str, Stored] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")[:-1] if len(tensor.shape) == 2 else []
        for number, leaf in enumerate(parts):
            path = ".".join(parts[: number + 1])
            # One inside a block is a head if it is as wide as a vocabulary: DeepSeek's for the token after the next.
            elsewhere = not _in_a_block(path) or tensor.shape[0] in widths
            if leaf in HEAD_NAMES or (leaf in HEAD_NAMES_OUTSIDE_BLOCKS and elsewhere):
                last[path] = tensor
    return {
        tensor.name: f"output head, named {path.rpartition('.')[2]!r}"
        for path, tensor in last.items()
        if tensor.name.rpartition(".")[0] == path or tensor.shape[0] != tensor.shape[1]
    }


def _in_a_block(path: str) -> bool:
    """Whether a module is inside a numbered one, such as ``layers.0``; the numbered one itself is not."""
    return any(part.isdecimal() for part in path.split(".")[:-1])
