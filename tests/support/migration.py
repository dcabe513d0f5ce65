"""What tests of migration share: the peers, and the settings that the page has for them."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.groups.choices import Rules, settings_of
from lwopt_backend.groups.registry import arguments
from tests.support.pages import blocks
from tests.support.references import Trained, random, rule_of

SETTINGS = {name: "migration" for _, name, _ in blocks("migration", "json") if name}
PEERS = ["torch", "keller_jordan", "dion", "moonlight", "pytorch_optimizer", "deepspeed", "megatron"]


def entry(peer: str) -> dict[str, Any]:
    (block,) = blocks(SETTINGS[peer], "json", peer)
    return json.loads(block.text)


def rules_for(peer: str) -> Rules:
    given = entry(peer)
    return settings_of(ZeROConfig, given["params"], peer)[0]


def ours_for(peer: str, shape: tuple[int, int], **changed: Any) -> Trained:
    """A matrix under the page's settings."""
    return Trained(rule_of("muon", **{**arguments(rules_for(peer).matrix), **changed}), random(shape, 1))


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
