#!/bin/sh
# torch 2.13.0: the momentum of torch.optim.Muon(nesterov=False) with bf16 weights.
#
# Guess: an average of gradients, as with fp32 weights, rounded to bf16.
#
# Seen: each step divides the momentum buffer itself by its norm.
# Five steps with one gradient of norm 32 and momentum 0.9 leave a buffer of norm 13.1 in fp32.
# In bf16 the norm is 1 after each step.
# A new gradient of norm 32 then weighs 3.2 against 0.9, so nearly nothing of the past remains.
# With nesterov=True, which is the default, bf16 gives 13.1 as well.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch


def norms(dtype: torch.dtype, nesterov: bool) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=nesterov)
    sizes = []
    for _ in range(5):
        weight.grad = torch.full((4, 4), 8.0, dtype=dtype)
        optimizer.step()
        sizes.append(round(optimizer.state[weight]["momentum_buffer"].norm().item(), 1))
    return sizes


seen = {
    f"{str(dtype).removeprefix('torch.')}, nesterov={nesterov}": norms(dtype, nesterov)
    for dtype in (torch.float32, torch.bfloat16)
    for nesterov in (False, True)
}
for case, sizes in seen.items():
    print(f"norm of the momentum after each step, {case}:", sizes)
assert seen["bfloat16, nesterov=False"] == [1.0] * 5
for case in ("float32, nesterov=False", "float32, nesterov=True", "bfloat16, nesterov=True"):
    assert seen[case][0] == 3.2 and abs(seen[case][-1] - 13.1) <= 0.1, case
PY
