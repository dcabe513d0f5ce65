"""What ``lwopt plan`` says is what a run does: the same plan by name, and the memory of every rank to the byte."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import lwopt_backend
from lwopt_backend.engines import report
from lwopt_backend.engines.fsdp2 import step as mesh_stepping
from lwopt_backend.integrations import fsdp2
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon
from lwopt_backend.plan import MACHINES
from tests.support.fsdp2 import mesh_of
from tests.support.models import UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.zero import config, engine_for
from tests.unit.cli.test_cli import run

KINDS = ("parameters", "gradients", "masters", "state", "padding")
Held = tuple[str, dict[str, int]]  # the plan's name, and bytes that this rank holds, of the kinds that were looked at


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("phi3")
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "vocab_size": 50}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0}
    transformers.Phi3Config(**sizes, **heads, architectures=["Phi3ForCausalLM"]).save_pretrained(folder)
    return str(folder)


def model_in(folder: str, dtype: str) -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.AutoConfig.from_pretrained(folder)).to(getattr(torch, dtype))


def planned(folder: str, *words: object, **options: Any) -> dict[str, Any]:
    """What the command says of a run on two ranks, with ``options`` of the engine."""
    given = [word for key, value in options.items() for word in ("--option", f"{key}={json.dumps(value)}")]
    return json.loads(run("plan", "--hf", folder, "--json", *(words or ("--world-size", 2)), *given))


def nbytes(tensors: list[Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def state_of(optimizer: Any) -> int:
    """With what is kept in 8 bits, of which FSDP2 shows tensors without memory."""
    steppers = getattr(optimizer, "_steppers", [])
    every = [each.matrix_stepper for each in (steppers.values() if isinstance(steppers, dict) else steppers)]
    tensors = [tensor for each in every if each is not None for tensor in each.matrices.quantized.tensors()]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values() if not tensor.is_meta]
    return nbytes(tensors)


def owned(folder: str, dtype: str, options: dict[str, Any]) -> Held:
    optimizer = lwopt_backend.LayerWiseOptimizer(model_in(folder, dtype), lr=0.02, report=False, **options)
    held = optimizer.memory_report()[dist.get_rank()]
    return optimizer.plan_digest, {kind: getattr(held, kind) for kind in KINDS}


def on_fsdp2(folder: str, dtype: str, options: dict[str, Any]) -> Held:
    model = model_in(folder, dtype)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh_of(2))
    optimizer = fsdp2.LayerWiseOptimizer(model, lr=0.02, report=False, **options)
    return optimizer.plan_digest, {"parameters": nbytes(list(model.parameters())), "state": state_of(optimizer)}


def under_deepspeed(stage: int, folder: str, dtype: str, options: dict[str, Any]) -> Held:
    settings = config(stage) | {"optimizer": {"type": "LayerWise", "params": {"lr": 0.02, "report": False, **options}}}
    settings["bf16"] = {"enabled": dtype == "bfloat16"}
    with engine_for(settings, model_in(folder, "float32")) as engine:
        optimizer = engine.basic_optimizer
        optimizer.state_store()  # makes the state
        stored = None if options.get("storage") == "owned" else optimizer._binding.stored(optimizer.param_groups)
        masters = {} if stored is None else {"masters": nbytes(stored)}
        return optimizer.plan_digest, {"state": state_of(optimizer), **masters}


SMALL = {"bucket_mb": 0.01}  # several buckets of the small model
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zero1": ("zero1", "float32", {}),
    "zero2": ("zero2", "bfloat16", {}),
    "zero2, some travel": ("zero2", "float32", {"policy": "balance", "bucket_numel": 2000, "matrix": "normuon"}),
    "owned under DeepSpeed, padded": ("zero2", "float32", {"storage": "owned", "layout": "padded", **SMALL}),
    "owned under DeepSpeed, compact": ("zero2", "float32", {"storage": "owned", "layout": "compact", **SMALL}),
    "zero3": ("zero3", "float32", {"bucket_numel": 3000}),
    "fsdp2": ("fsdp2", "float32", {}),
    "fsdp2, small buckets": ("fsdp2", "bfloat16", {"bucket_matrices": 2, "state_dtype": "float32"}),
    "zero2, int8": ("zero2", "float32", {"momentum_dtype": "int8"}),
    "zero3, int8": ("zero3", "bfloat16", {"momentum_dtype": "int8"}),
    "fsdp2, int8": ("fsdp2", "bfloat16", {"momentum_dtype": "int8"}),
    "plain": ("plain", "float32", {}),
    "plain, auto": ("plain", "bfloat16", SMALL),
    "plain, padded": ("plain", "float32", {"layout": "padded", **SMALL}),
    "plain, padded, bf16": ("plain", "bfloat16", {"layout": "padded", "keep_full_grads": True, **SMALL}),
    "plain, compact": ("plain", "float32", {"layout": "compact", "atoms": {"*.qkv_proj.weight": "whole"}, **SMALL}),
    "plain, compact, bf16": ("plain", "bfloat16", {"layout": "compact", "grad_dtype": "float32", "group_size": 1}),
}


@pytest.mark.parametrize("case", ENGINES)
@on_ranks(2)
def test_lwopt_plan_has_the_digest_and_the_bytes_of_a_run(phi3: str, case: str) -> None:
    engine, dtype, options = ENGINES[case]
    if engine == "plain":
        digest, held = owned(phi3, dtype, options)
    elif engine == "fsdp2":
        digest, held = on_fsdp2(phi3, dtype, options)
    else:
        digest, held = under_deepspeed(int(engine[-1]), phi3, dtype, options)
    stored_by = "plain" if options.get("storage") else engine
    words = ("--world-size", 2, "--cluster", "cpu", "--engine", stored_by, "--dtype", dtype)
    found = planned(phi3, *words, **{key: value for key, value in options.items() if key != "storage"})
    assert digest == found["digest"] == found["stages"][0]["digest"]
    assert held == {kind: found["memory_per_rank"][dist.get_rank()][kind] for kind in held}


@on_ranks(4)
def test_lwopt_plan_has_the_digest_and_bytes_of_hsdp(phi3: str) -> None:
    """`lwopt plan` has the digest and the bytes of a run on an HSDP mesh."""
    model = model_in(phi3, "float32")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh_of(2, 2, names=("copies", "shards")))
    optimizer = fsdp2.LayerWiseOptimizer(model, lr=0.02, report=False)
    words = ("--world-size", 4, "--cluster", "cpu", "--engine", "fsdp2", "--dtype", "float32", "--group-size")
    found = planned(phi3, *words, 2)
    memory = found["memory_per_rank"][dist.get_rank()]
    assert optimizer.plan_digest == found["digest"] != planned(phi3, *words, 4)["digest"]
    assert memory["parameters"] == nbytes(list(model.parameters())) and memory["state"] == state_of(optimizer)
    whole = found["numel"] * 4
    _, passed_on, *host = found["parts"][0]["collectives"]
    assert [(each["ranks"], each["nbytes"]) for each in host] == [(2, whole // 2)] * 3, (
        "halves travel in a row, halves are summed along the column, and bf16 comes twice"
    )
    gathered = (whole // 2 // 4, whole // 2 // 2)  # a rank's half, in bf16, of which it passes on what its row owns
    assert passed_on["ranks"] == 2 and gathered[0] <= passed_on["nbytes"] <= gathered[1]
    with pytest.raises(ValueError, match="group_size 3 does not divide the 4 ranks"):
        planned(phi3, *words, 3)


def test_plan_digest_is_of_owners_and_stages(phi3: str) -> None:
    """The plan's digest is of owners and stages, whatever the rates."""
    options = [{}, {"matrix": {"name": "muon", "lr": 0.5}}, {"bucket_numel": 1000}, {"atoms": {"*qkv*": "whole"}}]
    words = ("--world-size", 2, "--engine", "zero2", "--cluster", "cpu", "--dtype", "float32")
    digests = [planned(phi3, *words, **given)["digest"] for given in options]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    more = (["--cluster", name] for name in ("a100-8x-ib", "b200-8x-ib", "cuda"))
    found = [planned(phi3, "--world-size", 4, *words) for words in more]
    assert len({each["digest"] for each in found}) == 1 and len({each["seconds"] for each in found}) == 3
    excluded = planned(phi3, "--world-size", 2, "--exclude", "*.o_proj.*")["routing"]
    assert sum(some["parameters"] for some in excluded if some["kind"] == "matrix") == 3 * 3, "of three layers"
    stages = planned(phi3, "--world-size", 6, "--pp", 3)
    assert len({stages["digest"], *(stage["digest"] for stage in stages["stages"])}) == 4


