#!/bin/sh
# torchtitan 0.3.0 (torch 2.15.0): a checkpoint of FusedQKVLinear.
#
# Its docstring: it saves wq, wk and wv, "so checkpoints interoperate with the non-fused module".
# Guess: so does the optimizer's state, and training goes on with QKVLinear.
#
# Seen: the weight is saved as wq, wk and wv, and the momentum as one, under wqkv, whose rows are by key-value head.
# So a program that pairs weights with state finds three weights without state, and state without a weight.
# Loading it into QKVLinear with its optimizer raises, "Missing key in checkpoint state_dict: param_groups.wk.weight...".

set -- torch==2.15.0 torchtitan==0.3.0 triton
. "$(dirname "$0")/environment"
python -W ignore - 2> "$folder/errors" <<'PY' || { cat "$folder/errors"; exit 1; }
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict  # of its checkpoints
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
from torchtitan.models.common.linear import Linear

HEADS, GROUPS, HEAD, WIDTH = 4, 2, 3, 5


def linear(heads: int) -> Linear.Config:
    return Linear.Config(in_features=WIDTH, out_features=heads * HEAD)


def trained(model: torch.nn.Module) -> dict:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return {**model.state_dict(), **get_flat_optim_state_dict(optimizer)}


fused = FusedQKVLinear.Config(
    head_dim=HEAD, n_heads=HEADS, n_kv_heads=GROUPS, wqkv=linear(HEADS + 2 * GROUPS)
).build()
separate = QKVLinear.Config(head_dim=HEAD, wq=linear(HEADS), wkv=linear(GROUPS)).build()
saved, wanted = trained(fused), trained(separate)
shapes = {name: tuple(tensor.shape) for name, tensor in saved.items() if getattr(tensor, "ndim", 0) == 2}
print("saved:", shapes)
assert shapes == {
    "wq.weight": (12, 5),
    "wk.weight": (6, 5),
    "wv.weight": (6, 5),
    "state.wqkv.weight.momentum_buffer": (24, 5),
}
dcp.save(saved, checkpoint_id="saved", no_dist=True)
weights = {name: tensor for name, tensor in wanted.items() if name.endswith(".weight")}
dcp.load(weights, checkpoint_id="saved", no_dist=True)
assert all(torch.equal(weights[name], saved[name]) for name in ("wq.weight", "wk.weight", "wv.weight"))
try:
    dcp.load(wanted, checkpoint_id="saved", no_dist=True)
    said = "loaded"
except dcp.api.CheckpointException as error:
    said = str(error)
print("loading QKVLinear with its state:", said.strip().splitlines()[-1])
assert "Missing key in checkpoint state_dict: param_groups.wk.weight." in said
PY
