#!/bin/sh
# torch 2.13.0: one fully_shard unit with two layers of one size; rank 0 uses layer a and rank 1 layer b.
#
# Guess: each layer gets the mean of its own gradients, with zeros from the rank that did not use it, or an error.
#
# Seen: both layers get the mean of a's gradient on rank 0 and b's on rank 1, 1.5 in place of 0.5 and 1.0, without a word
# (pytorch issue 174862). Each rank's shard is of the layer that it used: the other layer's gradient is None there.
# set_reduce_scatter_unused_params(True), off by default, gives the right means.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 2, bias=False)
        self.b = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return getattr(self, use)(x).sum()


dist.init_process_group("gloo")
rank, seen = dist.get_rank(), {}
for zeros in (False, True):
    model = Layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(zeros)
    model(torch.full((1, 4), rank + 1.0), "ab"[rank]).backward()  # a's gradient is 1 on rank 0, b's 2 on rank 1
    grads = {name: param.grad for name, param in model.named_parameters()}
    mine = {name: None if grad is None else grad.to_local()[0, 0].item() for name, grad in grads.items()}
    seen[zeros] = [None, None]
    dist.all_gather_object(seen[zeros], mine)
    if rank == 0:
        first, second = seen[zeros]
        print(f"set_reduce_scatter_unused_params({zeros}): rank 0 has {first}, rank 1 has {second}")
assert seen[False] == [{"a.weight": 1.5, "b.weight": None}, {"a.weight": None, "b.weight": 1.5}]
assert seen[True] == [{"a.weight": 0.5, "b.weight": 1.0}] * 2
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
