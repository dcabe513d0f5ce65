#!/bin/sh
# torch 2.13.0: torch.nn.utils.clip_grad_norm_ of sharded fp16 gradients.
#
# Guess: the norm of sharded gradients is that of whole ones, which reaches up to fp16's largest number, 65504.
#
# Seen: ranks exchange squares of their norms, in fp16. A square of 256 overflows, and one of 0.0001 is zero.
#   norm 300      inf in place of 300: clipping multiplies each gradient by zero, and the step trains nothing.
#   norm 0.00001  0 in place of 0.00001.
# On one rank, and for whole gradients on many, both are right. No warning, and error_if_nonfinite is off by default.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh, seen = init_device_mesh("cpu", (2,)), {}
for size in (300.0, 1e-5):
    grad = torch.full((4, 4), size / 4, dtype=torch.float16)  # of this norm
    whole, sharded = torch.nn.Parameter(grad.clone()), torch.nn.Parameter(distribute_tensor(grad, mesh, [Shard(0)]))
    whole.grad, sharded.grad = grad.clone(), distribute_tensor(grad, mesh, [Shard(0)])
    norms = [torch.nn.utils.clip_grad_norm_([param], 1.0) for param in (whole, sharded)]
    seen[size] = (norms[0].item(), norms[1].full_tensor().item(), sharded.grad.to_local().abs().max().item())
    if dist.get_rank() == 0:
        print("norm of whole gradients {}, of sharded ones {}, the largest one after clipping {}".format(*seen[size]))
assert seen[300.0] == (300.0, torch.inf, 0.0)
assert seen[1e-5][0] > 9e-6 and seen[1e-5][1] == 0.0
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
