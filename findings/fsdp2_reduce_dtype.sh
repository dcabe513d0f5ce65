#!/bin/sh
# torch 2.13.0, fully_shard with MixedPrecisionPolicy(param_dtype=torch.bfloat16).
# Expected: without reduce_dtype, gradients of fp32 parameters are reduced in fp32, which loses nothing.
# Seen: they are reduced in bfloat16: the mean of 1 and 1/512 is 0.5. From torch 2.15 on it is 0.50098, so the same
# script gives other gradients after an upgrade.
set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > "$folder/script.py" << 'END'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
found = []
for reduce_dtype in (None, torch.float32):
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    model(torch.full((1, 8), 1 / 512 if dist.get_rank() else 1.0)).sum().backward()
    found.append(float(model[0].weight.grad.full_tensor()[0, 0]))
if dist.get_rank() == 0:
    print(f"mean of 1 and 1/512: {found[0]} without reduce_dtype, {found[1]} with float32")
assert found[0] == 0.5 and abs(found[1] - 0.500977) < 1e-5
dist.destroy_process_group()
END
python -m torch.distributed.run --nproc_per_node 2 "$folder/script.py"
