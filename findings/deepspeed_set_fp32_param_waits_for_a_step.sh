#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): safe_set_full_fp32_param, and a forward pass after it, to evaluate an average, say.
#
# Guess: the model computes with the new value. safe_get_full_fp32_param gives it back.
#
# Seen:
#   stages 1, 2 and 3  the model computes with the old value until the next step, in fp32 too. The call sets the
#                      optimizer's copy, which a step writes into the model. An evaluation before it is of old weights.
#   stage 0            the call has no effect, and safe_get_full_fp32_param returns None.
# No call says anything.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

seen = []
for stage in range(4):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    safe_set_full_fp32_param(model.weight, torch.full((1, 1), 3.0))
    value = safe_get_full_fp32_param(model.weight)
    outputs = [engine(torch.ones(1, 1))]
    engine.backward(outputs[0].sum())
    engine.step()  # at a rate of 0
    outputs.append(engine(torch.ones(1, 1)))
    seen.append((None if value is None else value.item(), *(output.item() for output in outputs)))
    print("stage {}: set to 3, read as {}, computes with {}, and after a step with {}".format(stage, *seen[-1]))
assert seen == [(None, 1.0, 1.0)] + [(3.0, 1.0, 3.0)] * 3
END
