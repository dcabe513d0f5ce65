#!/bin/sh
# torch 2.13.0: optimizer.zero_grad() in an accumulation without gradient sync, with fully_shard (FSDP2).
#
# Guess: zero_grad() drops what has been accumulated, so that a bad micro-batch can be thrown away.
#
# Seen: with set_requires_gradient_sync(False), FSDP2 keeps the unsharded gradients for itself.
# `parameter.grad` is None, so neither optimizer.zero_grad() nor model.zero_grad() finds anything to drop.
# The next synchronized backward adds the kept gradient.
# Here a micro-batch of gradient 100 was thrown away, and the weight still moves by 101 in place of 1.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def moved(*, sharded: bool) -> float:
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.set_requires_gradient_sync(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.full((1, 4), 100.0)).sum().backward()
    optimizer.zero_grad()
    model.zero_grad()
    if sharded:
        model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if sharded:
        model.reshard()
        return -model.weight.full_tensor()[0, 0].item()
    return -model.weight[0, 0].item()


seen = {"plain": moved(sharded=False), "fully_shard": moved(sharded=True)}
print("a weight moved:", seen)
assert seen == {"plain": 1.0, "fully_shard": 101.0}
PY
