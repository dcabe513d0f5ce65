"""Where each parameter of a model is used, by names that no wrapper around a module changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lwopt_backend.peft_layers import Adapter, places

# What activation checkpointing, torch.compile and FSDP1 put between a module's name and its parameter's.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def plain_name(name: str) -> str:
    """A parameter's or module's name as it was before anything was wrapped around modules."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class Use:
    """One place where a parameter is used. ``adapter`` says what it is there, if PEFT added it."""

    name: str
    module_name: str
    module: nn.Module
    adapter: Adapter | None = None

    @property
    def key(self) -> str:
        """The parameter's own name within its module, e.g. ``"weight"``."""
        return self.name.rpartition(".")[2]


def uses_of(model: nn.Module) -> Mapping[int, list[Use]]:
    """Every place each parameter is used in, by the parameter's id; a tied parameter has several."""
    uses: dict[int, list[Use]] = {}
    found = places(model)
    for module_name, place in found.items():
        for key, param in place.module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{module_name}.{key}" if module_name else key
            name, adapter = plain_name(full_name), None
            if place.added_by is not None:
                path = full_name.removeprefix(f"{place.added_by}.").split(".")
                adapter = Adapter(found[place.added_by], tuple(path))
            uses.setdefault(id(param), []).append(Use(name, name.rpartition(".")[0], place.module, adapter))
    return uses
