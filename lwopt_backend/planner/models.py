"""Names and shapes of a folder by torch.distributed.checkpoint (DCP), from its file ``.metadata`` alone."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lwopt_backend.checkpoint import safetensors
from lwopt_backend.checkpoint.contents import LONGEST_NAME, LazyTensor, read_as_expected
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder
from lwopt_backend.checkpoint.deepspeed.files import MODEL, model_files, names_in, read_model_states, tag_of
from lwopt_backend.checkpoint.deepspeed.universal import state_in
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.folders import check_links
from lwopt_backend.checkpoint.megatron import dist as megatron_dist
from lwopt_backend.checkpoint.megatron import fsdp as megatron_fsdp
from lwopt_backend.checkpoint.megatron import torch as megatron_torch
from lwopt_backend.planner.shapes import (
    NOT_IN_MODEL_ORDER,
    Contents,
    ModelShapes,
    Stored,
    Training,
    in_natural_order,
    read_hugging_face,
    read_json,
    read_shapes_json,
)
from lwopt_backend.routing.models import ADAPTERS, LORA, adapter_in, without_peft
from lwopt_backend.routing.output_heads import HEAD_NAMES, HEAD_NAMES_OUTSIDE_BLOCKS, NOT_A_VOCABULARY
from lwopt_backend.routing.routing import (
    BY_NAME,
    BY_WORD,
    Kind,
    Route,
    by_glob,
    check_globs,
    lora_factor,
    named_as_stack,
    stacked,
    vector,
)


def is_dcp_folder(folder: Path) -> bool:
    """Whether DCP wrote it; Megatron's formats, which it also writes, are to be asked first."""
    return (folder / METADATA).is_file()


def read_dcp_folder(folder: Path) -> Contents:
    """The model's tensors, whole, in the order of the state dict that was saved. Raises ValueError."""
    found = DcpFolder(folder, metadata_only=True)
    tensors = {name: Stored(name, entry.shape, entry.dtype.is_floating_point) for name, entry in found.tensors.items()}
    named = state_dict_in(_nested(tensors, found.paths), folder / METADATA, Stored)
    return Contents(
        f"torch.distributed.checkpoint folder {folder.name}",
        tuple(Stored(name, stored.shape, stored.floating) for name, stored in named.items()),
    )


