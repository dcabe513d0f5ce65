"""What tests of migration share: the peers, their state, and training with them and with ours."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lwopt_backend.chosen import Rules, settings_of
from lwopt_backend.config import ZeROConfig
from lwopt_backend.migration import from_checkpoint
from lwopt_backend.muon_config import muon_settings
from tests.fsdp2 import MATRIX_NAMES
from tests.launcher import ROOT
from tests.models import MATRICES
from tests.rule_steps import Trained, random, rule_of

PAGE = (ROOT / "docs" / "migration.md").read_text()
both_sizes = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
PEERS = ["torch", "keller_jordan", "dion", "deepspeed", "megatron", "moonlight", "pytorch_optimizer"]


def entry(peer: str) -> dict[str, Any]:
    """The JSON block of that name on the page."""
    (block,) = re.findall(rf"^```json {peer}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return json.loads(block)


def rules_for(peer: str) -> Rules:
    given = entry(peer)
    parsers = {"LayerWise": lambda params: settings_of(ZeROConfig, params, peer), "LayerWiseMuon": muon_settings}
    if given["type"] == "LayerWiseMuon":
        return muon_settings(given["params"], peer)[0]
    return parsers[given["type"]](given["params"])[0]


def ours_for(peer: str, shape: tuple[int, int], **changed: Any) -> Trained:
    """A matrix under the page's settings."""
    return Trained(rule_of("muon", **{**rules_for(peer).matrix.options.model_dump(), **changed}), random(shape, 1))


def distance(ours: Tensor, theirs: Tensor, start: Tensor) -> float:
    """The largest difference of an element, in units of the largest move."""
    return float((ours - theirs).abs().max() / (theirs - start).abs().max())


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """DeepSpeed's Newton-Schulz as written rather than compiled, and in fp32 also on CPUs with arithmetic in fp16."""
    from deepspeed.accelerator import get_accelerator

    torch.compiler.set_stance("force_eager")
    try:
        with mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: False):
            yield
    finally:
        torch.compiler.set_stance("default")


BEFORE, AFTER = range(3), range(3, 6)


def named_state(muon: Any, adamw: Any, names: list[str], **how: Any) -> dict[str, dict[str, Tensor]]:
    """Both of torch's optimizers, as ``Reference`` and ``Twin`` make them: matrices in the order of MATRICES."""
    matrices = [name for name in names if name in MATRIX_NAMES]
    others = [name for name in names if name not in MATRIX_NAMES]
    found = from_checkpoint(muon.state_dict(), matrices, **how)
    return {**found, **from_checkpoint(adamw.state_dict(), others, source="torch.optim.AdamW")}


def forget(state: dict[str, dict[str, Tensor]]) -> None:
    """What was given is the caller's again; an optimizer that shares its memory would go on with zeros."""
    for of_name in state.values():
        for tensor in of_name.values():
            tensor.zero_()


def names_of(model: nn.Module) -> list[str]:
    return [*MATRICES, *(name for name, _ in model.named_parameters() if name not in MATRICES)]


def spoil(state: dict[str, dict[str, Tensor]], what: str) -> None:
    if what == "unknown":
        state["layers.0.wait"] = state["layers.0.weight"]
    elif what == "missing":
        del state["layers.5.weight"]
    elif what == "keys":
        state["lm_head.weight"] = {"momentum_buffer": torch.zeros(37, 24)}
    elif what == "shape":
        state["layers.0.weight"] = {"momentum_buffer": torch.zeros(24, 63)}


WRONG = {
    "unknown": "no parameter 'layers.0.wait' is trained here; did you mean 'layers.0.weight'?",
    "missing": "there is no state of parameter 'layers.5.weight'; with strict=False it keeps what it has",
    "keys": "parameter 'lm_head.weight', which 'adamw' trains: expected ['exp_avg', 'exp_avg_sq', 'step'], found "
    "['momentum_buffer']; if another rule trained it, let the same rule train it here, with include or exclude",
    "shape": "parameter 'layers.0.weight', which 'muon' trains, 'momentum_buffer': expected shape (63, 24), found "
    "(24, 63)",
    "rule": "which 'normuon' trains: this rule keeps state at the matrix's owner",
}


def numbers_for(shapes: dict[str, tuple[int, ...]], matrices: Callable[[str], bool]) -> dict[str, dict[str, Tensor]]:
    """A state of Muon and AdamW with other numbers for every parameter."""
    state = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        keys = ["momentum_buffer"] if matrices(name) else ["exp_avg", "exp_avg_sq"]
        state[name] = {key: random(shape, 10 * seed + place) for place, key in enumerate(keys)}
        if not matrices(name):
            state[name]["step"] = torch.tensor(7.0)
    return state


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
