#!/bin/sh
# transformers 5.24.0 (torch 2.13.0, accelerate 1.15.0): Trainer with weight_decay, and which weights it decays.
#
# Guess: no normalization layer's weights, which the docstring says it leaves out "by layer type" and by name.
#
# Seen: the layer type is nn.LayerNorm alone, and an RMSNorm is known by its name only: ...norm, ..._norm, layernorm.
#   Qwen2.5-VL   norm1 and norm2 of the vision blocks and merger.ln_q are decayed. Norms of the text model are not.
#   Mamba        norm_f, the last norm, is decayed, and the norms of the layers, of the same class, are not.
#                So are A_log and D, which the authors of Mamba except from weight decay.
# A norm whose weights start at 1 is pulled towards 0. The Trainer says nothing.

set -- torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
. "$(dirname "$0")/environment"
python -W ignore - 2> errors <<'PY' || { cat errors; exit 1; }
import re

from transformers import (
    MambaConfig,
    MambaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32}
TEXT = {**SIZES, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
models = {
    "Qwen2.5-VL": Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION)),
    "Mamba": MambaForCausalLM(MambaConfig(**SIZES)),
}
seen = {}
for name, model in models.items():
    arguments = TrainingArguments("out", use_cpu=True, weight_decay=0.1, report_to="none")
    optimizer = Trainer(model, arguments).create_optimizer()
    decayed = {id(param) for group in optimizer.param_groups if group["weight_decay"] for param in group["params"]}
    seen[name] = {True: set(), False: set()}
    for key, param in model.named_parameters():
        layer = model.get_submodule(key.rpartition(".")[0])
        if "RMSNorm" in type(layer).__name__ or key.endswith((".A_log", ".D")):
            seen[name][id(param) in decayed].add(re.sub(r"\.\d+", "", key).removesuffix(".weight").rpartition(".")[2])
    print(f"{name}: decayed {sorted(seen[name][True])}, not decayed {sorted(seen[name][False])}")
assert seen["Qwen2.5-VL"][True] == {"norm1", "norm2", "ln_q"}
assert seen["Qwen2.5-VL"][False] == {"input_layernorm", "post_attention_layernorm", "norm"}
assert seen["Mamba"] == {True: {"norm_f", "A_log", "D"}, False: {"norm"}}
PY
