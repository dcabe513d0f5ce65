#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): "gradient_clipping" with the optimizer Muon.
#
# Guess: the gradient is clipped. Muon divides a gradient by its norm, so its first step is the same with any clipping.
#
# Seen: at stages 1, 2 and 3 the orthogonalized update is clipped, at the one norm of all updates together.
# The gradient below is a thousandth of an ordinary one, and its norm is 0.0004. No clipping should touch it.
#   no key, or 1.0  the step has norm 1, 0.27 of Muon's: DeepSpeed's default is 1.0.
#   0.0             the step has norm 3.69, Muon's own for two matrices of 16 by 16.
# More matrices mean smaller steps for each, because the norm of all updates grows with their number.
# get_global_grad_norm() returns 3.69 too. It is the norm of the update, and hardly changes in training.
# At stage 0 the step has Muon's own norm, whatever the key says.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python -W ignore - 2> "$folder/errors" <<'PY' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

torch._dynamo.config.disable = True  # Muon's functions would be compiled
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
MUON = {"type": "Muon", "params": {"lr": 1.0, "weight_decay": 0.0, "torch_adam": True}}


def step(stage: int, **clipping: float) -> tuple[float, float]:
    """The norm of the first step of both matrices, and the norm that DeepSpeed reports."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
    before = [weight.detach().clone() for weight in model.parameters()]
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": MUON, **clipping}
    engine = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={**config, "zero_optimization": {"stage": stage, "reduce_scatter": False}},
    )[0]
    engine.backward(engine(torch.randn(8, 16)).square().mean() / 1000)
    engine.step()
    after = [safe_get_full_fp32_param(weight) if stage == 3 else weight.detach() for weight in model.parameters()]
    moved = torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)]).norm().item()
    return round(moved, 2), round(float(engine.get_global_grad_norm() or 0), 2)


torch.manual_seed(0)
alone = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
(alone(torch.randn(8, 16)).square().mean() / 1000).backward()
norm = torch.cat([weight.grad.flatten() for weight in alone.parameters()]).norm().item()
print(f"norm of the gradient: {norm:.5f}")
assert norm < 0.001
for stage in range(4):
    seen = step(stage), step(stage, gradient_clipping=1.0), step(stage, gradient_clipping=0.0)
    print(f"stage {stage}, norm of the step and reported norm, without the key, with 1.0, with 0.0:", *seen)
    assert seen == (((1.0, 3.69),) * 2 + ((3.69, 3.69),) if stage else ((3.69, 0.0),) * 3)
PY
