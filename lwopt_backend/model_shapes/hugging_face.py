"""A Hugging Face model from its config.json: built on the meta device, so nothing is allocated or downloaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lwopt_backend.grouping import group_parameters
from lwopt_backend.installing import install_command
from lwopt_backend.model_shapes.json_files import read_json
from lwopt_backend.model_shapes.training import Training
from lwopt_backend.model_shapes.types import ModelShapes
from lwopt_backend.spelling import nearest

EXPECTED = "a Hugging Face config.json"


def read_hugging_face(
    path: str | os.PathLike[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    training: Training | None = None,
) -> ModelShapes:
    """The model that ``path``, a config.json or a folder that holds one, describes, as it would be trained.

    ``training`` says by which rules, by default ours for ``include`` and ``exclude``. The class is the one the
    configuration names; else the one that transformers has for training it on text, else its bare model. Code that
    comes with a checkpoint is never run. Raises ImportError without transformers, and ValueError for a file that it
    cannot build a model from.
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
    training = training or Training.routed(include, exclude)
    trained = [{"params": [param for param in model.parameters() if param.requires_grad]}]
    found = group_parameters(model, trained, training.rules, training.config, stacks=True)
    return ModelShapes(f"{path.name} of {model_class.__name__}", tuple(found.routes), found.divided, notes)


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


def _not_possible(path: Path, what: str, error: Exception, transformers: ModuleType) -> str:
    return (
        f"{path}: transformers {transformers.__version__} cannot {what}: {type(error).__name__}: {error}; correct the "
        "file, use the version it was written by, or list the shapes in a JSON file"
    )
