#!/bin/sh
# torch 2.13.0: torch.nn.utils.clip_grad_value_ where no parameter has a gradient.
#
# Guess: nothing happens, as with clip_grad_norm_, which returns 0.
# A loop clips after each pass; a rank whose batch uses none of a module's layers has no gradient of that module.
#
# Seen: clip_grad_norm_ returns 0. clip_grad_value_ is an internal error ("nested_tensorlist[0].empty()"), by each of its
# ways: foreach left out, True and False. With one gradient it clips.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

param = torch.nn.Parameter(torch.ones(2))
norm = clip_grad_norm_([param], 1.0).item()
said = {}
for foreach in (None, True, False):
    try:
        clip_grad_value_([param], 1.0, foreach=foreach)
        said[foreach] = "nothing"
    except RuntimeError as error:
        said[foreach] = str(error).partition(" to be")[0]
param.grad = torch.full((2,), 3.0)
clip_grad_value_([param], 1.0)
print("clip_grad_norm_ without a gradient returns", norm)
print("clip_grad_value_ without a gradient, by foreach:", said)
print("with one:", param.grad.tolist())
assert norm == 0.0 and param.grad.tolist() == [1.0, 1.0]
assert set(said.values()) == {"Expected !nested_tensorlist[0].empty()"}
PY
