#!/bin/sh
# torch 2.13.0: optimizer.step() between a forward and its backward pass, with tensor-parallel weights.
#
# Guess: backward() raises "modified by an inplace operation", as it does with ordinary weights.
# Autograd counts each change of a tensor, and foreach functions count as others do.
#
# Seen: on DTensors, foreach functions do not count. backward() takes the new weights and says nothing.
# Two layers with weights of 2 and 3: the gradient of the first one is 3. A step in between sets the second one to 2.
#   tensors, foreach or not  backward() raises.
#   DTensors, foreach=False  backward() raises.
#   DTensors, foreach=True   the gradient is 2.
# foreach is torch's choice on GPUs. Loops with two losses, such as those of GANs, meet this.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def gradient(*, sharded: bool, foreach: bool) -> float | str:
    """Of the first weight, where the optimizer changes the second one after the forward pass."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.constant_(model[0].weight, 2.0)
    torch.nn.init.constant_(model[1].weight, 3.0)
    if sharded:
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD([model[1].weight], lr=1.0, foreach=foreach)
    loss = model(torch.ones(1, 1)).sum()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "raises"
    found = model[0].weight.grad
    return found.full_tensor().item() if sharded else found.item()


seen = {}
for sharded in (False, True):
    for foreach in (False, True):
        seen[sharded, foreach] = gradient(sharded=sharded, foreach=foreach)
        print(f"{'DTensors' if sharded else 'tensors'}, foreach={foreach}:", seen[sharded, foreach])
assert seen == {(False, False): "raises", (False, True): "raises", (True, False): "raises", (True, True): 2.0}
PY
