#!/bin/sh
# torch 2.13.0: dist.reduce(tensor, dst=0) over gloo, and the tensors of the ranks other than 0.
#
# Guess: only rank 0 receives a result, so the others' tensors stay as they are.
#
# Seen: they hold own values, partial sums and whole sums, side by side.
# Of 1,000 elements on 4 ranks that send 1, 10, 100 and 1000, rank 1 is left with 10, 110, 1110 and 1111.
# One element on 2 ranks stays as it is, so a small test does not show it.
# A gradient that is read again after it was sent, for a norm for example, is wrong by then.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat >seen.py <<'PY'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank: int, size: int, numel: int, folder: str) -> None:
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = torch.full((numel,), 10.0**rank)
    dist.reduce(tensor, dst=0)
    torch.save(sorted(set(tensor.tolist())), f"{folder}/{size}.{numel}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = os.getcwd()
    for size, numel in ((2, 1), (2, 1000), (4, 1000)):
        mp.spawn(run, (size, numel, folder), nprocs=size)
        for rank in range(size):
            values = torch.load(f"{folder}/{size}.{numel}.{rank}")
            print(f"{numel} elements, {size} ranks: rank {rank} sent {10.0**rank} and is left with", values)
    assert torch.load(f"{folder}/4.1000.0") == [1111.0]
    assert torch.load(f"{folder}/2.1.1") == [10.0]
    assert torch.load(f"{folder}/2.1000.1") == [10.0, 11.0]
    assert torch.load(f"{folder}/4.1000.1") == [10.0, 110.0, 1110.0, 1111.0]
PY
python -W ignore seen.py
