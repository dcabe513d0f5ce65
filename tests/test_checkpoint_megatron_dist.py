"""Megatron's ``torch_dist`` and ``fsdp_dtensor`` checkpoints are read exactly, or refused with a reason."""

from __future__ import annotations

import argparse
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.dcp import files as dcp_files
from lwopt_backend.checkpoint.dcp.files import DcpFolder
from lwopt_backend.checkpoint.megatron import dist_reader as megatron_dist
from lwopt_backend.checkpoint.megatron import fsdp_reader as megatron_fsdp
from tests.megatron_dist import LAYERS, Setup, Truth, truth, write

SAMPLES = Path(__file__).parents[1].parent / "shared" / "megatron"
FOLDERS = sorted(path.name for path in SAMPLES.glob("*torchdist*"))
FSDP = SAMPLES / "t16_fsdp_dtensor_dp1"

SETUPS = {
    "LayerWise, 0.16": Setup(),
    "LayerWise, 0.16, common_step": Setup(step_in="common_step"),
    "LayerWise, every layer by itself": Setup(style="layers", fused_norms=False),
    "LayerWise, every tensor by itself": Setup(style="single"),
    "LayerWise, experts": Setup(experts=True),
    "LayerWise, experts, every layer by itself": Setup(experts=True, style="layers", fused_norms=False),
    "LayerWise, experts, every tensor by itself": Setup(experts=True, style="single", ep=2),
    "LayerWise, 0.18 without layout": Setup(chained=True),
    "LayerWise, 0.18": Setup("dp_reshardable", chained=True),
    "LayerWise, 0.19": Setup("dp_reshardable", chained=True, common_file=False),
    "LayerWise, 0.19, tp 2, stages": Setup("dp_reshardable", chained=True, common_file=False, tp=2, stages=(2, 1)),
    "LayerWise, 0.19, fully reshardable": Setup("fully_reshardable", common_file=False),
    "Adam": Setup(muon=False),
    "Adam, fully reshardable": Setup("fully_reshardable", muon=False, tied=True),
    "Adam, buckets": Setup("dp_reshardable", muon=False),
    "Adam, 2 buckets, tp 2": Setup("dp_reshardable", muon=False, tp=2, buckets=2),
    "Adam, 5 buckets, stages": Setup("dp_reshardable", muon=False, buckets=5, stages=(1, 2), style="layers"),
    "Adam, tied over stages": Setup("dp_reshardable", muon=False, tied=True, stages=(2, 1), tp=2),
    "Adam, experts in buckets": Setup("dp_reshardable", muon=False, experts=True, buckets=2),
    "Adam, sharded experts in buckets": Setup(
        "dp_reshardable", muon=False, experts=True, ep=2, tp=2, stages=(2, 1), chained=True
    ),
}


def assert_exact(found: Checkpoint, known: Truth) -> None:
    assert found.params.keys() == known.keys()
    for name, param in found.params.items():
        expected = dict(known[name])
        assert same(param.weight.read(), expected.pop("weight")), name
        assert param.states.keys() == expected.keys(), name
        for state, tensor in expected.items():
            assert same(param.states[state].read(), tensor), (name, state)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, and of one dtype."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", SETUPS)
def test_every_layout_is_read_exactly(tmp_path: Path, kind: str) -> None:
    setup = SETUPS[kind]
    known = truth(setup.muon, setup.experts, setup.tied)
    write(tmp_path / "iter_0000007", setup, known)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for path in (tmp_path, tmp_path / "iter_0000007"):
        assert megatron_dist.recognises(path)
        assert not megatron_fsdp.recognises(path)
        found = megatron_dist.read(path)
    assert_exact(found, known)
    assert (found.iteration, found.samples, found.names) == (7, 28, "megatron-core")
    assert found.scheduler == {"max_lr": 0.01, "num_steps": 28}
    assert found.world == {"dp": 2, "tp": setup.tp, "pp": len(setup.stages), "ep": setup.ep, "cp": 1}
    assert found.tied == ({"output_layer.weight": "embedding.word_embeddings.weight"} if setup.tied else {})
    for name, param in found.params.items():
        if "exp_avg" not in param.states:
            assert param.step is None
            continue
        assert param.step == 7.0
        group = found.groups[param.group]
        assert group["betas"] == (0.9, 0.99)
        assert group["weight_decay"] == (0.0 if len(param.shape) == 1 else 0.1), name
    for what, one, other in found.replicas:
        assert torch.equal(one.read(), other.read()), what
    copies = len(setup.stages) > 1 and setup.tied
    assert any("tied embedding" in what for what, _, _ in found.replicas) == copies


