#!/bin/sh
# torch 2.13.0: attributes of parameters after fully_shard, and after to_empty of a model on the meta device.
#
# Guess: an attribute that marks a parameter, as use_muon=False does for some trainers, stays on it.
#
# Seen: fully_shard replaces each parameter by another one, without the attribute.
# to_empty also does if the model was on the meta device; on a CPU it keeps the parameter.
# So a mark that was set while the model was built has no effect on an optimizer that is made after fully_shard.
# An attribute that is set after fully_shard stays through a step.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def marked(param: nn.Parameter) -> bool:
    return getattr(param, "use_muon", None) is False


seen = {}
for how, device, change in (
    ("to_empty on the CPU", "cpu", lambda layer: layer.to_empty(device="cpu")),
    ("to_empty from the meta device", "meta", lambda layer: layer.to_empty(device="cpu")),
    ("fully_shard", "cpu", fully_shard),
):
    layer = nn.Linear(4, 4, device=device)
    layer.weight.use_muon = False
    change(layer)
    seen[how] = marked(layer.weight)
layer.weight.use_muon = False
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(2, 4)).sum().backward()
optimizer.step()
layer.reshard()
seen["set after fully_shard"] = marked(layer.weight)
for how, stays in seen.items():
    print(f"{how}: the attribute {'stays' if stays else 'is lost'}")
assert list(seen.values()) == [True, False, False, True]
PY
