#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): a layer that the loss of one step does not use, as experts and adapters are.
#
# Guess: its gradient is zero in that step, or it stays as it is, as with torch.optim. So it is at stages 0, 1 and 2.
#
# Seen: at stage 3 the layer is trained again with its gradient of an earlier step, as often as it is not used.
# Plain SGD at rate 0.1 and a gradient of 1 in the first step only: the weight ends at 0.9, and at stage 3 at 0.7.
# The norm of the gradient, by which all layers are clipped, counts the old one as well: 1.41 in place of 1.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in (self.a, self.b):
            torch.nn.init.ones_(layer.weight)

    def forward(self, x, both):
        return (self.a(x) + self.b(x) if both else self.a(x)).sum()


weights, norms = [], []
for stage in range(4):
    model = Layers()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for both in (True, False, False):
        engine.backward(engine(torch.ones(1, 1), both))
        engine.step()
    with deepspeed.zero.GatheredParameters([model.b.weight], enabled=stage == 3):
        weights.append(round(model.b.weight.item(), 4))
    norms.append(engine.get_global_grad_norm())
    print(f"stage {stage}: the layer used in one step of three has the weight {weights[-1]}; last norm {norms[-1]}")
assert weights == [0.9, 0.9, 0.9, 0.7]
assert all(abs(norm - expected) < 1e-3 for norm, expected in zip(norms[1:], (1, 1, 2**0.5)))
END
