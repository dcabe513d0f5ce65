#!/bin/sh
# Accelerate 1.15.0 with DeepSpeed 0.19.8 (torch 2.13.0): accelerator.clip_grad_norm_ in a training loop.
#
# Guess: clip_grad_norm_(parameters, 0.1) clips at 0.1, as it does without DeepSpeed.
# Without `gradient_clipping` in DeepSpeed's configuration, nothing else clips.
#
# Seen, with a gradient of norm 42.4264 and SGD at rate 1:
#   without the key           the step has norm 1: DeepSpeed's own default, 1.0, clips.
#   "gradient_clipping": 0.0  the step has norm 42.4264: nothing clips.
# clip_grad_norm_ returns the true norm and has no other effect.
# accelerator.backward has made the step before it is called.
# (transformers 5.24.0 is installed because Accelerate asks for its version.)

set -- torch==2.13.0 accelerate==1.15.0 transformers==5.24.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def step(**clipping: float) -> tuple[float, float, float]:
    """How far backward() moved the weights, what clip_grad_norm_ returned, how far all of the step moved them."""
    AcceleratorState._reset_state(True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    plugin = DeepSpeedPlugin(hf_ds_config={**config, "zero_optimization": {"stage": 1}, **clipping})
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 2), 30.0)).sum())
    after_backward = model.module.weight.norm().item()
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    after_step = model.module.weight.norm().item()
    return round(after_backward, 4), round(float(norm), 4), round(after_step, 4)


seen = {"no key": step(), "0.0": step(gradient_clipping=0.0)}
print("moved by backward(), returned norm, moved by all, by DeepSpeed's gradient_clipping:", seen)
assert seen == {"no key": (1.0, 42.4264, 1.0), "0.0": (42.4264, 42.4264, 42.4264)}
PY
