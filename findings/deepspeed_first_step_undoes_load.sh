#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): load_checkpoint(load_optimizer_states=False), then one step in bf16.
#
# Guess: training goes on from the loaded weights with a fresh optimizer, at each ZeRO stage.
#
# Seen: the saved weight is -4, and the first step moves a weight by -0.5.
#   stages 1, 2 and 3  the weight is -4.5 after the step.
#   stage 0            the weight is -0.5: the step began at the weight before the load.
# At stage 0 the loaded weights go into the bf16 model and not into the optimizer's fp32 copy.
# The first step writes that copy over them. A check right after the load finds -4 at each stage.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def make(stage: int, rate: float) -> deepspeed.DeepSpeedEngine:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        config={**config, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}},
    )[0]


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    engine.step()


def weight(engine: deepspeed.DeepSpeedEngine) -> float:
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        return engine.module.weight[0, 0].item()


seen = {}
for stage in (0, 1, 2, 3):
    saved, loaded = make(stage, rate=4.0), make(stage, rate=0.5)
    step(saved)
    saved.save_checkpoint(f"stage{stage}")
    loaded.load_checkpoint(f"stage{stage}", load_optimizer_states=False)
    after_load = weight(loaded)
    step(loaded)
    seen[stage] = after_load, weight(loaded)
print("the weight after the load and after one step, by stage:", seen)
assert seen == {0: (-4.0, -0.5), 1: (-4.0, -4.5), 2: (-4.0, -4.5), 3: (-4.0, -4.5)}
PY
