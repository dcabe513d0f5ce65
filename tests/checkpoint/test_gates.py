"""Gates: what is not whole, or not what it says, is refused with the reason; and param groups with our options."""

import dataclasses
import re
import weakref
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, held
from lwopt_backend.checkpoint.convert import as_ours
from lwopt_backend.checkpoint.gates import check, trained_beyond
from lwopt_backend.checkpoint.names import CORE
from lwopt_backend.groups.registry import known_in
from tests.support.checkpoint_contents import changed

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MATRIX, NORM = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), "momentum_buffer"


def param(shape: tuple[int, ...], *states: str, dtype: torch.dtype = torch.bfloat16) -> Param:
    generator = torch.Generator().manual_seed(sum(shape))
    master = torch.randn(shape, generator=generator)
    kept = {key: held(torch.rand(shape, generator=generator), f"{key} in a file") for key in states}
    return Param(held(master.to(dtype), "a file"), {MASTER: held(master, "fp32 in a file"), **kept})


def whole(**changes: Any) -> Checkpoint:
    """Seven rows of the embedding are used, of eight."""
    params = {EMBEDDING: param((8, 4), *MOMENTS), MATRIX: param((4, 6), MOMENTUM), NORM: param((4,), *MOMENTS)}
    params |= {HEAD: param((8, 4), *MOMENTS)}
    source = Checkpoint("megatron torch_dist", "0.16.1", CORE, params, **changes)
    for key in MOMENTS:
        seven = torch.cat([params[EMBEDDING].states[key].read()[:7], torch.zeros(1, 4)])
        source = with_state(source, EMBEDDING, key, seven)
    return source


def having(params: dict[str, Param]) -> Checkpoint:
    return dataclasses.replace(whole(), params=params)


def with_state(source: Checkpoint, name: str, key: str, value: torch.Tensor | None) -> Checkpoint:
    states = {k: s for k, s in source.params[name].states.items() if k != key}
    return changed(source, name, states=states if value is None else {**states, key: held(value, f"{key} in a file")})