def _nested(tensors: Mapping[str, Stored], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The saved dictionary of dictionaries. ``paths``: its way to each flat name, if the writer flattened one."""
    tree: dict[str, Any] = {}
    for name in [name for name in paths if name in tensors] + [name for name in tensors if name not in paths]:
        *outer, key = map(str, paths.get(name, (name,)))
        branch = tree
        for part in outer:
            branch = branch.setdefault(part, {})
        branch[key] = tensors[name]
    return tree


# Names and shapes of a DeepSpeed checkpoint.

POINTERS = ("latest", "latest_universal")


def is_deepspeed_folder(folder: Path) -> bool:
    """Whether it is a tag, or a folder of tags."""
    return (
        any((folder / pointer).is_file() for pointer in POINTERS)
        or any(map(MODEL.fullmatch, names_in(folder)))
        or any(folder.glob("zero/*/fp32.pt"))
    )


def read_deepspeed_folder(folder: Path) -> Contents:
    """The parameters of the newest tag, in the module's order. Raises ValueError for pieces of model parallelism."""
    tag = tag_of(folder, next((name for name in POINTERS if (folder / name).is_file()), POINTERS[0]))
    if any(map(MODEL.fullmatch, names_in(tag))) or not (tag / "zero").is_dir():
        return Contents(f"DeepSpeed checkpoint {tag.name}", parameters_in(model_files(tag)))
    files = tag.glob("zero/*/fp32.pt")
    tensors = [stored(file.parent.name, state_in(torch_files.load(file), None, file)) for file in files]
    return Contents(f"DeepSpeed universal checkpoint {tag.name}", in_natural_order(tensors), (NOT_IN_MODEL_ORDER,))


def parameters_in(files: list[Path]) -> tuple[Stored, ...]:
    """The parameters in files of model states; those that no optimizer trained are frozen. Stage 0 does not say."""
    states = read_model_states(files)
    trained = {name: shape for group in states.shapes or () for name, shape in group.items()}
    shapes = {name: tensor.shape for name, tensor in {**states.module, **states.frozen}.items()} | trained
    return tuple(
        Stored(
            name,
            tuple(shapes[name]),
            tensor.dtype.is_floating_point,
            frozen=states.shapes is not None and name not in trained,
            aliases=tuple(alias for alias, other in states.tied.items() if other == name),
        )
        for name, tensor in states.module.items()
        if name not in states.buffers and name not in states.tied
    )


# Names and shapes of a Megatron checkpoint: whole parameters, layer by layer, whatever ranks wrote it.

_READERS = {megatron_torch: "torch", megatron_dist: "torch_dist", megatron_fsdp: "fsdp_dtensor"}


def is_megatron_folder(folder: Path) -> bool:
    """Whether Megatron wrote it."""
    return any(reader.recognises(folder) for reader in _READERS)


def read_megatron_folder(folder: Path) -> Contents:
    """The parameters in the model's order. Raises ValueError."""
    reader = next(reader for reader in _READERS if reader.recognises(folder))
    params = reader.read_weights(folder)
    return Contents(
        f"Megatron's {_READERS[reader]} checkpoint {folder.name}",
        tuple(stored(name, param.best) for name, param in params.items()),
    )


def read_safetensors(path: Path) -> list[Stored]:
    """The tensors of one file, in its order, which is by dtype and name. Raises ValueError if it is no such file."""
    floating = ("F", "BF")  # F32, BF16, F8_E4M3, ...; others are I, U, BOOL and C
    return [Stored(each.name, each.shape, each.dtype.startswith(floating)) for each in safetensors.entries(path)]


# Names and shapes of files by torch.save, of which no weights are read.

# Keys under which training scripts, DeepSpeed, Lightning and torch's examples keep the model's state dict.
CONTAINERS = ("app", "model", "module", "state_dict", "model_state_dict")
OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers"})
SAVE_AGAIN = "torch.save(model.state_dict(), path)"

T = TypeVar("T")


def load_without_elements(path: Path) -> Any:
    """What was saved, with a LazyTensor for every tensor. Raises ValueError."""
    if not zipfile.is_zipfile(path):  # the format before torch 1.6 would be loaded whole
        raise ValueError(
            f"{path}: expected a file by torch.save of torch 1.6 or newer, which is a zip archive, found another; "
            "download it again, or load and save it with a newer torch"
        )
    return torch_files.load(path)


def state_dict_in(saved: Any, where: Path, leaf: type[T]) -> dict[str, T]:
    """The model's state dict in what was saved: at the top, or under one of CONTAINERS. ``leaf`` is a tensor's type.

    Other branches, an optimizer's for one, are not looked into. Raises ValueError if there is no state dict.
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
            f"save it so: {SAVE_AGAIN}"
        )
    return named


def stored_tensors(named: Mapping[str, LazyTensor]) -> list[Stored]:
    """One entry per tensor; names that share their elements (tied weights) share an entry, under the first of them."""
    names: dict[Any, list[str]] = {}
    for name, tensor in named.items():
        place = (tensor.place, tensor.shape, tensor.stride) if tensor.numel else name
        names.setdefault(place, []).append(name)
    return [stored(first, named[first], tuple(others)) for first, *others in names.values()]


def stored(name: str, tensor: LazyTensor, aliases: tuple[str, ...] = ()) -> Stored:
    """A tensor without its elements."""
    return Stored(name, tensor.shape, tensor.dtype.is_floating_point, aliases=aliases)


# The parameters of a checkpoint: names and shapes, whatever the format; the weights are never read.

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
BY_NAME_ONLY = "routed by name and shape only: a checkpoint has no modules; correct it with include and exclude"


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
    return ModelShapes(contents.source, routes, divided, (BY_NAME_ONLY, *contents.notes, *_left_out(contents.tensors)))


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
        return parameters_in(model_files(path.parent) if MODEL.fullmatch(path.name) else [path])
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


# Routing without modules: by the names and shapes that a checkpoint has. The words are routing's and output_heads'.
#
# It is weaker than ``routing.route``, which sees the class of every module: an embedding called ``lookup`` is a matrix
# here. ``include`` and ``exclude`` correct it.

# Modules that are embeddings by a name that is not made of BY_WORD's words: GPT-2's two, and T5's and BART's one.
EMBEDDING_MODULES = frozenset({"wte", "wpe", "shared"})
PROJECTION = re.compile(r"(^|_)(proj|map)")  # embed_proj, embedding_hidden_mapping_in: a linear behind an embedding
NORM = re.compile(r"norm|(^|_)ln(\d|_|$)", re.IGNORECASE)
SCALE = re.compile(r"(^|_)scales?(_inv)?$")  # of a quantized matrix, one per block of it


def route_by_name(tensors: Sequence[Stored], include: Sequence[str], exclude: Sequence[str]) -> tuple[Route, ...]:
    """Route ``tensors``, in their order. Raises ValueError for a glob that matches nothing it could apply to."""
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
    check_globs("include", include, [r for r in routes if len(r.shape) == 2], routes)
    check_globs("exclude", exclude, routes, routes)
    return tuple(routes)


def _as_the_model_has_it(tensors: Sequence[Stored]) -> Mapping[str, Stored]:
    """By the name of every tensor, the model's own as it is without PEFT; for LoRA's factors the weight they change."""
    by_name, known = {tensor.name: tensor for tensor in tensors}, {}
    for tensor in tensors:
        found = adapter_in(tensor.name)
        if found is None:
            known[tensor.name] = replace(tensor, name=without_peft(tensor.name))
        elif found[1] in LORA:
            layer, attribute = found
            a, b = (by_name.get(_with_factor(tensor.name, attribute, factor), tensor) for factor in sorted(LORA))
            shape = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 else tensor.shape
            known[tensor.name] = replace(tensor, name=f"{layer}.weight", shape=shape)
    return known


def _with_factor(name: str, attribute: str, factor: str) -> str:
    """The name of LoRA's other factor, or of the same."""
    return ".".join(factor if part == attribute else part for part in name.split("."))


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
    """What a word in the names of the parameter and of its module says of a 2-D weight, or None."""
    module, key = _module_and_key(tensor.name)
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
    """The last weight of every module that is called like a head, unless it keeps the width: see output_heads."""
    last: dict[str, Stored] = {}
    for tensor in tensors:
        for path in _modules(tensor.name) if len(tensor.shape) == 2 else ():
            leaf = path.rpartition(".")[2]
            # One inside a block is a head if it is as wide as a vocabulary: DeepSeek's for the token after the next.
            elsewhere = not _in_a_block(path) or tensor.shape[0] in widths
            if leaf in HEAD_NAMES or (leaf in HEAD_NAMES_OUTSIDE_BLOCKS and elsewhere):
                last[path] = tensor
    return {
        tensor.name: f"output head, named {path.rpartition('.')[2]!r}"
        for path, tensor in last.items()
        if tensor.name.rpartition(".")[0] == path or tensor.shape[0] != tensor.shape[1]
    }


def _module_and_key(name: str) -> tuple[str, str]:
    """``"layers.0.q_proj.weight"``: the owning module's own name, ``"q_proj"``, and the parameter's, ``"weight"``."""
    owner, _, key = name.rpartition(".")
    return owner.rpartition(".")[2], key


def _modules(name: str) -> list[str]:
    """The paths of all modules the parameter is in, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _in_a_block(path: str) -> bool:
    """Whether the module of that name stands inside a numbered one, such as ``layers.0``; that itself does not."""
    return any(part.isdecimal() for part in path.split(".")[:-1])


# The parameters of a model, read without its weights: from shapes, from a configuration, from a checkpoint.

__all__ = ["ModelShapes", "Training", "read_checkpoint", "read_hugging_face", "read_shapes_json"]
