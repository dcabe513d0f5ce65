"""Megatron-core's parameter names: a rank's own numbers made global, Transformer Engine's spelling the local spec's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lwopt_backend.checkpoint.contents import CheckpointError

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
FUSED = (  # Transformer Engine's name, which torch_dist always has, and the local spec's
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_KNOWN = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "output_layer.")
_BUFFERS = (".router.expert_bias", ".router.local_tokens_per_expert", ".inv_freq")


def local_spec(name: str) -> str:
    """A name as Megatron's local spec has it, from that or from Transformer Engine's; its numbers stay.

    Raises CheckpointError for a name that is none of a GPT model's.
    """
    for fused, separate in FUSED:
        name = name.replace(fused, separate)
    name = _GROUPED.sub(r".mlp.experts.local_experts.\3.\1.\2", name)
    if not name.startswith(_KNOWN):
        raise CheckpointError(
            f"{name}: expected a parameter of a GPT model of Megatron-core; other models are not read"
        )
    if ".mlp.experts." in name and not _EXPERT.search(name):
        raise CheckpointError(f"{name}: experts in one tensor (legacy grouped GEMM) are not read; save as torch_dist")
    return name


def is_buffer(name: str) -> bool:
    """Whether it is a module's buffer, which no optimizer has."""
    return name.endswith(_BUFFERS)


def layer_of(name: str) -> int | None:
    """The number of the layer that it is in."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """The number of the routed expert that it is in."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def is_expert(name: str) -> bool:
    """Whether it is one of a layer's routed experts."""
    return expert_of(name) is not None


def is_tied(arguments: Mapping[str, Any]) -> bool:
    """Whether Megatron's ``args`` say that the output layer is the word embedding."""
    return arguments.get("untie_embeddings_and_output_weights") is False


def tied(names: Collection[str], arguments: Mapping[str, Any]) -> dict[str, str]:
    """The output layer's name with the embedding's, which is among ``names``, if they are tied."""
    return {OUTPUT: EMBEDDING} if is_tied(arguments) and EMBEDDING in names and OUTPUT not in names else {}


def layers_in(names: Iterable[str], where: str) -> int:
    """How many layers a rank's names have. Raises CheckpointError unless they are numbered from 0 without a gap."""
    found = {layer for name in names if (layer := layer_of(name)) is not None}
    if found != set(range(len(found))):
        raise CheckpointError(f"{where}: expected layers numbered from 0, found {sorted(found)}; the file is not whole")
    return len(found)


def global_name(name: str, *, first_layer: int, first_expert: int) -> str:
    """A rank's own name with global layer and expert numbers."""
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f".mlp.experts.local_experts.{int(match[1]) + first_expert}.", name)
