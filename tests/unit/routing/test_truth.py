"""What each weight of many kinds of models is, against a truth written by hand (tests/support/truth)."""

import functools
import importlib
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.judge import judged
from tests.support.told import Told, as_sets, kind_of, told
from tests.support.truth import CASES, WORDS, matrices
from tests.support.truth.wrong import WITH_EXAMPLE, WITHOUT_EXAMPLE

for kind in ("vision", "diffusion", "recurrent", "experts", "encoders", "graphs", "agents", "strangers"):
    importlib.import_module(f"tests.support.truth.{kind}")


@functools.cache
def model_of(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case].model()


@functools.cache
def answers(case: str, with_example: bool) -> dict[str, Told]:
    return told(model_of(case), CASES[case].example() if with_example else None)


def is_right(found: list[torch.Tensor] | None, truths: str, shape: torch.Size) -> bool:
    for truth in truths.split(" or "):
        wanted = matrices(truth, shape)
        if wanted is None or found is None:
            if wanted is None and found is None:
                return True
        elif {*map(as_sets, wanted)} == {*map(as_sets, found)}:
            return True
    return False


def kinds_of_weights(wrong: dict[str, dict[str, str]]) -> list[Any]:
    """Each kind of weight of each model: weights that differ in the number of a layer alone are one kind."""
    found: dict[str, Any] = {}
    for case in CASES:
        for name, param in model_of(case).named_parameters():
            kind = kind_of(name)
            if param.ndim > 1 and f"{case} {kind}" not in found:
                why = [
                    why for why, of in wrong.items() if any(fnmatchcase(kind, one) for one in of.get(case, "").split())
                ]
                marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=one) for one in why]
                found[f"{case} {kind}"] = pytest.param(case, name, id=f"{case} {kind}", marks=marks)
    return [*found.values()]


@pytest.mark.parametrize("case", CASES)
def test_a_model_runs_and_each_of_its_weights_has_one_truth(case: str) -> None:
    model, (args, kwargs) = model_of(case), CASES[case].example()
    for training in (True, False):
        with torch.no_grad():
            model.train(training)(*args, **kwargs)
    truths = CASES[case].truths(model)
    for name, truth in truths.items():
        shape = model.get_parameter(name).shape
        for found in filter(None, (matrices(one, shape) for one in truth.split(" or "))):
            elements = torch.cat([matrix.flatten() for matrix in found])
            assert torch.equal(elements.sort().values, torch.arange(shape.numel())), "each element is in one matrix"
    assert all(any(fnmatchcase(name, glob) for name in truths) for glob in CASES[case].truth)


@pytest.mark.parametrize("case", CASES)
def test_the_judge_sees_what_was_written_by_hand(case: str) -> None:
    judge = judged(model_of(case), *CASES[case].example())
    for name, truth in CASES[case].truths(model_of(case)).items():
        seen, shape = judge.seen[name], model_of(case).get_parameter(name).shape
        if truth in WORDS:
            is_head = judge.is_head(name) and not seen.uses
            assert (truth == "head") == is_head or truth == "vector", name
            assert truth in ("head", "vector", "convolution") or not seen.blocks or "looked up" in seen.uses, name
            assert (truth == "convolution") == ("convolved" in seen.uses), name
        elif seen.uses != {"computed"}:  # the judge does not follow products of weights
            found = seen.matrices()
            assert found is not None and not judge.is_head(name), name
            wanted = [{*map(as_sets, matrices(one, shape) or ())} for one in truth.split(" or ")]
            assert any({*map(as_sets, found)} <= one for one in wanted), name  # experts that were chosen


@pytest.mark.parametrize("case, name", kinds_of_weights(WITH_EXAMPLE))
def test_a_weight_is_what_the_forward_on_an_example_does_with_it(case: str, name: str) -> None:
    answer = answers(case, with_example=True)[name]
    assert is_right(answer.matrices, CASES[case].of(name), model_of(case).get_parameter(name).shape), answer


@pytest.mark.parametrize("case, name", kinds_of_weights(WITHOUT_EXAMPLE))
def test_without_an_example_a_weight_is_right_or_unclear(case: str, name: str) -> None:
    answer = answers(case, with_example=False)[name]
    is_cut = answer.matrices is not None and len(answer.matrices) > 1
    right = is_right(answer.matrices, CASES[case].of(name), model_of(case).get_parameter(name).shape)
    assert right or answer.said and not is_cut, answer
