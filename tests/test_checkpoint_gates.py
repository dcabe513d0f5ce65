"""Gates: what is not whole, or not what it says, is refused with the reason; everything else passes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.gates import check
from lwopt_backend.checkpoint.lazy import LazyTensor, held
from lwopt_backend.checkpoint.megatron import dist_reader as megatron_dist
from lwopt_backend.checkpoint.names import CORE, Numbers, translate

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "megatron"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MATRIX, NORM = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"


def param(shape: tuple[int, ...], *states: str, dtype: torch.dtype = torch.bfloat16, group: int | None = None) -> Param:
    generator = torch.Generator().manual_seed(sum(shape))
    master = torch.randn(shape, generator=generator)
    kept = {key: held(torch.rand(shape, generator=generator), f"{key} in a file") for key in states}
    return Param(held(master.to(dtype), "a file"), {MASTER: held(master, "fp32 in a file"), **kept}, group=group)


def whole(names: str = CORE, **changes: Any) -> Checkpoint:
    """Seven rows of the embedding are used, of eight."""
    params = {
        EMBEDDING: param((8, 4), "exp_avg", "exp_avg_sq"),
        MATRIX: param((4, 6), "momentum_buffer"),
        NORM: param((4,), "exp_avg", "exp_avg_sq"),
        HEAD: param((8, 4), "exp_avg", "exp_avg_sq"),
    }
    untrained = {}
    for key in ("exp_avg", "exp_avg_sq"):
        values = params[EMBEDDING].states[key].read()
        values[7] = 0
        untrained[key] = held(values, f"{key} in a file")
    params[EMBEDDING] = dataclasses.replace(params[EMBEDDING], states={**params[EMBEDDING].states, **untrained})
    return Checkpoint("megatron torch_dist", "0.16.1", names, params, **changes)


def changed(source: Checkpoint, name: str, **changes: Any) -> Checkpoint:
    found = dataclasses.replace(source.params[name], **changes)
    return dataclasses.replace(source, params={**source.params, name: found})


def with_state(source: Checkpoint, name: str, key: str, value: torch.Tensor | None) -> Checkpoint:
    states = {k: s for k, s in source.params[name].states.items() if k != key}
    return changed(source, name, states=states if value is None else {**states, key: held(value, f"{key} in a file")})


def refused(source: Checkpoint, *said: str, vocab_size: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(source, vocab_size)
    for each in said:
        assert each in str(caught.value), str(caught.value)
    assert str(caught.value).startswith(f"{len(said)} problem(s), so that nothing is written")
    return str(caught.value)


def test_a_whole_checkpoint_passes() -> None:
    assert check(whole(), 7) == [
        "All 4 master weights round to the saved weights, bit for bit.",
        "All values are finite.",
    ]


# States


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        (NORM, "exp_avg_sq", f"{NORM!r} has no exp_avg_sq, which {EMBEDDING!r} has"),
        (NORM, "exp_avg", f"{NORM!r} has no exp_avg, which {EMBEDDING!r} has"),
        (MATRIX, "momentum_buffer", f"{MATRIX!r} has no optimizer state, while others have exp_avg and exp_avg_sq"),
        (HEAD, MASTER, f"{HEAD!r} has no master weight (fp32), which {EMBEDDING!r} has"),
    ],
)
def test_a_missing_state_is_named(name: str, key: str, said: str) -> None:
    refused(with_state(whole(), name, key, None), said)


def test_states_of_several_rules_are_none_that_others_lack() -> None:
    lion = {name: dataclasses.replace(param, group=int(name == NORM)) for name, param in whole().params.items()}
    lion[NORM] = dataclasses.replace(lion[NORM], states={k: lion[NORM].states[k] for k in (MASTER, "exp_avg")})
    check(dataclasses.replace(whole(), params=lion))
    owned = dataclasses.replace(whole().params[MATRIX], owner_states={0: {"state": {}}})
    owned = dataclasses.replace(owned, states={MASTER: owned.states[MASTER]})
    check(dataclasses.replace(whole(), params={**whole().params, MATRIX: owned}))


def test_a_frozen_parameter_is_in_no_group_and_is_said() -> None:
    params = {name: dataclasses.replace(param, group=0) for name, param in whole().params.items()}
    params["frozen"] = Param(held(torch.ones(3, dtype=torch.bfloat16), "a file"))
    notes = check(dataclasses.replace(whole(), params=params))
    assert "1 parameter(s) without a param group have no state, such as 'frozen'." in notes
    params["frozen"] = dataclasses.replace(params["frozen"], group=0)
    known = "exp_avg and exp_avg_sq or momentum_buffer"
    said = [f"'frozen' has no optimizer state, while others have {known}", "'frozen' has no master weight"]
    refused(dataclasses.replace(whole(), params=params), *said)


def test_weights_alone_pass_and_are_said() -> None:
    params = {name: Param(param.weight) for name, param in whole().params.items()}
    notes = check(dataclasses.replace(whole(), params=params))
    assert notes == ["There is no optimizer state, only weights.", "All values are finite."]


def test_weights_in_float32_are_their_own_masters() -> None:
    params = {name: param((3, 4), "exp_avg", dtype=torch.float32) for name in ("a", "b")}
    params["b"] = dataclasses.replace(params["b"], states={"exp_avg": params["b"].states["exp_avg"]})
    check(dataclasses.replace(whole(), params=params))


def test_a_state_of_another_shape_is_named() -> None:
    source = with_state(whole(), MATRIX, "momentum_buffer", torch.ones(6, 4))
    refused(source, f"momentum_buffer of {MATRIX!r} has shape (6, 4), but the parameter (4, 6)")
    refused(
        with_state(whole(), NORM, MASTER, torch.ones(5)), f"fp32 of {NORM!r} has shape (5,), but the parameter (4,)"
    )


# Values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_master_that_does_not_round_to_its_weight_is_named(dtype: torch.dtype) -> None:
    good = param((4, 6), "momentum_buffer", dtype=dtype)
    source = dataclasses.replace(whole(), params={**whole().params, MATRIX: good})
    check(source)
    weight = good.weight.read()
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    weight.view(bits)[2, 3] ^= 1  # the last bit
    said = f"master weight of {MATRIX!r} does not round to the saved {dtype} weight in 1 of 24 elements (element 15 is"
    message = refused(changed(source, MATRIX, weight=held(weight, "a file")), said)
    assert (
        "--dist-ckpt-optim-fully-reshardable" in message
        and "load them in Megatron with --no-load-optim, save again" in message
    )


def test_masters_round_to_nearest_even() -> None:
    """1 + 2^-8 lies between two bf16 numbers, and so does 1 + 3 * 2^-8; both go to the even one."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, float("inf"), 3.4e38])
    weight = torch.tensor([1, 1 + 4 * 2**-8, 1 + 2 * 2**-8, -0.0, float("inf"), float("inf")]).to(torch.bfloat16)
    states = {MASTER: held(master, "")}
    check(dataclasses.replace(whole(), params={"a": Param(held(weight, ""), states)}))
    for at, value in ((0, 1 + 2 * 2**-8), (1, 1 + 2 * 2**-8), (3, 0.0)):
        other = weight.clone()
        other[at] = value
        refused(dataclasses.replace(whole(), params={"a": Param(held(other, ""), states)}), f"(element {at} is")


