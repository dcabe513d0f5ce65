#!/bin/sh
# torch 2.13.0: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(0.999), of a bf16 model.
#
# Guess: the average follows the weights, rounded to bf16, as its formula says.
#
# Seen: it has the model's dtype, and each update moves it by a thousandth of the distance. In bf16 the sum rounds back.
# A weight goes from 1 to 2: after 5,000 updates the average is 1.993 in fp32, and 1 in bf16.
# At a decay of 0.99 it stops at 1.609, and at 0.9 at 1.969.
# Nothing is said, and there is no argument for the average's dtype.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def average(dtype: torch.dtype, decay: float) -> float:
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(model.weight)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    averaged.update_parameters(model)
    torch.nn.init.constant_(model.weight, 2.0)
    for _ in range(5000):
        averaged.update_parameters(model)
    return round(averaged.module.weight.item(), 3)


seen = {}
for decay in (0.999, 0.99, 0.9):
    seen[decay] = [average(dtype, decay) for dtype in (torch.float32, torch.bfloat16)]
    print("decay {}: the average of a weight of 2 is {} in fp32 and {} in bf16".format(decay, *seen[decay]))
assert seen[0.999] == [1.993, 1.0]
assert seen[0.99] == [2.0, 1.609] and seen[0.9] == [2.0, 1.969]
PY
