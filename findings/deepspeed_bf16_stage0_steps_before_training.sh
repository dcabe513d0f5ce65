#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): deepspeed.initialize in bf16 at stage 0, with torch.optim.AdamW.
#
# Guess: it changes neither weights nor the optimizer's state. So it is in fp32, and at stages 1, 2 and 3.
#
# Seen: it makes a step with zero gradients at the full rate, to create the state, and the step counts.
#   weight decay   the fp32 weights are decayed once before training, here from 1 to 0.95.
#   AdamW's count  it is 2 after the first step, so the first update is 0.744 of the rate in place of 1.0.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

LR, DECAY = 0.1, 0.5


def moves(stage, decay):
    """How far initialize, and then the first step, move the fp32 weight, which is 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=decay)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def weight():
        value = safe_get_full_fp32_param(model.weight) if stage else optimizer.param_groups[0]["params"][0]
        return value.item()

    found = [weight()]
    engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
    engine.step()
    return 1 - found[0], found[0] - weight()


for stage in range(4):
    decayed, first = moves(stage, DECAY)[0], moves(stage, 0.0)[1] / LR
    print(f"stage {stage}: initialize decays a weight by {decayed:.4f}; the first update is {first:.3f} of the rate")
    assert abs(decayed - (0 if stage else LR * DECAY)) < 1e-6
    assert abs(first - (1 if stage else 0.744)) < 1e-3
END
