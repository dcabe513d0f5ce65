#!/bin/sh
# torch 2.13.0: torch.distributed.checkpoint, and two ranks whose different weights have the same names.
#
# Guess: save() keeps both or raises, because two tensors with different values cannot have one key.
# Two stages of a pipeline, each its own nn.Sequential, have such names: both begin at 0.weight.
#
# Seen: a tensor that is no DTensor is taken for a copy that each rank has. One rank's is written, the others' are not.
# Which rank writes is chosen for each tensor, to balance the writing.
# After save() and load(), each stage has one layer of its own and one of the other stage.
# No call says anything.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py <<'PY'
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn


def run(rank: int, folder: str) -> None:
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    stage = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for number, weight in enumerate(stage.parameters()):
        nn.init.constant_(weight, 10 * rank + number)
    dcp.save(stage.state_dict(), checkpoint_id=f"{folder}/checkpoint")
    for weight in stage.parameters():
        nn.init.constant_(weight, -1)
    state = stage.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    stage.load_state_dict(state)
    torch.save([weight.mean().item() for weight in stage.parameters()], f"{folder}/{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (os.getcwd(),), nprocs=2)
    seen = [torch.load("0"), torch.load("1")]
    for rank in (0, 1):
        print(f"stage {rank}: saved {[10.0 * rank, 10.0 * rank + 1]}, loaded {seen[rank]}")
    assert seen[0] == seen[1] != [0.0, 1.0]
PY
python -W ignore seen.py
