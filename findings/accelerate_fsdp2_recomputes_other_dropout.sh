#!/bin/sh
# Accelerate 1.15.0 (torch 2.13.0): activation_checkpointing of FSDP2, and a layer with dropout, LoRA's for example.
#
# Guess: it saves memory and changes no gradient. torch's checkpoint keeps the state of the random numbers for that, by
# default, and Accelerate's FSDP1 leaves it so.
#
# Seen: FSDP2's switches it off (preserve_rng_state=False). The backward pass recomputes the layer with another mask.
# Below, the layer multiplies numbers by weights of 1 and drops half of them. Its loss is the sum of what is left, so it
# equals the sum of the gradient. With the checkpointing it does not: gradients are of another network than the loss.
# (On CPUs Accelerate shards nothing, so fsdp2_apply_ac is called as Accelerator.prepare calls it.)

set -- torch==2.13.0 accelerate==1.15.0
. "$(dirname "$0")/environment"
python -W ignore - 2> errors <<'PY' || { cat errors; exit 1; }
from types import SimpleNamespace

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_apply_ac


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = torch.nn.Parameter(torch.ones(64)), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x * self.weight)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


seen = {}
for checkpointing in (False, True):
    torch.manual_seed(0)
    model = Model()
    if checkpointing:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            activation_checkpointing=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
        )
        plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
    loss = model(torch.arange(64.0))
    loss.backward()
    (param,) = model.parameters()
    seen[checkpointing] = (loss.item(), param.grad.sum().item())
    print("activation_checkpointing={}: loss {}, sum of the gradient {}".format(checkpointing, *seen[checkpointing]))
assert seen[False][0] == seen[False][1] == seen[True][0]
assert seen[True][1] != seen[True][0]
PY
