"""Megatron's formats (``torch``, ``torch_dist``, ``fsdp_dtensor``) are read exactly, or refused with a reason."""

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.checkpoint import convert, formats, gates
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, held
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.formats import Numbers
from lwopt_backend.checkpoint.megatron import conventions, ranks
from lwopt_backend.checkpoint.megatron import fsdp_dtensor as fsdp_reader
from lwopt_backend.checkpoint.megatron import torch_dist as dist_reader
from lwopt_backend.checkpoint.megatron import torch_format as torch_reader
from lwopt_backend.checkpoint.megatron.buffers import bucket_numel, states_in_buckets
from lwopt_backend.checkpoint.megatron.conventions import module_order, respelled
from lwopt_backend.checkpoint.megatron.ranks import TPSplit, local_shape, tp_split_of
from lwopt_backend.checkpoint.names import translate
from tests.support import megatron_torch
from tests.support.checkpoint_contents import params_of, same
from tests.support.command_line import genuine, succeeds, torch_dist
from tests.support.megatron_dist import Setup, Truth, fsdp_state, save, truth, write, write_mimo
from tests.support.megatron_torch import EMBEDDING, NORM, OUTPUT, SCHEDULE, Writer, is_sharded_expert
from tests.support.megatron_torch import Setup as TorchSetup

READERS = (torch_reader, dist_reader, fsdp_reader)
LAST_NORM = "decoder.layers.1.input_layernorm.weight"
LATENT = "decoder.layers{}.self_attention.linear_kv_down_proj.weight"


def made(setup: TorchSetup | Setup | None, folder: Path) -> tuple[Path, Truth]:
    if setup is None:
        known = truth(muon=False, tied=True)
        save(fsdp_state(known), folder / "iter_0000007")
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
        for of_name in known.values():
            of_name["weight"] = of_name["fp32"]
        return folder / "iter_0000007", known
    if isinstance(setup, TorchSetup):
        writer = Writer(setup)
        return writer.write(folder), writer.truth
    return torch_dist(folder, **vars(setup)) / "iter_0000007", truth(setup.muon, setup.experts, setup.tied)


def assert_exact(found: Checkpoint, known: Truth, in_order: bool = True) -> None:
    """Bit for bit, in the model's order."""
    assert list(found.params) == list(known) or not in_order
    tensors = {n: {k: t for k, t in p.items() if isinstance(t, Tensor)} for n, p in params_of(found).items()}
    assert same(tensors, known), [name for name in known if not same(tensors.get(name, {}), known[name])]


