#!/bin/sh
# transformers 5.24.0 (torch 2.13.0): min_lr of cosine_with_min_lr, and param groups with rates of their own.
#
# Guess: no rate goes below min_lr, as with eta_min of torch's CosineAnnealingLR.
#
# Seen: min_lr is divided by the rate that the optimizer was made with. Each group ends at that share of its own rate.
# With min_lr 0.002, matrices at 0.02 end at 0.002, and vectors at 0.003 at 0.0003.
# An optimizer that is made without a rate has torch's, 0.001: both groups end at twice the rate that they began with.

set -- torch==2.13.0 transformers==5.24.0
. "$(dirname "$0")/environment"
python -W ignore - 2> errors <<'PY' || { cat errors; exit 1; }
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup

LOWEST, STEPS = 0.002, 10


def ends(*, is_torchs: bool, **default: float) -> list[float]:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.02, 0.003)]
    optimizer = torch.optim.AdamW(groups, **default)
    if is_torchs:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, LOWEST)
    else:
        schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, STEPS, min_lr=LOWEST)
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
    return [round(group["lr"], 6) for group in optimizer.param_groups]


seen = {
    "torch's, made with 0.02": ends(is_torchs=True, lr=0.02),
    "transformers', made with 0.02": ends(is_torchs=False, lr=0.02),
    "transformers', made without a rate": ends(is_torchs=False),
}
for name, rates in seen.items():
    print(f"{name}: {rates}")
assert list(seen.values()) == [[0.002, 0.002], [0.002, 0.0003], [0.04, 0.006]]
PY
