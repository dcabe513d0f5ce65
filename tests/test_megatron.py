"""Megatron's formats (``torch``, ``torch_dist``, ``fsdp_dtensor``) are read exactly, or refused with a reason."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.dcp import files as dcp_files
from lwopt_backend.checkpoint.dcp.files import DcpFolder
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.megatron import dist_reader, fsdp_reader, torch_reader
from lwopt_backend.checkpoint.megatron.buffers import bucket_numel
from lwopt_backend.checkpoint.megatron.folders import step_folder
from lwopt_backend.checkpoint.megatron.names import local_spec
from lwopt_backend.checkpoint.megatron.order import module_order
from lwopt_backend.checkpoint.megatron.parallel import Cut, cut_of, local_shape
from tests.command_line import SAMPLES, genuine
from tests.megatron_dist import LAYERS, Setup, Truth, fsdp_state, same, save, truth, write
from tests.megatron_torch import Setup as TorchSetup
from tests.megatron_torch import Writer, is_sharded_expert

READERS = (torch_reader, dist_reader, fsdp_reader)
EMBEDDING, OUTPUT, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
LAST_NORM = "decoder.layers.1.input_layernorm.weight"


def assert_exact(found: Checkpoint, known: Truth, in_order: bool = True) -> None:
    """Bit for bit, in the model's order."""
    assert list(found.params) == list(known) or not in_order and found.params.keys() == known.keys()
    for name, param in found.params.items():
        tensors = {"weight": param.weight, **param.states}
        assert tensors.keys() == known[name].keys(), name
        for key, tensor in tensors.items():
            assert tensor is not None and tensor.shape == known[name][key].shape, (name, key)
            assert same(tensor.read(), known[name][key]), (name, key)


def only_weights(known: Truth) -> Truth:
    return {name: {"weight": tensors["weight"]} for name, tensors in known.items()}


# The torch format


def torch_setups() -> dict[str, TorchSetup]:
    def named(start: str, cases: dict[str, dict[str, Any]], **common: Any) -> dict[str, TorchSetup]:
        return {f"{start}, {what}": TorchSetup(**(common | case)) for what, case in cases.items()}

    def in_buckets(**arguments: int) -> dict[str, Any]:
        return {"arguments": {"overlap_grad_reduce": True, **arguments}}

    experts = dict(family="moe", ep=2)
    plain = {
        "dp 2": dict(dp=2),
        "fused Adam": dict(dp=2, fused_adam=True),
        "learned positions, biases, tp 2": dict(family="gpt2", tp=2),
        "fp32": dict(dtype=torch.float32),
        "fp16": dict(dtype=torch.float16),
        "experts on ep 2": dict(dp=2, **experts),
        "uneven stages": dict(stages=((1, 2, 1),)),
        "virtual stages": dict(stages=((1, 2), (2, 1))),
        "tied, pp 2": dict(stages=((1, 1),), tied=True),
        "tied, pp 1": dict(tied=True),
    }
    distributed = {
        "dp 2": dict(dp=2),
        "tp 2": dict(tp=2),
        "fp32": dict(dtype=torch.float32),
        "small buckets": dict(dp=4, **in_buckets(ddp_bucket_size=4000)),
        "3 buckets of a biased model": dict(family="gpt2", dp=4, **in_buckets(ddp_num_buckets=3)),
        "default buckets, tp 2, dp 3": dict(tp=2, dp=3, **in_buckets()),
        "tied": dict(tied=True, **in_buckets(ddp_num_buckets=3)),
        "tied, pp 2, buckets": dict(dp=2, stages=((2, 2),), tied=True, **in_buckets(ddp_num_buckets=3)),
        "virtual stages, buckets": dict(stages=((1, 1), (1, 1)), **in_buckets(ddp_num_buckets=4)),
        "experts on ep 2": dict(dp=4, **experts),
        "experts on ep 2, tp 2, pp 2, buckets": dict(
            tp=2, dp=2, stages=((1, 2),), **experts, **in_buckets(ddp_num_buckets=3)
        ),
        "experts, ep 1": dict(family="moe", dp=2),
    }
    layer_wise = {
        "dp 2": dict(dp=2),
        "dp 1": {},
        "dp 4": dict(dp=4, stages=((3,),)),
        "more ranks than parameters": dict(dp=12, stages=((1,),), fused_adam=True),
        "tp 2, dp 2": dict(tp=2, dp=2),
        "pp 2, tied": dict(dp=2, stages=((1, 1),), tied=True, fused_adam=True),
        "a stage in the middle": dict(dp=3, stages=((1, 1, 1),)),
        "virtual stages": dict(dp=2, stages=((1, 1), (1, 1))),
        "learned positions": dict(family="gpt2", dp=3),
        "experts, ep 1": dict(family="moe", dp=2),
        "experts on ep 2": dict(dp=4, **experts),
        "experts on ep 2, dp 2": dict(dp=2, **experts),
        "experts on ep 2, tp 2, pp 2": dict(tp=2, dp=4, stages=((1, 1),), **experts),
        "fp32": dict(dp=2, dtype=torch.float32),
        "as 0.18 names it": dict(dp=2, arguments={"use_distributed_optimizer": True}),
    }
    return {
        **named("plain", plain),
        **named("distributed", distributed, optimizer="distributed"),
        **named("layer-wise", layer_wise, optimizer="layer_wise"),
    }


