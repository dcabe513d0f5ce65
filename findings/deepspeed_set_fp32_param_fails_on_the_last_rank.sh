#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): safe_set_full_fp32_param at ZeRO stage 3, on two ranks.
#
# Guess: every rank calls it with the whole value, and takes its own part, as safe_get_full_fp32_param gives it back.
#
# Seen, with a weight of 4 elements: so it is, at stages 1, 2 and 3.
# With a weight of 3: at stages 1 and 2 too. At stage 3 the last rank fails,
#   RuntimeError: start (2) + length (2) exceeds dimension size (3).
# because its part ends in padding. The first rank returns, so from then on the ranks' code differs.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
cat > "$folder/script.py" <<'PY'
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
dist.init_process_group("gloo")
seen = {}
for size in (4, 3):
    for stage in (1, 2, 3):
        model = torch.nn.Linear(size, 1, bias=False)
        engine = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            },
        )[0]
        value = torch.arange(1.0, size + 1).view(1, size)
        said = "set"
        try:
            safe_set_full_fp32_param(model.weight, value)
        except RuntimeError as error:
            said = str(error)
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, said)
        found = safe_get_full_fp32_param(model.weight)
        if of_ranks == ["set", "set"]:
            assert torch.equal(found.flatten()[:size], value.flatten()), found
        seen[size, stage] = of_ranks
        if dist.get_rank() == 0:
            print(f"stage {stage}, {size} elements, ranks 0 and 1:", *of_ranks, sep="  ")
fails = "start (2) + length (2) exceeds dimension size (3)."
assert seen.pop((3, 3)) == ["set", fails]
assert all(of_ranks == ["set", "set"] for of_ranks in seen.values()), seen
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 "$folder/script.py" 2> "$folder/errors" || {
    cat "$folder/errors"
    exit 1
}