@on_ranks(2)
def test_before_there_is_a_plan_its_digest_is_an_error() -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    late = fsdp2.LayerWiseOptimizer(UnevenLM(), lr=0.02, sharded_later=True, report=False)
    for optimizer in (LayerWise([param], lr=0.02), LayerWiseMuon([param], lr=0.02, storage="owned"), late):
        with pytest.raises(RuntimeError, match="has no plan yet, so plan_digest has no value.*after the first step"):
            _ = optimizer.plan_digest


@on_ranks(2)
def test_the_report_of_a_run_ends_with_the_plan_digest(phi3: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        optimizer = lwopt_backend.LayerWiseOptimizer(model_in(phi3, "float32"), lr=0.02)
    lines = printed.getvalue().splitlines()
    assert lines[-1].startswith(f"Plan {optimizer.plan_digest}: ") if dist.get_rank() == 0 else lines == []


def test_lwopt_plan_takes_the_dtype_of_config_json(phi3: str, tmp_path: Path) -> None:
    """Without one, it says which dtype it assumed."""
    written = json.loads((Path(phi3) / "config.json").read_text())
    written = {key: value for key, value in written.items() if key not in ("dtype", "torch_dtype")}
    words = ("--world-size", 2, "--engine", "zero2")
    for key in ("dtype", "torch_dtype"):
        (tmp_path / "config.json").write_text(json.dumps({**written, key: "float32"}))
        found = planned(str(tmp_path), *words)
        assert found["digest"] == planned(str(tmp_path), *words, "--dtype", "float32")["digest"]
        assert found["options"]["dtype"] == "float32" and "in float32, as config.json says" in found["notes"][-1]
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = planned(str(tmp_path), *words)
    assert found["options"]["dtype"] == "bfloat16" and "assumed to be bfloat16" in found["notes"][-1]


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"up": torch.ones(2, 24, 16), "down": torch.ones(2, 16, 24)})
        self.mixes = nn.Linear(16, 16, bias=False)