SETUPS = torch_setups()


@pytest.mark.parametrize("what", SETUPS)
def test_what_megatron_wrote_in_the_torch_format_is_read_exactly(what: str, tmp_path: Path) -> None:
    setup = SETUPS[what]
    writer = Writer(setup)
    step = writer.write(tmp_path)
    assert torch_reader.recognises(tmp_path) and torch_reader.recognises(step)
    found = torch_reader.read(tmp_path)
    assert_exact(found, writer.truth)
    assert (found.iteration, found.samples, found.names) == (7, 28, "megatron-core")
    assert found.scheduler == {"num_steps": 28, "max_lr": 0.01}
    assert found.world == {"dp": setup.dp, "tp": setup.tp, "pp": setup.pp, "ep": setup.ep, "cp": 1}
    assert list(torch_reader.read(step).params) == list(found.params)
    for pair, first, second in found.replicas:
        assert torch.equal(first.read(), second.read()), pair
    assert found.tied == ({OUTPUT: EMBEDDING} if setup.tied else {})
    copies = {pair.split()[0] for pair, _, _ in found.replicas if "tied" in pair}
    assert copies == ({"exp_avg", "exp_avg_sq", "fp32", "weight"} if setup.tied and setup.pp > 1 else set())
    no_masters = setup.dtype == torch.float32 and setup.optimizer != "distributed"
    assert any("could not be checked by value" in note for note in found.notes) == no_masters
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


FLAT, OWN, MODEL = "distrib_optim.pt", "layer_wise_optimizer_{}.pt", "mp_rank_00/model_optim_rng.pt"
Damage = Callable[[Path], None]


def edited(edit: Callable[[Any], Any], file: str = MODEL) -> Damage:
    """Change what is saved in a file of a step."""

    def change(step: Path) -> None:
        saved = torch.load(step / file, weights_only=False)
        edit(saved)
        torch.save(saved, step / file)

    return change


def arguments(**changes: Any) -> Damage:
    return edited(lambda saved: vars(saved["args"]).update(changes))


def in_model(name: str, value: Any) -> Damage:
    return edited(lambda saved: saved["model"].update({name: value}))


def in_buffer(**changes: Any) -> Damage:
    return edited(lambda saved: next(iter(saved[0].values())).update(changes), f"mp_rank_00/{FLAT}")


def lost(name: str) -> Damage:
    def remove(step: Path) -> None:
        shutil.rmtree(step / name) if (step / name).is_dir() else (step / name).unlink()

    return remove


def from_other(file: str, **changes: Any) -> Damage:
    """A file of another run with two ranks."""

    def replace(step: Path) -> None:
        other = Writer(TorchSetup(**{"tp": 2, **changes})).write(step.parent.parent / "other")
        shutil.copy(other / file, step / file)

    return replace


def swap(saved: Any) -> None:
    masters = saved[0]["fp32_from_fp16_params"][0]
    pairs = ((i, j) for i in range(len(masters)) for j in range(i) if masters[i].shape == masters[j].shape)
    first, second = next(pairs)
    masters[first], masters[second] = masters[second], masters[first]


def not_trained(saved: Any) -> None:
    saved[1]["fp32_from_fp16_params"][0].pop()
    saved[1]["optimizer"]["param_groups"][0]["params"].pop()


def two_that_fit(saved: Any) -> None:
    groups = saved["optimizer"]["optimizer"]["param_groups"]
    groups.append(groups[0] | {"params": []})
    saved["optimizer"]["fp32_from_fp16_params"].append([])


def state_of_first(**changes: Any) -> Damage:
    return edited(lambda saved: saved["optimizer"]["optimizer"]["state"][0].update(changes))


