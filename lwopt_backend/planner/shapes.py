"""A model's parameters without its weights: from a Hugging Face configuration or a list of shapes."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.options import install_command, nearest
from lwopt_backend.groups.choices import Rules, changed, settings_of
from lwopt_backend.groups.grouping import as_taken, group_parameters
from lwopt_backend.groups.param_groups import check_overrides, overrides_of
from lwopt_backend.routing.matrices import Divided, divide_by_name
from lwopt_backend.routing.routing import Route, named_as_stack


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model's parameters and their routes.

    - ``source``: what was read, e.g. ``"config.json of LlamaForCausalLM"``.
    - ``routes``: one per parameter, in model order if the source keeps it.
    - ``divided``: the matrices in each parameter that the matrix rule trains, by name.
    - ``notes``: sentences for the user.
    - ``dtype``: of the parameters, if the source says so, e.g. ``"bfloat16"``.
    """

    source: str
    routes: tuple[Route, ...]
    divided: Mapping[str, Divided]
    notes: tuple[str, ...] = ()
    dtype: str | None = None


# Reading a JSON file.

Pairs = list[tuple[str, Any]]
LARGEST = 2**60  # elements; their bytes still fit torch's integers


def read_json(path: Path, expected: str, objects: Callable[[Pairs], Any] = dict) -> Any:
    """The content of ``path``; ``expected`` describes it in errors.

    ``objects`` makes an object from its pairs; a dict drops repeated names. Raises ValueError for a missing file and
    for anything that is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=objects)
    except OSError as error:
        raise ValueError(f"{path}: expected {expected}, but the file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {expected}, but this is not JSON: {error}; correct the file") from error


# A Hugging Face model from its config.json: built on the meta device, so nothing is allocated or downloaded.

EXPECTED = "a Hugging Face config.json"
_COUNTS = re.compile(r"(layers?|blocks?|experts?)$")
MOST = 4096
DTYPES = ("bfloat16", "float16", "float32")


def read_hugging_face(path: str | os.PathLike[str], training: Training | None = None) -> ModelShapes:
    """The model that ``path``, a config.json or a folder with one, describes, as it would be trained.

    ``training`` has the rules, by default Muon and AdamW. The class is the one that the configuration names; otherwise
    transformers' class for training it on text, or else its bare model. Code that comes with a checkpoint is never run.
    Raises ImportError without transformers, and ValueError for a file from which no model can be built.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    written = read_json(path, EXPECTED)
    if not isinstance(written, dict):
        raise ValueError(f"{path}: expected {EXPECTED}, an object, found {type(written).__name__}; give another file")
    _check_counts(path, written)
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{path}: reading a Hugging Face configuration needs transformers, which cannot be imported ({error}); "
            f"run: {install_command('transformers')}"
        ) from error
    config = _config(path, written, transformers)
    model_class, notes = _model_class(path, config, transformers)
    config._attn_implementation = "eager"  # the file's choice may not be installed here
    try:
        with torch.device("meta"):
            model: nn.Module = model_class(config)
    except Exception as error:  # code of several hundred model families
        raise ValueError(_not_possible(path, f"build {model_class.__name__}", error, transformers)) from error
    training = training or Training()
    trained = [{"params": [param for param in model.parameters() if param.requires_grad]}]
    found = group_parameters(model, trained, training.rules, training.config)
    source = f"{path.name} of {model_class.__name__}"
    return ModelShapes(source, tuple(found.routes), found.divided, notes, _dtype(path, written))


def _dtype(path: Path, written: Mapping[str, Any]) -> str | None:
    """The dtype that a configuration, or the one of its language model, gives; None if it gives none."""
    for part in (written, written.get("text_config")):
        found = next((part[key] for key in ("dtype", "torch_dtype") if part.get(key)), None) if part else None
        if found is not None and found != "auto":
            name = str(found).removeprefix("torch.")
            if name not in DTYPES:
                raise ValueError(f"{path}: dtype: expected one of {', '.join(DTYPES)}, found {found!r}; give --dtype")
            return name
    return None


def _check_counts(path: Path, written: Mapping[str, Any]) -> None:
    """Raises ValueError for more layers or experts than any model has: each is built as a module."""
    for key, value in written.items():
        if isinstance(value, Mapping):
            _check_counts(path, value)
        elif _COUNTS.search(str(key)) and isinstance(value, (int, float)) and value > MOST:
            raise ValueError(f"{path}: {key}: expected at most {MOST}, found {value}; correct the file")


def _config(path: Path, written: Mapping[str, Any], transformers: ModuleType) -> Any:
    kind, known = written.get("model_type"), transformers.CONFIG_MAPPING
    if not isinstance(kind, str):
        raise ValueError(f"{path}: expected {EXPECTED} with a 'model_type', found {kind!r}; give the model's own file")
    if kind not in known:
        own = f"; its own code {written['auto_map']} is not run" if written.get("auto_map") else ""
        close = nearest(kind, known)
        hint = f"did you mean {close!r}?" if close else "a newer transformers may have it."
        raise ValueError(
            f"{path}: model_type {kind!r} is not one of transformers {transformers.__version__}{own}; {hint} "
            "Otherwise list the model's shapes in a JSON file."
        )
    try:
        return known[kind].from_dict(dict(written))
    except Exception as error:  # every configuration class has its own checks
        raise ValueError(_not_possible(path, f"read the {kind!r} configuration", error, transformers)) from error


