#!/bin/sh
# DeepSpeed 0.19.8 with transformers 5.24.0 (torch 2.13.0): which weights of GPT-2 its Muon trains.
#
# Guess: the hidden matrices. Embeddings and the head go to AdamW, as in the published recipe of Muon.
#
# Seen: the optimizer "Muon" takes each parameter of two or more dimensions.
# It leaves out only names that contain "embed" or "lm_head".
# GPT-2 calls its token embedding `wte` and its position embedding `wpe`.
# Both are orthogonalized, and so is the head, which is tied to `wte`.
# Llama calls its embedding `embed_tokens`, which goes to AdamW.

set -- torch==2.13.0 transformers==5.24.0 deepspeed==0.19.8
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch._dynamo.config.disable = True  # Muon's functions would be compiled
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
MUON = {"type": "Muon", "params": {"lr": 0.1, "weight_decay": 0.0, "torch_adam": True}}


def by_the_rate(model: torch.nn.Module) -> dict[str, float]:
    """The share of a weight's moved elements that the first step moved by the rate itself, as AdamW's does."""
    weights = {
        name: (weight, weight.detach().clone())
        for name, weight in model.named_parameters()
        if name.split(".")[-2] in ("wte", "wpe", "embed_tokens", "lm_head")
    }
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": MUON}
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**config, "zero_optimization": {"stage": 1, "reduce_scatter": False}},
    )[0]
    tokens = torch.arange(32)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    moved = {name: (weight.detach() - before).abs() for name, (weight, before) in weights.items()}
    return {name: round((size[size > 0] - 0.1).abs().lt(1e-3).float().mean().item(), 2) for name, size in moved.items()}


COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=32, **COMMON))
small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
llama = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **small, **COMMON))
shares = {**by_the_rate(gpt2), **by_the_rate(llama)}
print("share of moved elements that the first step moved by the rate itself, as AdamW does:", shares)
assert shares["transformer.wte.weight"] < 0.1 and shares["transformer.wpe.weight"] < 0.1
assert shares["model.embed_tokens.weight"] > 0.9 and shares["lm_head.weight"] > 0.9
PY
