"""What other optimizers' ``state_dict`` holds, by parameter name and under our keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.migration.momentum import BUFFER, Form, check_form, convert_momentum
from lwopt_backend.spelling import suggestion

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"}


@dataclass(frozen=True)
class Source:
    """How an optimizer keeps its state. ``form`` None: its param groups say it, under ``momentum_form``.

    ``momentum`` are the keys under which param groups have the momentum, ``buffer`` is the key of the buffer,
    ``moments`` are Adam's keys by ours, ``step`` the key of Adam's counter, which may be in the param group instead.
    """

    form: Form | None
    momentum: tuple[str, ...] = ("momentum",)
    buffer: str = BUFFER
    moments: Mapping[str, str] = field(default_factory=lambda: MOMENTS)
    step: str = "step"


OLD_ADAM = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
SOURCES: dict[str, Source] = {
    "torch.optim.Muon": Source("ema"),
    "torch.optim.AdamW": Source("ema"),
    "keller_jordan": Source("ema"),  # from June 2025 on
    "keller_jordan_2024": Source("sum", moments=OLD_ADAM),  # before February 2025, when the sum became an average
    "moonlight": Source("sum", moments=OLD_ADAM),
    "dion": Source(
        "sum", ("mu",), "momentum", moments={"exp_avg": "momentum", "exp_avg_sq": "variance"}, step="step_dev"
    ),
    "deepspeed": Source("ema"),
    "megatron": Source("ema", ("momentum", "momentum_beta")),  # Emerging-Optimizers 0.1 says momentum_beta
    "pytorch_optimizer": Source("ema"),
    "lwopt_backend": Source(None),
}


def from_checkpoint(
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None = None,
    *,
    source: str = "torch.optim.Muon",
    momentum: float | None = None,
    momentum_form: Form = "ema",
) -> dict[str, dict[str, Tensor]]:
    """The state in another optimizer's ``state_dict``, by parameter name, for ``load_named_state``.

    - ``state_dict``: of a single process, or a full one: whole tensors under ``state``, by number or by name.
    - ``names``: the parameters' in the order of the param groups; not needed where the state is by name, or where the
      param groups have torch's ``param_names``.
    - ``source``: whose it is, one of ``SOURCES``; AdamW's moments are found in all of them.
    - ``momentum``: if another than that in the param groups. It is needed only where the form changes.
    - ``momentum_form``: what our optimizer is set to.

    Returns new fp32 tensors: ``momentum_buffer`` of what Muon trains; ``exp_avg``, ``exp_avg_sq`` and ``step`` of what
    AdamW does. Called on any ranks; it communicates nothing. Raises ValueError for an unknown source or form, for names
    that are not as many as the parameters or occur twice, for state that is missing, sharded, of differing shapes or
    of another optimizer, and where the momentum is not known.
    """
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; {suggestion(str(source), SOURCES)}")
    check_form("momentum_form", momentum_form)
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"the state dict of {source!r}: expected keys 'state' and 'param_groups', found {list(state_dict)}; it has "
            "to be the optimizer's own state_dict() with whole tensors, not one of a wrapper that has cut them (ZeRO)"
        )
    groups = state_dict["param_groups"]
    in_groups = [(index, group) for group in groups for index in group["params"]]
    all_names = _names(groups, [index for index, _ in in_groups], names, source)
    return {
        name: _Entry(name, source, state_dict["state"].get(index), group).converted(momentum, momentum_form)
        for name, (index, group) in zip(all_names, in_groups, strict=True)
    }


def _names(
    groups: Sequence[Mapping[str, Any]], indices: list[Any], names: Iterable[str] | None, source: str
) -> list[str]:
    if names is None and all(isinstance(index, str) for index in indices):
        return indices
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is None:
        raise ValueError(
            f"the state dict of {source!r} knows its parameters by number; pass their names in the order of its param "
            "groups"
        )
    names = list(names)
    if len(names) != len(indices):
        sizes = [len(group["params"]) for group in groups]
        raise ValueError(
            f"names: expected {len(indices)}, as many as the parameters in the param groups of {source!r} "
            f"({', '.join(map(str, sizes))}); found {len(names)}"
        )
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"names: {name!r} occurs twice")
        seen.add(name)
    return names


@dataclass(frozen=True)
class _Entry:
    """The state of one parameter as the other optimizer has it, with the param group it is in."""

    name: str
    source: str
    state: Mapping[str, Any] | None
    group: Mapping[str, Any]

    def converted(self, momentum: float | None, form: Form) -> dict[str, Tensor]:
        theirs = SOURCES[self.source]
        if self.group.get("algorithm") == "lion":
            raise self._error("is trained by Lion, whose state is not converted")
        if not self.state:
            raise self._error(
                "has no state; it has had no gradient yet. Take it out of names and of the state dict's param groups, "
                "and load with strict=False"
            )
        if theirs.moments["exp_avg_sq"] in self.state:
            return self._moments(theirs)
        buffer = self._tensor(theirs.buffer)
        return {BUFFER: self._in_form(buffer, theirs, momentum, form)}

    def _moments(self, theirs: Source) -> dict[str, Tensor]:
        assert self.state is not None
        moments = {
            ours: self._tensor(key)
            for ours, key in theirs.moments.items()
            if key in self.state or ours != "max_exp_avg_sq"
        }
        shapes = {key: tuple(tensor.shape) for key, tensor in moments.items()}
        if len(set(shapes.values())) > 1:
            raise self._error(f"has moments of different shapes, {shapes}")
        step = self.state.get(theirs.step, self.group.get("step"))
        if step is None:
            raise self._error(f"has no {theirs.step!r}, nor has its param group a 'step'")
        return {**moments, "step": torch.tensor(float(step))}

    def _in_form(self, buffer: Tensor, theirs: Source, momentum: float | None, form: Form) -> Tensor:
        source = theirs.form or self.group.get("momentum_form")
        if source is None:
            raise self._error("is in a param group without 'momentum_form'; it is not the state of a Muon of ours")
        if momentum is None:
            momentum = next((float(self.group[key]) for key in theirs.momentum if key in self.group), None)
        if source == form:
            momentum = 0.0  # not needed, and a factor of one
        elif momentum is None:
            keys = " or ".join(map(repr, theirs.momentum))
            raise self._error(f"is in a param group without {keys}; pass momentum, to convert {source!r} to {form!r}")
        return convert_momentum(buffer, momentum, source=source, target=form)

    def _tensor(self, key: str) -> Tensor:
        assert self.state is not None
        if key not in self.state:
            close = [other for other, kind in SOURCES.items() if kind.buffer in self.state]
            hint = f"; the source may be one of {close}" if close else ""
            raise self._error(f"has no {key!r}, only {list(self.state)}{hint}")
        value = self.state[key]
        if not isinstance(value, Tensor):
            raise self._error(f"{key!r}: expected a tensor, found {value!r}")
        if hasattr(value, "full_tensor"):
            raise self._error(
                f"{key!r} is a DTensor, of which every rank has a part; save it whole, with "
                "get_optimizer_state_dict(options=StateDictOptions(full_state_dict=True))"
            )
        return value.detach().to(torch.float32, copy=True)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"the state dict of {self.source!r}: parameter {self.name!r} {what}")
