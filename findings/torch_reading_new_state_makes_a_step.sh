#!/bin/sh
# torch 2.13.0, with pytorch_optimizer 4.1.0 for SOAP: get_optimizer_state_dict of a new optimizer.
#
# Guess: it reads. Training after it is the same as without it.
# A loop that saves before its first step calls it on a new optimizer.
#
# Seen: torch makes a whole step with zero gradients to create the state, and the step counts.
#   torch.optim.AdamW  the first real update is 0.744 of the rate in place of 1.0.
#   SOAP               its first step only initializes the eigenbases, without an update.
#                      They come from zero gradients then, and the first real gradient is applied at once.

set -- torch==2.13.0 pytorch-optimizer==4.1.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
from collections.abc import Callable

import torch
from pytorch_optimizer import SOAP
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def updates(make: Callable[..., torch.optim.Optimizer], *, read: bool) -> list[float]:
    """How far the first two steps move a weight of 8 by 8."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.0)
    if read:
        get_optimizer_state_dict(model, optimizer)
    sizes = []
    for _ in range(2):
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn(8, 8)
        optimizer.step()
        sizes.append(round((model.weight.detach() - before).norm().item() / 0.8, 3))
    return sizes


adamw = {read: updates(torch.optim.AdamW, read=read) for read in (False, True)}
soap = {read: updates(SOAP, read=read) for read in (False, True)}
print("root mean square of the first two updates, in rates, by whether the state was read before:")
print("AdamW:", adamw)
print("SOAP:", soap)
assert adamw[False][0] == 1.0 and adamw[True][0] == 0.744
assert soap[False][0] == 0.0 and soap[True][0] > 0.5
PY
