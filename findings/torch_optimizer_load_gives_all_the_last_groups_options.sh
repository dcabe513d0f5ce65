#!/bin/sh
# torch 2.13.0: set_optimizer_state_dict of a checkpoint whose optimizer had other param groups.
#
# Guess: an error, as optimizer.load_state_dict raises ("a different number of parameter groups"), or the options of each
# parameter by its name, as states are found.
#
# Seen, without flatten_optimizer_state_dict:
#   saved from two groups, weights with decay and biases without, loaded into one   the whole model has the options of
#     the last group, so nothing is decayed any more.
#   saved from one group, loaded into two   the first group has no options at all, and the next step is a KeyError.
# No call says anything. With flatten_optimizer_state_dict=True one group takes its first parameter's options.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

model = torch.nn.Linear(2, 2)


def made(*, groups: int) -> torch.optim.Optimizer:
    if groups == 1:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    else:
        decay, rest = {"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decay, rest], lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


seen = {}
for before, after in ((2, 1), (1, 2)):
    saved, optimizer = get_optimizer_state_dict(model, made(groups=before)), made(groups=after)
    set_optimizer_state_dict(model, optimizer, saved)
    seen[before] = [(group.get("lr"), group.get("weight_decay")) for group in optimizer.param_groups]
    print(f"saved from {before} groups, loaded into {after}: rates and decays are {seen[before]}")
assert seen == {2: [(0.1, 0.0)], 1: [(None, None), (0.1, 0.5)]}
try:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
except KeyError as error:
    print("the next step of the two groups raises", repr(error))
else:
    raise AssertionError("the step was made")
PY
