#!/bin/sh
# torch 2.13.0, DeepSpeed 0.19.8, two ranks: two micro-batches a step at ZeRO stage 1, the second without layer b.
#
# Guess: overlap_comm changes when gradients are reduced, and not what they are.
#
# Seen: with overlap_comm only what the last micro-batch uses is reduced. Layer b, which the first micro-batch used,
# moves by the gradient of the rank that owns it, 1.0, in place of the mean, 0.75. Stage 2 is right either way.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import deepspeed
import torch
import torch.distributed as dist


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 1, bias=False)
        self.b = torch.nn.Linear(4, 1, bias=False)
        for param in self.parameters():
            torch.nn.init.zeros_(param)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.a(x) + self.b(x) if both else self.a(x)).sum()


deepspeed.init_distributed("gloo")
rank, moved = dist.get_rank(), {}
for stage, overlap in ((1, False), (1, True), (2, False), (2, True)):
    model = Layers()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]
    for both in (True, False):  # gradients of b: 1 and 2 on the two ranks, over 2 micro-batches
        engine.backward(engine(torch.full((1, 4), rank + 1.0), both))
        engine.step()
    moved[stage, overlap] = by = -model.b.weight[0, 0].item()
    if rank == 0:
        print(f"stage {stage}, overlap_comm {overlap}: the layer that only the first micro-batch used moves by {by}")
assert moved == {(1, False): 0.75, (1, True): 1.0, (2, False): 0.75, (2, True): 0.75}
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
