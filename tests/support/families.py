"""Every family of transformers: what the routing says of each weight, beside what the judge saw of its outputs."""

import inspect
import re
import warnings
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

from tests.support.judge import Judge
from tests.support.zoo.compare import Verdict, passes, verdicts

CONFIGS = hf.models.auto.configuration_auto.CONFIG_MAPPING
FAMILIES = sorted(family for family in CONFIGS if CONFIGS[family] in hf.models.auto.modeling_auto.MODEL_MAPPING)
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")  # lists of a configuration, by layer
# What the judge cannot see, or sees otherwise than one would train it, by weight, with the reason
EXPLAINED = {
    r"\.q(_b)?_proj\.weight: q_nope, q_rope": "queries are joined again: W_UQ and W_QR of arXiv 2405.04434",
    r"self_attention\.query_key_value\.weight: q, k, v": "Falcon indexes with a list, which the meta device forgets",
    r"self_attn\.v_proj\.weight: ": "DiffLlama repeats each half of the heads of its values",
    r"compressor(\.indexer)?\.gate_proj\.weight: part0, part1": "a softmax over windows, for each channel by itself",
    r"sampling_offsets\.weight": "offsets of points on levels of an image; one small linear",
}


class Found(NamedTuple):
    verdicts: list[Verdict]
    failed: list[str]  # forward passes that ended in an error


def family(name: str) -> Found:
    """Build a family's model without memory, run what can be run of it, and judge. Raises what building raises."""
    return judged_by_parts(built(name).eval())


def judged_by_parts(model: nn.Module) -> Found:
    """The models in a model run by themselves as well, which sees more where the whole model's pass stops."""
    judge, failed = Judge(model), []
    parts = [module for module in model.modules() if isinstance(module, hf.PreTrainedModel)]
    for part in [*parts[1:], parts[0]]:
        stopped = passes(judge, part, (), inputs(part))
        if stopped:
            failed.append(f"{type(part).__name__}: {stopped}"[:120])
    return Found([_explained(one) for one in verdicts(model, judge, None, full=False)], failed)


def _explained(verdict: Verdict) -> Verdict:
    told = f"{verdict.weight}: {verdict.parts}"
    return verdict._replace(fault="") if any(re.search(pattern, told) for pattern in EXPLAINED) else verdict


def built(name: str, of: str = "AutoModel") -> nn.Module:
    """The model of a family's own configuration, of few layers, on the meta device; ``of`` names its class."""
    config, made = CONFIGS[name](), getattr(hf, of)
    for one, options in ((_few_layers(config), {"attn_implementation": "eager"}), (CONFIGS[name](), {})):
        try:
            with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(action="ignore"):
                built_from = made.from_config if made is hf.AutoModel else made._from_config
                model: nn.Module = built_from(one, dtype=torch.bfloat16, **options)
            return model
        except Exception:
            if not options:
                raise
    raise AssertionError


def _few_layers(config: Any) -> Any:
    for key, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            _few_layers(value)
        elif key in KINDS and isinstance(value, list):
            setattr(config, key, kinds := list(dict.fromkeys(value)))
            config.num_hidden_layers = len(kinds)
        elif type(value) is int and value > 2 and "layer" in key and ("num" in key or "n_" in key):
            setattr(config, key, 2)
    return config


def inputs(part: Any) -> dict[str, Any]:
    """Something for a part's main input."""
    config, size = part.config, getattr(part.config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shapes = {
        "input_ids": (1, 7),
        "decoder_input_ids": (1, 7),
        "pixel_values": (1, getattr(config, "num_channels", 3), height, width),
        "input_features": (1, getattr(config, "num_mel_bins", 80), 3000),
        "input_values": (1, 16000),
        "hidden_states": (1, 7, getattr(config, "hidden_size", 1)),
        "encoder_hidden_states": (1, 7, getattr(config, "hidden_size", 1)),
    }
    wanted = inspect.signature(part.forward).parameters
    names = {part.main_input_name, "decoder_input_ids"}.intersection(shapes).intersection(wanted)
    if getattr(config, "is_decoder", False) and "encoder_hidden_states" in wanted:
        names.add("encoder_hidden_states")
    dtypes = {name: torch.long if name.endswith("_ids") else torch.bfloat16 for name in names}
    found = {name: torch.zeros(shapes[name], dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    return {**found, **({"use_cache": False} if "use_cache" in wanted else {})}
