"""torchtitan's trainer with our optimizer by name: torch.optim's weights, resumed runs, and recipes in our words.

LWOPT_TORCHTITAN_SOURCES names a folder with a package ``torchtitan``, of main for example, that is run in place of the
installed one.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from lwopt_backend.checkpoint import formats
from tests.support.command_line import lwopt
from tests.support.launcher import torchrun
from tests.support.pages import blocks
from tests.support.zero import newton_schulz_in_float32

if "LWOPT_TORCHTITAN_SOURCES" in os.environ:
    sys.path.insert(0, os.environ["LWOPT_TORCHTITAN_SOURCES"])
    os.environ["PYTHONPATH"] = os.environ["LWOPT_TORCHTITAN_SOURCES"]  # of the trainer's ranks
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


def trained(
    folder: Path, run: str, kind: str, *more: str, steps: int = 6, processes: int = 2
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of the checkpoint after these steps, by path; and the optimizers' whole state."""
    torchrun(SCRIPT, folder, run, kind, steps, *more, processes=processes)
    dcp_to_torch_save(folder / run / "checkpoint" / f"step-{steps}", folder / "whole.pt")
    leaves, _ = tree_flatten_with_path(torch.load(folder / "whole.pt", weights_only=False))
    tensors = {keystr(path): value for path, value in leaves if isinstance(value, Tensor)}
    return tensors, torch.load(folder / run / "held.pt", weights_only=False)


def test_it_trains_what_torch_optim_trains(folder: Path) -> None:
    """Both have other orders of sums in Newton-Schulz, which multiplies roundings of 1e-7 by 3.4 in each of 5 steps."""
    ours, _ = trained(folder, "ours", "muon", processes=1)
    theirs, _ = trained(folder, "theirs", "torch", processes=1)
    weights = [name for name, value in theirs.items() if value.ndim == 2 and "optimizer" not in name]
    assert len(weights) == 2 * 7 + 2
    for name in weights:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0.0, atol=1e-4, msg=name)


def test_resumed_run_has_the_weights_of_a_whole_one(folder: Path) -> None:
    """A resumed run has the weights of a whole one, and other ranks its state."""
    whole, state = trained(folder, "whole", "normuon")
    trained(folder, "in two", "normuon", steps=3)
    resumed, _ = trained(folder, "in two", "normuon")
    assert any("second_moment" in name for name in whole) and whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    _, alone = trained(folder, "whole", "normuon", "resized", processes=1)
    assert alone.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(value, alone[name]) if isinstance(value, Tensor) else value == alone[name], name


def test_folder_of_its_trainer_is_converted(folder: Path, tmp_path: Path) -> None:
    """Every tensor that torch reads from it is there after a way through each format that has a place for it, but for
    the momentum of a fused weight: torchtitan saves the weight as three, and the optimizer's state as one."""
    saved, _ = trained(folder, "to convert", "muon")
    source = folder / "to convert" / "checkpoint" / "step-6"
    for target in ("universal", "dcp", "safetensors"):
        assert lwopt("convert", source, tmp_path / target, "--to", target).code == 0
        source = tmp_path / target
        params, wanted = formats.read(source).params, dict(saved)
        for name, param in params.items():
            assert torch.equal(param.best.read(), wanted.pop(f"['{name}']")), name
            for key, tensor in (item for item in param.states.items() if item[0] != "fp32"):
                assert torch.equal(tensor.read(), wanted.pop(f"['optimizer']['state.{name}.{key}']")), (name, key)
        left = [key for key, value in wanted.items() if value.ndim and "wqkv.weight.momentum" not in key]
        assert len(params) == 21 and (target == "safetensors" or not left), left


