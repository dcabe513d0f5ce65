"""The heads in attention's weights, for the option ``per_head``: which of a weight's outputs are one head's.

A module is attention if it has weights of queries, keys and values by the names below, a fused weight of them, or those
of latent attention (MLA). A head's size is an attribute of the module, or the outputs over the number of heads, or the
configuration's. Nothing is guessed: the resulting number of heads must be one that the module or a configuration
declares. Everything else is an error that names the setting ``atoms``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lwopt_backend.plan.atoms import Parts, Stripes, undivided
from lwopt_backend.routing.fused import Fusion, weight_of
from lwopt_backend.routing.models import modules_of

# Names of weights, by what they make, in transformers 5.24's modules, torch's, torchtitan's and Megatron's.
_NAMES = {
    "query": "q_proj query q_lin q_attn query_proj to_q to_query linear_q wq q q_proj_weight q_b_proj wq_b",
    "key": "k_proj key k_lin key_proj to_k to_key linear_k wk k k_proj_weight",
    "value": "v_proj value v_lin value_proj to_v linear_v wv v v_proj_weight",
    "fused": "qkv_proj query_key_value c_attn in_proj_qkv in_proj_qkvz in_proj_weight qkv Wqkv wqkv att_proj "
    "linear_qkv kv_proj to_kv qkvo_w",
    "latent": "kv_b_proj wkv_b",  # keys and values of all heads
}
KIND: Mapping[str, str] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# Attributes with a head's size, in order of preference; with numbers of heads; with those of keys and values
SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_head")
OF_VALUES, OF_KEYS = ("head_v_dim", "v_head_dim", *SIZES), ("head_k_dim", "qk_head_dim", *SIZES)
COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_attn_heads", "num_head", "heads")
OF_FEWER = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "num_k_heads", "num_v_heads")


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """How many outputs a head has in every part of a weight, by the part's name, ``""`` if it is not fused.

    ``number`` heads share the outputs of a part without a size. ``as_one``: a head's outputs are those of all parts, as
    in MLA. ``counts`` are the declared numbers of heads, ``whose`` the module's class; ``problem`` is the reason if
    unknown.
    """

    whose: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    number: int = 0
    counts: frozenset[int] = frozenset()
    as_one: bool = False
    problem: str = ""

    def divide(self, parts: Parts, outputs: int, param: str) -> tuple[Parts, str]:
        """Every head as a separate part, and a description with their numbers; ``parts`` are those of a fused weight.

        Raises ValueError, naming parameter ``param``, if the heads are unknown.
        """
        found: list[tuple[str, Stripes]] = []
        said = []
        for name, run in undivided(outputs) if self.as_one or not parts else parts:
            size = self.sizes.get(name) or (0 if not self.number or run.size % self.number else run.size // self.number)
            what = f"{run.size} outputs{f' for {name!r}' if name else ''}"
            if problem := self.problem or self._problem(run, size, what):
                raise unknown(param, f"{self.whose} {problem}")
            starts = [start for begin, stop in run.runs() for start in range(begin, stop, size)]
            prefix = f"{name}." if name else ""
            found += [(f"{prefix}head{number}", Stripes(start, size)) for number, start in enumerate(starts)]
            said.append(f"{len(starts)} {f'{name} ' if name else ''}head{'s' if len(starts) > 1 else ''} of {size}")
        return found, f"{', '.join(said)}, as {self.whose} has them"

    def _problem(self, run: Stripes, size: int, what: str) -> str:
        if not size:
            return f"has {what}, and neither it nor a configuration has the size of a head"
        if run.length % size:
            return f"has {what}, which heads of {size} do not divide"
        if self.counts and run.size // size not in self.counts | {1}:
            declared = " or ".join(map(str, sorted(self.counts)))
            return f"has {what}, {run.size // size} heads of {size}, but {declared} heads are declared"
        return ""


def unknown(param: str, why: str) -> ValueError:
    """The error for a weight whose heads are unknown."""
    return ValueError(
        f"per_head: {param!r}: expected attention with known heads, but {why}. Set the option atoms: "
        f"{{{param!r}: {{'heads': 12}}}} with the number of heads, in a fused weight those of q, k and v together; or "
        "'whole', to leave it one matrix"
    )


def none_found(names: Iterable[str]) -> ValueError:
    """The error for matrices ``names`` of which none is known to be attention's."""
    some = ", ".join(map(repr, [*names][:3]))
    return ValueError(
        f"per_head: expected a query, key or value weight of a known kind, found none in {some}, ...; name those that "
        "have heads in the option atoms, {'*.query.weight': {'heads': 12}}, or leave per_head out"
    )


