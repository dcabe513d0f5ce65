"""A few families of libraries of models, where these are installed; `make test-versions ARGS=zoo` has all."""

import importlib.util

import pytest

from tests.support.zoo import vision_operators
from tests.support.zoo.__main__ import judged
from tests.support.zoo.libraries import LIBRARIES

FEW = ("transformers.bert.BertForNextSentencePrediction", "transformers.bart.BartForQuestionAnswering")
FEW += ("transformers.vit.ViTForImageClassification", "timm.levit.levit_128", "diffusers.DiTTransformer2DModel")
FEW += ("torchvision.swin_transformer.swin_t", "diffusers.ZImageTransformer2DModel")


@pytest.mark.parametrize("name", FEW)
def test_no_weight_of_a_family_is_cut_falsely(name: str) -> None:
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    vision_operators.load()
    found, stopped = judged(next(family for family in LIBRARIES[library]() if family.name == name))
    assert not stopped
    assert not [verdict for verdict in found if verdict.fault == "false cut"]
