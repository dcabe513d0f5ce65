"""LLaMA-Factory's own training on two ranks of ZeRO 2, in bf16, through ``lwopt_backend.run``, as the page says.

LLaMA-Factory imports torchaudio, for audio alone, which is built for CUDA: an empty module takes its place.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.docs.test_sixteen_bits import same
from tests.peers.test_trl import with_texts
from tests.support.command_line import lwopt
from tests.support.launcher import torchrun

STEPS, HALF, ROWS = 6, 3, 8  # rows of a step, on all ranks together


def trained(folder: Path, name: str, ranks: int, resume: Path | None = None) -> tuple[list[float], str]:
    """The losses of the last checkpoint's history, and what was printed."""
    arguments = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(folder),
        "dataset": "sums",
        "template": "empty",
        "cutoff_len": 64,
        "output_dir": str(folder / name),
        "resume_from_checkpoint": str(resume) if resume else None,
        "deepspeed": str(folder / "ds_config.json"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ROWS // 2 // ranks,
        "learning_rate": 0.02,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "bf16": True,
        "use_cpu": True,
        "report_to": "none",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(arguments))
    (package,) = importlib.util.find_spec("llamafactory").submodule_search_locations  # type: ignore[union-attr,misc]
    script = f"{package}/launcher.py"  # which no more than calls run_exp, as the checkout's src/train.py
    printed = torchrun("-m", "lwopt_backend.run", script, folder / f"{name}.yaml", processes=ranks)
    state = json.loads((folder / name / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row], printed


def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "torchaudio.py").touch()
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    with_texts(folder)
    rows = [{"instruction": f"what is {n} plus {n}?", "input": "", "output": f"{2 * n}"} for n in range(STEPS * ROWS)]
    (folder / "sums.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
    keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    params: dict[str, Any] = {"lr": "auto", "weight_decay": "auto", "adamw": {"lr": 3e-4}}
    config = {**dict.fromkeys(keys, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    entry = {"type": "LayerWiseMuon", "params": params}
    (folder / "ds_config.json").write_text(json.dumps({**config, "optimizer": entry}))


def test_it_trains_resumes_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other ranks, too."""
    prepare(tmp_path, monkeypatch)
    whole, printed = trained(tmp_path, "whole", 2)
    assert re.search("Routing: 14 of 21", printed), printed
    assert len(whole) == STEPS and whole[-1] < whole[0]
    half, last = (tmp_path / "whole" / f"checkpoint-{step}" for step in (HALF, STEPS))
    resumed, _ = trained(tmp_path, "resumed", 2, half)
    assert resumed == whole
    assert lwopt("convert", half, tmp_path / "moved", "--to", "universal").code == 0
    elsewhere, _ = trained(tmp_path, "elsewhere", 1, tmp_path / "moved")
    assert elsewhere[:HALF] == whole[:HALF]  # the history that was saved
    assert elsewhere[HALF] == pytest.approx(whole[HALF], rel=1e-5)  # of the same weights and rows
    assert lwopt("convert", last, tmp_path / "weights", "--to", "safetensors").code == 0
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16).state_dict()
    same({name: tensor.bfloat16() for name, tensor in exported.items()}, loaded)
