#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): ds_to_universal, then load_checkpoint with "load_universal".
#
# Guess: a universal checkpoint holds each weight under its name, so every weight of the model is loaded.
# What cannot be loaded is an error.
#
# Seen, with a bf16 model of two layers, and no error in any case:
#   saved with one param group, loaded with two  stages 1 and 2 leave the second group's weight as it was initialized.
#                                                Stage 3 loads it, and gives its group the first group's rate.
#   saved with the first layer frozen            stages 1, 2 and 3 leave its weight as it was initialized.
# One group becomes two where weight decay is taken from some weights, for example.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python -W ignore - 2> "$folder/errors" <<'PY' || { cat "$folder/errors"; exit 1; }
import argparse
import contextlib
import io
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def engine(stage: int, groups: list[list[int]], value: float, lr: float, **config: dict) -> deepspeed.DeepSpeedEngine:
    """Two layers whose weights are ``value``; ``groups`` lists the layers that each param group trains."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    for layer in model:
        torch.nn.init.constant_(layer.weight, value)
    model.requires_grad_(False)
    for group in groups:
        for number in group:
            model[number].requires_grad_(True)
    params = [{"params": [model[number].weight for number in group]} for group in groups]
    base = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**base, **config})[0]


def loaded(stage: int, saved: list[list[int]], groups: list[list[int]]) -> tuple[list[bool], list[float]]:
    """Which layers have the saved value, 1, after the load, and the rates of the groups."""
    folder = Path(f"{stage}-{len(saved[0])}-{len(groups)}")
    trained = engine(stage, saved, value=1.0, lr=0.1)
    trained.backward(trained(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * 0)
    trained.step()  # without a change; ds_to_universal needs the optimizer's state
    trained.save_checkpoint(folder, tag="saved")
    where = {"input_folder": str(folder / "saved"), "output_folder": str(folder / "universal")}
    how = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(argparse.Namespace(**where, **how, inject_missing_state=True))
    (folder / "latest_universal").write_text("universal")
    found = engine(stage, groups, value=-1.0, lr=0.2, checkpoint={"load_universal": True})
    found.load_checkpoint(folder)
    weights = found.module.parameters()
    values = [safe_get_full_fp32_param(w) if w.requires_grad else getattr(w, "ds_tensor", w) for w in weights]
    return [value.mean().item() == 1 for value in values], [group["lr"] for group in found.optimizer.param_groups]


for stage in (1, 2, 3):
    seen = {
        "one group": loaded(stage, [[0, 1]], [[0, 1]]),
        "one group to two": loaded(stage, [[0, 1]], [[0], [1]]),
        "first layer frozen": loaded(stage, [[1]], [[1]]),
    }
    for case, (is_loaded, rates) in seen.items():
        print(f"stage {stage}, {case}: layers loaded {is_loaded}, rates {rates}")
    assert seen["one group"] == ([True, True], [0.1])
    assert seen["one group to two"] == (([True, True], [0.1, 0.1]) if stage == 3 else ([True, False], [0.1, 0.2]))
    assert seen["first layer frozen"] == ([False, True], [0.1])
PY
