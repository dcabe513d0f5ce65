#!/bin/sh
# DeepSpeed 0.19.8, bf16, stages 1 and 2: engine.backward(loss), then engine.backward(loss / 2), then one engine.step().
# Expected: the sum, 1.5 times the gradient, as loss.backward() gives twice, whatever accumulates the gradients.
# Seen: with grad_accum_dtype fp32, stage 1 counts the first loss twice, 2.5, and stage 2 sums; in bf16, stage 1 uses the
# last loss alone, 0.5.
set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

LR, found = 0.1, {}
for stage, dtype in ((1, "fp32"), (1, "bf16"), (2, "fp32")):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": dtype},
        "gradient_clipping": 0.0,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)[0]
    before = safe_get_full_fp32_param(engine.module.weight).clone()
    loss = engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss / 2)
    engine.step()
    moved = before - safe_get_full_fp32_param(engine.module.weight)
    found[stage, dtype] = round(float(moved.mean() / LR), 3)
    print(f"stage {stage}, accumulated in {dtype}: {found[stage, dtype]} times the gradient")
assert found == {(1, "fp32"): 2.5, (1, "bf16"): 0.5, (2, "fp32"): 1.5}
END