def test_order_is_the_models(tmp_path: Path) -> None:
    known = truth(muon=True)
    write(tmp_path / "iter_0000007", Setup(), known)
    assert list(megatron_dist.read(tmp_path / "iter_0000007").params) == list(known)


def test_a_step_that_was_not_saved_is_said(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000007", Setup(step_in="nowhere"), truth(muon=True))
    found = megatron_dist.read(tmp_path / "iter_0000007")
    assert {param.step for param in found.params.values()} == {None}
    assert any("how many steps Adam made is not saved" in note for note in found.notes)


def test_weights_alone(tmp_path: Path) -> None:
    known = {name: {"weight": of_name["weight"]} for name, of_name in truth(muon=False).items()}
    step = tmp_path / "iter_0000007"
    write(step, Setup(muon=False), known)
    changed(step, lambda common: common.pop("optimizer"))
    found = megatron_dist.read(step)
    assert_exact(found, known)
    assert found.groups == ()


def test_groups_without_states_are_said(tmp_path: Path) -> None:
    known = {name: {"weight": of_name["weight"]} for name, of_name in truth(muon=False).items()}
    write(tmp_path / "iter_0000007", Setup(muon=False), known)
    found = megatron_dist.read(tmp_path / "iter_0000007")
    assert any("no state of a parameter is saved" in note for note in found.notes)


def test_optimizers_that_are_chained_in_a_chained_one(tmp_path: Path) -> None:
    """As where Muon has one for experts, beside Adam in flat buckets."""
    known = truth(muon=True, experts=True)
    step = tmp_path / "iter_0000007"
    write(step, Setup("dp_reshardable", chained=True, experts=True), known)

    def nest(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.startswith("chained_0.")]:
            state[f"chained_0.chained_{int('.experts.' in key)}.{key.removeprefix('chained_0.')}"] = state.pop(key)

    def nest_groups(common: dict[str, Any]) -> None:
        muon = common["optimizer"][0]
        (group,) = muon["optimizer"]["param_groups"]
        of_experts = {"optimizer": {"param_groups": [{**group, "is_expert_parallel": True}]}}
        common["optimizer"] = {0: {0: muon, 1: of_experts}, 1: common["optimizer"][1]}

    resaved(step, nest)
    changed(step, nest_groups)
    found = megatron_dist.read(step)
    assert_exact(found, known)
    assert [("betas" in group, group["is_expert_parallel"]) for group in found.groups] == [
        *((False, False), (False, True), (True, False), (True, False))
    ]
    assert {param.step for param in found.params.values() if "exp_avg" in param.states} == {7.0}


@pytest.mark.parametrize("step_in", ["group", "common_step"])
def test_a_step_may_be_a_tensor_of_one_element(tmp_path: Path, step_in: str) -> None:
    known = truth(muon=False)
    step = tmp_path / "iter_0000007"
    write(step, Setup(muon=False, step_in=step_in), known)

    def as_tensor(common: dict[str, Any]) -> None:
        inner = common["optimizer"]["optimizer"]
        if step_in == "common_step":
            inner["state"]["common_step"] = torch.tensor([7.0])
        for group in inner["param_groups"] if step_in == "group" else ():
            group["step"] = torch.tensor([7])

    changed(step, as_tensor)
    assert {param.step for param in megatron_dist.read(step).params.values()} == {7.0}


@pytest.mark.parametrize("iteration", ["release", None])
def test_an_iteration_that_is_no_number(tmp_path: Path, iteration: str | None) -> None:
    write(tmp_path / "iter_0000009", Setup(), truth(muon=True))
    changed(tmp_path / "iter_0000009", lambda common: common.update(iteration=iteration))
    (tmp_path / "iter_0000009").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert megatron_dist.recognises(tmp_path)
    assert megatron_dist.read(tmp_path).iteration is None


def test_names_of_other_attention_and_of_layers_that_differ(tmp_path: Path) -> None:
    """Norms of q and k, latent attention, Transformer Engine's norm before experts, experts in some layers only."""
    known = truth(muon=False)
    more = {
        "decoder.layers.0.self_attention.q_layernorm.weight": (4,),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (6, 8),
        "decoder.layers.1.mlp.router.weight": (2, 8),
        **{f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc2.weight": (8, 12) for e in range(2)},
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (6, 8),
    }
    for name, shape in more.items():
        states = {key: torch.randn(shape) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        known[name] = {"weight": states["fp32"].bfloat16(), **states}
    step = tmp_path / "iter_0000007"
    write(step, Setup("fully_reshardable", muon=False, style="single", fused_norms=False), known)
    resaved(step, lambda state: None)
    assert_exact(megatron_dist.read(step), known)


def nd_shaped(tensor: Tensor, fragments: tuple[int, ...]) -> Tensor:
    """Cut along every axis, fragment by fragment, each flat."""
    pieces = [tensor]
    for axis, count in enumerate(fragments):
        pieces = [part for piece in pieces for part in piece.chunk(count, axis)]
    return torch.stack([piece.reshape(-1) for piece in pieces]).view(*fragments, -1)


@pytest.mark.parametrize("layer_fragments", [1, LAYERS])
def test_model_space_fragments(tmp_path: Path, layer_fragments: int) -> None:
    """Up to 0.15: states cut into fragments of which each is flat, their real shapes beside DCP's metadata."""
    known = truth(muon=False)
    step = tmp_path / "iter_0000007"
    write(step, Setup("fully_sharded_model_space", muon=False), known)
    folder = DcpFolder(step)
    state: dict[str, Any] = {key: folder.object(key) for key in folder.objects}
    extra = {}
    for key in folder.tensors:
        tensor = folder.tensor(key).read()
        if key.startswith("optimizer.state."):
            extra[key] = {"nd_reformulated_orig_global_shape": tuple(tensor.shape)}
            fragments = [1] * tensor.ndim
            if ".layers." in key:
                fragments[0] = layer_fragments
            if "linear_fc1.weight" in key:
                fragments[1] = 4  # gate and up on two ranks
            if "linear_fc2.weight" in key:
                fragments[2] = 2
            tensor = nd_shaped(tensor, tuple(fragments))
        state[key] = tensor
    shutil.rmtree(step / "__0_0.distcp", ignore_errors=True)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=step, planner=planner, no_dist=True)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    metadata.mcore_data = extra
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    found = megatron_dist.read(step)
    assert_exact(found, known)
    assert found.version == "0.15 or earlier"


def no_common(step: Path) -> None:
    (step / "common.pt").unlink()


def changed(step: Path, change: Any) -> None:
    common = torch.load(step / "common.pt", weights_only=False)
    change(common)
    torch.save(common, step / "common.pt")


def other_layout(step: Path) -> None:
    metadata = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
    changed(step, lambda common: common.update(content_metadata=metadata))


def more_ranks(step: Path) -> None:
    changed(step, lambda common: setattr(common["args"], "tensor_model_parallel_size", 2))


def resaved(step: Path, change: Any) -> None:
    folder = DcpFolder(step)
    state = {key: folder.object(key) for key in folder.objects}
    state |= {key: folder.tensor(key).read() for key in folder.tensors}
    change(state)
    dcp.save(state, checkpoint_id=step, planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
REFUSED = {
    "no common state": (Setup(), no_common, "common.pt is missing"),
    "another layout": (Setup(), other_layout, "'dp_zero_gather_scatter' is not read.*1 without --overlap"),
    "a rank's buckets are missing": (
        Setup("dp_reshardable", muon=False),
        more_ranks,
        "buffers of 2 model-parallel ranks, found those of",
    ),
    "an unknown state": (
        Setup(),
        lambda step: resaved(step, lambda s: s.update({"optimizer.state.shampoo.output_layer.weight": torch.ones(3)})),
        "optimizer.state.shampoo.output_layer.weight in .* is a state that is not known",
    ),
    "a state of nothing": (
        Setup(),
        lambda step: resaved(step, lambda s: s.pop("output_layer.weight")),
        "of output_layer.weight, which the model does not have",
    ),
    "another shape": (
        Setup(),
        lambda step: resaved(step, lambda s: s.update({"output_layer.weight": torch.ones(3, 8).bfloat16()})),
        r"output_layer.weight: expected shape \(3, 8\), found \(16, 8\)",
    ),
    "a master weight in bf16": (
        Setup(),
        lambda step: resaved(
            step, lambda s: s.update({"optimizer.state.fp32_param.output_layer.weight": torch.ones(16, 8).bfloat16()})
        ),
        "master weight of output_layer.weight: expected fp32",
    ),
    "gate without up": (
        Setup(style="single"),
        lambda step: resaved(step, lambda s: s.pop("decoder.layers.1.mlp.linear_fc1.weight_v")),
        r"expected decoder.layers.1.mlp.linear_fc1.weight_w \(gate\)",
    ),
    "a bucket that is too long": (
        Setup("dp_reshardable", muon=False),
        lambda step: resaved(
            step, lambda s: s.update({f"{BUCKET}.{k}": torch.ones(9999) for k in ("param", "exp_avg", "exp_avg_sq")})
        ),
        "do not hold the model's parameters",
    ),
    "a bucket that is missing": (
        Setup("dp_reshardable", muon=False),
        lambda step: resaved(step, lambda s: s.pop(f"{BUCKET}.exp_avg")),
        "expected the same buckets",
    ),
    "a virtual pipeline": (
        Setup("dp_reshardable", muon=False),
        lambda step: resaved(
            step,
            lambda s: s.update({k.replace("gbuf_idx_0", "gbuf_idx_1"): t for k, t in s.items() if "gbuf_idx_0" in k}),
        ),
        "as virtual pipelines make",
    ),
    "the whole optimizer's state as one object": (
        Setup(muon=False),
        lambda step: resaved(
            step, lambda s: s.update({"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": [{0: 1}]})
        ),
        "param_state/shard_0_1 in .* is a part of the optimizer's state that is not known",
    ),
    "groups of another form": (
        Setup("dp_reshardable", muon=False),
        lambda step: resaved(
            step, lambda s: s.update({"optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": [{"groups": 1}]})
        ),
        "dp_group_idx_0.optimizer/shard_0_1 in .*: expected param_groups",
    ),
    "modules of unknown order in buckets": (
        Setup("dp_reshardable", muon=False),
        lambda step: resaved(
            step, lambda s: s.update({"decoder.layers.self_attention.linear_kv_down_proj.weight": torch.ones(3, 4, 8)})
        ),
        "the place of decoder.layers.0.self_attention.linear_kv_down_proj.weight, .* save with --dist-ckpt-optim-fully",
    ),
    "arguments of another form": (
        Setup(),
        lambda step: changed(step, lambda common: common.update(args="--num-layers 3")),
        "iter_0000007 is not as Megatron writes it",
    ),
    "a model with state spaces": (
        Setup(),
        lambda step: resaved(step, lambda s: s.update({"decoder.final_norm.weight": torch.ones(8)})),
        "decoder.final_norm.weight: expected a parameter of a GPT model",
    ),
    "another model": (
        Setup(),
        lambda step: resaved(step, lambda s: s.update({"encoder.conv.weight": torch.ones(3)})),
        "encoder.conv.weight: expected a parameter of a GPT model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tmp_path: Path, case: str) -> None:
    setup, damage, message = REFUSED[case]
    step = tmp_path / "iter_0000007"
    write(step, setup, truth(setup.muon))
    damage(step)
    with pytest.raises(CheckpointError, match=message):
        megatron_dist.read(step)


def test_one_layer_is_read_without_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "iter_0000007", Setup(experts=True), truth(muon=True, experts=True))
    sizes = []
    real = dcp_files.torch_files.read_strided

    def counted(*args: Any) -> Tensor:
        found = real(*args)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(dcp_files.torch_files, "read_strided", counted)
    param = megatron_dist.read(tmp_path / "iter_0000007").params[
        "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"
    ]
    param.states["fp32"].read()
    assert sizes == [param.weight.numel]


# Genuine ones


def genuine_truth(path: Path) -> Truth:
    saved = torch.load(path / "ground_truth.pt", weights_only=True)["params"]
    return {
        name: {"weight": of_name["model"], **{k.replace("fp32_param", "fp32"): t for k, t in of_name["states"].items()}}
        for name, of_name in saved.items()
    }


@pytest.mark.skipif(not FOLDERS, reason="no genuine checkpoints here")
@pytest.mark.parametrize("folder", FOLDERS or ["none"])
def test_genuine_checkpoints(folder: str) -> None:
    path = SAMPLES / folder
    known = genuine_truth(path)
    steps = {name: of_name.pop("step") for name, of_name in known.items() if "step" in of_name}
    assert megatron_dist.recognises(path)
    found = megatron_dist.read(path)
    assert found.params.keys() == known.keys()
    wrong, unrounded = [], []
    for name, param in found.params.items():
        assert param.states.keys() == known[name].keys() - {"weight"}
        weight = param.weight.read()
        assert torch.equal(weight.float(), known[name]["weight"])
        wrong += [(name, key) for key, tensor in param.states.items() if not same(tensor.read(), known[name][key])]
        if not torch.equal(param.states["fp32"].read().to(weight.dtype), weight):
            unrounded.append(name)
        assert param.step == (float(steps[name]) if name in steps else None)
        assert param.group is not None
    if folder.startswith("BAD_"):  # as Megatron wrote it; whoever converts must see it
        assert (len(wrong), len(unrounded)) == (33, 11)
    else:
        assert (wrong, unrounded) == ([], [])


@pytest.mark.skipif(not FSDP.is_dir(), reason="no genuine checkpoints here")
def test_genuine_fsdp_checkpoint() -> None:
    known = torch.load(FSDP / "ground_truth_fsdp.pt", weights_only=True)
    assert megatron_fsdp.recognises(FSDP)
    assert not megatron_dist.recognises(FSDP)
    found = megatron_fsdp.read(FSDP)
    assert {f"module.module.module.{name}" for name in found.params} == known.keys()
    for name, param in found.params.items():
        expected = known[f"module.module.module.{name}"]
        assert same(param.weight.read(), expected["fp32_param"])
        assert same(param.states["fp32"].read(), expected["fp32_param"])
        assert param.states.keys() == {"fp32", *expected["states"]}
        for key, tensor in expected["states"].items():
            assert same(param.states[key].read(), tensor)
        assert found.groups[param.group] == expected["group"]
        assert param.step == expected["group"]["step"]
    assert found.iteration == 3
    assert found.scheduler["max_lr"] == 0.01
    assert found.arguments["num_layers"] == 2


def fsdp_state(known: Truth) -> dict[str, Any]:
    """As Megatron-FSDP writes it: gate and up apart, options by parameter, random states, torch's count of steps."""
    state: dict[str, Any] = {"args": argparse.Namespace(untie_embeddings_and_output_weights=False), "iteration": 7}
    state["rng_state.(0, 0).0.torch_rng_state"] = torch.zeros(5000, dtype=torch.uint8)
    state["rng_state.(0, 0).0.random_rng_state"] = (3, (1, 2), None)
    for name, of_name in known.items():
        halves = {"": slice(None)}
        if name.endswith("linear_fc1.weight"):
            half = of_name["fp32"].shape[0] // 2
            halves = {"_w": slice(half), "_v": slice(half, None)}
        for end, part in halves.items():
            prefix = f"module.module.module.{name}{end}"
            state[f"model.module.{name}{end}"] = of_name["fp32"][part].clone()
            state |= {
                f"optimizer.state.{prefix}.{key}": of_name[key][part].clone() for key in ("exp_avg", "exp_avg_sq")
            }
            state[f"optimizer.state.{prefix}.step"] = torch.tensor(7.0)
            state[f"optimizer.param_to_group_meta.{prefix}.betas"] = (0.9, 0.99)
            state[f"optimizer.param_to_group_meta.{prefix}.lr"] = torch.tensor(0.5)
    return state


def test_fsdp_checkpoints_of_torchs_adam_with_random_states_and_a_tied_embedding(tmp_path: Path) -> None:
    known = truth(muon=False, tied=True)
    step = tmp_path / "iter_0000007"
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(fsdp_state(known), checkpoint_id=step, planner=planner, no_dist=True)
    assert megatron_fsdp.recognises(step) and not megatron_dist.recognises(step)
    found = megatron_fsdp.read(step)
    assert_exact(found, {name: {**of_name, "weight": of_name["fp32"]} for name, of_name in known.items()})
    assert {(param.step, param.group) for param in found.params.values()} == {(7.0, 0)}
    assert found.groups == ({"betas": (0.9, 0.99), "lr": 0.5, "step": 7.0},)
    assert found.tied == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert found.notes == ("left out: rng_state",) and found.iteration == 7


FSDP_REFUSED = {
    "an unknown state": ("optimizer.state.module.output_layer.weight.shampoo", torch.ones(3), "neither a weight nor"),
    "weights in 16 bits": ("model.module.output_layer.weight", torch.ones(16, 8).bfloat16(), "expected fp32, as"),
    "a state of nothing": ("optimizer.state.module.decoder.layers.9.x.exp_avg", torch.ones(3), "weight's shape None"),
    "gate without up": ("model.module.decoder.layers.9.mlp.linear_fc1.weight_w", torch.ones(3, 8), "ends in _w"),
    "arguments of another form": ("args", [1], "is not as Megatron writes it"),
}


@pytest.mark.parametrize("case", FSDP_REFUSED)
def test_fsdp_refusals(tmp_path: Path, case: str) -> None:
    key, value, message = FSDP_REFUSED[case]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {**fsdp_state(truth(muon=False)), key: value}
    dcp.save(state, checkpoint_id=tmp_path / "iter_0000007", planner=planner, no_dist=True)
    with pytest.raises(CheckpointError, match=message):
        megatron_fsdp.read(tmp_path / "iter_0000007")
