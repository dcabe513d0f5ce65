"""The setting of a plan: a cluster, an engine with its options, and the parameters that some ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field
from torch import nn

from lwopt_backend.config.hosts import OF_BUCKETS, FSDP2Config, HostConfig, PlainConfig, ZeROConfig
from lwopt_backend.config.options import options_in, parse, suggestion
from lwopt_backend.groups.choices import Rules, settings_of
from lwopt_backend.groups.grouping import Grouping
from lwopt_backend.groups.param_groups import split
from lwopt_backend.groups.registry import cost_of
from lwopt_backend.plan.atoms import Atom, matrices_of
from lwopt_backend.plan.cost import CLUSTERS, LAUNCH_SECONDS, MACHINES, Machine, Shape
from lwopt_backend.plan.layouts import SUB_GROUP_SIZE
from lwopt_backend.planner.seconds import Elements
from lwopt_backend.planner.shapes import Training
from lwopt_backend.routing.matrices import Divided
from lwopt_backend.routing.routing import Route
from lwopt_backend.rules.protocol import option

# Clusters by name, or described in a YAML file.

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class ClusterOptions:
    """A cluster file: the speed of one rank. What has a default may be left out."""

    name: str
    flops_per_second: Positive
    bytes_per_second: Positive
    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    node_size: Annotated[int, Field(ge=1)] = 1
    node_bytes_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    memory_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    launch_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = LAUNCH_SECONDS


class _WithoutAliases(yaml.SafeLoader):
    """YAML without aliases: a few lines of them can mean billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("expected no aliases (*name); write out their values")
        return super().compose_node(parent, index)


