#!/bin/sh
# DeepSpeed 0.19.8, load_checkpoint into an engine whose gradient_clipping differs from that of the save.
# Expected: gradients are clipped at the configured norm, 5, as after every other change of the configuration.
# Seen: stages 1 and 2 clip at the norm of the save, 1; stages 0 and 3 at the configured one.
set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - "$folder" 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

LR = 0.1


def made(stage, norm):
    model = torch.nn.Linear(3, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": norm,
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)[0]


def weight(engine, stage):
    param = engine.module.weight
    return (safe_get_full_fp32_param(param) if stage else param).detach().clone().flatten()


def step(engine, size):
    engine.backward(engine(torch.full((1, 3), size)).sum())
    engine.step()


found = []
for stage in range(4):
    saved = made(stage, 1.0)
    step(saved, 1.0)
    saved.save_checkpoint(f"{sys.argv[1]}/{stage}")
    engine = made(stage, 5.0)
    engine.load_checkpoint(f"{sys.argv[1]}/{stage}")
    before = weight(engine, stage)
    step(engine, 100.0)  # of norm 173
    found.append(float((weight(engine, stage) - before).norm() / LR))
    print(f"stage {stage}: the clipped gradient has norm {found[-1]:.3f}")
assert all(abs(norm - expected) < 1e-4 for norm, expected in zip(found, (5, 1, 1, 5)))
END
