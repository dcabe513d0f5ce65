"""torchtitan's trainer, with the recipe of docs/start/torchtitan.md: torch.optim's weights, and a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.launcher import torchrun

SCRIPT = Path(__file__).with_name("torchtitan_llama3.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, and texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("titan")
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [f"Question {n}: what is {n} plus {n}? Answer: {2 * n}." for n in range(200)]
    files = {
        "tokenizer/tokenizer.json": tokenizer.to_str(),
        "tokenizer/tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}),
        "texts/texts.json": "\n".join(json.dumps({"text": text}) for text in texts),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def trained(folder: Path, run: str, kind: str, *, steps: int, processes: int) -> dict[str, Tensor]:
    """All tensors of the checkpoint after these steps, by path."""
    torchrun(SCRIPT, folder, run, kind, steps, processes=processes)
    dcp_to_torch_save(folder / run / "checkpoint" / f"step-{steps}", folder / "whole.pt")
    leaves, _ = tree_flatten_with_path(torch.load(folder / "whole.pt", weights_only=False))
    return {keystr(path): value for path, value in leaves if isinstance(value, Tensor)}


def test_it_trains_what_torch_optim_trains(folder: Path) -> None:
    """Both have other orders of sums in Newton-Schulz, which multiplies roundings of 1e-7 by 3.4 in each of 5 steps."""
    ours = trained(folder, "ours", "ours", steps=6, processes=1)
    theirs = trained(folder, "theirs", "theirs", steps=6, processes=1)
    weights = [name for name, value in theirs.items() if value.ndim == 2 and "optimizer" not in name]
    assert len(weights) == 2 * 7 + 2
    for name in weights:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0.0, atol=1e-4, msg=name)


def test_a_resumed_run_has_the_weights_of_a_whole_one(folder: Path) -> None:
    whole = trained(folder, "whole", "ours", steps=6, processes=2)
    trained(folder, "in two", "ours", steps=3, processes=2)
    resumed = trained(folder, "in two", "ours", steps=6, processes=2)
    assert any("momentum" in name for name in whole) and whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