# What is written by 0.14 to 0.19, in addition to the genuine folders
EP = dict(family="moe", ep=2)
BUCKETS = {"arguments": {"overlap_grad_reduce": True, "ddp_num_buckets": 3}}
SMALL = {"arguments": {"overlap_grad_reduce": True, "ddp_bucket_size": 400}}
IN_COMMON = dict(layout="dp_reshardable", chained=True, common_file=False)
BY_LAYER, FLAT_ADAM = dict(style="layers", fused_norms=False), dict(layout="dp_reshardable", muon=False)
FLAT_ADAM_ALONE = Setup(**FLAT_ADAM)
SETUPS: list[TorchSetup | Setup] = [
    TorchSetup(dp=2, fused_adam=True),
    TorchSetup("gpt2", tp=2),  # learned positions, biases
    TorchSetup(dtype=torch.float32),
    TorchSetup(dp=2, dtype=torch.float16, **EP),
    TorchSetup(stages=((1, 2), (2, 1))),  # virtual stages
    TorchSetup(stages=((1, 1),), tied=True),
    TorchSetup(optimizer="distributed", dp=4, **SMALL),
    TorchSetup("gpt2", "distributed", dp=4, **BUCKETS),
    TorchSetup(optimizer="distributed", dp=2, stages=((2, 2),), tied=True, **BUCKETS),
    TorchSetup(optimizer="distributed", stages=((1, 1), (1, 1)), **BUCKETS),
    TorchSetup(optimizer="distributed", tp=2, dp=4, stages=((1, 2),), **EP, **BUCKETS),
    TorchSetup(optimizer="layer_wise", dp=12, stages=((1,),), fused_adam=True),  # more ranks than parameters
    TorchSetup(optimizer="layer_wise", dp=3, stages=((1, 1), (1, 1)), tied=True),
    TorchSetup("moe", "layer_wise", dp=2),
    TorchSetup(optimizer="layer_wise", tp=2, dp=4, stages=((1, 1, 1),), **EP),
    TorchSetup(optimizer="layer_wise", dp=2, dtype=torch.float32),
    TorchSetup(optimizer="layer_wise", dp=2, arguments={"use_distributed_optimizer": True}),  # as 0.18 names it
    Setup(step_in="common_step"),  # torch_dist: 0.16
    Setup(experts=True, **BY_LAYER),
    Setup(experts=True, style="single", ep=2),  # every tensor by itself
    Setup("dp_reshardable", chained=True),  # 0.18
    Setup(**IN_COMMON, tp=2, stages=(2, 1)),  # 0.19
    Setup("fully_reshardable", common_file=False),
    Setup("fully_reshardable", muon=False, tied=True),
    Setup(**FLAT_ADAM, buckets=5, stages=(1, 2), style="layers"),
    Setup(**FLAT_ADAM, tied=True, stages=(2, 1), tp=2),
    Setup(**FLAT_ADAM, experts=True, buckets=2),
    Setup(**FLAT_ADAM, experts=True, ep=2, tp=2, stages=(2, 1), chained=True),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_megatron_wrote_is_read_exactly(setup: TorchSetup | Setup, tmp_path: Path) -> None:
    is_torch = isinstance(setup, TorchSetup)
    step, known = made(setup, tmp_path)
    for path in (tmp_path, step):
        assert [r.recognises(path) for r in READERS] == [is_torch, not is_torch, False]
        found = formats.read(path)
        assert_exact(found, known)
    model = setup if isinstance(setup, TorchSetup) else setup.model
    assert (found.iteration, found.samples, found.names) == (7, 28, "megatron-core")
    assert found.scheduler == SCHEDULE
    assert found.world == {"dp": model.dp, "tp": model.tp, "pp": model.pp, "ep": model.ep, "cp": 1}
    assert found.tied == ({OUTPUT: EMBEDDING} if model.tied else {})
    for pair, first, second in found.replicas:
        assert first is not second and torch.equal(first.read(), second.read()), pair
    copies = {pair.split()[0] for pair, _, _ in found.replicas if "tied" in pair}
    of_tied = {"exp_avg", "exp_avg_sq", "fp32"} | ({"weight"} if model is setup else set())
    assert copies == (of_tied if model.tied and model.pp > 1 else set())
    assert any("could not be checked by value" in note for note in found.notes) != model.has_masters
    for name in known:
        assert_grouped(found, setup, name)


def assert_grouped(found: Checkpoint, setup: TorchSetup | Setup, name: str) -> None:
    param = found.params[name]
    adam, decays = "exp_avg" in param.states, len(param.shape) > 1
    assert param.step == (7.0 if adam else None), name
    if isinstance(setup, Setup) and not adam:  # one group, which is not that of sharded experts
        return
    assert param.group is not None
    expected: dict[str, Any] = {"wd_mult": float(decays), "weight_decay": 0.1 * decays}
    expected |= {"betas": (0.9, 0.99)} if adam else {"momentum_beta": 0.9}
    if isinstance(setup, TorchSetup):
        expected |= {"lr": 0.004, "is_expert_parallel": is_sharded_expert(setup, name)}
        expected |= {"step": 7} if setup.fused_adam and adam else {}  # only a rank with parameters counts its steps
    group = found.groups[param.group]
    assert group.items() >= expected.items() and "params" not in group, name


# What is damaged, or not known
Damage = Callable[[Path], Any]
COMMON, MODEL, FLAT = "common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"
OWN_0, OWN_1 = (f"mp_rank_00/layer_wise_optimizer_{rank}.pt" for rank in range(2))


def edited(edit: Callable[[Any], Any], file: str = MODEL, *path: Any) -> Damage:
    def change(step: Path) -> None:
        saved = torch.load(step / file, weights_only=False)
        edit(functools.reduce(lambda place, key: place[key], path, saved))
        torch.save(saved, step / file)

    return change


def updated(file: str, *path: Any, **changes: Any) -> Damage:
    return edited(lambda place: place.update(changes), file, *path)


def without(file: str, *path: Any) -> Damage:
    return edited(lambda place: place.pop(path[-1]), file, *path[:-1])


def arguments(file: str = MODEL, /, **changes: Any) -> Damage:
    return edited(lambda saved: vars(saved["args"]).update(changes), file)


def all_of(*changes: Damage) -> Damage:
    return lambda step: [change(step) for change in changes]


def lost(name: str) -> Damage:
    return lambda step: shutil.rmtree(step / name) if (step / name).is_dir() else (step / name).unlink()


def from_other(file: str, **changes: Any) -> Damage:
    def change(step: Path) -> None:
        other = Writer(TorchSetup(**{"tp": 2, **changes})).write(step.parent.parent / "other")
        shutil.copy(other / file, step / file)

    return change


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


def added_to_fsdp(key: str, value: Any) -> Damage:
    return lambda step: save({**fsdp_state(truth(muon=False)), key: value}, step)


def more_buffers(state: dict[str, Any]) -> None:
    state.update({key.replace("gbuf_idx_0", "gbuf_idx_1"): t for key, t in state.items() if "gbuf_idx_0" in key})


FIRST = (0, "fp32_from_fp16_params", 0, 0)
NORMS, NORM_NUMBERS = (1, "fp32_from_fp16_params", 0, -1), (1, "optimizer", "param_groups", 0, "params", -1)
STATE = (MODEL, "optimizer", "optimizer", "state", 0)
BUFFER = (FLAT, 0, (torch.bfloat16, torch.float32))
ONE, TWO, MUON = TorchSetup(), TorchSetup(tp=2), TorchSetup(optimizer="layer_wise", dp=2)
ADAM, SOLO = TorchSetup(optimizer="distributed"), TorchSetup(optimizer="layer_wise")
SEED = dict(seed=1, optimizer="layer_wise", dp=2, tp=1)
OTHER_RANK, NOT_A_MASTER = "mp_rank_01/model_optim_rng.pt", "expected a master weight of shape .* that rounds to"
GROUP = "optimizer.distributed.dp_group_idx_0"
BUCKET = f"{GROUP}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
TOO_LONG = {f"{BUCKET}.{key}": torch.ones(9999) for key in ("param", "exp_avg", "exp_avg_sq")}
UP = "decoder.layers.1.mlp.linear_fc1.weight_v"
MASTER, SHAMPOO = f"optimizer.state.fp32_param.{OUTPUT}", f"optimizer.state.shampoo.{OUTPUT}"
LAYOUT, FULLY = "distrib_optim_sharding_type", "save with --dist-ckpt-optim-fully"
SHARES = {"expert_tensor_parallel_size": 2, "num_experts": 2}
REFUSED: list[tuple[TorchSetup | Setup | None, Damage, str]] = [
    # torch
    (TWO, lost("mp_rank_01"), "missing mp_rank_01, unexpected none"),
    (TWO, from_other(OTHER_RANK, iteration=8), "mp_rank_01.*expected iteration 7, found 8"),
    (TWO, from_other(OTHER_RANK, dp=2), "'dp': 1.*'dp': 2"),
    (MUON, lost(OWN_1), r"\[0, 1\], found those of \[0\]"),
    (MUON, from_other(OWN_0, **SEED), NOT_A_MASTER),
    (MUON, edited(lambda m: m.view(torch.int32)[3, 5].add_(1 << 16), OWN_1, *FIRST), "that does not"),  # its last bit
    (SOLO, all_of(without(OWN_0, *NORMS), without(OWN_0, *NORM_NUMBERS)), "expected 2 parameters.*found 1 and 1"),
    (
        ONE,
        arguments(decoupled_lr=0.1),
        "options show the group of embedding.word_embeddings.weight, found 2 that do not",
    ),
    (ONE, updated(*STATE, max_exp_avg=torch.ones(2)), "expected a known state .*'max_exp_avg'"),
    (ONE, updated(MODEL, "optimizer", other=1), r"only, found \['other'\] as well"),
    (ONE, arguments(num_layers=3), r"expected 3 layers \(args.num_layers\), found 2"),
    (ONE, arguments(mtp_num_layers=1), "multi-token prediction"),
    (ONE, arguments(data_parallel_size=10**12), "expected a possible number of ranks"),
    (ONE, arguments(**SHARES), "expert tensor"),
    (ONE, updated(MODEL, "model", **{OUTPUT: [1]}), "output_layer.weight as a tensor, .* fp8"),
    (MUON, lambda step: torch.save({}, step / FLAT), "expected a LayerWise optimizer alone"),
    (SOLO, arguments(context_parallel_size=2), "expected context parallel size 1, found 2.*overwrite"),
    (ADAM, lost(FLAT), "distrib_optim.pt is missing"),
    (ADAM, arguments(overlap_param_gather_with_optimizer_step=True), "not read: save as torch_dist"),
    (ADAM, edited(lambda s: s.update({1: s[0]}), FLAT), r"expected buffers \[0\], found \[0, 1\]"),
    (ADAM, updated(*BUFFER, max_exp_avg=torch.ones(2)), "found .*'max_exp_avg'"),
    (ADAM, updated(*BUFFER, exp_avg=torch.ones(2)), "'exp_avg': 2"),
    # torch_dist
    (Setup(), lost(COMMON), "common.pt: expected this file"),
    (Setup(), updated(COMMON, content_metadata={LAYOUT: "dp_zero_gather_scatter"}), "'dp_zero_gather_scatter'"),
    (Setup(), updated(COMMON, content_metadata={LAYOUT: "fully_sharded_model_space"}), "only Megatron 0.14 and 0.15 w"),
    (Setup(), added(**{SHAMPOO: torch.ones(3)}), f"{SHAMPOO} in .*: expected a known state"),
    (Setup(), added(**{f"opt)mizer.state.a.{OUTPUT}": torch.ones(16, 8)}), f"expected a state of {OUTPUT} under optim"),
    (Setup(), added(**{OUTPUT: torch.ones(3, 8)}), rf"{OUTPUT}: expected the weight's shape \(3, 8\), found \(16, 8\)"),
    (Setup(), added(**{MASTER: torch.ones(16, 8).bfloat16()}), "master weight of output_layer.weight: expected fp32"),
    (Setup(style="single"), resaved(lambda s: s.pop(UP)), r"expected exactly decoder.layers.1.mlp.linear_fc1.weight_w"),
    (FLAT_ADAM_ALONE, arguments(COMMON, tensor_model_parallel_size=2), "buffers of 2 model-parallel ranks, found"),
    (FLAT_ADAM_ALONE, added(**TOO_LONG), "expected the model's parameters in the optimizer's buffers"),
    (
        FLAT_ADAM_ALONE,
        resaved(lambda s: s.pop(f"{BUCKET}.exp_avg_sq")),
        r"that adam keeps \(fp32, exp_avg, exp_avg_sq\)",
    ),
    (FLAT_ADAM_ALONE, resaved(more_buffers), "as of virtual pipelines"),
    (FLAT_ADAM_ALONE, added(**{LATENT.format(""): torch.ones(3, 4, 8)}), f"found {LATENT.format('.0')}, .* {FULLY}"),
    (Setup(muon=False), added(**{f"{GROUP}.param_state/shard_0_1": [{0: 1}]}), "shard_0_1 in .* expected known state"),
    # fsdp_dtensor
    (
        None,
        added_to_fsdp(f"optimizer.state.module.{NORM}.shampoo", torch.ones(3)),
        "expected a weight or a known state",
    ),
    (None, added_to_fsdp(f"model.module.{NORM}", torch.ones(8).bfloat16()), "expected fp32 of Megatron-FSDP"),
]


@pytest.mark.parametrize(("setup", "damage", "words"), REFUSED)
def test_what_is_damaged_or_not_known_is_refused(
    setup: TorchSetup | Setup | None, damage: Damage, words: str, tmp_path: Path
) -> None:
    step, _ = made(setup, tmp_path / "run")
    damage(step)
    with pytest.raises(CheckpointError, match=words):
        params_of(formats.read(step))  # bytes are checked when they are read


# Other forms
def transformer_engine(saved: Any) -> None:
    model = list(saved["model"].items())
    saved["model"].clear()
    for name, value in model:
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        saved["model"][name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = value


def tensor_steps(saved: Any) -> None:
    for group in saved["optimizer"]["optimizer"]["param_groups"]:
        group["step"] = torch.tensor([7])


def released(step: Path) -> None:
    step.rename(step.with_name("release"))
    step.with_name("latest_checkpointed_iteration.txt").write_text("release\n")


def nested(state: dict[str, Any]) -> None:
    """Optimizers chained in a chained one, as where Muon has one for experts, with Adam in flat buckets."""
    for key in [key for key in state if key.startswith("chained_0.")]:
        state[f"chained_0.chained_{int('.experts.' in key)}.{key.removeprefix('chained_0.')}"] = state.pop(key)


def nested_groups(saved: dict[str, Any]) -> None:
    muon = saved["optimizer"][0]
    (group,) = muon["optimizer"]["param_groups"]
    of_experts = {"optimizer": {"param_groups": [{**group, "is_expert_parallel": True}]}}
    saved["optimizer"] = {0: {0: muon, 1: of_experts}, 1: saved["optimizer"][1]}


def without_states(state: dict[str, Any]) -> None:
    for key in [key for key in state if key.startswith("optimizer.")]:
        del state[key]


def steps_are(step: float | None) -> Callable[[Checkpoint], bool]:
    return lambda found: {param.step for param in found.params.values() if "exp_avg" in param.states} == {step}


def nudge(saved: Any) -> None:
    number = saved["optimizer"]["optimizer"]["param_groups"][1]["params"][2]
    saved["optimizer"]["optimizer"]["state"][number]["exp_avg"][4] += 1


def one_copy_differs(found: Checkpoint) -> bool:
    """It is handed on with all others, and is no error of reading."""
    of_norm, where = f" of {LAST_NORM}", " on ranks (0, 0, 0) and (1, 0, 0)"
    equal = {what: torch.equal(first.read(), second.read()) for what, first, second in found.replicas}
    assert equal[f"weight{of_norm}{where}"] and "linear_qkv" not in str(equal)
    return [what for what in equal if not equal[what]] == [f"exp_avg{of_norm}{where}"]


def of_torchs_adam(found: Checkpoint) -> bool:
    assert {(param.step, param.group) for param in found.params.values()} == {(7.0, 0)}
    assert found.groups == ({"betas": (0.9, 0.99), "lr": 0.5, "step": 7.0},)
    return (found.tied, found.notes, found.iteration) == ({OUTPUT: EMBEDDING}, ("left out: rng_state",), 7)


def groups_are_nested(found: Checkpoint) -> bool:
    of_experts = [("betas" in group, group["is_expert_parallel"]) for group in found.groups]
    return steps_are(7.0)(found) and of_experts == [(False, False), (False, True), (True, False), (True, False)]


def says(*words: str) -> Callable[[Checkpoint], bool]:
    return lambda found: all(any(word in note for note in found.notes) for word in words)


BIAS = "decoder.layers.0.mlp.router.expert_bias"
ALONE, NOT_SAVED = ("no optimizer state", "'extra'"), "Adam's count of steps is not saved"
TENSOR_STEP = updated(COMMON, "optimizer", "optimizer", "state", common_step=torch.tensor([7.0]))
OTHER_FORMS: list[tuple[TorchSetup | Setup | None, Damage, Callable[[Checkpoint], bool]]] = [
    (ONE, edited(transformer_engine), steps_are(7.0)),
    (TorchSetup("moe"), updated(MODEL, "model", **{BIAS: torch.ones(4)}), lambda found: [*found.buffers] == [BIAS]),
    (TWO, edited(nudge, OTHER_RANK), one_copy_differs),
    (ADAM, edited(tensor_steps), steps_are(7.0)),
    (ONE, released, lambda found: found.iteration == 7),
    (ONE, all_of(without(MODEL, "optimizer"), updated(MODEL, extra=3)), says(*ALONE)),
    (
        Setup("dp_reshardable", chained=True, experts=True),
        all_of(resaved(nested), edited(nested_groups, COMMON)),
        groups_are_nested,
    ),
    (Setup(step_in="nowhere"), all_of(), lambda found: steps_are(None)(found) and says(NOT_SAVED)(found)),
    (Setup(muon=False, step_in="common_step"), TENSOR_STEP, steps_are(7.0)),
    (Setup(), all_of(updated(COMMON, iteration="release"), released), lambda found: not found.iteration),
    (Setup(muon=False), resaved(without_states), says("no parameter has state")),
    (None, all_of(), of_torchs_adam),
]


@pytest.mark.parametrize(("setup", "edit", "holds"), OTHER_FORMS)
def test_other_forms_are_read(
    setup: TorchSetup | Setup | None, edit: Damage, holds: Callable[[Checkpoint], bool], tmp_path: Path
) -> None:
    step, known = made(setup, tmp_path)
    edit(step)
    found = formats.read(tmp_path)
    if not any(param.states for param in found.params.values()):
        known = {name: {"weight": of_name["weight"]} for name, of_name in known.items()}
    assert_exact(found, known, in_order=setup is not None)
    assert holds(found)


LION, ADAPTIVE = {"optimizer": "lion"}, {"optimizer": "adaptive_muon"}
LION_BESIDE, BEFORE = {"optimizer": "muon", "muon_scalar_optimizer": "lion"}, {"optimizer": "adam", "fp16": True}
OTHERS: list[tuple[TorchSetup | Setup, tuple[str, ...]]] = [  # and the states that there are not
    (Setup(muon=False, arguments=LION), ("exp_avg_sq",)),
    (Setup(**FLAT_ADAM, arguments=LION), ("exp_avg_sq",)),
    (TorchSetup(arguments=LION), ("exp_avg_sq",)),
    (TorchSetup(optimizer="distributed", arguments=LION), ("exp_avg_sq",)),
    (Setup("dp_reshardable", chained=True, arguments=LION_BESIDE), ("exp_avg_sq",)),
    (TorchSetup(optimizer="layer_wise", dp=2, arguments=LION_BESIDE), ("exp_avg_sq",)),
    (Setup("fully_reshardable", arguments=ADAPTIVE), ()),
    (TorchSetup(optimizer="layer_wise", dp=2, arguments=ADAPTIVE), ()),
    (Setup(**FLAT_ADAM, arguments=BEFORE), ("exp_avg", "exp_avg_sq")),  # fp16 before its first step
    (TorchSetup(optimizer="distributed", arguments=BEFORE), ("exp_avg", "exp_avg_sq")),
]


@pytest.mark.parametrize(("setup", "gone"), OTHERS, ids=str)
def test_other_optimizers_states_are_read(setup: TorchSetup | Setup, gone: tuple[str, ...], tmp_path: Path) -> None:
    """Lion's, adaptive_muon's, and in fp16 before the first step; in every layout."""
    writer = Writer(setup) if isinstance(setup, TorchSetup) else None
    known = truth(setup.muon) if writer is None else writer.truth
    adaptive = setup.arguments == ADAPTIVE
    for of_name in known.values():
        for key in set(gone) & set(of_name):
            del of_name[key]
        if adaptive and "momentum_buffer" in of_name:
            of_name["moment2_buffer"] = of_name["momentum_buffer"].square()
    if writer is None:
        write(tmp_path / "iter_0000007", setup, known)
    else:
        writer.write(tmp_path)
    found = formats.read(tmp_path / "iter_0000007")
    assert_exact(found, known)
    assert not [note for note in [*found.notes, *gates.check(found)] if "steps" in note]
    notes = convert.prepared(found, "universal", None, None, Numbers()).notes
    assert (convert.ADAPTIVE_MUON in notes) == adaptive
    if writer and adaptive:
        updated(OWN_0, 0, "optimizer", "state", 0, moment2_buffer=torch.ones(8, 1))(tmp_path / "iter_0000007")
        with pytest.raises(CheckpointError, match="normuon's, one for each row or column, is not converted"):
            formats.read(tmp_path)


def test_lion_of_matrices_has_adam_beside_it(tmp_path: Path) -> None:
    """Megatron's --optimizer lion; under its DistributedOptimizer it does not save Adam's second moment."""
    more, known = {"optimizer": "lion", "use_distributed_optimizer": False}, truth(muon=True)
    for of_name in known.values():
        if "momentum_buffer" in of_name:
            of_name["exp_avg"] = of_name.pop("momentum_buffer")
    write(tmp_path / "iter_0000007", Setup(arguments=more), known)
    found = dist_reader.read(tmp_path / "iter_0000007")
    assert_exact(found, known)
    groups = {name: found.groups[param.group] for name, param in found.params.items()}
    assert {n for n, group in groups.items() if "eps" in group} == {n for n in known if "exp_avg_sq" in known[n]}
    alone = {name: {key: t for key, t in of.items() if key != "exp_avg_sq"} for name, of in known.items()}
    write(tmp_path / "iter_0000009", Setup(arguments=more), alone)
    with pytest.raises(CheckpointError, match="expected exp_avg_sq of .*Save without --use-distributed-opt"):
        dist_reader.read(tmp_path / "iter_0000009")


def test_names_of_any_module_are_read_or_renamed(tmp_path: Path) -> None:
    """Latent attention, Transformer Engine's norms, experts in some layers, Mamba, prediction of further tokens, a
    vision model; of which the families know nothing."""
    known, step = truth(muon=False), tmp_path / "iter_0000007"
    more = {
        **{"0.self_attention.q_layernorm.weight": (4,), "0.self_attention.linear_kv_down_proj.weight": (6, 8)},
        **{"1.mlp.router.weight": (2, 8), "1.mlp.shared_experts.linear_fc1.weight": (6, 8)},
        **{f"1.mlp.experts.local_experts.{e}.linear_fc2.weight": (8, 12) for e in range(2)},
    }
    more = {f"decoder.layers.{name}": shape for name, shape in more.items()}
    more |= {"decoder.layers.2.mixer.A_log": (4,), "mtp.layers.0.eh_proj.weight": (8, 16)}
    more |= {"vision_model.decoder.layers.1.mlp.linear_fc2.weight": (8, 12), "vision_model.class_token": (1, 1, 8)}
    for name, shape in more.items():
        states = {key: torch.randn(shape) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        known[name] = {"weight": states["fp32"].bfloat16(), **states}
    write(step, Setup("fully_reshardable", muon=False, style="single", fused_norms=False), known)
    found = dist_reader.read(step)
    assert_exact(found, known, in_order=False)
    with pytest.raises(CheckpointError, match="expected a whole model, found"):
        translate(found, "hf-llama", Numbers(heads=2, kv_channels=4))
    renamed = translate(found, lambda name, tensor, model: {f"mine.{name}": tensor})
    assert params_of(renamed).keys() == {f"mine.{name}" for name in known}


ENCODER = {
    **{"encoders.clip.class_token": (1, 1, 8), "encoders.clip.conv1.weight": (8, 3, 2, 2)},
    **{f"encoders.clip.decoder.layers.{n}.mlp.linear_fc1.weight": (12, 8) for n in range(2)},
    **{f"encoders.clip.decoder.layers.{n}.input_layernorm.bias": (8,) for n in range(2)},
    **{"input_projections.0.encoder.linear_fc1.weight": (12, 8), "input_projections.0.encoder.linear_fc1.bias": (12,)},
}


def module_of(known: Truth) -> nn.Module:
    """A module with these parameters, all zero."""
    root = nn.Module()
    for name, of_name in known.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, nn.Parameter(torch.zeros_like(of_name["weight"])))
    return root


def test_modules_of_a_mimo_model_load_into_their_optimizers(tmp_path: Path) -> None:
    step, setup = tmp_path / "step", Setup()
    known = {"images": megatron_torch.make_truth(setup.model, ENCODER), "language": truth(muon=True)}
    write_mimo(step, known, setup)
    found = formats.read(step)
    assert_exact(found, {f"{module}.{name}": of for module in known for name, of in known[module].items()}, False)
    assert {param.step for param in found.params.values() if "exp_avg" in param.states} == {7.0}
    assert [group["module"] for group in found.groups] == ["images"] * 3 + ["language"] * 3
    optimizers, adams = {}, {"images": ["*.conv1.*", "*.class_token"], "language": [EMBEDDING, OUTPUT]}
    for module, of_module in known.items():
        succeeds("convert", step, tmp_path / module, "--to", "dcp", "--module", module)
        succeeds("diff", step, tmp_path / module, "--module", module)
        params = [name for name, of_name in of_module.items() if of_name["weight"].ndim == 1]
        flat = {"params": params, "elementwise": {"weight_decay": 0.0}}
        given: dict[str, Any] = {"lr": 0.02, "exclude": adams[module], "overrides": [flat], "report": False}
        optimizers[module] = LayerWiseOptimizer(module_of(of_module), **given)
    both = ModuleOptimizers(optimizers)
    for module, of_module in known.items():
        both.modules[module].load_state_dict_from(tmp_path / module)
        both.modules[module].save_state_dict(tmp_path / "saved" / module)
        assert_exact(formats.read(tmp_path / "saved" / module), of_module, False)
    assert [group["weight_decay"] for group in both.param_groups] == [0.1, 0.1, 0.0] * 2
    with pytest.raises(CheckpointError, match="no parameter of 'image'.*did you mean 'images'"):
        convert.of_module(found, "image")


@pytest.mark.parametrize(
    "key, said",
    [
        ("bridge.weight", "bridge.weight.*expected a tensor of a module"),
        ("mimo.language.optimizer.state.other.a", "module language: optimizer.state.other.a.*expected a known state"),
    ],
)
def test_what_is_not_known_of_a_mimo_model_is_refused(key: str, said: str, tmp_path: Path) -> None:
    write_mimo(tmp_path / "step", {"language": truth(muon=True)}, Setup(), {key: torch.zeros(2)})
    with pytest.raises(CheckpointError, match=said):
        formats.read(tmp_path / "step")


@pytest.mark.parametrize("path", genuine("t14"))
def test_genuine_fragments_of_model_space_are_refused(path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="fragments that only Megatron 0.14 and 0.15 write .*; load it in 0.16 or"
    ):
        formats.read(path)


@pytest.mark.parametrize("setup", [TWO, ADAM, MUON])
def test_opening_the_torch_format_reads_no_tensor(setup: TorchSetup, tmp_path: Path) -> None:
    """But counts of steps. A master is compared with its weight when it is read, whole or in part."""
    step, known = made(setup, tmp_path)
    read: list[tuple[int, ...]] = []
    box = torch_files.StoredTensor.box
    with mock.patch.object(torch_files.StoredTensor, "box", lambda *at: read.append(at[2]) or box(*at)):
        found = formats.read(step)
        assert set(read) <= {()}
        master = found.params[NORM].states["fp32"]
        assert torch.equal(master.piece(2, 5).read(), known[NORM]["fp32"][2:5])


def test_only_a_part_of_the_flat_buffer_is_read_for_a_parameter(tmp_path: Path) -> None:
    path = Writer(ADAM).write(tmp_path) / FLAT
    lazy = torch_reader.read(tmp_path).params[NORM].states["exp_avg"]
    whole, wanted = path.read_bytes(), lazy.read()
    place = whole.index(wanted.numpy().tobytes())
    path.write_bytes(bytes(place) + whole[place : place + wanted.nbytes])  # nothing else is left of the file
    assert torch.equal(lazy.read(), wanted)


def test_folders_that_are_none_of_megatrons_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "zero").mkdir(parents=True)
    (tmp_path / "latest" / "iter_0000003").mkdir(parents=True)
    for text in ("3", "../latest/iter_0000003", "release", "\xff"):
        (tmp_path / "latest" / "latest_checkpointed_iteration.txt").write_text(text)
        for name in ("nothing", "file", "folder", "latest"):
            formats_of_megatron = [format for format in formats.FORMATS if format.startswith("megatron")]
            assert not any(formats.recognises(format, tmp_path / name) for format in formats_of_megatron)


# Genuine ones
def genuine_truth(path: Path) -> dict[str, tuple[dict[str, Tensor], Any, dict[str, Any]]]:
    """By parameter: weight and states, the step and the group, as Megatron held them."""
    found = {}
    if (path / "ground_truth_fsdp.pt").is_file():
        for name, of in torch.load(path / "ground_truth_fsdp.pt", weights_only=True).items():
            tensors = {"weight": of["fp32_param"], "fp32": of["fp32_param"], **of["states"]}
            found[name.removeprefix("module.module.module.")] = (tensors, of["group"]["step"], of["group"])
        return found
    for name, of in torch.load(path / "ground_truth.pt", weights_only=True)["params"].items():
        states = {key.replace("fp32_param", "fp32"): tensor for key, tensor in of["states"].items()}
        step = states.pop("step", None)
        found[respelled(name)] = (
            {"weight": of["model"], **states},
            None if step is None else float(step),
            of.get("group"),
        )
    return found


@pytest.mark.parametrize("path", [*genuine(), *genuine("BAD")])
def test_genuine_checkpoints_are_read_exactly(path: Path) -> None:
    known, found = genuine_truth(path), formats.read(path)
    assert sum(reader.recognises(path) for reader in READERS) == 1
    assert found.params.keys() == known.keys()
    wrong, unrounded = [], []
    for name, param in found.params.items():
        expected, step, group = known[name]
        assert {"weight", *param.states} == expected.keys()
        weight = param.weight.read()
        assert torch.equal(weight.float(), expected["weight"].float())
        wrong += [(name, key) for key, tensor in param.states.items() if not same(tensor.read(), expected[key])]
        unrounded += [] if torch.equal(param.states["fp32"].read().to(weight.dtype), weight) else [name]
        assert param.group is not None
        if group is None:  # the truth does not have it, nor steps
            continue
        assert param.step == step
        ours = {key: value for key, value in found.groups[param.group].items() if key != "step"}
        assert ours == {key: value for key, value in group.items() if key in ours}, name
    if path.name.startswith("BAD"):  # as Megatron wrote it; whoever converts must see it
        assert wrong and unrounded
    else:
        assert (wrong, unrounded) == ([], [])
    is_hybrid, is_fp32 = found.arguments.get("hybrid_layer_pattern") == "*-*-", path.name.endswith("_adam")
    assert (found.iteration, found.arguments["num_layers"]) == (3, 4 if is_hybrid else 2)
    assert found.arguments["params_dtype"] == (torch.float32 if is_fp32 else torch.bfloat16)
    assert found.scheduler is not None and found.scheduler["max_lr"] == 0.01


# Rules for what the small models here do not have
def test_the_default_size_of_a_bucket_grows_with_the_ranks() -> None:
    for sizes, expected in (((50, 1), 50_000_000), ((2, 1), 40_000_000), ((50, 2), 100_000_000)):
        given = dict(zip(("data_parallel_size", "context_parallel_size"), sizes), overlap_grad_reduce=True)
        assert bucket_numel(given, parameters=100, pipeline_rank=0) == expected


def test_ranks_do_not_look_through_other_ranks_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have 30,000 experts' matrices in the flat buffers of 1,000 ranks."""
    weights, flats, width = {}, {}, 64
    expert = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
    for layer, number in itertools.product(range(4), range(8)):
        values = torch.full((1, width), float(8 * layer + number))
        weights[expert.format(layer, number)] = held(values.bfloat16(), "model")
        rank = layer // 2 * 8 + number
        flats[rank] = torch.cat([values.view(-1), flats.get(rank, torch.empty(0))])  # the last layer is first
    tensors = {
        f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
        f".bucket_idx_0.{state}": held(flat, state)
        for rank, flat in flats.items()
        for state in ("param", "exp_avg", "exp_avg_sq")
    }
    folder = mock.Mock(path=Path("step"), tensors=tensors, tensor=tensors.__getitem__)
    sizes = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "num_experts": 8}
    numbers, asked = conventions.layer_of, []
    monkeypatch.setattr(conventions, "layer_of", lambda name: asked.append(name) or numbers(name))
    found, _ = states_in_buckets(folder, weights, {(): True}, sizes)
    assert found.keys() == weights.keys() and len(asked) <= 4 * len(weights)
    for name, weight in weights.items():
        assert all(same(state.read(), weight.read().float()) for state in found[name].values())


