"""Megatron-core's parameter names, their order in groups, the folder of a step, and names of states.

A name is read as it is, whatever the model: only flat buffers need the order of modules, and families of names decide
what they know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, CheckpointError, LazyTensor, Param
from lwopt_backend.checkpoint.files.pickles import options, scalar

# Megatron-core's parameter names in the local spec's spelling, with a rank's own numbers made global.

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
EMBEDDINGS = (EMBEDDING, HEAD)  # "is_embedding_or_output_parameter"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
FUSED = (  # Transformer Engine's name, which torch_dist always has, and the local spec's
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_BUFFERS = (".router.expert_bias", ".router.local_tokens_per_expert", ".inv_freq")


def respelled(name: str) -> str:
    """A parameter's name in Megatron's local spec, from that or Transformer Engine's; numbers do not change."""
    for fused, separate in FUSED:
        name = name.replace(fused, separate)
    return _GROUPED.sub(r".mlp.experts.local_experts.\3.\1.\2", name)


def is_buffer(name: str) -> bool:
    """Whether ``name`` is a module's buffer, which no optimizer trains."""
    return name.endswith(_BUFFERS)


def layer_of(name: str) -> int | None:
    match = LAYER.match(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    match = EXPERT.search(name)
    return int(match[1]) if match else None


def is_tied(arguments: Mapping[str, Any]) -> bool:
    """Whether Megatron's ``args`` tie the output layer to the word embedding."""
    return arguments.get("untie_embeddings_and_output_weights") is False


def tied(names: Collection[str], arguments: Mapping[str, Any]) -> dict[str, str]:
    """The output layer's name with that of the embedding in ``names``, if they are tied."""
    return {HEAD: EMBEDDING} if is_tied(arguments) and EMBEDDING in names and HEAD not in names else {}


def training_notes(arguments: Mapping[str, Any], params: Mapping[str, Param]) -> list[str]:
    """What Megatron's ``args`` say of its training that differs from training here."""
    ranks = world(arguments)["tp"]
    is_muons = any("momentum_buffer" in param.states for param in params.values())
    if is_muons and ranks > 1 and arguments.get("muon_tp_mode") == "blockwise":
        return [
            f"Megatron's Muon orthogonalized the parts of a matrix on the {ranks} tensor-parallel ranks "
            "(--muon-tp-mode blockwise, the default up to 0.19.2); here it orthogonalizes whole matrices"
        ]
    return []


# The optimizer's known states, by the keys in Megatron's files.

SECOND = "moment2_buffer"  # adaptive_muon's
STATES = ("momentum_buffer", SECOND, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
BY_NAME = {"fp32_param": MASTER, "param": MASTER, **{key: key for key in STATES}}  # in torch_dist, of each parameter
FLAT = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # in the DistributedOptimizer's buffers
States = Mapping[str, Mapping[str, LazyTensor]]  # by parameter and state
SAVED_WHOLE = (  # up to 0.19.2, with several gradient buckets, it writes masters and moments of other parameters
    "load it in Megatron and save with --dist-ckpt-optim-fully-reshardable (up to 0.19.2 without "
    "--overlap-grad-reduce, with which that option writes wrong state)"
)


def flat_states(found: Collection[str], arguments: Mapping[str, Any]) -> dict[str, str]:
    """The states that flat buffers must have, of which some are ``found``: Lion keeps one moment, and in fp16 there is
    none before the first step without an overflow."""
    if arguments.get("fp16") and set(found) <= {"param", MASTER}:
        return {"param": MASTER}
    lion = "lion" in (arguments.get("optimizer"), arguments.get("muon_scalar_optimizer"))
    return {key: state for key, state in FLAT.items() if not (lion and key == "exp_avg_sq")}


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """A rank's own name with global layer and expert numbers."""
    name = LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return EXPERT.sub(lambda match: f".mlp.experts.local_experts.{int(match[1]) + first_expert}.", name)


def check_states(
    states: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, LazyTensor],
    where: str,
    known: Sequence[str] = (MASTER, *STATES),
) -> None:
    """Raises CheckpointError for states that are not ``known``, states without a weight, and for another shape or dtype
    than the weight implies."""
    for name, of_name in states.items():
        for state, tensor in of_name.items():
            is_tensor = isinstance(tensor, LazyTensor)
            what = f"{tensor.where if is_tensor else where}: {'master weight' if state == MASTER else state} of {name}"
            if state not in known:
                problem = f"expected a known state ({', '.join(STATES)}), found {state!r}"
                raise CheckpointError(f"{what}: {problem}; save it with a supported optimizer")
            if name not in weights:
                raise CheckpointError(f"{what}: expected a weight for it; copy it")
            shape = tensor.shape if is_tensor else type(tensor).__name__
            if shape != weights[name].shape:
                hint = "; normuon's, one for each row or column, is not converted" if state == SECOND else ""
                raise CheckpointError(f"{what}: expected the weight's shape {weights[name].shape}, found {shape}{hint}")
            if state == MASTER and tensor.dtype != torch.float32:
                raise CheckpointError(f"{what}: expected fp32, found {tensor.dtype}")


# The order of Megatron-core's modules, for files without it: that of ``GPTModel.named_parameters()``.

_IN_LAYER = re.compile(r"decoder\.layers\.\d+\.((?:mlp\.experts\.local_experts\.\d+\.)?(.+))")
_BEFORE = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings")
_AFTER = ("decoder.final_layernorm", "decoder.final_norm")  # HybridModel has final_norm
_HEAD = ("output_layer",)  # after layers that predict further tokens (MTP)
_MTP = re.compile(r"mtp\.layers\.(\d+)\.([^.]+)\.(.+)")
_IN_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
# In the order of the constructors: TransformerLayer, Attention before SelfAttention, MoELayer, MLP.
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

    Layer and expert numbers may be local or global, but must be of one rank. Raises CheckpointError with all names
    whose place is unknown.
    """
    local = arguments.get("transformer_impl") == "local"
    grouped = bool(arguments.get("moe_grouped_gemm"))
    keys = {name: _key(name, _LOCAL if local else _FUSED, grouped) for name in names}
    unknown = sorted(name for name, key in keys.items() if key is None)
    if unknown:
        raise CheckpointError(
            f"expected names with a known place among the modules, found {', '.join(unknown)}; flat buffers cannot be "
            "split: " + SAVED_WHOLE
        )
    return sorted(keys, key=lambda name: keys[name] or ())


def _key(name: str, modules: tuple[str, ...], grouped: bool) -> tuple[int, ...] | None:
    if (mtp := _MTP.fullmatch(name)) and mtp[2] in _IN_MTP:
        within = mtp[3]
        inner = _key(f"decoder.layers.{mtp[1]}.{within}", modules, grouped) if mtp[2] == "transformer_layer" else None
        ends = inner[2:] if inner else (_LAST.index(within),) if within in _LAST else None
        return None if ends is None else (3, int(mtp[1]), _IN_MTP.index(mtp[2]), *ends)
    layer, expert, match = layer_of(name), expert_of(name), _IN_LAYER.fullmatch(name)
    if layer is None or match is None:
        module, _, last = name.rpartition(".")
        known: tuple[str, ...]
        for part, known in ((0, _BEFORE), (2, _AFTER), (4, _HEAD)):
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


# The folders of Megatron's checkpoints: the step's folder, and each rank's folder in it.
#
# latest_checkpointed_iteration.txt          a number, or the word "release"
# iter_0000003/mp_rank_TT[_PPP][_EEE]/       tensor, pipeline (if > 1), expert parallel rank (if > 1)

POINTER = "latest_checkpointed_iteration.txt"
MOST_RANKS = 2**20  # more is damage
_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_STEP = re.compile(r"iter_(\d{7,})|release")
Coordinates = tuple[int, int, int]  # ranks: tensor, pipeline, expert parallel


def step_folder(path: Path) -> Path:
    """The folder of one step: ``path`` itself, or the one that the pointer in it names. Raises CheckpointError for a
    pointer without a valid name, or to a missing folder."""
    pointer = path / POINTER
    if not pointer.is_file():
        return path
    try:
        text = pointer.read_bytes()[:100].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}; name the step's folder itself") from error
    if text != "release" and not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{pointer}: expected an iteration or 'release', found {text!r}; name the step's folder")
    found = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError(f"{found}: expected this folder by {pointer}; copy it, or name another")
    return found


def iteration_of(step: Path) -> int | None:
    """The iteration in the name of a step's folder."""
    match = _STEP.fullmatch(step.name)
    return int(match[1]) if match and match[1] else None


def rank_folders(step: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(step.iterdir()) if _RANK.fullmatch(path.name) and path.is_dir()}


def expected_folders(arguments: Mapping[str, Any]) -> dict[str, Coordinates]:
    """The names of all ranks' folders, with their coordinates."""
    tensor, pipeline, expert = (world(arguments)[size] for size in ("tp", "pp", "ep"))
    return {
        f"mp_rank_{t:02d}" + f"_{p:03d}" * (pipeline > 1) + f"_{e:03d}" * (expert > 1): (t, p, e)
        for t in range(tensor)
        for p in range(pipeline)
        for e in range(expert)
    }


def world(arguments: Mapping[str, Any]) -> dict[str, int]:
    """The number of ranks of each kind of parallelism. Raises CheckpointError for impossible numbers."""
    names = {
        "dp": "data_parallel_size",
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "cp": "context_parallel_size",
    }
    found = {short: int(arguments.get(name) or 1) for short, name in names.items()}
    of_model = math.prod(found[short] for short in ("tp", "pp", "ep"))
    if min(found.values()) < 1 or max(of_model, *found.values()) > MOST_RANKS:
        sizes = ", ".join(f"{name} {found[short]}" for short, name in names.items())
        raise CheckpointError(f"args: expected a possible number of ranks, found {sizes}; copy it again")
    return found


def of_matrices(groups: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which groups belong to the optimizer of the matrices: Muon's, without ``betas``, where others are Adam's or
    Lion's; with ``--optimizer lion`` Lion's, without ``eps``, where others are Adam's."""
    for key in ("betas", "eps"):
        if len({key in group for group in groups}) > 1:
            return [key not in group for group in groups]
    return [False] * len(groups)


def groups_of(
    shapes: Mapping[str, Sequence[int]], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, int | None]:
    """The number of each parameter's group; None if no group, or more than one, fits it.

    A group's options show whether it is of sharded experts, of Muon or Lion (see ``of_matrices``), with weight decay
    (``wd_mult``), and with the usual learning rate. Muon gets the matrices except word embeddings and output layer, but
    including learned positions and routers (``get_megatron_muon_optimizer`` in megatron/core/optimizer/muon.py,
    ``_get_param_groups`` and ``get_standard_config_overrides`` in the same folder).
    """
    matrices = of_matrices(groups)
    mixed = any(matrices)  # otherwise one optimizer for all
    kinds = [
        (
            bool(group.get("is_expert_parallel", False)),
            of_matrix,
            group.get("wd_mult", 1.0) != 0,
            bool(group.get("default_config", True)) and not group.get("is_decoupled_lr", False),
        )
        for group, of_matrix in zip(groups, matrices)
    ]
    norms_decay = arguments.get("no_weight_decay_cond_type") == "apply_wd_to_qk_layernorm"
    norms_decay = norms_decay or bool(arguments.get("apply_wd_to_qk_layernorm"))
    found: dict[str, int | None] = {}
    for name, shape in shapes.items():
        decays = len(shape) != 1 and not name.endswith(".bias")
        wanted = (
            is_sharded_expert(name, arguments),
            mixed and len(shape) == 2 and name not in EMBEDDINGS,
            decays or norms_decay and ("q_layernorm." in name or "k_layernorm." in name),
            arguments.get("decoupled_lr") is None or name not in EMBEDDINGS,
        )
        numbers = [number for number, kind in enumerate(kinds) if kind == wanted]
        found[name] = numbers[0] if len(numbers) == 1 else None
    return found


def names_by_group(
    weights: Mapping[str, LazyTensor], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], where: str
) -> list[list[str]]:
    """The names in each group, in the module order of ``weights``. Raises CheckpointError if it cannot be inferred."""
    found: list[list[str]] = [[] for _ in groups]
    for name, number in groups_of({name: w.shape for name, w in weights.items()}, groups, arguments).items():
        if number is None:
            raise CheckpointError(
                f"{where}: expected param groups whose options show the group of {name}, found {len(groups)} that do "
                "not; save this checkpoint in the torch_dist format"
            )
        found[number].append(name)
    return found


def common_groups(ranks: Sequence[Sequence[Mapping[str, Any]]], where: str) -> tuple[dict[str, Any], ...]:
    """The groups' options as plain data, each from a rank with parameters in the group, because other ranks' counters
    may not advance. Raises CheckpointError if the ranks' numbers of groups differ."""
    if len({len(groups) for groups in ranks}) > 1:
        raise CheckpointError(
            f"{where}: expected the same param groups on all ranks, found {[len(groups) for groups in ranks]} of them; "
            "the ranks' files are of different checkpoints: copy them again"
        )
    found = []
    for copies in zip(*ranks):
        group = next((copy for copy in copies if copy.get("params", True)), copies[0])
        found.append(options(group))
    return tuple(found)


def step_of(groups: Sequence[Mapping[str, Any]], number: int | None) -> float | None:
    """Adam's count of steps for a parameter: its group's, or that of all Adam's groups if its own is unknown."""
    mine = groups if number is None else [groups[number]]
    steps = {scalar(group.get("step")) for group in mine if "betas" in group}
    step = steps.pop() if len(steps) == 1 else None
    return None if step is None else float(step)


def is_sharded_expert(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the parameter is an expert's, with other experts on other ranks."""
    return expert_of(name) is not None and int(arguments.get("expert_model_parallel_size") or 1) > 1
