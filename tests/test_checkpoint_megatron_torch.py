"""Megatron's ``torch`` checkpoints are read exactly, or refused with a reason."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.megatron.assignment import dealt
from lwopt_backend.checkpoint.megatron.buffers import bucket_numel, buckets, buckets_of, own_buckets
from lwopt_backend.checkpoint.megatron.folders import step_folder
from lwopt_backend.checkpoint.megatron.names import local_spec
from lwopt_backend.checkpoint.megatron.order import module_order
from lwopt_backend.checkpoint.megatron.parallel import Cut, cut_of, local_shape
from lwopt_backend.checkpoint.megatron.torch_reader import read, recognises
from tests.megatron_torch import Setup, Writer, is_sharded_expert, whole_shapes

SAMPLES = Path(__file__).parents[1].parent / "shared" / "megatron"
MODEL, FLAT = "model_optim_rng.pt", "distrib_optim.pt"

SETUPS = {
    "plain": Setup(dp=2),
    "plain, fused Adam": Setup(dp=2, fused_adam=True),
    "plain, learned positions, biases, tp 2": Setup(family="gpt2", tp=2),
    "plain, fp32": Setup(dtype=torch.float32),
    "plain, fp16": Setup(dtype=torch.float16),
    "plain, experts on ep 2": Setup(family="moe", dp=2, ep=2),
    "plain, uneven stages": Setup(stages=((1, 2, 1),)),
    "plain, virtual stages": Setup(stages=((1, 2), (2, 1))),
    "plain, tied, pp 2": Setup(stages=((1, 1),), tied=True),
    "plain, tied, pp 1": Setup(tied=True),
    "distributed": Setup(optimizer="distributed", dp=2),
    "distributed, tp 2": Setup(optimizer="distributed", tp=2),
    "distributed, fp32": Setup(optimizer="distributed", dtype=torch.float32),
    "distributed, small buckets": Setup(
        optimizer="distributed", dp=4, arguments={"overlap_grad_reduce": True, "ddp_bucket_size": 4000}
    ),
    "distributed, 3 buckets of a biased model": Setup(
        "gpt2", "distributed", dp=4, arguments={"overlap_grad_reduce": True, "ddp_num_buckets": 3}
    ),
    "distributed, default buckets, tp 2, dp 3": Setup(
        optimizer="distributed", tp=2, dp=3, arguments={"overlap_grad_reduce": True}
    ),
    "distributed, tied, pp 2, buckets": Setup(
        optimizer="distributed",
        dp=2,
        stages=((2, 2),),
        tied=True,
        arguments={"overlap_grad_reduce": True, "ddp_num_buckets": 3},
    ),
    "distributed, virtual stages, buckets": Setup(
        optimizer="distributed", stages=((1, 1), (1, 1)), arguments={"overlap_grad_reduce": True, "ddp_num_buckets": 4}
    ),
    "distributed, experts on ep 2": Setup("moe", "distributed", dp=4, ep=2),
    "distributed, experts on ep 2, tp 2, pp 2, buckets": Setup(
        *("moe", "distributed"),
        tp=2,
        dp=2,
        ep=2,
        stages=((1, 2),),
        arguments={"overlap_grad_reduce": True, "ddp_num_buckets": 3},
    ),
    "distributed, experts, ep 1": Setup("moe", "distributed", dp=2),
    "layer-wise": Setup(optimizer="layer_wise", dp=2),
    "layer-wise, dp 1": Setup(optimizer="layer_wise"),
    "layer-wise, dp 4": Setup(optimizer="layer_wise", dp=4, stages=((3,),)),
    "layer-wise, more ranks than parameters": Setup(optimizer="layer_wise", dp=12, stages=((1,),), fused_adam=True),
    "layer-wise, tp 2, dp 2": Setup(optimizer="layer_wise", tp=2, dp=2),
    "layer-wise, pp 2, tied": Setup(optimizer="layer_wise", dp=2, stages=((1, 1),), tied=True, fused_adam=True),
    "layer-wise, a stage in the middle": Setup(optimizer="layer_wise", dp=3, stages=((1, 1, 1),)),
    "layer-wise, virtual stages": Setup(optimizer="layer_wise", dp=2, stages=((1, 1), (1, 1))),
    "layer-wise, learned positions": Setup("gpt2", "layer_wise", dp=3),
    "layer-wise, experts, ep 1": Setup("moe", "layer_wise", dp=2),
    "layer-wise, experts on ep 2": Setup("moe", "layer_wise", dp=4, ep=2),
    "layer-wise, experts on ep 2, dp 2": Setup("moe", "layer_wise", dp=2, ep=2),
    "layer-wise, experts on ep 2, tp 2, pp 2": Setup("moe", "layer_wise", tp=2, dp=4, ep=2, stages=((1, 1),)),
    "layer-wise, fp32": Setup(optimizer="layer_wise", dp=2, dtype=torch.float32),
}


def assert_is(found: Checkpoint, truth: dict[str, dict[str, torch.Tensor]]) -> None:
    assert list(found.params) == list(truth)
    for name, wanted in truth.items():
        param = found.params[name]
        assert {"weight", *param.states} == set(wanted), name
        assert param.weight is not None
        for key, tensor in wanted.items():
            lazy = param.weight if key == "weight" else param.states[key]
            assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), tensor.dtype), (name, key)
            assert torch.equal(lazy.read(), tensor), (name, key)


def assert_steps_and_groups(found: Checkpoint, setup: Setup) -> None:
    for name, param in found.params.items():
        muon = "momentum_buffer" in param.states
        assert param.step == (None if muon else 7.0), name
        assert param.group is not None
        group = found.groups[param.group]
        assert ("betas" in group) == (not muon)
        assert group["lr"] == 0.004 and "params" not in group
        if setup.fused_adam and not muon:  # only a rank with parameters of a group counts its steps
            assert group["step"] == 7
        assert group["is_expert_parallel"] == is_sharded_expert(setup, name)
        assert group["wd_mult"] == float(len(param.shape) > 1)


@pytest.mark.parametrize("what", SETUPS)
def test_what_megatron_wrote_is_read_exactly(what: str, tmp_path: Path) -> None:
    setup = SETUPS[what]
    writer = Writer(setup)
    step = writer.write(tmp_path)
    assert recognises(tmp_path) and recognises(step)
    found = read(tmp_path)
    assert_is(found, writer.truth)
    assert (found.iteration, found.samples, found.names) == (7, 28, "megatron-core")
    assert found.scheduler == {"num_steps": 28, "max_lr": 0.01}
    sizes = {"dp": setup.dp, "tp": setup.tp, "pp": setup.pp, "ep": setup.ep, "cp": 1}
    assert found.world == sizes
    assert list(read(step).params) == list(found.params)
    for pair, first, second in found.replicas:
        assert torch.equal(first.read(), second.read()), pair
    assert_steps_and_groups(found, setup)


@pytest.mark.parametrize("name", ["t16_do_adam_dp2", "t16_lw_muon_dp2", "t16_lw_muon_pp2", "t16_plain_adam_dp2"])
def test_genuine_checkpoints_are_read_exactly(name: str) -> None:
    folder = SAMPLES / f"{name}_torch"
    if not folder.is_dir():
        pytest.skip("the genuine Megatron checkpoints are not here")
    truth = torch.load(folder / "ground_truth.pt", weights_only=True)
    found = read(folder)
    assert set(found.params) == set(truth["params"])
    for parameter, wanted in truth["params"].items():
        param, states = found.params[parameter], dict(wanted["states"])
        states["fp32"] = states.pop("fp32_param")
        step = states.pop("step", None)
        assert param.step == (None if step is None else float(step))
        assert set(param.states) == set(states), parameter
        assert param.weight is not None and torch.equal(param.weight.read().float(), wanted["model"]), parameter
        for key, tensor in states.items():
            assert torch.equal(param.states[key].read(), tensor), (parameter, key)
        group = {key: value for key, value in found.groups[param.group or 0].items() if key != "step"}
        assert group == {key: value for key, value in wanted["group"].items() if key in group}, parameter
    assert found.iteration == 3 and found.arguments["padded_vocab_size"] == 64
    assert found.arguments["attention_backend"] == "AttnBackend(5)"
    assert found.arguments["params_dtype"] == "torch.bfloat16"
    assert found.scheduler is not None and found.samples == found.scheduler["num_steps"]


def test_the_order_of_modules_is_that_of_a_genuine_file() -> None:
    folder = SAMPLES / "t16_plain_adam_dp2_torch"
    if not folder.is_dir():
        pytest.skip("the genuine Megatron checkpoints are not here")
    saved = torch_files.load(folder / "iter_0000003" / "mp_rank_00" / MODEL)
    names = [name for name, value in saved["model"].items() if value is not None]
    assert module_order(sorted(names), vars(saved["args"])) == names


# What must be noticed.


def write(tmp_path: Path, setup: Setup) -> Path:
    return Writer(setup).write(tmp_path)


def change(path: Path, edit: object) -> None:
    saved = torch.load(path, weights_only=False)
    edit(saved)  # type: ignore[operator]
    torch.save(saved, path)


@pytest.mark.parametrize(
    "setup, lost, words",
    [
        (Setup(tp=2), "mp_rank_01", "missing are those of [(1,)]"),
        (Setup(stages=((1, 1),)), "mp_rank_00_001", "missing are those of [(0, 1)]"),
        (Setup("moe", dp=2, ep=2), "mp_rank_00_001", "missing are those of [(0, 1)]"),
        (Setup(tp=2), f"mp_rank_01/{MODEL}", "is missing"),
        (Setup(optimizer="distributed", tp=2), f"mp_rank_01/{FLAT}", "is missing"),
        (
            Setup(optimizer="layer_wise", dp=3),
            "mp_rank_00/layer_wise_optimizer_2.pt",
            "[0, 1, 2], found those of [0, 1]",
        ),
        (Setup(optimizer="layer_wise"), "mp_rank_00/layer_wise_optimizer_0.pt", "[0], found those of []"),
    ],
)
def test_a_lost_file_is_noticed(setup: Setup, lost: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, setup) / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError) as error:
        read(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize("setup", [Setup(tp=1), Setup(optimizer="layer_wise", dp=2)])
def test_files_too_many_are_noticed(setup: Setup, tmp_path: Path) -> None:
    folder = write(tmp_path, setup) / "mp_rank_00"
    if setup.optimizer == "layer_wise":
        shutil.copy(folder / "layer_wise_optimizer_1.pt", folder / "layer_wise_optimizer_2.pt")
    else:
        shutil.copytree(folder, folder.with_name("mp_rank_01"))
    with pytest.raises(CheckpointError, match=r"too many \[\(1,\)\]|found those of \[0, 1, 2\]"):
        read(tmp_path)


def read_tensors(path: Path) -> None:
    """Every one, as their bytes are checked when they are read."""
    for param in read(path).params.values():
        assert param.weight is not None
        for tensor in (param.weight, *param.states.values()):
            tensor.read()


@pytest.mark.parametrize("kind", ["distributed", "layer_wise", "plain"])
@pytest.mark.parametrize("damage", ["cut off", "flipped", "empty"])
def test_a_damaged_file_is_noticed(kind: str, damage: str, tmp_path: Path) -> None:
    step = write(tmp_path, Setup(optimizer=kind, dp=2))
    files = sorted(step.rglob("*.pt"))
    assert len(files) == {"distributed": 2, "layer_wise": 3, "plain": 1}[kind]
    for path in files:
        whole = path.read_bytes()
        half = len(whole) // 2
        broken = {"cut off": whole[:half], "flipped": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]}
        path.write_bytes(broken.get(damage, b""))
        with pytest.raises(CheckpointError, match=path.name):
            read_tensors(tmp_path)
        path.write_bytes(whole)
    read_tensors(tmp_path)


def test_a_file_of_another_iteration_is_noticed(tmp_path: Path) -> None:
    step = write(tmp_path / "a", Setup(tp=2))
    other = Writer(Setup(tp=2, iteration=8)).write(tmp_path / "b")
    shutil.copy(other / "mp_rank_01" / MODEL, step / "mp_rank_01" / MODEL)
    with pytest.raises(CheckpointError, match="mp_rank_01.*expected iteration 7, found 8"):
        read(tmp_path / "a")


def test_a_file_of_another_world_is_noticed(tmp_path: Path) -> None:
    step = write(tmp_path / "a", Setup(tp=2))
    other = write(tmp_path / "b", Setup(tp=2, dp=2))
    shutil.copy(other / "mp_rank_01" / MODEL, step / "mp_rank_01" / MODEL)
    with pytest.raises(CheckpointError, match="'dp': 1.*'dp': 2"):
        read(tmp_path / "a")


@pytest.mark.parametrize("what", ["layer-wise, dp 4", "layer-wise, experts on ep 2", "plain"])
def test_masters_of_another_run_are_noticed(what: str, tmp_path: Path) -> None:
    setup = SETUPS[what]
    step = write(tmp_path / "a", setup)
    other = Writer(Setup(**vars(setup) | {"seed": 1})).write(tmp_path / "b")
    path = max(step.rglob("layer_wise_optimizer_*.pt"), default=None)
    if path is not None:
        shutil.copy(other / path.relative_to(step), path)
    else:
        fresh = torch.load(other / "mp_rank_00" / MODEL, weights_only=False)["optimizer"]
        change(step / "mp_rank_00" / MODEL, lambda saved: saved.update(optimizer=fresh))
    with pytest.raises(CheckpointError, match="expected a master weight of shape .* that rounds to"):
        read(tmp_path / "a")


def test_two_matrices_of_one_shape_that_change_places_are_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, Setup(optimizer="layer_wise", dp=2)) / "mp_rank_00" / "layer_wise_optimizer_0.pt"

    def swap(saved: list) -> None:
        masters = saved[0]["fp32_from_fp16_params"][0]
        first, second = next(
            (i, j) for i in range(len(masters)) for j in range(i) if masters[i].shape == masters[j].shape
        )
        masters[first], masters[second] = masters[second], masters[first]

    change(path, swap)
    with pytest.raises(CheckpointError, match="layer_wise_optimizer_0.pt"):
        read(tmp_path)


def test_a_master_that_is_off_by_its_last_rounded_bit_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, Setup(optimizer="layer_wise", dp=2)) / "mp_rank_00" / "layer_wise_optimizer_1.pt"

    def nudge(saved: list) -> None:
        saved[0]["fp32_from_fp16_params"][0][0].view(torch.int32)[3, 5] += 1 << 16

    change(path, nudge)
    with pytest.raises(CheckpointError, match="that does not"):
        read(tmp_path)


def test_a_parameter_that_is_not_trained_is_not_guessed_at(tmp_path: Path) -> None:
    path = write(tmp_path, Setup(optimizer="layer_wise")) / "mp_rank_00" / "layer_wise_optimizer_0.pt"

    def drop(saved: list) -> None:
        saved[1]["fp32_from_fp16_params"][0].pop()
        saved[1]["optimizer"]["param_groups"][0]["params"].pop()

    change(path, drop)
    with pytest.raises(CheckpointError, match="expected 2 parameters.*found 1 and 1"):
        read(tmp_path)


def test_groups_that_two_descriptions_fit_are_not_guessed_at(tmp_path: Path) -> None:
    path = write(tmp_path, Setup()) / "mp_rank_00" / MODEL

    def split(saved: dict) -> None:
        groups = saved["optimizer"]["optimizer"]["param_groups"]
        groups.append(groups[0] | {"params": []})
        saved["optimizer"]["fp32_from_fp16_params"].append([])

    change(path, split)
    with pytest.raises(CheckpointError, match="which of 3 param groups has embedding.word_embeddings.weight"):
        read(tmp_path)


def test_a_decoupled_learning_rate_makes_a_group_of_embeddings(tmp_path: Path) -> None:
    writer = Writer(Setup(arguments={"decoupled_lr": 0.1}))
    path = writer.write(tmp_path) / "mp_rank_00" / MODEL

    def split(saved: dict) -> None:
        optimizer = saved["optimizer"]
        decay, other = optimizer["optimizer"]["param_groups"]
        masters, rest = optimizer["fp32_from_fp16_params"]
        ends, middle = [0, len(masters) - 1], range(1, len(masters) - 1)
        embeddings = decay | {"params": [decay["params"][i] for i in ends], "default_config": False, "lr": 0.1}
        decay["params"] = [decay["params"][i] for i in middle]
        optimizer["optimizer"]["param_groups"] = [decay, other, embeddings]
        optimizer["fp32_from_fp16_params"] = [[masters[i] for i in middle], rest, [masters[i] for i in ends]]

    change(path, split)
    found = read(tmp_path)
    assert_is(found, writer.truth)
    of_embeddings = [name for name, param in found.params.items() if param.group == 2]
    assert of_embeddings == ["embedding.word_embeddings.weight", "output_layer.weight"]


@pytest.mark.parametrize(
    "setup, edit, words",
    [
        (Setup(), lambda s: s["optimizer"]["optimizer"]["state"][0].update(max_exp_avg=torch.ones(2)), "'max_exp_avg'"),
        (Setup(), lambda s: s["optimizer"].update(other=1), r"found also \['other'\]"),
        (Setup(), lambda s: s["optimizer"]["optimizer"]["state"][0].update(exp_avg=torch.ones(2)), r"found \(2,\)"),
        (Setup(), lambda s: s["model"].pop("output_layer.weight"), "expected 9 parameters.*found 10"),
        (
            Setup(),
            lambda s: s["model"].pop("decoder.layers.0.input_layernorm.weight"),
            "expected 4 parameters.*found 5",
        ),
        (Setup(), lambda s: s["args"].__dict__.update(num_layers=3), r"expected 3 layers \(args.num_layers\), found 2"),
        (
            Setup(),
            lambda s: s["args"].__dict__.update(tensor_model_parallel_size=None),
            "args.tensor_model_parallel_size",
        ),
        (Setup(), lambda s: s["args"].__dict__.update(mtp_num_layers=1), "multi-token prediction"),
        (Setup(), lambda s: s["args"].__dict__.update(data_parallel_size=10**12), "of so many ranks"),
        (Setup(), lambda s: s["args"].__dict__.update(tensor_model_parallel_size=-1), "of so many ranks"),
        (Setup(), lambda s: s.update(args="--tensor-model-parallel-size 1"), "is not as Megatron writes it"),
        (
            Setup(),
            lambda s: s["model"].update({"output_layer.weight": [1]}),
            "output_layer.weight to be a tensor, .* fp8",
        ),
        (Setup(), lambda s: s["args"].__dict__.update(num_experts=2, expert_tensor_parallel_size=2), "expert tensor"),
        (Setup(), lambda s: s.update(model={"language_model": {}}), "language_model"),
        (
            Setup(),
            lambda s: s["model"].update({"encoder.x": torch.ones(1)}),
            "encoder.x: expected a parameter of a GPT",
        ),
        (Setup(), lambda s: s.pop("model"), "expected a model"),
        (Setup(), lambda s: s["args"].__dict__.update(use_distributed_optimizer=True), f"{FLAT} is missing"),
        (
            Setup(optimizer="layer_wise"),
            lambda s: s["args"].__dict__.update(context_parallel_size=2),
            "context parallel size 2.*overwrite",
        ),
        (
            Setup(optimizer="distributed"),
            lambda s: s["args"].__dict__.update(overlap_param_gather_with_optimizer_step=True),
            "not read: save as torch_dist",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(setup: Setup, edit: object, words: str, tmp_path: Path) -> None:
    change(write(tmp_path, setup) / "mp_rank_00" / MODEL, edit)
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path)


def test_layer_wise_files_count_and_not_what_the_arguments_say_of_the_optimizer(tmp_path: Path) -> None:
    """From 0.18 on --use-distributed-optimizer is given to get them."""
    writer = Writer(Setup(optimizer="layer_wise", dp=2, arguments={"use_distributed_optimizer": True}))
    step = writer.write(tmp_path)
    assert_is(read(tmp_path), writer.truth)
    torch.save({}, step / "mp_rank_00" / FLAT)
    with pytest.raises(CheckpointError, match="beside a distributed one"):
        read(tmp_path)


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda s: s.update(buckets_coalesced=False), "'buckets_coalesced'"),
        (lambda s: s.update({1: s[0]}), r"expected buffers \[0\], found \[0, 1\]"),
        (lambda s: s.update({0: {(torch.uint8, torch.float32): {}}}), "expected buffer 0 to hold torch.bfloat16"),
        (lambda s: next(iter(s[0].values())).update(max_exp_avg=torch.ones(2)), "found .*'max_exp_avg'"),
        (lambda s: next(iter(s[0].values())).pop("exp_avg"), r"found \['exp_avg_sq', 'param'\]"),
        (lambda s: next(iter(s[0].values())).update(exp_avg=torch.ones(2)), "'exp_avg': 2"),
        (lambda s: next(iter(s[0].values())).update(numel_unpadded=5), "'numel_unpadded': 5"),
    ],
)
def test_flat_buffers_of_another_form_are_refused(edit: object, words: str, tmp_path: Path) -> None:
    change(write(tmp_path, Setup(optimizer="distributed")) / "mp_rank_00" / FLAT, edit)
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path)


def test_buckets_that_the_arguments_do_not_explain_are_refused(tmp_path: Path) -> None:
    setup = SETUPS["distributed, 3 buckets of a biased model"]
    path = write(tmp_path, setup) / "mp_rank_00" / MODEL
    change(path, lambda saved: saved["args"].__dict__.update(ddp_num_buckets=10**9))
    with pytest.raises(CheckpointError, match=f"buffer 0 in .*{FLAT}: expected .* elements in buckets of"):
        read(tmp_path)


def test_copies_of_a_norm_that_differ_are_handed_on(tmp_path: Path) -> None:
    name = "decoder.layers.1.input_layernorm.weight"
    path = write(tmp_path, Setup(tp=2)) / "mp_rank_01" / MODEL

    def nudge(saved: dict) -> None:
        identifier = saved["optimizer"]["optimizer"]["param_groups"][1]["params"][2]
        saved["optimizer"]["optimizer"]["state"][identifier]["exp_avg"][4] += 1

    change(path, nudge)
    found = read(tmp_path)
    differ = [what for what, first, second in found.replicas if not torch.equal(first.read(), second.read())]
    assert differ == [f"exp_avg of {name} on ranks (0, 0, 0) and (1, 0, 0)"]
    assert f"weight of {name} on ranks (0, 0, 0) and (1, 0, 0)" in [what for what, _, _ in found.replicas]
    assert not any("linear_qkv" in what for what, _, _ in found.replicas)


@pytest.mark.parametrize("kind", ["plain", "distributed", "layer_wise"])
def test_the_tied_embedding_is_there_once_and_its_copy_to_compare(kind: str, tmp_path: Path) -> None:
    write(tmp_path, Setup(optimizer=kind, stages=((1, 1),), tied=True))
    found = read(tmp_path)
    assert "output_layer.weight" not in found.params
    assert found.tied == {"output_layer.weight": "embedding.word_embeddings.weight"}
    tied = [what.split()[0] for what, _, _ in found.replicas if "tied" in what]
    assert sorted(tied) == ["exp_avg", "exp_avg_sq", "fp32", "weight"]


def test_a_model_with_an_output_layer_of_its_own_is_not_tied(tmp_path: Path) -> None:
    write(tmp_path, Setup(stages=((1, 1),)))
    assert read(tmp_path).tied == {}


def test_transformer_engines_names_become_the_local_specs(tmp_path: Path) -> None:
    writer = Writer(Setup(dp=2))
    path = writer.write(tmp_path) / "mp_rank_00" / MODEL

    def rename(saved: dict) -> None:
        model = list(saved["model"].items())
        saved["model"].clear()
        for name, value in model:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            saved["model"][name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = value

    change(path, rename)
    assert_is(read(tmp_path), writer.truth)


def test_buffers_are_no_parameters(tmp_path: Path) -> None:
    writer = Writer(Setup("moe"))
    path = writer.write(tmp_path) / "mp_rank_00" / MODEL
    name = "decoder.layers.0.mlp.router.expert_bias"
    change(path, lambda saved: saved["model"].update({name: torch.arange(4.0)}))
    found = read(tmp_path)
    assert_is(found, writer.truth)
    assert torch.equal(found.buffers[name].read(), torch.arange(4.0))


def test_a_step_may_be_a_tensor_of_one_element(tmp_path: Path) -> None:
    step = write(tmp_path, Setup(optimizer="distributed", dp=2))

    def as_tensor(saved: dict) -> None:
        for group in saved["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = torch.tensor([7])

    change(step / "mp_rank_00" / MODEL, as_tensor)
    assert {param.step for param in read(tmp_path).params.values()} == {7.0}


def test_weights_without_an_optimizer_are_read_and_it_is_said(tmp_path: Path) -> None:
    writer = Writer(Setup())
    path = writer.write(tmp_path) / "mp_rank_00" / MODEL
    change(path, lambda saved: (saved.pop("optimizer"), saved.update(extra=3)))
    found = read(tmp_path)
    assert_is(found, {name: {"weight": tensors["weight"]} for name, tensors in writer.truth.items()})
    assert any("no optimizer state" in note for note in found.notes)
    assert any("'extra'" in note for note in found.notes)


def test_states_without_masters_are_read_and_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, SETUPS["layer-wise, fp32"])
    assert any("could not be checked by value" in note for note in read(tmp_path).notes)


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


@pytest.mark.parametrize("path", [MODEL, "layer_wise_optimizer_0.pt"])
def test_a_file_that_would_run_something_is_refused(path: str, tmp_path: Path) -> None:
    folder = write(tmp_path, Setup(optimizer="layer_wise")) / "mp_rank_00"
    witness = tmp_path / "witness"
    torch.save({"args": Hostile(f"touch {witness}")}, folder / path, pickle_module=pickle)
    with pytest.raises(CheckpointError, match="system"):
        read(tmp_path)
    assert not witness.exists()


def test_only_a_part_of_the_flat_buffer_is_read_for_a_parameter(tmp_path: Path) -> None:
    write(tmp_path, Setup(optimizer="distributed"))
    lazy = read(tmp_path).params["decoder.final_layernorm.weight"].states["exp_avg"]
    path = next(tmp_path.rglob(FLAT))
    whole = path.read_bytes()
    wanted = lazy.read()
    place = whole.index(wanted.numpy().tobytes())
    path.write_bytes(bytes(place) + whole[place : place + wanted.nbytes])  # nothing else is left of the file
    assert torch.equal(lazy.read(), wanted)


# Folders.


@pytest.mark.parametrize("text", ["../other", "8", "", "release", "7\n/etc", "\xff"])
def test_a_pointer_that_names_no_step_is_refused(text: str, tmp_path: Path) -> None:
    write(tmp_path, Setup())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert not recognises(tmp_path)
    with pytest.raises(CheckpointError):
        read(tmp_path)


def test_a_release_is_read(tmp_path: Path) -> None:
    writer = Writer(Setup())
    writer.write(tmp_path).rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert step_folder(tmp_path) == tmp_path / "release"
    assert_is(read(tmp_path), writer.truth)


@pytest.mark.parametrize("path", ["nothing", "file", "folder", "latest"])
def test_other_things_are_not_recognised(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "zero").mkdir(parents=True)
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "latest" / "iter_0000003").mkdir()
    assert not recognises(tmp_path / path)


# The rules, one by one.


def test_parameters_are_dealt_as_megatrons_own_example() -> None:
    names = [f"p{i}" for i in range(10)]
    numels = {name: 10 + i for i, name in enumerate(names)}
    shares = dealt([names[5:], names[:5]], numels, ranks=4)
    hands = [sorted(shares[0][rank] + shares[1][rank]) for rank in range(4)]
    assert hands == [["p0", "p7", "p8"], ["p1", "p6", "p9"], ["p2", "p5"], ["p3", "p4"]]


def test_experts_are_dealt_to_a_ring_of_their_own() -> None:
    groups = [["a", "b", "c"], ["x", "y", "z"]]
    numels = {"a": 3, "b": 2, "c": 1, "x": 1, "y": 1, "z": 1}
    shares = dealt(groups, numels, ranks=4, expert_groups=frozenset({1}), expert_ranks=2)
    assert shares == [[["c"], ["b"], ["a"], []], [["x"], ["y", "z"]]]
    assert dealt(groups, numels, ranks=1) == [[["a", "b", "c"]], [["x", "y", "z"]]]


@pytest.mark.parametrize("closed_at", [None, 1, 2000, 2500, 10**9])
@pytest.mark.parametrize("alone", [(), ("embedding.word_embeddings.weight", "output_layer.weight")])
def test_buckets_are_found_again_from_their_lengths(closed_at: int | None, alone: tuple[str, ...]) -> None:
    shapes = whole_shapes(Setup("gpt2"))
    made = buckets(shapes, closed_at=closed_at, alone=alone)
    assert [place.name for bucket in made for place in bucket.places] == list(reversed(shapes))
    assert all(place.start % 64 == 0 for bucket in made for place in bucket.places)
    assert buckets_of(shapes, [bucket.numel for bucket in made]) == made
    for wrong in (-1, 65):
        with pytest.raises(ValueError):
            buckets_of(shapes, [*(bucket.numel for bucket in made[:-1]), made[-1].numel + wrong])


def test_a_tied_embedding_has_a_bucket_of_its_own_only_on_several_stages() -> None:
    tied = {"untie_embeddings_and_output_weights": False, "pipeline_model_parallel_size": 2}
    assert own_buckets(tied) == ("embedding.word_embeddings.weight", "output_layer.weight")
    assert own_buckets(tied | {"pipeline_model_parallel_size": 1}) == ()
    assert own_buckets(tied | {"untie_embeddings_and_output_weights": True}) == ()


@pytest.mark.parametrize(
    "changed, stage, chunk, expected",
    [
        ({}, 0, 0, 50_000_000),
        ({"data_parallel_size": 2}, 0, 0, 40_000_000),
        ({"context_parallel_size": 2}, 0, 0, 100_000_000),
        ({"ddp_bucket_size": 7}, 0, 0, 7),
        ({"ddp_num_buckets": 3, "ddp_bucket_size": 7}, 0, 0, 33),
        ({"ddp_num_buckets": 3}, 1, 0, None),
        ({"ddp_num_buckets": 3}, 0, 1, None),
        ({"overlap_grad_reduce": False, "ddp_num_buckets": 3}, 0, 0, None),
        ({"overlap_param_gather_with_optimizer_step": True}, 0, 0, None),
    ],
)
def test_when_a_bucket_is_closed(changed: dict, stage: int, chunk: int, expected: int | None) -> None:
    arguments = {"overlap_grad_reduce": True, "data_parallel_size": 50} | changed
    assert bucket_numel(arguments, parameters=100, pipeline_rank=stage, chunk=chunk) == expected


@pytest.mark.parametrize(
    "name, cut",
    [
        ("embedding.word_embeddings.weight", Cut("split", 0)),
        ("output_layer.weight", Cut("split", 0)),
        ("embedding.position_embeddings.weight", Cut("whole")),
        ("decoder.final_layernorm.weight", Cut("whole")),
        ("decoder.layers.3.self_attention.linear_qkv.bias", Cut("split", 0)),
        ("decoder.layers.3.self_attention.q_layernorm.weight", Cut("whole")),
        ("decoder.layers.3.self_attention.linear_proj.weight", Cut("split", 1)),
        ("decoder.layers.3.self_attention.linear_proj.bias", Cut("whole")),
        ("decoder.layers.3.mlp.linear_fc1.weight", Cut("gated", 0)),
        ("decoder.layers.3.mlp.linear_fc2.weight", Cut("split", 1)),
        ("decoder.layers.3.mlp.linear_fc2.bias", Cut("whole")),
        ("decoder.layers.3.mlp.router.weight", Cut("whole")),
        ("decoder.layers.3.mlp.experts.local_experts.11.linear_fc1.bias", Cut("gated", 0)),
        ("decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight", Cut("split", 1)),
        ("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", Cut("gated", 0)),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", Cut("whole")),
    ],
)
def test_how_a_parameter_is_cut(name: str, cut: Cut) -> None:
    assert cut_of(name, gated=True) == cut
    assert cut_of(name, gated=False) == (Cut("split", 0) if cut.kind == "gated" else cut)


def test_a_parameter_whose_cut_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="linear_kv_down_proj.*torch_dist"):
        cut_of("decoder.layers.0.self_attention.linear_kv_down_proj.weight", gated=True)


def test_the_shape_of_a_part() -> None:
    assert local_shape((8, 6), Cut("split", 1), 3) == (8, 2)
    assert local_shape((8, 6), Cut("gated", 0), 2) == (4, 6)
    assert local_shape((8, 6), Cut("whole"), 2) == (8, 6)
    with pytest.raises(ValueError, match="does not divide"):
        local_shape((6, 6), Cut("gated", 0), 2)


def test_the_order_of_modules_by_their_implementation() -> None:
    layer = "decoder.layers.1."
    names = [
        *("embedding.word_embeddings.weight", f"{layer}input_layernorm.weight"),
        *(f"{layer}self_attention.linear_proj.weight", f"{layer}self_attention.linear_qkv.weight"),
        *(f"{layer}self_attention.q_layernorm.weight", f"{layer}self_attention.k_layernorm.weight"),
        *(f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.router.weight"),
        *(f"{layer}mlp.experts.local_experts.{e}.linear_fc{i}.weight" for e in (2, 10) for i in (1, 2)),
        *(f"{layer}mlp.shared_experts.gate_weight", f"{layer}mlp.shared_experts.linear_fc1.weight"),
        *("decoder.layers.10.input_layernorm.weight", "decoder.final_layernorm.weight", "decoder.final_layernorm.bias"),
        "output_layer.weight",
    ]
    assert module_order(sorted(names), {"transformer_impl": "local"}) == names
    fused = module_order(sorted(names), {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True})
    assert fused[1:3] == [names[2], names[1]]
    experts = [name.split("local_experts.")[1] for name in fused[8:12]]
    assert experts == [f"{e}.linear_fc{i}.weight" for i in (1, 2) for e in (2, 10)]
    with pytest.raises(CheckpointError, match="decoder.layers.0.mixer.in_proj.weight"):
        module_order([*names, "decoder.layers.0.mixer.in_proj.weight"], {})


def test_names_of_grouped_experts() -> None:
    assert local_spec("decoder.layers.0.mlp.experts.linear_fc1.weight3").endswith("local_experts.3.linear_fc1.weight")
    with pytest.raises(CheckpointError, match="experts in one tensor"):
        local_spec("decoder.layers.0.mlp.experts.weight1")
