#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): frozen weights in the fp32 export of a ZeRO checkpoint.
#
# Guess: get_fp32_state_dict_from_zero_checkpoint returns the whole model in fp32, at each ZeRO stage.
# It is what zero_to_fp32.py, the script in each checkpoint's folder, calls.
#
# Seen, with a bf16 model of two layers whose first is frozen:
#   stage 1         the frozen weight is missing.
#   stages 2 and 3  it is there, in bf16.
# At stage 1 the checkpoint itself holds the weight, and the export says nothing.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen = {}
for stage in (1, 2, 3):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    model[0].weight.requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([model[1].weight], lr=0.1),
        config={**config, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}},
    )[0]
    engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint(f"stage{stage}")
    exported = get_fp32_state_dict_from_zero_checkpoint(f"stage{stage}")
    seen[stage] = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in exported.items()}
saved = torch.load("stage1/global_step1/mp_rank_00_model_states.pt", weights_only=False)["module"]
print("in stage 1's checkpoint:", sorted(saved))
print("exported, by stage:", seen)
assert sorted(saved) == ["0.weight", "1.weight"]
assert seen[1] == {"1.weight": "float32"}
assert seen[2] == seen[3] == {"0.weight": "bfloat16", "1.weight": "float32"}
PY
