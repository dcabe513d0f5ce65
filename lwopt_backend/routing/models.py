"""The model as an argument, and PEFT's layers in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def check_is_module(model: Any, caller: str) -> None:
    """Raises TypeError, with what to pass, unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise _no_module(model, caller, "a torch.nn.Module")


def as_module(models: Any, caller: str) -> nn.Module:
    """A module, or several as one. Raises TypeError for anything else."""
    items = [models] if isinstance(models, nn.Module) else _items(models)
    if not items or not all(isinstance(item, nn.Module) for item in items):
        given = items if isinstance(models, Iterator) else models
        raise _no_module(given, caller, "a torch.nn.Module, or a list of them")
    for item in items:
        check_code(item)
    return models if isinstance(models, nn.Module) else nn.ModuleList(items)


def called(model: nn.Module) -> list[nn.Module]:
    """The modules whose ``forward`` is called: those of a list, or the module itself."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def has_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward") or type(module).forward
    return forward not in (nn.Module.forward, nn.modules.module._forward_unimplemented)


def modules_of(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """``model.named_modules()``, without overrides, in which PEFT's attention makes parameters anew."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, above: frozenset[int]) -> None:
        if id(module) in (seen if remove_duplicate else above):
            return
        seen.add(id(module))
        found[name] = module
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{key}" if name else key, child, above | {id(module)})

    visit("", model, frozenset())
    return found


def parameters_of(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()``, likewise."""
    seen: set[int] = set()
    for name, module in modules_of(model, remove_duplicate).items():
        for key, param in dict.items(module._parameters):
            if param is not None and not (remove_duplicate and id(param) in seen):
                seen.add(id(param))
                yield f"{name}.{key}" if name else key, param


def check_code(model: nn.Module) -> None:
    """Raises TypeError for a module of TorchScript, which has no code that can be followed, and no plain parameters."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"found module {name!r} of TorchScript" if name else "found one of TorchScript"
            raise TypeError(
                f"model: expected a torch.nn.Module with Python code, {where}; pass the module that was scripted or "
                "traced (torch.compile works)"
            )


def check_memory(model: nn.Module) -> None:
    """Raises ValueError for a parameter that has memory in common with another one, or with a buffer.

    Engines keep parameters in memory of their own, so such a parameter would be a second one from then on. One
    parameter under several names stays one.
    """
    params = [(name, param.data, param.requires_grad) for name, param in parameters_of(model)]
    named = [*params, *((name, buffer, False) for name, buffer in model.named_buffers())]
    spans = []  # in memory, and the number of the tensor
    for number, (_, tensor, _) in enumerate(named):
        if type(tensor.detach()) is Tensor and tensor.numel() and not (tensor.is_meta or tensor.is_sparse):
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + _extent(tensor) * tensor.itemsize, number))
    before: list[tuple[str, int, int, int]] = []  # those that end behind the start of the next one
    for span in sorted(spans):
        before = [other for other in before if other[0] == span[0] and other[2] > span[1]]
        for other in before:
            (one, ours, trained), (another, theirs, also) = (named[each] for each in sorted((span[3], other[3])))
            if (trained or also) and _overlap(ours, theirs):
                raise ValueError(
                    f"{one!r} and {another!r} share memory, so a step of one would change the other; expected memory "
                    "of its own for each. Make them one parameter (a.weight = b.weight), compute one from the other in "
                    "the forward (b.weight.t()), or untie them (clone())"
                )
        before.append(span)


