"""The order of Megatron-core's modules, for files that do not tell it: that of ``GPTModel.named_parameters()``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.megatron.names import expert_of, layer_of
from lwopt_backend.checkpoint.megatron.states import SAVED_WHOLE

_IN_LAYER = re.compile(r"decoder\.layers\.\d+\.((?:mlp\.experts\.local_experts\.\d+\.)?(.+))")
_BEFORE = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings")
_AFTER = ("decoder.final_layernorm", "output_layer")
# As constructors make them: TransformerLayer, Attention before SelfAttention, MoELayer, MLP.
_ATTENTION = ("self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm")
_LOCAL = (
    *("input_layernorm", *_ATTENTION, "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router"),
    *("mlp.linear_fc1", "mlp.linear_fc2", "mlp.experts", "mlp.shared_experts"),
)
_FUSED = (  # Transformer Engine's linear layers have the norm before them, as their first parameters
    *(_ATTENTION[0], "input_layernorm", *_ATTENTION[1:], "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.router", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.experts", "mlp.shared_experts"),
)
_LAST = ("weight", "bias")
_MLP = ("gate_weight", "linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")


def module_order(names: Iterable[str], arguments: Mapping[str, Any]) -> list[str]:
    """Local-spec names in the order of the modules that ``arguments`` (Megatron's ``args``) describe.

    Layer and expert numbers may be local or global, as long as they are of one rank. Raises CheckpointError with all
    the names whose place is not known.
    """
    local = arguments.get("transformer_impl") == "local"
    grouped = bool(arguments.get("moe_grouped_gemm"))
    keys = {name: _key(name, _LOCAL if local else _FUSED, grouped) for name in names}
    unknown = sorted(name for name, key in keys.items() if key is None)
    if unknown:
        raise CheckpointError(
            f"the place of {', '.join(unknown)} among the modules is not known, so flat buffers cannot be taken apart; "
            + SAVED_WHOLE
        )
    return sorted(keys, key=lambda name: keys[name] or ())


def _key(name: str, modules: tuple[str, ...], grouped: bool) -> tuple[int, ...] | None:
    layer, expert, match = layer_of(name), expert_of(name), _IN_LAYER.fullmatch(name)
    if layer is None or match is None:
        module, _, last = name.rpartition(".")
        known: tuple[str, ...]
        for part, known in ((0, _BEFORE), (2, _AFTER)):
            if module in known and last in _LAST:
                return (part, known.index(module), _LAST.index(last))
        return None
    rest, of_expert = match.groups()
    place = next((i for i, module in enumerate(modules) if rest.startswith(f"{module}.")), None)
    if place is None:
        return None
    rest = rest.removeprefix(f"{modules[place]}.")
    if expert is not None and of_expert in _MLP:
        inner = (_MLP.index(of_expert), expert) if grouped else (expert, _MLP.index(of_expert))
        return (1, layer, place, *inner)
    known = _MLP if modules[place] == "mlp.shared_experts" else _LAST
    return (1, layer, place, known.index(rest), 0) if rest in known else None