ONE, TP, MUON = TorchSetup(), TorchSetup(tp=2), TorchSetup(optimizer="layer_wise", dp=2)
ADAM, EP = TorchSetup(optimizer="distributed"), TorchSetup("moe", dp=2, ep=2)
SEED, SOLO = dict(seed=1, optimizer="layer_wise", dp=2, tp=1), TorchSetup(optimizer="layer_wise")
SEED_E, OWN_E = dict(SEED, family="moe", dp=4, ep=2), f"mp_rank_00_000/{OWN.format(0)}"
OWN_0, OWN_1 = (f"mp_rank_00/{OWN.format(rank)}" for rank in (0, 1))
NOT_A_MASTER = "expected a master weight of shape .* that rounds to"
REFUSED_TORCH: list[tuple[TorchSetup, Damage, str]] = [
    (TP, lost("mp_rank_01"), r"missing are those of \[\(1,\)\]"),
    (TorchSetup(stages=((1, 1),)), lost("mp_rank_00_001"), r"missing are those of \[\(0, 1\)\]"),
    (EP, lost("mp_rank_00_001"), r"missing are those of \[\(0, 1\)\]"),
    (TP, lost("mp_rank_01/model_optim_rng.pt"), "is missing"),
    (TorchSetup(optimizer="distributed", tp=2), lost(f"mp_rank_01/{FLAT}"), "is missing"),
    (MUON, lost(OWN_1), r"\[0, 1\], found those of \[0\]"),
    (SOLO, lost(OWN_0), r"\[0\], found those of \[\]"),
    (MUON, lambda step: shutil.copy(step / OWN_1, step / f"mp_rank_00/{OWN.format(2)}"), r"those of \[0, 1, 2\]"),
    (ONE, lambda step: shutil.copytree(step / "mp_rank_00", step / "mp_rank_01"), r"too many \[\(1,\)\]"),
    (TP, from_other("mp_rank_01/model_optim_rng.pt", iteration=8), "mp_rank_01.*expected iteration 7, found 8"),
    (TP, from_other("mp_rank_01/model_optim_rng.pt", dp=2), "'dp': 1.*'dp': 2"),
    (MUON, from_other(OWN_0, **SEED), NOT_A_MASTER),
    (TorchSetup("moe", "layer_wise", dp=4, ep=2), from_other(OWN_E, **SEED_E), NOT_A_MASTER),
    (ONE, edited(lambda s: s["optimizer"]["fp32_from_fp16_params"][0][1].add_(1)), NOT_A_MASTER),
    (MUON, edited(swap, OWN_0), "layer_wise_optimizer_0.pt"),
    (
        MUON,  # off by the last bit that is kept
        edited(lambda s: s[0]["fp32_from_fp16_params"][0][0].view(torch.int32)[3, 5].add_(1 << 16), OWN_1),
        "that does not",
    ),
    (SOLO, edited(not_trained, OWN_0), "expected 2 parameters.*found 1 and 1"),
    (ONE, edited(two_that_fit), "which of 3 param groups has embedding.word_embeddings.weight"),
    (ONE, state_of_first(max_exp_avg=torch.ones(2)), "'max_exp_avg'"),
    (ONE, edited(lambda s: s["optimizer"].update(other=1)), r"found also \['other'\]"),
    (ONE, state_of_first(exp_avg=torch.ones(2)), r"found \(2,\)"),
    (ONE, edited(lambda s: s["model"].pop(OUTPUT)), "expected 9 parameters.*found 10"),
    (ONE, edited(lambda s: s["model"].pop(LAST_NORM)), "expected 4 parameters.*found 5"),
    (ONE, arguments(num_layers=3), r"expected 3 layers \(args.num_layers\), found 2"),
    (ONE, arguments(tensor_model_parallel_size=None), "args.tensor_model_parallel_size"),
    (ONE, arguments(mtp_num_layers=1), "multi-token prediction"),
    (ONE, arguments(data_parallel_size=10**12), "of so many ranks"),
    (ONE, arguments(tensor_model_parallel_size=-1), "of so many ranks"),
    (ONE, edited(lambda s: s.update(args="--tensor-model-parallel-size 1")), "is not as Megatron writes it"),
    (ONE, in_model(OUTPUT, [1]), "output_layer.weight to be a tensor, .* fp8"),
    (ONE, arguments(num_experts=2, expert_tensor_parallel_size=2), "expert tensor"),
    (ONE, edited(lambda s: s.update(model={"language_model": {}})), "language_model"),
    (ONE, in_model("encoder.x", torch.ones(1)), "encoder.x: expected a parameter of a GPT"),
    (ONE, edited(lambda s: s.pop("model")), "expected a model"),
    (ONE, arguments(use_distributed_optimizer=True), f"{FLAT} is missing"),
    (MUON, lambda step: torch.save({}, step / "mp_rank_00" / FLAT), "beside a distributed one"),
    (SOLO, arguments(context_parallel_size=2), "context parallel size 2.*overwrite"),
    (ADAM, arguments(overlap_param_gather_with_optimizer_step=True), "not read: save as torch_dist"),
    (ADAM, edited(lambda s: s.update(buckets_coalesced=False), f"mp_rank_00/{FLAT}"), "'buckets_coalesced'"),
    (ADAM, edited(lambda s: s.update({1: s[0]}), f"mp_rank_00/{FLAT}"), r"expected buffers \[0\], found \[0, 1\]"),
    (
        ADAM,
        edited(lambda s: s.update({0: {(torch.uint8, torch.float32): {}}}), f"mp_rank_00/{FLAT}"),
        "expected buffer 0 to hold torch.bfloat16",
    ),
    (ADAM, in_buffer(max_exp_avg=torch.ones(2)), "found .*'max_exp_avg'"),
    (
        ADAM,
        edited(lambda s: next(iter(s[0].values())).pop("exp_avg"), f"mp_rank_00/{FLAT}"),
        r"found \['exp_avg_sq', 'param'\]",
    ),
    (ADAM, in_buffer(exp_avg=torch.ones(2)), "'exp_avg': 2"),
    (ADAM, in_buffer(numel_unpadded=5), "'numel_unpadded': 5"),
    (
        SETUPS["distributed, 3 buckets of a biased model"],
        arguments(ddp_num_buckets=10**9),
        f"buffer 0 in .*{FLAT}: expected .* elements in buckets of",
    ),
]


@pytest.mark.parametrize(("setup", "damage", "words"), REFUSED_TORCH)
def test_what_is_damaged_or_not_known_in_the_torch_format_is_refused(
    setup: TorchSetup, damage: Damage, words: str, tmp_path: Path
) -> None:
    damage(Writer(setup).write(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=words):
        torch_reader.read(tmp_path / "run")


@pytest.mark.parametrize("kind", ["distributed", "layer_wise", "plain"])
def test_a_damaged_file_is_noticed(kind: str, tmp_path: Path) -> None:
    def read_all() -> None:  # bytes of tensors are checked when they are read
        for param in torch_reader.read(tmp_path).params.values():
            for tensor in (param.weight, *param.states.values()):
                tensor.read()

    files = sorted(Writer(TorchSetup(optimizer=kind, dp=2)).write(tmp_path).rglob("*.pt"))
    assert len(files) == {"distributed": 2, "layer_wise": 3, "plain": 1}[kind]
    for path in files:
        whole = path.read_bytes()
        half = len(whole) // 2
        for broken in (whole[:half], whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :], b""):
            path.write_bytes(broken)
            with pytest.raises(CheckpointError, match=path.name):
                read_all()
        path.write_bytes(whole)
    read_all()


