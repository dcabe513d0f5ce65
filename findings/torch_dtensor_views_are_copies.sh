#!/bin/sh
# torch 2.13.0: writing into a part of a sharded DTensor in place, on two ranks.
#
# Guess: matrix[0].add_(1) and matrix.diagonal().add_(1) write into the matrix, as they do on a tensor.
# If DTensor cannot do that, it raises an error, as it does for fill_diagonal_.
#
# Seen: whatever crosses the shards is computed on a gathered copy, and the write is lost without a word.
#   matrix[0].add_(1)           lost when rows are sharded, right when columns are.
#   matrix[:, 0].add_(1)        the other way round.
#   matrix.diagonal().add_(1)   lost in both.
#   matrix.view(-1).add_(1)     right in both.
# On one rank all of them are right, so a test in one process shows nothing.
# Optimizers write so: a damping term on a diagonal, or the parts of a fused QKV weight.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py <<'PY'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WRITES = {
    "matrix[0]": lambda matrix: matrix[0].add_(1),
    "matrix[:, 0]": lambda matrix: matrix[:, 0].add_(1),
    "matrix.diagonal()": lambda matrix: matrix.diagonal().add_(1),
    "matrix.view(-1)": lambda matrix: matrix.view(-1).add_(1),
}


def run(rank: int, size: int, folder: str) -> None:
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    kept = {}
    for name, write in WRITES.items():
        tensor = torch.zeros(4, 4)
        write(tensor)
        for dim in (0, 1):
            matrix = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(dim)])
            write(matrix)
            kept[name, dim] = torch.equal(matrix.full_tensor(), tensor)
    torch.save(kept, f"{folder}/{size}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in (1, 2):
        mp.spawn(run, (size, os.getcwd()), nprocs=size)
        kept = torch.load(f"{size}.0")
        for name in WRITES:
            words = {dim: "kept" if kept[name, dim] else "lost" for dim in (0, 1)}
            print(f"{size} ranks, {name}.add_(1): {words[0]} if rows are sharded, {words[1]} if columns are")
        lost = {case for case, is_kept in kept.items() if not is_kept}
        seen = {("matrix[0]", 0), ("matrix[:, 0]", 1), ("matrix.diagonal()", 0), ("matrix.diagonal()", 1)}
        assert lost == (seen if size == 2 else set()), lost
PY
python -W ignore seen.py