def test_no_number_is_equal_to_no_number_and_is_counted() -> None:
    source = whole()
    weight, master = source.params[MATRIX].weight.read(), source.params[MATRIX].states[MASTER].read()
    weight[1, 1:3], master[1, 1:3] = torch.nan, -torch.nan
    weight.view(torch.int16)[1, 1] |= 1  # another pattern of bits, and no number either
    source = with_state(changed(source, MATRIX, weight=held(weight, "")), MATRIX, MASTER, master)
    source = with_state(source, MATRIX, "momentum_buffer", torch.full((4, 6), torch.inf))
    *_, said = check(source)
    assert said == (
        f"28 values are infinite or no numbers: 2 in weight of {MATRIX!r}, 2 in fp32 of {MATRIX!r}, "
        f"24 in momentum_buffer of {MATRIX!r}."
    )
    master[1, 1] = 1.0
    refused(with_state(source, MATRIX, MASTER, master), "in 1 of 24 elements (element 7 is 1.0, but the weight nan")


def test_at_most_twenty_problems_are_listed_and_all_are_counted() -> None:
    bad = Param(held(torch.ones(2, dtype=torch.bfloat16), ""), {MASTER: held(torch.zeros(2), "")})
    with pytest.raises(CheckpointError) as caught:
        check(dataclasses.replace(whole(), params={f"p{number}": bad for number in range(45)}))
    message = str(caught.value)
    assert message.startswith("45 problem(s)") and message.count("does not round") == 20 and "and 25 more" in message


