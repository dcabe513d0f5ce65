#!/bin/sh
# DeepSpeed 0.19.8, fp32, an infinite gradient at ZeRO stages 0 to 3.
# Expected: all stages do the same with it.
# Seen: stages 1 to 3 skip the step; stage 0 writes it into the weights, and skipped_steps stays 0.
set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch

found = {}
for stage in range(4):
    model = torch.nn.Linear(3, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    engine.backward(engine(torch.ones(1, 3)).sum() * float("inf"))
    engine.step()
    with torch.no_grad():
        found[stage] = (bool(torch.isfinite(engine(torch.ones(1, 3))).all()), engine.skipped_steps)
for stage, (finite, skipped) in found.items():
    print(f"stage {stage}: weights finite {finite}, skipped steps {skipped}")
assert found == {0: (False, 0), 1: (True, 1), 2: (True, 1), 3: (True, 1)}
END
