#!/bin/sh
# transformers 5.24.0 with torch.optim.Muon (torch 2.13.0): the factor by shape on GPT-2's weights.
#
# Guess: a layer of 16 inputs and 64 outputs gets the same update as the equal nn.Linear.
# Muon's factor for it is sqrt(outputs / inputs) = 2.
#
# Seen: GPT-2's layers are Conv1D, whose weight is stored as inputs by outputs.
# Muon reads rows as outputs.
# The wide layer (mlp.c_fc, attn.c_attn) gets the factor 1 in place of 2.
# The narrow one (mlp.c_proj) gets 2 in place of 1.
# The direction of the update is the same, so the two are wrong by opposite factors.

set -- torch==2.13.0 transformers==5.24.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
from transformers import GPT2Config, GPT2Model

torch.manual_seed(0)
block = GPT2Model(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)).h[0]


def update(layer: torch.nn.Module, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    before = layer.weight.detach().clone()
    optimizer = torch.optim.Muon([layer.weight], lr=1.0, weight_decay=0.0)
    (layer(data) - target).square().sum().backward()
    optimizer.step()
    return layer.weight.detach() - before


seen = {}
for name, inputs, outputs in (("c_fc", 16, 64), ("c_proj", 64, 16)):
    conv = getattr(block.mlp, name)
    linear = torch.nn.Linear(inputs, outputs)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.T)
        linear.bias.copy_(conv.bias)
    data, target = torch.randn(128, inputs), torch.randn(128, outputs)
    by_conv, by_linear = update(conv, data, target).T, update(linear, data, target)
    cosine = torch.nn.functional.cosine_similarity(by_conv.flatten(), by_linear.flatten(), dim=0).item()
    seen[name] = round((by_conv.norm() / by_linear.norm()).item(), 2), round(cosine, 3)
    print(f"{type(conv).__name__} {name} {tuple(conv.weight.shape)} against nn.Linear, size and cosine:", seen[name])
assert seen["c_fc"][0] == 0.5 and seen["c_proj"][0] == 2.0
assert all(cosine > 0.99 for _, cosine in seen.values())
PY