def named_as_heads(name: str) -> bool:
    """Whether a parameter is one of attention's by its name, if its module is not available."""
    return not KIND.keys().isdisjoint(name.split(".")[-2:])


def heads_in(model: nn.Module, fused: Mapping[int, Fusion], ranks: int = 1) -> dict[int, AttentionHeads]:
    """The heads of attention's weights, by the weight's id; those of output projections are not among them.

    ``fused`` are the known parts of weights. Modules on ``ranks`` tensor-parallel ranks may count the heads of one.
    """
    found: dict[int, AttentionHeads] = {}
    for module in modules_of(model).values():
        names = KIND.keys() & {*vars(module), *module._modules, *module._parameters}
        kinds = {KIND[name] for name in names}
        if kinds & {"fused", "latent"} or kinds == {"query", "key", "value"}:
            for name in names:
                weight = weight_of(module, name)
                if weight is not None:
                    fusion = fused.get(id(weight), Fusion())
                    declared = _Declared(module, tuple(_configs(module, model)), ranks)
                    found[id(weight)] = _heads(declared, KIND[name], fusion, "latent" in kinds)
    return found


def _configs(*owners: nn.Module) -> Iterator[Any]:
    for config in (getattr(owner, "config", None) for owner in owners):
        yield from (config, getattr(config, "text_config", None))


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a module and the configurations of it and its model have as numbers."""

    module: nn.Module
    configs: tuple[Any, ...]
    ranks: int

    def first(self, names: Sequence[str], of: Iterable[Any]) -> int:
        """The first number under one of ``names``, or 0."""
        values = (getattr(one, name, None) for one in of for name in names)
        return next((value for value in values if type(value) is int and value > 0), 0)

    def size(self, names: Sequence[str]) -> int:
        """The size of a head; 0 if only numbers of heads are given, or nothing."""
        found = self.first(names, [self.module])
        if found or self.number:
            return found
        width, heads = (self.first([name], self.configs) for name in ("hidden_size", "num_attention_heads"))
        return self.first(["head_dim"], self.configs) or (width // heads if heads and width % heads == 0 else 0)

    @property
    def number(self) -> int:
        return self.first(COUNTS, [self.module]) if self.ranks == 1 else 0

    @property
    def counts(self) -> frozenset[int]:
        own = {self.first([name], [self.module]) for name in (*COUNTS, *OF_FEWER)}
        configured = {self.first([name], [config]) for name in (*COUNTS, *OF_FEWER) for config in self.configs}
        return frozenset({*own, *(count * self.ranks for count in own), *configured} - {0})


def _heads(declared: _Declared, kind: str, fusion: Fusion, latent: bool) -> AttentionHeads:
    """``kind`` is what the weight makes, ``latent`` whether its module is latent attention."""
    module, counts = declared.module, declared.counts
    whose = type(module).__name__
    if latent and kind in ("latent", "query"):
        names = ("qk_nope_head_dim", "v_head_dim" if kind == "latent" else "qk_rope_head_dim")
        both = [declared.first([name], [module, *declared.configs]) for name in names]
        return AttentionHeads(whose, {"": sum(both) if all(both) else 0}, 0, counts, as_one=True)
    if kind == "fused" and not fusion.outputs:
        why = f": {fusion.why}" if fusion.why else ""
        return AttentionHeads(whose, problem=f"is not known by how it lays out this fused weight{why}")
    parts = [part for part, _ in fusion.outputs] or [""]
    of_values = {part: part in ("v", "z") or kind == "value" for part in parts}
    sizes = {part: declared.size(OF_VALUES if of_value else OF_KEYS) for part, of_value in of_values.items()}
    # The parts of a known fused weight fit its module, and so does a size of that module.
    fits = bool(fusion.outputs) and declared.first(OF_KEYS, [module]) > 0
    return AttentionHeads(whose, sizes, declared.number, frozenset() if fits else counts)
