#!/bin/sh
# Accelerate 1.15.0 (torch 2.13.0), FullyShardedDataParallelPlugin with fsdp_version=2 and mixed precision "bf16".
#
# Guess: a model that computes its loss in fp32 returns it in fp32, as with fsdp_version=1 and without FSDP, where
# Accelerate makes outputs fp32 (convert_outputs_to_fp32). A curve of losses looks the same after the upgrade to 2.
#
# Seen: the plugin sets output_dtype to bfloat16 as well, and fully_shard rounds every output of the model, the loss
# among them. Logged losses between 4 and 8 are multiples of 1/32:
#   without FSDP, fsdp_version=1    5.3638 float32
#   fsdp_version=2                  5.3750 bfloat16
# With 3 micro-batches, accelerator.backward divides the rounded loss, and so the gradient begins as 0.333984 in place of
# 1/3. A policy with output_dtype=None has neither.
# (fully_shard is given the plugin's policy here, as Accelerate's prepare does, which shards on accelerators alone.)

set -- torch==2.13.0 accelerate==1.15.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 256)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(inputs).float(), labels)


def policy(version: int) -> object:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision("bf16")
    return plugin.mixed_precision_policy


inputs, labels = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), torch.arange(4)
losses = {
    "without FSDP": Accelerator(cpu=True, mixed_precision="bf16").prepare(Model()),
    "fsdp_version=1": FullyShardedDataParallel(Model(), mixed_precision=policy(1), device_id=torch.device("cpu")),
    "fsdp_version=2": fully_shard(Model(), mp_policy=policy(2)),
    "fsdp_version=2, output_dtype=None": fully_shard(Model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
}
losses = {name: model(inputs, labels) for name, model in losses.items()}
thirds = {name: torch.autograd.grad(loss / 3, loss)[0].item() for name, loss in losses.items()}
for name, loss in losses.items():
    print(f"{name:34} {loss.item():.4f} {loss.dtype}, gradient of a third {thirds[name]:.6f}")
assert [loss.dtype for loss in losses.values()] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
first, *_, sharded, kept = losses.values()
assert kept == first and sharded != first and sharded == first.bfloat16()
assert thirds["fsdp_version=2"] == 0.333984375
PY
