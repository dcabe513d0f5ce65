"""A Hugging Face model from its config.json: built on the meta device, so nothing is allocated or downloaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lwopt_backend.atoms import Divided, divide
from lwopt_backend.installing import install_command
from lwopt_backend.model_shapes.json_files import read_json
from lwopt_backend.model_shapes.types import ModelShapes
from lwopt_backend.plan.blocks import matrices_of
from lwopt_backend.routing import Route, route
from lwopt_backend.spelling import nearest

EXPECTED = "a Hugging Face config.json"


def read_hugging_face(
    path: str | os.PathLike[str], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> ModelShapes:
    """Route the model that ``path``, a config.json or a folder that holds one, describes, in its own order.

    ``include`` and ``exclude`` are those of ``routing.route``. The class is the one the configuration names; else the
    one that transformers has for training it on text, else its bare model. Code that comes with a checkpoint is never
    run. Raises ImportError without transformers, and ValueError for a file that it cannot build a model from.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    written = read_json(path, EXPECTED)
    if not isinstance(written, dict):
        raise ValueError(f"{path}: expected {EXPECTED}, an object, found {type(written).__name__}; give another file")
    transformers = _transformers(path)
    config = _config(path, written, transformers)
    model_class, notes = _model_class(path, config, transformers)
    model = _build(path, model_class, config, transformers)
    divided = divide(model, route(model, include, exclude, stacks=True))
    routes = tuple(_with_parts(r, divided.get(r.name)) for r in route(model, include, exclude))
    return ModelShapes(f"{path.name} of {model_class.__name__}", routes, (*notes, *_stacked_experts(routes)))


def _with_parts(found: Route, matrices: Divided | None) -> Route:
    """The route with the matrices that training finds in the parameter."""
    if matrices is None or len(matrices.blocks) < 2:
        return found
    parts = tuple((block.of(found.name), block.shape) for block in matrices.blocks)
    told = found.kind == "matrix" and matrices.blocks != matrices_of(found.shape)
    return replace(found, parts=parts, reason=f"{found.reason}: {matrices.reason}" if told else found.reason)


def _transformers(path: Path) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{path}: reading a Hugging Face configuration needs transformers, which cannot be imported ({error}); "
            f"run: {install_command('transformers')}"
        ) from error
    return transformers


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
            "Else read a checkpoint of the model, or list its shapes in a JSON file."
        )
    try:
        return known[kind].from_dict(dict(written))
    except Exception as error:  # every configuration class checks in its own way
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


def _build(path: Path, model_class: type[nn.Module], config: Any, transformers: ModuleType) -> nn.Module:
    config._attn_implementation = "eager"  # another one that the file asks for may not be installed here
    try:
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:  # model code of several hundred families
        raise ValueError(_not_possible(path, f"build {model_class.__name__}", error, transformers)) from error


def _stacked_experts(routes: Sequence[Route]) -> tuple[str, ...]:
    stacked = [r.name for r in routes if len(r.shape) == 3 and "experts" in r.name]
    if not stacked:
        return ()
    return (
        f"transformers stacks the experts of a layer in parameters such as {stacked[0]!r}: under DeepSpeed every slice "
        "is a matrix, elsewhere they are element-wise; for a model that keeps them apart, read a checkpoint, which has "
        "them one by one, or list the shapes",
    )


def _not_possible(path: Path, what: str, error: Exception, transformers: ModuleType) -> str:
    return (
        f"{path}: transformers {transformers.__version__} cannot {what}: {type(error).__name__}: {error}; correct the "
        "file, use the version it was written by, or list the shapes in a JSON file"
    )