@on_ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_stacks_are_planned_as_they_are_cut(tmp_path: Path, dim: int) -> None:
    """Of fewer experts than ranks, cut between or within; what cuts between leaves ranks without any, and is told."""
    model = Stacks()
    shapes = [[name, [*param.shape]] for name, param in model.named_parameters()]
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    fully_shard(model, shard_placement_fn=lambda param: Shard(dim) if param.ndim == 3 else None)
    printed = io.StringIO()
    machine = mock.patch.object(mesh_stepping, "machine_for", lambda device: MACHINES["cuda"])
    with contextlib.redirect_stdout(printed), machine, mock.patch.object(report, "MANY_PIECES", 2):
        digest = fsdp2.LayerWiseOptimizer(model, lr=0.02).plan_digest
    words = ["--shapes", tmp_path / "shapes.json", "--world-size", 4, "--engine", "fsdp2", "--stack-dim", dim]
    assert json.loads(run("plan", *words, "--json"))["digest"] == digest
    if dist.get_rank() == 0:
        said = " ".join(printed.getvalue().split())
        assert ("Stacks: 2 matrices" in said) == (dim == 0)
        assert "Separate: each rank stores pieces of " in said
        # Two stacks of two slices, on one rank of two or on all four, and the weight that is cut by rows.
        assert f"pieces of {2 if dim == 0 else 5} matrices" in said
