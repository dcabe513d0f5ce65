#!/bin/sh
# torch 2.13.0: dcp.save({"model": model, "optimizer": optimizer}), and dcp.load of the same into a new optimizer.
#
# Guess: both are restored. Each has state_dict and load_state_dict, which is all that DCP's Stateful asks for.
# What the file has and the program does not is an error, as in model.load_state_dict.
#
# Seen: load asks the new optimizer for what to read. It has made no step yet, so it has no state, and none is read.
# Rates are restored and the model is, so training goes on, from a momentum of zero. Nothing is said.
# The same call into an optimizer that has made a step restores its state.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed.checkpoint as dcp


def made(lr: float, *, stepped: bool) -> dict:
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if stepped:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


saved = made(0.5, stepped=True)
dcp.save(saved, checkpoint_id="saved")
seen = {}
for name, stepped in (("new", False), ("after a step", True)):
    loaded = made(0.1, stepped=stepped)
    dcp.load(loaded, checkpoint_id="saved")
    state = loaded["optimizer"].state_dict()["state"]
    seen[name] = {
        "weight": loaded["model"].weight[0, 0].item(),
        "lr": loaded["optimizer"].param_groups[0]["lr"],
        "momentum": state[0]["momentum_buffer"][0, 0].item() if state else None,
    }
    print(f"loaded into an optimizer, {name}: {seen[name]}")
assert seen["new"] == {"weight": 0.5, "lr": 0.5, "momentum": None}
assert seen["after a step"] == {"weight": 0.5, "lr": 0.5, "momentum": 1.0}
PY
