#!/bin/sh
# torch 2.13.0, fully_shard.
# Expected: a forward pass under no_grad between backward and clipping changes nothing: a model has the same parameters
# before and after.
# Seen: the root stays unsharded, so model.parameters() lists other objects for it, without gradients.
# torch.nn.utils.clip_grad_norm_ misses them: 5.46 in place of 7.32. model.reshard() brings the old objects back.
set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > "$folder/script.py" << 'END'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
fully_shard(model[0])
fully_shard(model)
before = list(model.parameters())
model(torch.ones(1, 4)).square().sum().backward()
true = torch.nn.utils.get_total_norm([param.grad for param in before]).full_tensor()
with torch.no_grad():
    model(torch.ones(1, 4))
same = [one is other for one, other in zip(before, model.parameters())]
found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
model.reshard()
again = [one is other for one, other in zip(before, model.parameters())]
if dist.get_rank() == 0:
    print(f"same objects {same}, after reshard {again}; norm {float(found):.2f}, of all gradients {float(true):.2f}")
assert same == [True, True, False, False] and all(again) and found < 0.8 * true
dist.destroy_process_group()
END
python -m torch.distributed.run --nproc_per_node 2 "$folder/script.py"