def decoupled_rate(saved: Any) -> None:
    """Embeddings have a group of their own."""
    optimizer = saved["optimizer"]
    decay, other = optimizer["optimizer"]["param_groups"]
    masters, rest = optimizer["fp32_from_fp16_params"]
    ends, middle = [0, len(masters) - 1], range(1, len(masters) - 1)
    embeddings = decay | {"params": [decay["params"][i] for i in ends], "default_config": False, "lr": 0.1}
    decay["params"] = [decay["params"][i] for i in middle]
    optimizer["optimizer"]["param_groups"] = [decay, other, embeddings]
    optimizer["fp32_from_fp16_params"] = [[masters[i] for i in middle], rest, [masters[i] for i in ends]]


def transformer_engine(saved: Any) -> None:
    model = list(saved["model"].items())
    saved["model"].clear()
    for name, value in model:
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        saved["model"][name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = value


def tensor_steps(saved: Any) -> None:
    for group in saved["optimizer"]["optimizer"]["param_groups"]:
        group["step"] = torch.tensor([7])


BIAS = "decoder.layers.0.mlp.router.expert_bias"
OTHER_FORMS: dict[str, tuple[TorchSetup, Damage, Callable[[Checkpoint], bool]]] = {
    "a learning rate of its own for embeddings": (
        TorchSetup(arguments={"decoupled_lr": 0.1}),
        edited(decoupled_rate),
        lambda found: [name for name, param in found.params.items() if param.group == 2] == [EMBEDDING, OUTPUT],
    ),
    "Transformer Engine's names": (ONE, edited(transformer_engine), lambda found: True),
    "a buffer": (
        TorchSetup("moe"),
        in_model(BIAS, torch.arange(4.0)),
        lambda found: torch.equal(found.buffers[BIAS].read(), torch.arange(4.0)),
    ),
    "steps as tensors": (
        ADAM,
        edited(tensor_steps),
        lambda found: {param.step for param in found.params.values()} == {7.0},
    ),
    "a release": (
        ONE,
        lambda step: (
            step.rename(step.with_name("release")),
            step.with_name("latest_checkpointed_iteration.txt").write_text("release\n"),
        ),
        lambda found: found.iteration == 7,
    ),
    "weights alone": (
        ONE,
        edited(lambda saved: (saved.pop("optimizer"), saved.update(extra=3))),
        lambda found: all(any(said in note for note in found.notes) for said in ("no optimizer state", "'extra'")),
    ),
}


@pytest.mark.parametrize("case", OTHER_FORMS)
def test_other_forms_of_the_torch_format_are_read(case: str, tmp_path: Path) -> None:
    setup, edit, holds = OTHER_FORMS[case]
    writer = Writer(setup)
    edit(writer.write(tmp_path))
    found = torch_reader.read(tmp_path)
    assert_exact(found, only_weights(writer.truth) if case == "weights alone" else writer.truth)
    assert holds(found)


def test_copies_of_a_norm_that_differ_are_handed_on(tmp_path: Path) -> None:
    def nudge(saved: Any) -> None:
        identifier = saved["optimizer"]["optimizer"]["param_groups"][1]["params"][2]
        saved["optimizer"]["optimizer"]["state"][identifier]["exp_avg"][4] += 1

    edited(nudge, "mp_rank_01/model_optim_rng.pt")(Writer(TP).write(tmp_path))
    replicas = torch_reader.read(tmp_path).replicas
    differ = [what for what, first, second in replicas if not torch.equal(first.read(), second.read())]
    assert differ == [f"exp_avg of {LAST_NORM} on ranks (0, 0, 0) and (1, 0, 0)"]
    assert f"weight of {LAST_NORM} on ranks (0, 0, 0) and (1, 0, 0)" in [what for what, _, _ in replicas]
    assert not any("linear_qkv" in what for what, _, _ in replicas)


def test_only_a_part_of_the_flat_buffer_is_read_for_a_parameter(tmp_path: Path) -> None:
    Writer(ADAM).write(tmp_path)
    lazy = torch_reader.read(tmp_path).params[NORM].states["exp_avg"]
    path = next(tmp_path.rglob(FLAT))
    whole, wanted = path.read_bytes(), lazy.read()
    place = whole.index(wanted.numpy().tobytes())
    path.write_bytes(bytes(place) + whole[place : place + wanted.nbytes])  # nothing else is left of the file
    assert torch.equal(lazy.read(), wanted)


def test_folders_that_are_none_of_megatrons_are_not_recognised(tmp_path: Path) -> None:
    Writer(ONE).write(tmp_path / "run")
    assert step_folder(tmp_path / "run") == tmp_path / "run" / "iter_0000007"
    for text in ("../other", "8", "", "release", "7\n/etc", "\xff"):
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)
        assert not torch_reader.recognises(tmp_path / "run")
        with pytest.raises(CheckpointError):
            torch_reader.read(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "zero").mkdir(parents=True)
    (tmp_path / "latest" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "latest" / "latest_checkpointed_iteration.txt").write_text("3")
    for name in ("nothing", "file", "folder", "latest"):
        assert not any(reader.recognises(tmp_path / name) for reader in READERS)