def _extent(tensor: Tensor) -> int:
    """The elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, each of which has memory between the ends of the other, have any element in common."""
    some = (one, other)
    if one.dtype != other.dtype or all(_extent(tensor) == tensor.numel() for tensor in some):
        return True
    first = min(tensor.data_ptr() for tensor in some)
    starts = [(tensor.data_ptr() - first) // tensor.itemsize for tensor in some]
    held = torch.zeros(max(start + _extent(tensor) for start, tensor in zip(starts, some)), dtype=torch.bool)
    held.as_strided(one.shape, one.stride(), starts[0]).fill_(True)
    return bool(held.as_strided(other.shape, other.stride(), starts[1]).any())


def _items(given: Any) -> list[Any]:
    """The items of a list or an iterator; for anything else, a list with the thing itself."""
    return [given] if isinstance(given, (Tensor, Mapping, str)) or not isinstance(given, Iterable) else list(given)


def _no_module(given: Any, caller: str, wanted: str) -> TypeError:
    first = next(iter(_items(given)), None)
    found = "None" if given is None else f"a {type(given).__name__}"
    if first is not None and first is not given:
        found += f" of {type(first).__name__}"
    problem = f"{caller}: model: expected {wanted}; found {found}"
    if not isinstance(first, (Tensor, Mapping, tuple)):
        return TypeError(problem)
    groups = ", and param groups as params=[...]" if isinstance(first, Mapping) else ", not its parameters"
    return TypeError(f"{problem}. Pass the model{groups}: its structure and names decide what is a matrix")


# What PEFT adds to a model: the parameters of its adapters; and which modules are the model's own.
# Where a module's class is defined decides whether it is PEFT's: subclasses by FSDP2 or users count, and PEFT is never
# imported. The attribute of the layer that has an adapter's parameter shows what that parameter is. The adapter's own
# name, chosen by users, does not.

# Attributes in which PEFT's modules keep the model's: the replaced module, its copies by adapter, or all of them.
IN_PLACE = frozenset({"base_layer", "original_module", "token_adapter"})
COPIES = frozenset({"modules_to_save", "ln_tuning_layers"})
MODELS = frozenset({"model", "base_model", "lora_model", "word_embeddings"})

LORA = {"lora_A": "lora_B", "lora_B": "lora_A"}  # each factor's attribute, with the other factor's


# Other attributes. In LoRA, activations pass through A and then B, as through two linears. None of these does that:
# LoHa multiplies its factors element by element, LoKr maps reshaped activations, DeLoRA divides by norms, HiRA
# multiplies by the weight.
_ADAPTERS = {
    "LoRA of an embedding": "lora_embedding_A lora_embedding_B",
    "AdaLoRA's singular values": "lora_E",
    "DoRA magnitude": "lora_magnitude_vector",
    "IA3 gain": "ia3_l",
    "VeRA vector": "vera_lambda_b vera_lambda_d pvera_lambda_b pvera_lambda_d",
    "random projection": "vera_A vera_B pvera_A pvera_B randlora_A randlora_B",
    "VB-LoRA's logits and vectors": "vblora_vector_bank vblora_logits_A vblora_logits_B",
    "RandLoRA scale": "randlora_lambda randlora_gamma",
    "DeLoRA factor": "delora_A delora_B delora_lambda",
    "HiRA factor": "hira_A hira_B hira_embedding_A hira_embedding_B",
    "OFT rotation": "oft_R oft_embedding_R",
    "BOFT rotation": "boft_R",
    "BOFT gain": "boft_s",
    "HRA reflection": "hra_u",
    "LoHa factor": "hada_w1_a hada_w1_b hada_w2_a hada_w2_b hada_t1 hada_t2",
    "LoKr factor": "lokr_w1 lokr_w1_a lokr_w1_b lokr_w2 lokr_w2_a lokr_w2_b lokr_t2",
    "Fourier or wavelet spectrum": "fourierft_spectrum waveft_spectrum",
    "MiSS block": "miss_block",
    "trainable token rows": "trainable_tokens_delta",
    "prompt": "prompt_encoder prompt_embeddings",
}
ADAPTERS: Mapping[str, str] = {name: what for what, names in _ADAPTERS.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module of a model, under its name without PEFT: base layers and copies have their layer's name.

    ``outer`` is the outermost PEFT layer in the module's place, or the module itself. ``added_by`` is the full name of
    the PEFT module that this is or belongs to; None for the model's own.
    """

    name: str
    module: nn.Module
    outer: nn.Module
    added_by: str | None

    @property
    def is_own(self) -> bool:
        return self.added_by is None


def named_modules(model: nn.Module, remove_duplicate: bool = False) -> dict[str, NamedModule]:
    """Every module of ``model`` by its full name, in the order of ``model.named_modules()``."""
    found: dict[str, NamedModule] = {}
    for full_name, module in modules_of(model, remove_duplicate).items():
        named = _under(found, full_name, module) if full_name else NamedModule("", module, module, None)
        if is_peft(module) and (named.is_own or hasattr(module, "adapter_layer_names")):
            named = NamedModule(named.name, module, named.outer, full_name)
        found[full_name] = named
    return found


def _under(found: Mapping[str, NamedModule], full_name: str, module: nn.Module) -> NamedModule:
    """A module under its name, from the one that has it as an attribute."""
    above, _, key = full_name.rpartition(".")
    parent = found[above]
    in_peft, copied = parent.added_by == above, above.rpartition(".")[2] in COPIES
    if in_peft and key in COPIES:
        return NamedModule(parent.name, module, parent.outer, full_name)
    if in_peft and (key in IN_PLACE or copied):
        return NamedModule(parent.name, module, parent.outer, None)
    if in_peft and key in MODELS:
        return NamedModule(parent.name, module, module, None)
    return NamedModule(f"{parent.name}.{key}" if parent.name else key, module, module, parent.added_by)


def is_peft(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A parameter that a PEFT module, the layer, added. ``path`` leads to it, e.g. ``("lora_A", "default")``."""

    layer: NamedModule
    path: tuple[str, ...]

    @property
    def what(self) -> str:
        return ADAPTERS.get(self.path[0], f"PEFT's {self.path[0]}, not known to be a linear's weight")


@dataclass(frozen=True, slots=True)
class LoRA:
    """A change of the weight of ``base`` by B A, or of each of the ``stacked`` slices of parameter ``key`` by its own.

    For stacked slices, A has the rows of one slice after another, and B's columns alternate between the slices.
    """

    a: Tensor
    b: Tensor
    base: nn.Module
    key: str
    stacked: int

    @property
    def changed(self) -> Tensor | None:
        """The weight that it changes, if the base has it under a name that is known."""
        found = getattr(self.base, self.key, None)
        return getattr(self.base, "in_proj_weight", None) if found is None else found  # of torch's attention


def lora_of(layer: nn.Module, adapter: str) -> LoRA | None:
    """LoRA by that adapter in a PEFT layer; None if A and B are not the weights of two plain linears."""
    factors = []
    for attribute in LORA:
        factor = dict(getattr(layer, attribute, {})).get(adapter)
        factors.append(factor.weight if isinstance(factor, nn.Linear) else factor)
    a, b = factors
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    base, inner = layer, getattr(layer, "base_layer", None)
    while isinstance(inner, nn.Module):
        base, inner = inner, getattr(inner, "base_layer", None)
    return LoRA(a, b, base, getattr(layer, "parameter_name", "weight"), getattr(layer, "num_experts", 1))


def all_lora(model: nn.Module) -> Iterator[LoRA]:
    """LoRA by every adapter in every layer of ``model``."""
    for module in modules_of(model).values():
        if is_peft(module):
            found = (lora_of(module, adapter) for adapter in getattr(module, "lora_A", ()))
            yield from (lora for lora in found if lora is not None)
