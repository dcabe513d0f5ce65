"""Which parameters the param groups have, compared with those that they were made with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from lwopt_backend.groups import Groups
from lwopt_backend.groups.registry import rule_of
from lwopt_backend.runtime.agreement import digest, setting

ADVICE = (
    "give the constructor all groups (params, overrides) and freeze what is to be trained later, or make another "
    "optimizer for these parameters"
)


class Members:
    """The parameters with which each of the param ``groups`` was made; ``names`` has their names by id.

    torch's optimizers read the groups in every step. So does this package, as far as a plan allows: a parameter that
    was taken out of its group is not trained, and keeps its state until it is put back, at any place in the group.
    Nothing may be added, or moved to another group, because the plan does not know it there. State dicts count the
    parameters in the groups' order, so each group gets the order back in which it was made.
    """

    def __init__(self, groups: Groups, names: Mapping[int, str]) -> None:
        self._made = [list(group["params"]) for group in groups]
        self._names = {id(param): names[id(param)] for params in self._made for param in params}
        self._seen = [list(params) for params in self._made]
        of_groups = ([self._names[id(param)] for param in params] for params in self._made)
        self._signatures = [digest(sorted(of_group))[:16] for of_group in of_groups]
        self.out: frozenset[str] = frozenset()  # names of those that were taken out

    def sign(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add to the rule of each group of a state dict a digest of the parameters with which it was made.

        torch's ``set_state_dict`` gives a group here the options of any saved group that shares a parameter with it,
        and only the options. A digest of its own would be a key that earlier folders lack, which torch refuses to load.
        """
        for group, signature in zip(groups, self._signatures):
            if "rule" in group:  # else AdamW trains everything, in groups that are torch's
                group["rule"] = f"{rule_of(group)} {signature}"

    def check_signed(self, where: str, saved: Groups) -> None:
        """Raises ValueError for saved groups, of the rules that are here, that were made with other parameters."""
        for number, (group, signature) in enumerate(zip(saved, self._signatures)):
            theirs = str(group.get("rule", "")).partition(" ")[2]
            if theirs not in ("", signature):
                raise ValueError(
                    f"{where}: param group {number} ({rule_of(group)}, lr {group.get('lr')}) had other parameters when "
                    "it was saved, so its options are not those of the parameters here; make the param groups "
                    "(params, overrides) that it was saved with"
                )

    def look(self, groups: Groups) -> None:
        """Note which parameters are taken out, and put the others in order. Raises ValueError for one that was added or
        moved, before anything is changed."""
        held: list[Sequence[Tensor]] = [group["params"] for group in groups]
        if len(held) == len(self._seen) and all(map(same, held, self._seen)):
            return
        if len(held) != len(self._made):
            raise _refusal(f"the {len(self._made)} param groups that it was made with, found {len(held)}")
        for number, (params, made) in enumerate(zip(held, self._made)):
            own, found = {id(param) for param in made}, set[int]()
            for param in params:
                name = self._names.get(id(param), f"another parameter of shape {tuple(param.shape)}")
                if id(param) not in own:
                    raise _refusal(f"the parameters in param group {number} with which it was made, found {name!r}")
                if id(param) in found:
                    raise _refusal(f"every parameter once in param group {number}, found {name!r} twice")
                found.add(id(param))
        here = {id(param) for params in held for param in params}
        self.out = frozenset(name for key, name in self._names.items() if key not in here)
        for group, made in zip(groups, self._made):
            ordered = [param for param in made if id(param) in here]
            if isinstance(group["params"], list):  # to which a loop may keep a reference
                group["params"][:] = ordered
            elif isinstance(group, dict):
                group["params"] = ordered
        held = [group["params"] for group in groups]
        self._seen = [list(params) for params in held]

    def knows_any(self, groups: Groups) -> bool:
        """Whether any parameter in the groups is one of those with which they were made."""
        return any(id(param) in self._names for group in groups for param in group["params"])

    def lines(self) -> list[str]:
        """Lines that must be equal on all ranks."""
        return [setting("parameters taken out of the param groups", sorted(self.out))] if self.out else []


def is_by_number(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict counts parameters. torch's ``set_optimizer_state_dict`` gives one by name, in the order in
    which the groups are."""
    return all(isinstance(each, int) for group in state_dict.get("param_groups", ()) for each in group["params"])


def check_all_held(where: str, out: Collection[str]) -> None:
    """Raises ValueError if any parameters are out of their param groups, so that a state dict cannot name them."""
    if out:
        raise ValueError(
            f"{where}: expected the param groups with all of their parameters, found {sorted(out)} taken out; put "
            "these back, load, and take them out again"
        )


def _refusal(expected: str) -> ValueError:
    return ValueError(f"param_groups: expected {expected}; the plan knows no later changes: {ADVICE}")


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists have the same objects; tensors cannot be compared by ``==``."""
    return len(some) == len(others) and all(map(is_, some, others))
