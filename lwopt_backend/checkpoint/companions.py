"""What a trainer keeps beside a checkpoint and needs to go on from it, and what a model needs beside its weights.

Hugging Face's Trainer and Accelerate give an engine one folder and write files of their own into it. They read them
again from the folder that they resume from, so a conversion takes them along.
"""

from __future__ import annotations

import filecmp
import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.deepspeed.files import load_mapping
from lwopt_backend.checkpoint.files.folders import Content
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.formats import FORMATS, step_path

CONFIG, TRAINER, SCHEDULER = "config.json", "trainer_state.json", "scheduler.pt"
OF_MODEL = (  # what from_pretrained reads of a model, its tokenizer and its processors
    *(CONFIG, "generation_config.json", "*tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*"),
    *("merges.txt", "tekken.json", "*.model", "chat_template*", "*processor_config.json"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py"),
)
OF_RUN = (
    *(TRAINER, "training_args.bin", SCHEDULER, "scaler.pt", "rng_state*.pth"),  # the Trainer's
    *("scheduler*.bin", "sampler*.bin", "dl_state_dict*.bin", "random_states_*.pkl", "custom_checkpoint_*.pkl"),
    "adapter_config.json",
)


def beside(path: Path, format: str, target: str) -> list[Path]:
    """The files beside a checkpoint of ``format`` that its conversion to ``target`` takes along: the model's, and for
    a target that training resumes from, the run's. A format without a pointer in the run's folder has a folder for each
    step: if no model's configuration lies in it, the model's files are those above it, if one lies there."""
    pointed = FORMATS[format].pointer is not None
    folder = step_path(path, format).parent if pointed else path
    found = _known(folder, OF_MODEL if target == "safetensors" else (*OF_MODEL, *OF_RUN))
    above = path.resolve().parent
    if not pointed and not (folder / CONFIG).exists() and _is_of_a_model(above / CONFIG):
        there = {file.name for file in found}
        found += [file for file in _known(above, OF_MODEL) if file.name not in there]
    return sorted(found, key=lambda file: file.name)


def _known(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = [file for file in folder.iterdir() if any(fnmatchcase(file.name, pattern) for pattern in patterns)]
    return [file for file in found if file.is_file()]


def _is_of_a_model(file: Path) -> bool:
    """Whether ``save_pretrained`` of a model may have written the file; other programs have a config.json, too."""
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)


def missing(taken: Collection[str], target: str, folder: Path) -> list[str]:
    """A note if ``taken``, the files' names, lack what from_pretrained needs beside the weights in ``folder``."""
    if target != "safetensors" or CONFIG in taken:
        return []
    said = f"from_pretrained needs a {CONFIG}, and none lies beside the checkpoint"
    return [f"{said}; model.config.save_pretrained({str(folder)!r}) writes it."]


def with_schedule(checkpoint: Checkpoint, files: Sequence[Path]) -> Checkpoint:
    """With the state of the Trainer's scheduler from its file, if the checkpoint has none. Accelerate's counts steps of
    all ranks together, so it is no engine's."""
    file = next((file for file in files if file.name == SCHEDULER), None)
    if file is None or checkpoint.scheduler is not None:
        return checkpoint
    return replace(checkpoint, scheduler=plain(dict(load_mapping(file))))


def contents(checkpoint: Checkpoint, files: Sequence[Path], target: str, dtype: str | None) -> dict[str, Content]:
    """What to write beside the ``target``, by file name.

    The model's configuration names the ``dtype`` of the weights, if given, for from_pretrained takes it from there. On
    FSDP2, the Trainer reads the scheduler's state from a file, which DeepSpeed keeps in its own.
    """
    found: dict[str, Content] = {file.name: file for file in files}
    if dtype is not None and CONFIG in found:
        (file,) = (file for file in files if file.name == CONFIG)
        config = json.loads(file.read_bytes())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        found[CONFIG] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if target == "accelerate" and TRAINER in found and SCHEDULER not in found and checkpoint.scheduler is not None:
        written = io.BytesIO()
        torch.save(dict(checkpoint.scheduler), written)
        found[SCHEDULER] = written.getvalue()
    return found


def refuse_others(folder: Path, files: Mapping[str, Content]) -> None:
    """Raises CheckpointError if ``folder`` has other files of these names, as it does if another step of a trainer was
    converted into it."""
    for name, content in files.items():
        there = folder / name
        if isinstance(content, Path) and there.is_file() and not filecmp.cmp(there, content, shallow=False):
            raise CheckpointError(
                f"{there} already exists, and is not that of {content.parent}; nothing is replaced: choose another "
                "destination, one for each of a trainer's checkpoints"
            )