def _model_class(path: Path, config: Any, transformers: ModuleType) -> tuple[type[nn.Module], tuple[str, ...]]:
    """The class to build, and a note unless the configuration names it."""
    named = list(config.architectures or [])
    for name in named:
        found = getattr(transformers, name, None)
        if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel):
            assert issubclass(found, nn.Module)
            return found, ()
    with_head = (
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING  # the other mapping has some of their decoders alone
        if config.is_encoder_decoder
        else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    for mapping in (with_head, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found[0] if isinstance(found, tuple) else found
            why = f"names {named[0]}, which transformers does not have" if named else "names no architecture"
            return found, (f"{path.name} {why}; built as {found.__name__}",)
    raise ValueError(
        f"{path}: transformers {transformers.__version__} has no model class for {type(config).__name__} "
        f"(architectures: {named}); name one under 'architectures', or list the shapes in a JSON file"
    )


def _not_possible(path: Path, what: str, error: Exception, transformers: ModuleType) -> str:
    return (
        f"{path}: transformers {transformers.__version__} cannot {what}: {type(error).__name__}: {error}; correct the "
        "file, use the version it was written by, or list the shapes in a JSON file"
    )


# Shapes that the user wrote down: ``[["layers.0.q", [4096, 4096]], ...]`` in model order.

FORM = '[["name", [rows, columns]], ...] or {"name": [rows, columns], ...}'


def read_shapes_json(path: str | os.PathLike[str], training: Training | None = None) -> ModelShapes:
    """The parameters listed in ``path``, in order. Everything with two dimensions is a matrix, as listed.

    ``training`` has the rules. Raises ValueError with the file, the entry, what was expected and what was found.
    """
    path = Path(path)
    entries = read_json(path, FORM, objects=tuple)  # an object becomes a tuple of pairs, a list stays a list
    if not isinstance(entries, (list, tuple)) or not entries:
        found = "no entry" if entries in ([], ()) else repr(entries)
        raise ValueError(f"{path}: expected {FORM}, found {found}; list the model's parameters")
    routes: dict[str, Route] = {}
    for index, entry in enumerate(entries):
        name, shape = _checked(entry, type(entries), f"{path}: entry {index}")
        if name in routes:
            first = list(routes).index(name)
            raise ValueError(
                f"{path}: entry {index} ({name!r}): expected a new name, found that of entry {first}; "
                "give every parameter a unique name"
            )
        matrix = len(shape) == 2
        reason = "listed as a matrix" if matrix else f"{len(shape)}-D"
        stack = named_as_stack(name, shape)
        routes[name] = Route(name, tuple(shape), "matrix" if matrix else "elementwise", reason, stack=stack)
    return ModelShapes(path.name, *(training or Training()).of(list(routes.values())))


def _checked(entry: Any, pair: type[list[Any]] | type[tuple[Any, ...]], where: str) -> tuple[str, list[int]]:
    """The name and shape of an entry, which is a ``pair``: a list, or a tuple if it was an object."""
    if not (type(entry) is pair and len(entry) == 2 and isinstance(entry[0], str) and entry[0]):
        found = dict(entry) if isinstance(entry, tuple) else entry
        raise ValueError(f'{where}: expected ["name", [rows, columns]], found {found!r}; write it in this form')
    name, shape = entry
    if not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
        raise ValueError(
            f"{where} ({name!r}): expected a shape of positive integers, such as [4096, 1024], found {shape!r}; "
            "correct it"
        )
    if math.prod(shape) > LARGEST:
        raise ValueError(f"{where} ({name!r}): expected at most 2**60 elements, found a shape of {shape}; correct it")
    return name, shape


# The rules for which a model is read, and what they train, given only names and shapes.


@dataclass(frozen=True)
class Training:
    """The rules, and the options that routing reads."""

    rules: Rules = field(default_factory=lambda: settings_of(HostConfig, {}, "default rules")[0])
    config: HostConfig = field(default_factory=lambda: HostConfig(allow_no_matrix=True))

    @classmethod
    def routed(cls, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Training:
        """Training with the default rules."""
        return cls(config=HostConfig(include=tuple(include), exclude=tuple(exclude), allow_no_matrix=True))

    def of(self, routes: Sequence[Route]) -> tuple[tuple[Route, ...], dict[str, Divided]]:
        """Routes by name as training has them, stacked experts slice by slice, and the matrices in each parameter."""
        found = [as_taken(route.as_stack(), self.rules.matrix["rule"], self.config) for route in routes]
        found = [replace(route, overrides=self.rules.selecting(route.name)) for route in found]
        check_overrides(self.rules, found)
        per_head = {route.name for route in found if route.kind == "matrix" and self._per_head(route)}
        return tuple(found), divide_by_name(found, AtomSettings.parse(self.config.atoms), per_head)

    def _per_head(self, route: Route) -> bool:
        group = self.rules.matrix
        for number in overrides_of(route.overrides, "matrix", self.rules):
            group = changed(group, self.rules.overrides[number].matrix)
        return bool(group.get("per_head", False))
