#!/bin/sh
# DeepSpeed 0.19.8 (torch 2.13.0): requires_grad_(False) and requires_grad_(True) after deepspeed.initialize.
#
# Guess: as in a torch loop whose optimizer has all parameters: a frozen layer stays as it is, a thawed one trains.
# Schedules that thaw layers from the head down, and warm-ups of a new head alone, do this.
#
# Seen, with SGD and a momentum of 0.9:
#   frozen after a step                        at stages 1, 2 and 3 it goes on by its momentum. At stage 0 it stays.
#   frozen at initialize, thawed after a step  at stages 1, 2 and 3 it never trains. At stage 0 it does.
# No call says anything.

set -- torch==2.13.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python - 2> "$folder/errors" << 'END' || { cat "$folder/errors"; exit 1; }
import deepspeed
import torch


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        torch.nn.init.ones_(self.a.weight)

    def forward(self, x):
        return (self.a(x) + self.b(x)).sum()


def weights(stage, train):
    """The weight of layer a, whose gradient is 1 where it is trained, after each of two steps."""
    model = Layers()
    weight = model.a.weight
    weight.requires_grad_(train[0])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for is_trained in train:
        weight.requires_grad_(is_trained)
        engine.backward(engine(torch.ones(1, 1)))
        engine.step()
        with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
            found.append(round(weight.item(), 4))
    return found


frozen, thawed = ([weights(stage, train) for stage in range(4)] for train in ((True, False), (False, True)))
for stage in range(4):
    print(f"stage {stage}: frozen after a step {frozen[stage]}, thawed after a step {thawed[stage]}")
assert frozen == [[0.9, 0.9]] + [[0.9, 0.81]] * 3
assert thawed == [[1.0, 0.9]] + [[1.0, 1.0]] * 3
END
