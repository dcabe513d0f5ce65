#!/bin/sh
# torch 2.13.0, torch.optim.Muon.
# Expected: a misspelt adjust_lr_fn is an error, wherever it comes from, as it is in the constructor.
# Seen: in a param group, also in one that load_state_dict brings, it is taken, and means the factor 1.0. A matrix of
# 2 x 8 then moves 1.77 times as far as with the misspelt 'match_rms_adamw'.
set -- torch==2.13.0
. "$(dirname "$0")/environment"
python - << 'END'
import torch

weight = torch.nn.Parameter(torch.zeros(2, 8))
try:
    torch.optim.Muon([weight], adjust_lr_fn="match_rms_adam")
    raise SystemExit("the constructor takes it now")
except ValueError as error:
    print("constructor:", error)
moved = {}
for name in ("match_rms_adamw", "match_rms_adam"):
    weight.data.zero_()
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0)
    state = optimizer.state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = name
    optimizer.load_state_dict(state)
    weight.grad = torch.arange(16.0).view(2, 8)
    optimizer.step()
    moved[name] = float(weight.detach().norm())
    print(f"loaded {name}: moved {moved[name]:.3f}")
assert 1.7 < moved["match_rms_adam"] / moved["match_rms_adamw"] < 1.8
END