def stepped(param: Tensor, gradient: Tensor, rows: int | None) -> Tensor:
    """By torch.optim: Muon on every ``rows`` as one matrix, or AdamW."""
    shape = (-1, rows, param.shape[-1]) if rows else (1, *param.shape)
    parts = [nn.Parameter(part.detach().clone()) for part in param.reshape(shape)]
    for part, its_gradient in zip(parts, gradient.reshape(shape)):
        part.grad = its_gradient
    if rows:
        torch.optim.Muon(parts, lr=8e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    else:
        torch.optim.AdamW(parts, lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1).step()
    return torch.stack(parts).reshape(param.shape).detach()


def test_torchtitans_muon_recipe_has_our_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's recipe for Muon has the same matrices and rates here. Kimi's debug model in two layers, against
    torch.optim.Muon on each of DistMuon's matrices: heads, experts."""
    pictures = "torchtitan.hf_datasets.multimodal.utils.image"  # needs torchvision, which is not installed
    monkeypatch.setitem(sys.modules, pictures, MagicMock())
    from torchtitan.distributed.flex_shard import BlockShard
    from torchtitan.models.kimi_k2_7 import config_registry

    from lwopt_backend.integrations.torchtitan import layer_wise

    config = config_registry.kimi_k2_5_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.model_spec.model.vision_encoder = None
    model = config.model_spec.model.build()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 16
    given = {name: torch.randn(param.shape, generator=generator) / 16 for name, param in model.named_parameters()}
    layouts = config.optimizer.optimizer_factory_kwargs_by_name["DistMuon"]["compute_sharding_by_fqn"]
    expected = {}
    for name, param in model.named_parameters():
        blocks = layouts[name].shardings_by_mesh_axis.values() if name in layouts else ()
        sizes = [block.block_size for block in blocks if isinstance(block, BlockShard)]
        rows = (sizes[0] if sizes else param.shape[-2]) if name in layouts else None
        with newton_schulz_in_float32():
            expected[name] = stepped(param, given[name], rows)
    assert len([name for name in expected if name in layouts]) == 2 * 4 + 3 + 3 + 1 + 3
    config.optimizer.param_groups[0].optimizer_kwargs["ns_dtype"] = "float32"
    ours = layer_wise(config.optimizer).build(model_parts=[model])
    torch.stack([(param * given[name]).sum() for name, param in model.named_parameters()]).sum().backward()
    ours.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), expected[name], rtol=0.0, atol=1e-6, msg=name)


def test_a_recipe_of_adamw_keeps_its_rate_and_has_matrices() -> None:
    from torchtitan.models.llama3 import config_registry

    from lwopt_backend.integrations.torchtitan import layer_wise

    config = config_registry.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    ours = layer_wise(config.optimizer).build(model_parts=[config.model_spec.model.build()])
    matrices, others = ours.optimizers[0].param_groups
    assert len(matrices["param_names"]) == 5 and matrices["adjust_lr_fn"] == "match_rms_adamw"
    assert (matrices["lr"], matrices["weight_decay"]) == (others["lr"], others["weight_decay"]) == (8e-4, 0.1)
    assert others["betas"] == (0.9, 0.95) and "tok_embeddings.weight" in others["param_names"]
    config.optimizer.param_groups[0].optimizer_name = "Adam"
    with pytest.raises(ValueError, match="found optimizer 'Adam'"):
        layer_wise(config.optimizer).build(model_parts=[config.model_spec.model.build()])


def test_the_pages_commands_and_configuration_are_taken() -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    made = []
    for kind, _, text in blocks("start/trainers", "bash|python", "torchtitan"):
        if kind == "python":
            recipe: dict[str, Any] = {}
            exec(text, recipe)
            made.append(recipe["optimizer"])
            continue
        words = shlex.split(text.replace("\\\n", " "))
        config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
        apply_overrides(config.override, config)
        made.append(config.optimizer)
    rates = {"lr": 0.02, "elementwise_lr": 8e-4}
    assert [each.arguments for each in made] == [{}, rates, {"matrix": "muon", **rates}]
    assert [len(each.param_groups) for each in made] == [1, 1, 0]