def read_yaml(text: str) -> Any:
    """Raises ValueError for text that is not YAML, and for aliases."""
    try:
        return yaml.load(text, Loader=_WithoutAliases)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def cluster_named(name: str) -> Machine:
    """The cluster called ``name``, or the one that the YAML file ``name`` describes. Raises ValueError."""
    known = {**CLUSTERS, **MACHINES}
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise ValueError(f"unknown cluster {name!r}; {suggestion(name, known)} or give a cluster in a YAML file")
    try:
        content = read_yaml(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cluster file {name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"cluster file {name}: expected a mapping with flops_per_second, bytes_per_second and so on")
    options = parse(ClusterOptions, {str(key): value for key, value in content.items()}, f"cluster file {name}")
    return Machine(**vars(options))


# The setting of a study: an engine with its own options, and how seconds are counted.


@dataclass(frozen=True)
class MeshConfig(FSDP2Config):
    """Options on FSDP2, and the one of the mesh that ``fully_shard`` is given."""

    group_size: int | None = option(
        None,
        "number of ranks over which parameters are sharded; the other ranks hold copies (HSDP). None: all ranks",
        ge=1,
    )


ENGINES: Mapping[str, type[HostConfig]] = {
    **{"plain": PlainConfig, "zero1": ZeROConfig, "zero2": ZeROConfig, "zero3": ZeROConfig, "fsdp2": MeshConfig}
}
WHERE = "lwopt plan"


@dataclass(frozen=True)
class Setting:
    """What a model is planned for.

    - ``config``, ``rules``: the engine's options, with the engine's defaults.
    - ``machine``: the cluster whose seconds are modelled. The plan is made for ``plans_for``: all that an
      engine knows is whether it is on CPUs.
    - ``dtype``, ``grad_dtype``: of parameters, and of gradients as they are kept and sent.
    - ``sub_group_size``: ZeRO-3's.
    - ``stack_dim``: the dimension of stacked matrices that FSDP2 shards.
    """

    engine: str
    config: HostConfig
    rules: Rules
    machine: Machine
    dtype: torch.dtype
    grad_dtype: torch.dtype
    plans_for: Machine
    sub_group_size: int = SUB_GROUP_SIZE
    stack_dim: int = 0

    @classmethod
    def of(
        cls,
        engine: str = "plain",
        machine: Machine = CLUSTERS["h100-8x-ib"],
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        grad_dtype: str = "parameter",
        plans_for: Machine | None = None,
        sub_group_size: int = SUB_GROUP_SIZE,
        stack_dim: int = 0,
    ) -> Setting:
        """The setting of an engine, with ``options`` as its optimizer takes them: the engine's own, and rules'
        sections.

        ``dtype`` is bf16 by default; on FSDP2, whose shards are the masters, fp32. ``plans_for`` is a CPU on the
        cluster of that name, otherwise an accelerator. Raises ValueError for wrong options.
        """
        given = {**({"grad_dtype": grad_dtype} if engine == "plain" else {}), **(options or {})}
        rules, config = settings_of(ENGINES[engine], given, f"{WHERE}, engine {engine!r}")
        dtype = dtype or (torch.float32 if engine == "fsdp2" else torch.bfloat16)
        wide = (config.grad_dtype if isinstance(config, PlainConfig) else grad_dtype) == "float32"
        plans_for = plans_for or (machine if machine == MACHINES["cpu"] else MACHINES["cuda"])
        grad = torch.float32 if wide else dtype
        return cls(engine, config, rules, machine, dtype, grad, plans_for, sub_group_size, stack_dim)

    def of_experts(self) -> Setting:
        """This setting for experts, which have their own ranks: a group size that the user gave is that of the rest, as
        is what their copies do."""
        known = fields_of(self.engine)
        alone: dict[str, Any] = {name: None for name in ("group_size", "share_copies") if name in known}
        return replace(self, config=replace(self.config, **alone))

    @property
    def training(self) -> Training:
        return Training(self.rules, self.config)

    def seconds(self, cost: int) -> float:
        """The seconds that a rank takes for work of this cost."""
        return cost / self.machine.flops_per_second

    @property
    def elements(self) -> Elements:
        """Bytes of an element on the wire."""
        return Elements(self.dtype.itemsize, self.grad_dtype.itemsize)


# Param groups of a part of a model, as an optimizer would make them, from names and shapes.


@dataclass(frozen=True)
class Share:
    """The parameters that some ranks share. ``wholes`` are the shapes of matrices that ``tp`` ranks store together."""

    grouping: Grouping
    wholes: Mapping[str, Shape]
    tp: int = 1

    def shown(self, atom: Atom, setting: Setting) -> Atom:
        """The matrix, with the cost of its work for one rank."""
        if self.tp == 1:
            return atom
        return replace(atom, cost=-(-cost_of(self.wholes.get(atom.name, atom.shape), setting.rules.matrix) // self.tp))


def share_of(routes: Sequence[Route], divided: Mapping[str, Divided], setting: Setting, *, tp: int = 1) -> Share:
    """Param groups of parameters without memory; all trained ones are in one group, which is split by rule.

    With ``tp`` > 1, a rank stores 1 / ``tp`` of each matrix's longer side, and of every other parameter; the ``tp``
    ranks take turns in the work.
    """
    wholes: dict[str, Shape] = {}
    if tp > 1:
        routes, divided, wholes = _cut(routes, divided, tp)
    params = {
        route.name: nn.Parameter(torch.empty(route.shape, dtype=setting.dtype, device="meta"))
        for route in routes
        if route.kind != "frozen" and 0 not in route.shape
    }
    is_matrix = {id(params[r.name]): r.kind == "matrix" for r in routes if r.name in params}
    names = {id(param): name for name, param in params.items()}
    trains = any(is_matrix.values())
    overrides = {id(params[r.name]): r.overrides for r in routes if r.name in params}
    groups = split([{"params": list(params.values())}], is_matrix, setting.rules, overrides)
    groups = [{**group, "lr": group["lr"] or 0.0} for group in groups]  # a plan needs no rate, a rehearsal steps
    own = {route.name: divided[route.name] for route in routes if route.kind == "matrix"}
    return Share(Grouping(list(routes), groups, names, own, trains), wholes, tp)


def _cut(
    routes: Sequence[Route], divided: Mapping[str, Divided], tp: int
) -> tuple[list[Route], dict[str, Divided], dict[str, Shape]]:
    """What one of ``tp`` ranks stores: a part of every matrix in a parameter, as a separate parameter."""
    found: list[Route] = []
    parts: dict[str, Divided] = {}
    wholes: dict[str, Shape] = {}
    for route in routes:
        if route.kind != "matrix":
            first = -(-route.shape[0] // tp) if route.shape else 1
            found.append(replace(route, shape=(first, *route.shape[1:]) if route.shape else ()))
            continue
        for block in divided[route.name].blocks:
            name, (rows, columns) = block.of(route.name), block.shape
            shape = (-(-rows // tp), columns) if rows >= columns else (rows, -(-columns // tp))
            found.append(replace(route, name=name, shape=shape, aliases=()))
            parts[name], wholes[name] = Divided(matrices_of(shape)), block.shape
    return found, parts, wholes


# The command line's arguments, as the engine's own options.

OF_STORAGE_OWNED = ("storage", *OF_BUCKETS)  # fields of ZeROConfig, for ``"storage": "owned"``


def fields_of(engine: str) -> list[str]:
    """The options that an engine has."""
    hidden = OF_STORAGE_OWNED if engine.startswith("zero") else ()
    return [name for name in options_in(ENGINES[engine]) if name not in hidden]


def engine_options(engine: str, named: Mapping[str, Any], more: Sequence[str]) -> dict[str, Any]:
    """The options of ``engine`` that were given: the ``named`` ones, where not None, and those of ``--option``.

    Raises ValueError for one that this engine does not have, that is given twice, or that cannot be read.
    """
    given = {key: value for key, value in named.items() if value not in (None, [])}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    for key in options:
        if key not in fields_of(engine):
            engines = [name for name in ENGINES if key in fields_of(name)]
            raise ValueError(
                f"expected --{key.replace('_', '-')} only with engine {' and '.join(map(repr, engines))}, found "
                f"{engine!r}; leave it out"
            )
    for text in more:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--option {text!r}: expected KEY=VALUE, such as keep_full_grads=true or matrix=soap")
        key = key.strip()
        if key in options:
            raise ValueError(f"--option {text!r}: expected {key!r} once, found it twice")
        try:
            options[key] = read_yaml(value)
        except ValueError as error:
            raise ValueError(
                f"--option {text!r}: expected a value as YAML or JSON, found {value!r}: {error}"
            ) from error
    return options