def test_how_a_parameter_is_cut() -> None:
    cuts = {
        "mlp.shared_experts.linear_fc1.weight": TPSplit("gated", 0),
        "mlp.experts.local_experts.11.linear_fc1.bias": TPSplit("gated", 0),
        "self_attention.q_layernorm.weight": TPSplit("whole"),
        "mlp.shared_experts.gate_weight": TPSplit("whole"),
    }
    for name, cut in cuts.items():
        assert tp_split_of(f"decoder.layers.3.{name}", gated=True) == cut, name
        not_gated = TPSplit("split", 0) if cut.kind == "gated" else cut
        assert tp_split_of(f"decoder.layers.3.{name}", gated=False) == not_gated, name
    with pytest.raises(CheckpointError, match="linear_kv_down_proj.*torch_dist"):
        tp_split_of(LATENT.format(".0"), gated=True)
    with pytest.raises(ValueError, match="expected a shape with"):
        local_shape((6, 6), TPSplit("gated", 0), 2)


def test_the_order_of_modules_by_their_implementation() -> None:
    attention = [f"self_attention.{name}" for name in ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")]
    experts = [f"experts.local_experts.{e}.linear_fc{i}.weight" for e in (2, 10) for i in (1, 2)]
    mlp = ["router.weight", *experts, "shared_experts.gate_weight", "shared_experts.linear_fc1.weight"]
    of_layer = [f"{name}.weight" for name in ("input_layernorm", *attention, "pre_mlp_layernorm")]
    names = [EMBEDDING, *(f"decoder.layers.1.{name}" for name in (*of_layer, *(f"mlp.{name}" for name in mlp)))]
    names += ["decoder.layers.10.input_layernorm.weight", NORM, "decoder.final_layernorm.bias"]
    of_further = (
        "enorm",
        "hnorm",
        "eh_proj",
        *(f"transformer_layer.{name[:-7]}" for name in of_layer),
        "final_layernorm",
    )
    names += [*(f"mtp.layers.{number}.{name}.weight" for number in (2, 10) for name in of_further), OUTPUT]
    assert module_order(sorted(names), {"transformer_impl": "local"}) == names
    fused = module_order(sorted(names), {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True})
    assert fused[1:3] == [names[2], names[1]]
    found = [name.split("local_experts.")[1] for name in fused[8:12]]
    assert found == [f"{e}.linear_fc{i}.weight" for i in (1, 2) for e in (2, 10)]
    for other in ("decoder.layers.0.mixer.in_proj.weight", "mtp.layers.0.transformer_layer.mixer.in_proj.weight"):
        with pytest.raises(CheckpointError, match=other):
            module_order([*names, other], {})
    assert respelled("decoder.layers.0.mlp.experts.linear_fc1.weight3").endswith("local_experts.3.linear_fc1.weight")
    one = {"model": {"decoder.layers.0.mlp.experts.weight1": held(torch.ones(2), "a tensor")}}
    with pytest.raises(CheckpointError, match="expected separate experts, found one tensor"):
        ranks._models(one, Path("model_optim_rng.pt"))