# The torch_dist format

RESHARDABLE = dict(layout="dp_reshardable", muon=False)
DIST = {
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
    "Adam, buckets": Setup(**RESHARDABLE),
    "Adam, 2 buckets, tp 2": Setup(**RESHARDABLE, tp=2, buckets=2),
    "Adam, 5 buckets, stages": Setup(**RESHARDABLE, buckets=5, stages=(1, 2), style="layers"),
    "Adam, tied over stages": Setup(**RESHARDABLE, tied=True, stages=(2, 1), tp=2),
    "Adam, experts in buckets": Setup(**RESHARDABLE, experts=True, buckets=2),
    "Adam, sharded experts in buckets": Setup(**RESHARDABLE, experts=True, ep=2, tp=2, stages=(2, 1), chained=True),
}


@pytest.mark.parametrize("kind", DIST)
def test_every_layout_of_torch_dist_is_read_exactly(tmp_path: Path, kind: str) -> None:
    setup = DIST[kind]
    known = truth(setup.muon, setup.experts, setup.tied)
    write(tmp_path / "iter_0000007", setup, known)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for path in (tmp_path, tmp_path / "iter_0000007"):
        assert [reader.recognises(path) for reader in READERS] == [False, True, False]
        found = dist_reader.read(path)
    assert_exact(found, known)
    assert (found.iteration, found.samples, found.names) == (7, 28, "megatron-core")
    assert found.scheduler == {"max_lr": 0.01, "num_steps": 28}
    assert found.world == {"dp": 2, "tp": setup.tp, "pp": len(setup.stages), "ep": setup.ep, "cp": 1}
    assert found.tied == ({OUTPUT: EMBEDDING} if setup.tied else {})
    for name, param in found.params.items():
        is_adam = "exp_avg" in param.states
        assert param.step == (7.0 if is_adam else None)
        if is_adam:
            group = found.groups[param.group]
            assert group["betas"] == (0.9, 0.99)
            assert group["weight_decay"] == (0.0 if len(param.shape) == 1 else 0.1), name
    for what, one, other in found.replicas:
        assert torch.equal(one.read(), other.read()), what
    copies = len(setup.stages) > 1 and setup.tied
    assert any("tied embedding" in what for what, _, _ in found.replicas) == copies


def common(change: Callable[[Any], Any]) -> Damage:
    return edited(change, "common.pt")


