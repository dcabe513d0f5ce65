#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): its schedules, and param groups with rates of their own, 0.02 and 0.003.
#
# Guess: a schedule multiplies each group's rate, as WarmupCosineLR does, and torch's schedules.
# Rates differ for matrices and vectors with Muon, by layer in fine-tuning, and between LoRA's two factors.
#
# Seen, at the end of the warm-up:
#   WarmupCosineLR                          0.02 and 0.003
#   WarmupLR without warmup_max_lr          0.02 and 0.003
#   WarmupLR with warmup_max_lr 0.02        0.02 and 0.02
#   WarmupDecayLR without warmup_max_lr     0.001 and 0.001, which no one wrote
#   OneCycle                                its maximum for both, and the beta2 of both is 0.99, whatever it was.
# No call says anything.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import torch
from deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

STEPS = 4
MAKES = {
    "WarmupCosineLR": lambda optimizer: WarmupCosineLR(optimizer, 100, warmup_num_steps=STEPS),
    "WarmupLR": lambda optimizer: WarmupLR(optimizer, warmup_num_steps=STEPS),
    "WarmupLR, 0.02": lambda optimizer: WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=STEPS),
    "WarmupDecayLR": lambda optimizer: WarmupDecayLR(optimizer, 100, warmup_num_steps=STEPS),
    "OneCycle, 0.02": lambda optimizer: OneCycle(optimizer, 0.001, 0.02, cycle_first_step_size=STEPS),
}
seen = {}
for name, make in MAKES.items():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.02, 0.003)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule, rates = make(optimizer), []
    for _ in range(2 * STEPS):
        optimizer.step()
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    peaks = tuple(round(max(of_group), 6) for of_group in zip(*rates))
    seen[name] = (peaks, {group["betas"][1] for group in optimizer.param_groups})
    print(f"{name}: largest rates {peaks}, beta2 {seen[name][1]}")
assert seen == {
    "WarmupCosineLR": ((0.02, 0.003), {0.95}),
    "WarmupLR": ((0.02, 0.003), {0.95}),
    "WarmupLR, 0.02": ((0.02, 0.02), {0.95}),
    "WarmupDecayLR": ((0.001, 0.001), {0.95}),
    "OneCycle, 0.02": ((0.02, 0.02), {0.99}),
}
END