def refused(source: Checkpoint, *said: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(source)
    for each in said:
        assert each in str(caught.value), str(caught.value)
    assert str(caught.value).startswith(f"{len(said)} problem(s), and nothing was written")
    return str(caught.value)


def test_a_whole_checkpoint_passes() -> None:
    rounding = "All 4 master weights round to the saved weights, bit for bit."
    assert check(whole()) == [rounding, "All values are finite."]


@pytest.mark.parametrize(
    ("name", "key", "shape", "said"),
    [
        (NORM, "exp_avg_sq", None, f"{NORM!r} has no exp_avg_sq, which {EMBEDDING!r} has"),
        (NORM, "exp_avg", None, f"{NORM!r} has no exp_avg, which {EMBEDDING!r} has"),
        (MATRIX, MOMENTUM, None, f"{MATRIX!r} has no exp_avg and exp_avg_sq, which {EMBEDDING!r} has"),
        (HEAD, MASTER, None, f"{HEAD!r} has no master weight (fp32), which {EMBEDDING!r} has"),
        (
            MATRIX,
            MOMENTUM,
            (6, 4),
            f"momentum_buffer of {MATRIX!r}: expected the parameter's shape (4, 6), found (6, 4)",
        ),
        (NORM, MASTER, (5,), f"fp32 of {NORM!r}: expected the parameter's shape (4,), found (5,)"),
    ],
)
def test_a_missing_state_and_one_of_another_shape_are_named(name: str, key: str, shape: Any, said: str) -> None:
    refused(with_state(whole(), name, key, None if shape is None else torch.ones(shape)), said)


def test_a_missing_count_of_steps_is_named() -> None:
    counted = {name: dataclasses.replace(param, step=7.0) for name, param in whole().params.items()}
    check(having(counted))
    refused(changed(having(counted), NORM, step=None), f"{NORM!r} has no step, which {EMBEDDING!r} has")


def test_states_of_several_rules_are_none_that_others_lack() -> None:
    lion = {name: dataclasses.replace(param, group=int(name == NORM)) for name, param in whole().params.items()}
    lion[NORM] = dataclasses.replace(lion[NORM], states={k: lion[NORM].states[k] for k in (MASTER, "exp_avg")})
    check(having(lion))
    check(changed(with_state(whole(), MATRIX, MOMENTUM, None), MATRIX, owner_states={0: {"state": {}}}))
    in_fp32 = {name: param((3, 4), "exp_avg", dtype=torch.float32) for name in ("a", "b")}  # their own masters
    check(with_state(having(in_fp32), "b", MASTER, None))


def test_frozen_parameters_and_weights_alone_pass_and_are_said() -> None:
    params = {name: dataclasses.replace(param, group=0) for name, param in whole().params.items()}
    params["frozen"] = Param(held(torch.ones(3, dtype=torch.bfloat16), "a file"))
    notes = check(having(params))
    assert "1 parameter(s) without a param group have no state, such as 'frozen'; give --tied" in notes[0]
    params["frozen"] = dataclasses.replace(params["frozen"], group=0)
    refused(having(params), f"'frozen' has no momentum_buffer, which {MATRIX!r} has", "'frozen' has no master weight")
    notes = check(having({name: Param(param.weight) for name, param in whole().params.items()}))
    assert notes == ["There is no optimizer state, only weights.", "All values are finite."]


# Values
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_master_that_does_not_round_to_its_weight_is_named(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a later block."""
    monkeypatch.setattr(contents, "BLOCK", 5)
    source = having({**whole().params, MATRIX: param((4, 6), MOMENTUM, dtype=dtype)})
    check(source)
    weight = source.params[MATRIX].weight.read()
    weight.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])[2, 3] ^= 1  # the last bit
    said = f"master weight of {MATRIX!r} does not round to the saved {dtype} weight in 1 of 24 elements (element 15 is"
    message = refused(changed(source, MATRIX, weight=held(weight, "a file")), said)
    for advice in ("--dist-ckpt-optim-fully-reshardable", "load them in Megatron with --no-load-optim, save again"):
        assert advice in message


def test_masters_round_to_nearest_even() -> None:
    """1 + 2^-8 lies between two bf16 numbers, and so does 1 + 3 * 2^-8; both go to the even one."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, float("inf"), 3.4e38])
    weight = torch.tensor([1, 1 + 4 * 2**-8, 1 + 2 * 2**-8, -0.0, float("inf"), float("inf")]).to(torch.bfloat16)
    states = {MASTER: held(master, "")}
    check(having({"a": Param(held(weight, ""), states)}))
    for at, value in ((0, 1 + 2 * 2**-8), (1, 1 + 2 * 2**-8), (3, 0.0)):
        other = weight.clone()
        other[at] = value
        refused(having({"a": Param(held(other, ""), states)}), f"(element {at} is")


def test_no_number_is_equal_to_no_number_and_is_counted() -> None:
    source = whole()
    weight, master = source.params[MATRIX].weight.read(), source.params[MATRIX].states[MASTER].read()
    weight[1, 1:3], master[1, 1:3] = torch.nan, -torch.nan
    weight.view(torch.int16)[1, 1] |= 1  # another pattern of bits, and no number either
    source = with_state(changed(source, MATRIX, weight=held(weight, "")), MATRIX, MASTER, master)
    source = with_state(source, MATRIX, MOMENTUM, torch.full((4, 6), torch.inf))
    assert check(source)[-1] == (
        f"28 values are infinite or NaN: 2 in weight of {MATRIX!r}, 2 in fp32 of {MATRIX!r}, "
        f"24 in momentum_buffer of {MATRIX!r}."
    )
    master[1, 1] = 1.0
    refused(with_state(source, MATRIX, MASTER, master), "in 1 of 24 elements (element 7 is 1.0, the weight nan")


def test_at_most_twenty_problems_are_listed_and_all_are_counted() -> None:
    bad = Param(held(torch.ones(2, dtype=torch.bfloat16), ""), {MASTER: held(torch.zeros(2), "")})
    with pytest.raises(CheckpointError) as caught:
        check(having({f"p{number}": bad for number in range(45)}))
    message = str(caught.value)
    assert message.startswith("45 problem(s)") and message.count("does not round") == 20 and "and 25 more" in message


def test_replicas_must_be_equal() -> None:
    def tied(second: torch.Tensor) -> tuple[str, LazyTensor, LazyTensor]:
        return "the tied embedding", held(one, "stage 0"), held(second, "stage 1")

    one, nan = torch.arange(6.0), held(torch.tensor([float("nan")]), "")
    assert "All 2 replicas are equal." in check(whole(replicas=(tied(one), ("a constant", nan, nan))))
    said = "replicas of the tied embedding differ"
    differ = (tied(one), tied(torch.where(one == 4, 9, one)))
    refused(whole(replicas=differ), f"{said} in 1 of 6 elements (stage 0, stage 1)")
    refused(whole(replicas=(tied(one[:5]),)), f"{said}: torch.float32 of shape (6,)")


def test_each_tensor_is_read_once_and_one_is_in_memory_at_a_time() -> None:
    alive: list[int] = []
    most: list[int] = []

    def lazy(dtype: torch.dtype) -> LazyTensor:
        def read() -> torch.Tensor:
            tensor = torch.full((64,), 2.0, dtype=dtype)
            alive.append(1)
            weakref.finalize(tensor, alive.pop)
            most.append(len(alive))
            return tensor

        return LazyTensor((64,), dtype, read, "counted")

    kept = {key: lazy(torch.float32) for key in (MASTER, *MOMENTS)}
    check(having({f"p{number}": Param(lazy(torch.bfloat16), kept) for number in range(5)}))
    assert len(most) == 20 and max(most) == 1 and not alive


@pytest.mark.parametrize(
    ("names", "called"), [(CORE, (EMBEDDING, HEAD)), ("hf-llama", ("model.embed_tokens.weight", "lm_head.weight"))]
)
def test_a_vocabulary_that_cuts_trained_rows_is_refused(names: str, called: tuple[str, str]) -> None:
    params = {dict(zip((EMBEDDING, HEAD), called)).get(name, name): param for name, param in whole().params.items()}
    source = dataclasses.replace(whole(), names=names, params=params)
    for enough in (None, 7, 8):
        assert trained_beyond(source, enough) == []
    (problem,) = trained_beyond(source, 5)
    said = f"{called[0]!r}: expected untrained rows beyond the given vocabulary of 5, found 2 trained, such as row 5"
    assert problem.startswith(said) and "give at least 7" in problem
    tied = {name: param for name, param in params.items() if name != called[1]}  # all rows get gradients
    assert trained_beyond(dataclasses.replace(source, params=tied, tied={called[1]: called[0]}), 5) == []


# Param groups of other optimizers under this package's options; that engines go on with them is in the chains
OF_MUON = (MOMENTUM,)
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, "amsgrad": False}  # of torch
MUON = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
SGD = torch.optim.SGD([torch.ones(1)], lr=0.1, momentum=0.8).defaults
MEGATRON = {
    **{"optimizer": "muon", "muon_nesterov": True, "muon_scale_mode": "unit_rms_norm", "muon_num_ns_steps": 5},
    **{"muon_extra_scale_factor": 0.2, "muon_coefficient_type": "simple", "muon_fp32_matmul_prec": "high"},
}


def grouped(
    groups: list[dict[str, Any]], states: list[tuple[str, ...]], arguments: dict[str, Any] | None = None, **more: Any
) -> Checkpoint:
    tensor = held(torch.ones(2, 2), "a tensor")
    params = {f"p{n}": Param(tensor, dict.fromkeys(keys, tensor), group=n) for n, keys in enumerate(states)}
    return as_ours(Checkpoint("any", "", "model", params, tuple(groups), arguments or {}, **more))


def ds_config(**params: Any) -> dict[str, Any]:
    return {"ds_config": {"optimizer": {"type": "Muon", "params": params}}}


TORCHS = torch.optim.Muon([torch.ones(2, 2)], lr=0.3, nesterov=False, adjust_lr_fn="match_rms_adamw").defaults
OF_MEGATRONS = {"lr": 0.1, "max_lr": 0.5, "weight_decay": 0.3, "wd_mult": 1.0}
AS_MEGATRON = {
    **{"rule": "muon", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True, "eps": 1e-15},
    **{"adjust_lr_fn": "unit_rms_norm", "extra_scale_factor": 0.2, "ns_steps": 5, "ns_coefficients": "simple"},
    **{"ns_dtype": "float32", "initial_lr": 0.5},
}
OF_DEEPSPEEDS = {"use_muon": True, **MUON}
AS_DEEPSPEED = {"rule": "muon", **MUON, "nesterov": True, "initial_lr": 0.1}
GRAM = {**AS_DEEPSPEED, "gram_aspect": 1.0, "gram_restarts": (2,), "ns_dtype": "float32"}
STANDARD = {**AS_DEEPSPEED, "gram_aspect": None, "gram_restarts": None, "ns_dtype": "bfloat16"}
OURS = {"lr": 1.0, "weight_decay": 0.5}
TRANSLATED = [  # the group, its states, the checkpoint's arguments, and options that come out
    ({**OF_MEGATRONS, "momentum": 0.9}, OF_MUON, MEGATRON, AS_MEGATRON),
    (OF_DEEPSPEEDS, OF_MUON, ds_config(), GRAM),
    (OF_DEEPSPEEDS, OF_MUON, ds_config(ns_method="gram"), GRAM),
    (OF_DEEPSPEEDS, OF_MUON, ds_config(ns_method="standard"), STANDARD),
    (TORCHS, OF_MUON, {}, {"rule": "muon", **TORCHS}),
    ({**ADAM, "bias_correction": True}, MOMENTS, {}, {"rule": "adamw", **ADAM, "initial_lr": 0.1}),
    ({**ADAM, "initial_lr": 0.5}, MOMENTS, {}, {"initial_lr": 0.5}),
    ({"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.2}, ("exp_avg",), {}, {"rule": "lion", "weight_decay": 0.2}),
    ({"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.2}, MOMENTS, {}, {"rule": "lion"}),  # DeepSpeedCPULion's zeros
    (SGD, OF_MUON, {"optimizer": "sgd"}, {"rule": "sgd", "momentum": 0.8}),  # Megatron's
    # What we saved gets all keys that a group of any engine has: torch's DCP fails where one is missing.
    ({"rule": "muon", **OURS}, (), {}, OURS),
    ({"rule": "adamw", **OURS}, (), {}, OURS),
]


@pytest.mark.parametrize(("group", "states", "arguments", "expected"), TRANSLATED)
def test_groups_of_others_have_our_options(
    group: dict[str, Any], states: tuple[str, ...], arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = grouped([group], [states], arguments)
    assert found.notes == ()
    (one,) = found.groups
    assert one.items() >= expected.items()
    torchs = torch.optim.AdamW([torch.ones(1)]).defaults if one["rule"] == "adamw" else {}
    assert set(one) >= {*known_in(one), *torchs}


def test_what_we_saved_stays_without_places() -> None:
    """Unknown rules keep their options."""
    saved = {"rule": "soap", "lr": 1.0, "members": "digest", "from_group": 1, "overrides": []}
    (found,) = grouped([saved], [()]).groups
    assert (found["rule"], found["lr"]) == ("soap", 1.0) and not {"members", "from_group", "overrides"} & set(found)
    assert grouped([{"rule": "somebodys", "lr": 1.0}], [()]).groups == ({"rule": "somebodys", "lr": 1.0},)


OURS_AFTER = {"rule": "adamw", "lr": 0.1}, {"rule": "muon", "lr": 0.7}
ORDERS: list[tuple[list[dict[str, Any]], list[int]]] = [  # groups, and the order in which an optimizer here has them
    ([{**ADAM, "lr": 0.1}, {**ADAM, "lr": 0.3}, {**TORCHS, "lr": 0.7}], [2, 0, 1]),  # another's: matrices first
    ([*OURS_AFTER], [0, 1]),  # as saved
    ([{**group, "from_group": n, "overrides": []} for group in OURS_AFTER for n in (1, 0)], [3, 1, 2, 0]),  # a pipeline
]


@pytest.mark.parametrize(("groups", "order"), ORDERS)
def test_parameters_and_schedules_follow_our_groups(groups: list[dict[str, Any]], order: list[int]) -> None:
    """Parameters and schedules follow groups in the order of our optimizers. Rates stay as they are. Lists that are not
    by group, of any length, do too, and containers keep their types."""

    def state(of: list[int]) -> dict[str, Any]:
        numbers: dict[str, Any] = {"base_lrs": [float(n) for n in of], "lr_lambdas": [{"n": n} for n in of]}
        fixed = {"milestones": Counter({4: 2}), "_milestones": [*range(len(of))], "nothing": OrderedDict()}
        return {**fixed, **numbers, "_schedulers": [numbers, {**numbers, "_last_lr": []}]}

    states, unmoved = [MOMENTS if "betas" in group else OF_MUON for group in groups], [*range(len(groups))]
    found = grouped(groups, states, scheduler=state(unmoved), client={"mine": state(unmoved), "x": (1,)})
    assert [group["lr"] for group in found.groups] == [groups[n]["lr"] for n in order]
    assert {name: param.group for name, param in found.params.items()} == {f"p{n}": order.index(n) for n in unmoved}
    for one in (found.scheduler, found.client["mine"]):
        assert one == state(order) and type(one["nothing"]) is OrderedDict
    assert found.client["x"] == (1,)


@pytest.mark.parametrize(("group", "states"), [(ADAM, MOMENTS), ({"rule": "muon", "lr": 0.1}, OF_MUON)])
def test_the_rate_that_a_schedule_multiplies_is_the_warmups(group: dict[str, Any], states: tuple[str, ...]) -> None:
    def first(group: dict[str, Any], scheduler: dict[str, Any], peak: Any = 0.4) -> Any:
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": peak, "warmup_num_steps": 8}}
        arguments = {"ds_config": {"scheduler": schedule}}
        return grouped([group], [states], arguments, scheduler=scheduler).groups[0].get("initial_lr")

    theirs = {"last_batch_iteration": 3}
    assert first(group, theirs) == 0.4
    assert first({**group, "initial_lr": 0.5}, theirs) == 0.5
    assert first(group, {"last_epoch": 3}) is None  # a schedule in place of the configured one
    assert first(group, theirs, peak=[0.1, 0.2]) is None and first(group, theirs, peak=[0.1]) == 0.1
    assert "initial_lr" not in grouped([group], [states], scheduler=theirs).groups[0]


def test_warmup_groups_keep_their_share_of_the_peak() -> None:
    """Of the peak of a warmup, groups have the share that they had in training. DeepSpeed without this package writes
    the number into all groups."""

    def peaks(*groups: dict[str, Any]) -> list[Any]:
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 8}}
        states = [MOMENTS if "betas" in group else OF_MUON for group in groups]
        more = {"arguments": {"ds_config": {"scheduler": schedule}}, "scheduler": {"last_batch_iteration": 3}}
        return [group.get("initial_lr") for group in grouped([*groups], states, **more).groups]

    ours = [{"rule": "muon", "lr": 0.01}, {"rule": "adamw", "lr": 1e-3}]
    assert peaks(*ours) == pytest.approx([0.4, 0.04]) and peaks(*({**group, "lr": 0.0} for group in ours)) == [None] * 2
    assert peaks({**TORCHS, "lr": 0.01}, {**ADAM, "lr": 1e-3}) == [0.4, 0.4]


@pytest.mark.parametrize(
    ("group", "states", "arguments", "words"),
    [
        (ADAM, MOMENTS, ds_config(adam_w_mode=False), "expected decoupled weight decay"),
        ({**ADAM, "bias_correction": False}, MOMENTS, {}, "expected bias correction"),
        (ADAM, ("exp_avg",), {}, r"known optimizer, found the state \['exp_avg'\]"),
        (MUON, OF_MUON, {}, "expected the state of a known optimizer"),
        (MUON, OF_MUON, {**MEGATRON, "muon_coefficient_type": "aol"}, "coefficient_type='aol' has no counterpart"),
        (MUON, OF_MUON, {**MEGATRON, "muon_scale_mode": "new"}, "adjust_lr_fn"),
        ({**ADAM, "max_coeff": 10.0}, MOMENTS, {}, "it may be that of LAMB or LARS"),  # DeepSpeed's FusedLamb
        (SGD, (*OF_MUON, "exp_avg"), {}, "it may be that of torch.optim.SGD"),
        ({"lr": 0.1, "momentum": 0.9}, OF_MUON, MEGATRON, r"options \['lr', 'momentum'\]"),
        (OF_DEEPSPEEDS, OF_MUON, ds_config(per_head_muon=True), "orthogonalized each head"),
    ],
)
def test_what_has_no_counterpart_stays_and_is_said(
    group: dict[str, Any], states: tuple[str, ...], arguments: dict[str, Any], words: str
) -> None:
    found = grouped([group], [states], arguments)
    assert found.groups == (group,)
    (note,) = found.notes
    assert re.search(words, note), note