def resaved(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Write a step of torch_dist again with other tensors or objects."""

    def edit(step: Path) -> None:
        folder = DcpFolder(step)
        state = {key: folder.object(key) for key in folder.objects}
        state |= {key: folder.tensor(key).read() for key in folder.tensors}
        change(state)
        save(state, step)

    return edit


def added(**tensors: Any) -> Damage:
    return resaved(lambda state: state.update(tensors))


def nest(step: Path) -> None:
    """Optimizers chained in a chained one, as where Muon has one for experts, beside Adam in flat buckets."""

    def keys(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.startswith("chained_0.")]:
            state[f"chained_0.chained_{int('.experts.' in key)}.{key.removeprefix('chained_0.')}"] = state.pop(key)

    def groups(saved: dict[str, Any]) -> None:
        muon = saved["optimizer"][0]
        (group,) = muon["optimizer"]["param_groups"]
        of_experts = {"optimizer": {"param_groups": [{**group, "is_expert_parallel": True}]}}
        saved["optimizer"] = {0: {0: muon, 1: of_experts}, 1: saved["optimizer"][1]}

    resaved(keys)(step)
    common(groups)(step)


def tensor_common_step(saved: Any) -> None:
    saved["optimizer"]["optimizer"]["state"]["common_step"] = torch.tensor([7.0])


def is_released(step: Path) -> None:
    common(lambda saved: saved.update(iteration="release"))(step)
    step.rename(step.with_name("release"))
    (step.parent / "latest_checkpointed_iteration.txt").write_text("release")


def adams_steps(found: Checkpoint) -> set[Any]:
    return {param.step for param in found.params.values() if "exp_avg" in param.states}


def says(*words: str) -> Callable[[Checkpoint], bool]:
    return lambda found: all(any(word in note for note in found.notes) for word in words)


NESTED = [(False, False), (False, True), (True, False), (True, False)]
OTHER_DIST: dict[str, tuple[Setup, Damage, Callable[[Checkpoint], bool]]] = {
    "chains in a chain": (
        Setup("dp_reshardable", chained=True, experts=True),
        nest,
        lambda found: (
            [("betas" in g, g["is_expert_parallel"]) for g in found.groups] == NESTED and adams_steps(found) == {7.0}
        ),
    ),
    "a step that was not saved": (
        Setup(step_in="nowhere"),
        lambda step: None,
        lambda found: adams_steps(found) == {None} and says("how many steps Adam made is not saved")(found),
    ),
    "steps as tensors": (Setup(muon=False), common(tensor_steps), lambda found: adams_steps(found) == {7.0}),
    "a common step as a tensor": (
        Setup(muon=False, step_in="common_step"),
        common(tensor_common_step),
        lambda found: adams_steps(found) == {7.0},
    ),
    "a release": (Setup(), is_released, lambda found: found.iteration is None),
    "no iteration": (Setup(), common(lambda saved: saved.update(iteration=None)), lambda found: found.iteration == 7),
    "weights alone": (Setup(muon=False), common(lambda saved: saved.pop("optimizer")), lambda found: not found.groups),
    "groups without states": (Setup(muon=False), lambda step: None, says("no state of a parameter is saved")),
}


@pytest.mark.parametrize("case", OTHER_DIST)
def test_other_forms_of_torch_dist_are_read(case: str, tmp_path: Path) -> None:
    setup, edit, holds = OTHER_DIST[case]
    known = truth(setup.muon, setup.experts)
    if case in ("weights alone", "groups without states"):
        known = only_weights(known)
    write(tmp_path / "iter_0000007", setup, known)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    edit(tmp_path / "iter_0000007")
    found = dist_reader.read(tmp_path)
    assert_exact(found, known)
    assert holds(found)


def test_names_of_other_attention_and_of_layers_that_differ(tmp_path: Path) -> None:
    """Norms of q and k, latent attention, Transformer Engine's norm before experts, experts in some layers only."""
    known = truth(muon=False)
    more = {
        **{"0.self_attention.q_layernorm.weight": (4,), "0.self_attention.linear_kv_down_proj.weight": (6, 8)},
        **{"1.mlp.router.weight": (2, 8), "1.mlp.shared_experts.linear_fc1.weight": (6, 8)},
        **{f"1.mlp.experts.local_experts.{e}.linear_fc2.weight": (8, 12) for e in range(2)},
    }
    for name, shape in more.items():
        states = {key: torch.randn(shape) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        known[f"decoder.layers.{name}"] = {"weight": states["fp32"].bfloat16(), **states}
    step = tmp_path / "iter_0000007"
    write(step, Setup("fully_reshardable", muon=False, style="single", fused_norms=False), known)
    found = dist_reader.read(step)
    assert_exact(found, known, in_order=False)


@pytest.mark.parametrize("layer_fragments", [1, LAYERS])
def test_model_space_fragments(tmp_path: Path, layer_fragments: int) -> None:
    """Up to 0.15: states cut into fragments of which each is flat, their real shapes beside DCP's metadata."""
    known, extra, step = truth(muon=False), {}, tmp_path / "iter_0000007"
    write(step, Setup("fully_sharded_model_space", muon=False), known)

    def cut(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.startswith("optimizer.state.")]:
            tensor = state[key]
            extra[key] = {"nd_reformulated_orig_global_shape": tuple(tensor.shape)}
            fragments = [1] * tensor.ndim
            if ".layers." in key:
                fragments[0] = layer_fragments
            if "linear_fc1.weight" in key:
                fragments[1] = 4  # gate and up on two ranks
            if "linear_fc2.weight" in key:
                fragments[2] = 2
            pieces = [tensor]
            for axis, count in enumerate(fragments):
                pieces = [part for piece in pieces for part in piece.chunk(count, axis)]
            state[key] = torch.stack([piece.reshape(-1) for piece in pieces]).view(*fragments, -1)

    resaved(cut)(step)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    metadata.mcore_data = extra
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    found = dist_reader.read(step)
    assert_exact(found, known)
    assert found.version == "0.15 or earlier"


def more_buffers(state: dict[str, Any]) -> None:
    state.update({key.replace("gbuf_idx_0", "gbuf_idx_1"): t for key, t in state.items() if "gbuf_idx_0" in key})


OTHER_LAYOUT = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
GROUP = "optimizer.distributed.dp_group_idx_0"
BUCKET = f"{GROUP}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
LATENT = "decoder.layers{}.self_attention.linear_kv_down_proj.weight"
UP = "decoder.layers.1.mlp.linear_fc1.weight_v"
TOO_LONG = {f"{BUCKET}.{key}": torch.ones(9999) for key in ("param", "exp_avg", "exp_avg_sq")}
REFUSED_DIST: list[tuple[Setup, Damage, str]] = [
    (Setup(), lost("common.pt"), "common.pt is missing"),
    (
        Setup(),
        common(lambda saved: saved.update(content_metadata=OTHER_LAYOUT)),
        "'dp_zero_gather_scatter' is not read.*1 without --overlap",
    ),
    (
        DIST["Adam, buckets"],
        common(lambda saved: setattr(saved["args"], "tensor_model_parallel_size", 2)),
        "buffers of 2 model-parallel ranks, found those of",
    ),
    (
        Setup(),
        added(**{"optimizer.state.shampoo.output_layer.weight": torch.ones(3)}),
        "optimizer.state.shampoo.output_layer.weight in .* is a state that is not known",
    ),
    (Setup(), resaved(lambda s: s.pop(OUTPUT)), "of output_layer.weight, which the model does not have"),
    (
        Setup(),
        added(**{OUTPUT: torch.ones(3, 8).bfloat16()}),
        r"output_layer.weight: expected shape \(3, 8\), found \(16, 8\)",
    ),
    (
        Setup(),
        added(**{f"optimizer.state.fp32_param.{OUTPUT}": torch.ones(16, 8).bfloat16()}),
        "master weight of output_layer.weight: expected fp32",
    ),
    (
        DIST["LayerWise, every tensor by itself"],
        resaved(lambda s: s.pop(UP)),
        r"expected decoder.layers.1.mlp.linear_fc1.weight_w \(gate\)",
    ),
    (DIST["Adam, buckets"], added(**TOO_LONG), "do not hold the model's parameters"),
    (DIST["Adam, buckets"], resaved(lambda s: s.pop(f"{BUCKET}.exp_avg")), "expected the same buckets"),
    (DIST["Adam, buckets"], resaved(more_buffers), "as virtual pipelines make"),
    (
        Setup(muon=False),
        added(**{f"{GROUP}.param_state/shard_0_1": [{0: 1}]}),
        "param_state/shard_0_1 in .* is a part of the optimizer's state that is not known",
    ),
    (
        DIST["Adam, buckets"],
        added(**{f"{GROUP}.optimizer/shard_0_1": [{"groups": 1}]}),
        "dp_group_idx_0.optimizer/shard_0_1 in .*: expected param_groups",
    ),
    (
        DIST["Adam, buckets"],
        added(**{LATENT.format(""): torch.ones(3, 4, 8)}),
        f"the place of {LATENT.format('.0')}, .* save with --dist-ckpt-optim-fully",
    ),
    (Setup(), common(lambda saved: saved.update(args="--num-layers 3")), "iter_0000007 is not as Megatron writes it"),
    *(
        (Setup(), added(**{name: torch.ones(8)}), f"{name}: expected a parameter of a GPT model")
        for name in ("decoder.final_norm.weight", "encoder.conv.weight")  # of state spaces, and of another model
    ),
]


@pytest.mark.parametrize(("setup", "damage", "words"), REFUSED_DIST)
def test_what_is_damaged_or_not_known_in_torch_dist_is_refused(
    setup: Setup, damage: Damage, words: str, tmp_path: Path
) -> None:
    step = tmp_path / "iter_0000007"
    write(step, setup, truth(setup.muon))
    damage(step)
    with pytest.raises(CheckpointError, match=words):
        dist_reader.read(step)


def test_one_layer_is_read_without_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "iter_0000007", Setup(experts=True), truth(muon=True, experts=True))
    sizes, real = [], dcp_files.torch_files.read_strided

    def counted(*args: Any) -> Tensor:
        found = real(*args)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(dcp_files.torch_files, "read_strided", counted)
    params = dist_reader.read(tmp_path / "iter_0000007").params
    param = params["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"]
    param.states["fp32"].read()
    assert sizes == [param.weight.numel]


# The fsdp_dtensor format


def test_fsdp_checkpoints_of_torchs_adam_with_random_states_and_a_tied_embedding(tmp_path: Path) -> None:
    known, step = truth(muon=False, tied=True), tmp_path / "iter_0000007"
    save(fsdp_state(known), step)
    assert [reader.recognises(step) for reader in READERS] == [False, False, True]
    found = fsdp_reader.read(step)
    weights = {name: {**of_name, "weight": of_name["fp32"]} for name, of_name in known.items()}
    assert_exact(found, weights, in_order=False)
    assert {(param.step, param.group) for param in found.params.values()} == {(7.0, 0)}
    assert found.groups == ({"betas": (0.9, 0.99), "lr": 0.5, "step": 7.0},)
    assert found.tied == {OUTPUT: EMBEDDING}
    assert found.notes == ("left out: rng_state",) and found.iteration == 7


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (f"optimizer.state.module.{OUTPUT}.shampoo", torch.ones(3), "neither a weight nor"),
        (f"model.module.{OUTPUT}", torch.ones(16, 8).bfloat16(), "expected fp32, as"),
        ("optimizer.state.module.decoder.layers.9.x.exp_avg", torch.ones(3), "weight's shape None"),
        ("model.module.decoder.layers.9.mlp.linear_fc1.weight_w", torch.ones(3, 8), "ends in _w"),
        ("args", [1], "is not as Megatron writes it"),
    ],
)
def test_what_is_not_known_in_fsdp_checkpoints_is_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    save({**fsdp_state(truth(muon=False)), key: value}, tmp_path / "iter_0000007")
    with pytest.raises(CheckpointError, match=words):
        fsdp_reader.read(tmp_path / "iter_0000007")