def test_replicas_must_be_equal() -> None:
    one, nan = torch.arange(6.0), torch.tensor([float("nan")])
    same = ("the tied embedding", held(one, "stage 0"), held(one, "stage 1"))
    notes = check(whole(replicas=(same, ("a constant", held(nan, ""), held(nan, "")))))
    assert "All 2 replicas are equal." in notes
    other = one.clone()
    other[4] = 9
    differs = ("the tied embedding", held(one, "stage 0"), held(other, "stage 1"))
    refused(
        whole(replicas=(same, differs)), "replicas of the tied embedding differ in 1 of 6 elements (stage 0, stage 1)"
    )
    shorter = ("the tied embedding", held(one, "stage 0"), held(other[:5], "stage 1"))
    refused(whole(replicas=(shorter,)), "replicas of the tied embedding differ: torch.float32 of shape (6,)")


# Vocabulary


@pytest.mark.parametrize("names", [CORE, "hf-llama", "megatron-deepspeed"])
def test_a_vocabulary_that_is_wrong_is_refused(names: str) -> None:
    called = {
        CORE: (EMBEDDING, HEAD),
        "hf-llama": ("model.embed_tokens.weight", "lm_head.weight"),
        "megatron-deepspeed": ("1.word_embeddings.weight", "{layers+3}.lm_head.weight"),
    }[names]
    source = whole(names)
    params = {dict(zip((EMBEDDING, HEAD), called)).get(name, name): param for name, param in source.params.items()}
    source = dataclasses.replace(source, params=params)
    for enough in (None, 7, 8):
        check(source, enough)
    both = [f"{name!r} has 8 rows, fewer than the vocabulary of 9" for name in called]
    refused(source, *both, vocab_size=9)
    said = f"2 row(s) of {called[0]!r} beyond the given vocabulary of 5 were trained, such as row 5"
    assert "give at least 7" in refused(source, said, vocab_size=5)


def test_a_tied_embedding_does_not_tell_what_is_padding() -> None:
    source = whole()
    tied = {name: param for name, param in source.params.items() if name != HEAD}
    check(dataclasses.replace(source, params=tied, tied={HEAD: EMBEDDING}), 5)


# Genuine checkpoints, and memory


def folders() -> list[Path]:
    found = sorted(path for path in SHARED.iterdir() if megatron_dist.recognises(path)) if SHARED.is_dir() else []
    return found or [SHARED]


@pytest.mark.parametrize("folder", folders(), ids=lambda path: path.name)
def test_genuine_checkpoints_pass_and_the_corrupt_ones_are_refused(folder: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the genuine checkpoints beside this project")
    source = megatron_dist.read(folder)
    if not folder.name.startswith("BAD"):
        *_, rounding, finite = check(source)
        assert rounding.startswith(f"All {len(source.params)} master weights round") and "finite" in finite
        return
    with pytest.raises(CheckpointError) as caught:
        check(source)
    assert str(caught.value).startswith("11 problem(s)")
    assert len(re.findall("master weight of '.*' does not round to the saved torch.bfloat16", str(caught.value))) == 11
    assert "several gradient buckets" in str(caught.value)


def test_a_vocabulary_without_the_last_rows_that_were_trained_is_refused() -> None:
    """Megatron's argument vocab_size is 61 there, but row 61 was looked up, and trained."""
    folder = SHARED / "t16_lw_muon_dp2_torchdist"
    if not folder.is_dir():
        pytest.skip("needs the genuine checkpoints beside this project")
    source = megatron_dist.read(folder)
    assert source.arguments["vocab_size"] == 61
    refused(source, "1 row(s) of 'embedding.word_embeddings.weight' beyond the given vocabulary of 61", vocab_size=61)
    check(source, 62)
    cut = translate(source, "hf-llama", Numbers(vocab_size=62))
    assert cut.params["lm_head.weight"].shape == cut.params["model.embed_tokens.weight"].shape == (62, 32)
    check(cut, 62)


def test_one_parameter_is_in_memory_at_a_time() -> None:
    alive: list[int] = []

    def lazy(dtype: torch.dtype) -> LazyTensor:
        def read() -> torch.Tensor:
            alive.append(torch.ones(1).numel())
            found = Tracked(torch.full((64,), 2.0, dtype=dtype), alive)
            most.append(len(alive))
            return found.tensor

        return LazyTensor((64,), dtype, read, "counted")

    most: list[int] = []
    kept = {key: lazy(torch.float32) for key in (MASTER, "exp_avg", "exp_avg_sq")}
    params = {f"p{number}": Param(lazy(torch.bfloat16), kept) for number in range(5)}
    check(dataclasses.replace(whole(), params=params))
    assert len(most) == 20 and max(most) == 2 and not alive


class Tracked:
    """Counts tensors until they are freed."""

    def __init__(self, tensor: torch.Tensor, alive: list[int]) -> None:
        import weakref

        self.tensor = tensor
        weakref.finalize(tensor, alive.pop)
