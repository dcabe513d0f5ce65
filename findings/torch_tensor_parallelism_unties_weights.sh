#!/bin/sh
# torch 2.13.0: parallelize_module of a model whose head is tied to its embedding.
#
# Guess: the two stay one weight, or it is an error, as for two fully_shard units that share a parameter.
# The styles are those of torch's tutorial: RowwiseParallel for the embedding, ColwiseParallel for the head.
#
# Seen: each module gets a DTensor of its own. They start equal, and each trains on its own gradient only.
# The model has one parameter more, the optimizer twice the state for it, and after two steps the two weights differ.
# No call says anything. Tying them again after parallelize_module (head.weight = embedding.weight) keeps one, and trains
# as on one process.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh, seen = init_device_mesh("cpu", (2,)), {}
PLAN = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
for way in ("one process", "parallel", "parallel, tied again"):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False))
    torch.nn.init.ones_(model[0].weight)
    model[1].weight = model[0].weight
    if way != "one process":
        parallelize_module(model, mesh, PLAN)
    if way == "parallel, tied again":
        model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    for _ in range(2):
        model(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [layer.weight if way == "one process" else layer.weight.full_tensor() for layer in model]
    seen[way] = [len(list(model.parameters())), *(weight[0, 0].item() for weight in whole)]
    if dist.get_rank() == 0:
        print("{}: {} parameters, an element of the embedding {}, of the head {}".format(way, *seen[way]))
assert seen["one process"] == seen["parallel, tied again"] and seen["one process"][0] == 1
assert seen["parallel"][0] == 2 and len({*seen["parallel"][1:], seen["one process"][1]}) == 3
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