# Genuine ones


def genuine_truth(path: Path) -> dict[str, tuple[dict[str, Tensor], Any, dict[str, Any]]]:
    """By parameter: weight and states, the step and the group, as Megatron held them."""
    if (path / "ground_truth_fsdp.pt").is_file():
        saved = torch.load(path / "ground_truth_fsdp.pt", weights_only=True)
        return {
            name.removeprefix("module.module.module."): (
                {"weight": of["fp32_param"], "fp32": of["fp32_param"], **of["states"]},
                of["group"]["step"],
                of["group"],
            )
            for name, of in saved.items()
        }
    found = {}
    for name, of in torch.load(path / "ground_truth.pt", weights_only=True)["params"].items():
        states = {key.replace("fp32_param", "fp32"): tensor for key, tensor in of["states"].items()}
        step = states.pop("step", None)
        found[name] = ({"weight": of["model"], **states}, None if step is None else float(step), of["group"])
    return found


@pytest.mark.parametrize("path", [*genuine(), *genuine(bad=True)])
def test_genuine_checkpoints_are_read_exactly(path: Path) -> None:
    known, found = genuine_truth(path), formats.read(path)
    assert sum(reader.recognises(path) for reader in READERS) == 1
    assert found.params.keys() == known.keys()
    wrong, unrounded = [], []
    for name, param in found.params.items():
        expected, step, group = known[name]
        assert {"weight", *param.states} == expected.keys()
        weight = param.weight.read()
        assert torch.equal(weight.float(), expected["weight"])
        wrong += [(name, key) for key, tensor in param.states.items() if not same(tensor.read(), expected[key])]
        unrounded += [] if torch.equal(param.states["fp32"].read().to(weight.dtype), weight) else [name]
        assert param.step == step and param.group is not None
        ours = {key: value for key, value in found.groups[param.group].items() if key != "step"}
        assert ours == {key: value for key, value in group.items() if key in ours}, name
    if path.name.startswith("BAD"):  # as Megatron wrote it; whoever converts must see it
        assert wrong and unrounded
    else:
        assert (wrong, unrounded) == ([], [])
    assert (found.iteration, found.arguments["num_layers"]) == (3, 2)
    assert found.arguments["params_dtype"] == "torch.bfloat16"
    assert found.scheduler is not None and found.scheduler["max_lr"] == 0.01


