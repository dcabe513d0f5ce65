#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): a weight that is edited between two steps, to reset a head or a router, for example.
#
# Guess: it stays edited. At stage 3, GatheredParameters(params, modifier_rank=0) is the documented way to edit weights.
#
# Seen: the model computes with the edited weight once. The next step begins at the optimizer's fp32 copy, which has the
# old value, and writes it over the edit: at stages 1, 2 and 3, in fp32 and in bf16, and at stage 0 in bf16.
# At stage 0 in fp32 the edit stays. No call says anything.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch

seen = {}
for stage in range(4):
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == torch.bfloat16},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        with deepspeed.zero.GatheredParameters([model.weight], modifier_rank=0, enabled=stage == 3), torch.no_grad():
            model.weight.fill_(3)
        outputs = [engine(torch.ones(1, 1, dtype=dtype))]
        engine.backward(outputs[0].float().sum())
        engine.step()  # at a rate of 0
        outputs.append(engine(torch.ones(1, 1, dtype=dtype)))
        before, after = seen[stage, dtype] = [output.item() for output in outputs]
        print(f"stage {stage}, {dtype}: edited from 1 to 3, computes with {before}, and after a step with {after}")
assert {case for case, outputs in seen.items() if outputs == [3.0, 3.0]} == {(0, torch.float32)}
assert sum(outputs == [3.0, 1.0] for outputs in seen.values()) == 7
END
