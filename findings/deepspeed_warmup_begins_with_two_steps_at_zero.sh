#!/bin/sh
# DeepSpeed 0.19.8, WarmupLR, WarmupDecayLR and WarmupCosineLR.
# Expected: with warmup_min_lr 0 the first step has a small rate, or at most the first one has the rate 0.
# Seen: the first two steps have the rate 0, in all three, logarithmic and linear, and train nothing.
set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - << 'END'
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

MAKES = {
    "WarmupLR": lambda optimizer: WarmupLR(optimizer, 0.0, 0.1, 4),
    "WarmupLR, linear": lambda optimizer: WarmupLR(optimizer, 0.0, 0.1, 4, warmup_type="linear"),
    "WarmupDecayLR": lambda optimizer: WarmupDecayLR(optimizer, 10, 0.0, 0.1, 4),
    "WarmupCosineLR": lambda optimizer: WarmupCosineLR(optimizer, 10, 0.0, 4),
}
for name, make in MAKES.items():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule, rates = make(optimizer), []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    print(name, [round(rate, 4) for rate in rates])
    assert rates[:2] == [0.0, 0.0] and rates[2] > 0
END