def test_the_order_of_modules_is_that_of_a_genuine_file() -> None:
    saved = torch_files.load(SAMPLES / "t16_lw_muon_dp2_torch" / "iter_0000003" / MODEL)
    names = [name for name, value in saved["model"].items() if value is not None]
    assert module_order(sorted(names), vars(saved["args"])) == names


# The rules, one by one


def test_the_default_size_of_a_bucket_grows_with_the_ranks() -> None:
    for sizes, expected in (((50, 1), 50_000_000), ((2, 1), 40_000_000), ((50, 2), 100_000_000)):
        given = dict(zip(("data_parallel_size", "context_parallel_size"), sizes), overlap_grad_reduce=True)
        assert bucket_numel(given, parameters=100, pipeline_rank=0) == expected


CUTS = {
    Cut("split", 0): (EMBEDDING, OUTPUT, "decoder.layers.3.self_attention.linear_qkv.bias"),
    Cut("split", 1): [
        f"decoder.layers.3.{name}.weight"
        for name in ("self_attention.linear_proj", "mlp.linear_fc2", "mlp.experts.local_experts.11.linear_fc2")
    ],
    Cut("gated", 0): [
        f"decoder.layers.3.mlp.{name}"
        for name in (
            "linear_fc1.weight",
            "experts.local_experts.11.linear_fc1.bias",
            "shared_experts.linear_fc1.weight",
        )
    ],
    Cut("whole"): [
        *(NORM, "embedding.position_embeddings.weight", "decoder.layers.3.self_attention.q_layernorm.weight"),
        *("decoder.layers.3.self_attention.linear_proj.bias", "decoder.layers.3.mlp.linear_fc2.bias"),
        *("decoder.layers.3.mlp.router.weight", "decoder.layers.3.mlp.shared_experts.gate_weight"),
    ],
}


def test_how_a_parameter_is_cut() -> None:
    for cut, names in CUTS.items():
        for name in names:
            assert cut_of(name, gated=True) == cut, name
            assert cut_of(name, gated=False) == (Cut("split", 0) if cut.kind == "gated" else cut), name
    with pytest.raises(CheckpointError, match="linear_kv_down_proj.*torch_dist"):
        cut_of(LATENT.format(".0"), gated=True)
    assert local_shape((8, 6), Cut("split", 1), 3) == (8, 2)
    assert local_shape((8, 6), Cut("gated", 0), 2) == (4, 6)
    assert local_shape((8, 6), Cut("whole"), 2) == (8, 6)
    with pytest.raises(ValueError, match="does not divide"):
        local_shape((6, 6), Cut("gated", 0), 2)


def test_the_order_of_modules_by_their_implementation() -> None:
    attention = [f"self_attention.{name}" for name in ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")]
    experts = [f"experts.local_experts.{e}.linear_fc{i}.weight" for e in (2, 10) for i in (1, 2)]
    mlp = ["router.weight", *experts, "shared_experts.gate_weight", "shared_experts.linear_fc1.weight"]
    of_layer = [f"{name}.weight" for name in ("input_layernorm", *attention, "pre_mlp_layernorm")]
    names = [EMBEDDING, *(f"decoder.layers.1.{name}" for name in (*of_layer, *(f"mlp.{name}" for name in mlp)))]
    names += ["decoder.layers.10.input_layernorm.weight", NORM, "decoder.final_layernorm.bias", OUTPUT]
    assert module_order(sorted(names), {"transformer_impl": "local"}) == names
    fused = module_order(sorted(names), {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True})
    assert fused[1:3] == [names[2], names[1]]
    found = [name.split("local_experts.")[1] for name in fused[8:12]]
    assert found == [f"{e}.linear_fc{i}.weight" for i in (1, 2) for e in (2, 10)]
    with pytest.raises(CheckpointError, match="decoder.layers.0.mixer.in_proj.weight"):
        module_order([*names, "decoder.layers.0.mixer.in_proj.weight"], {})
    assert local_spec("decoder.layers.0.mlp.experts.linear_fc1.weight3").endswith("local_experts.3.linear_fc1.weight")
    with pytest.raises(CheckpointError, match="experts in one tensor"):
        local_spec("decoder.layers.0.mlp.experts.weight1")
