"""What owned storage cannot do under DeepSpeed is refused by name, on every rank, and nothing hangs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests import zero
from tests.models import UnevenLM
from tests.owned import difference, exact_sums
from tests.owned_deepspeed import config, engine_on_any_cpu, in_precision, reference, train
from tests.ranks import RankPool
from tests.zero import engine_for

ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False, "offload": False}


def build(changes: dict[str, Any], zero: dict[str, Any], options: dict[str, Any]) -> None:
    settings = {**config(**options), **changes}
    settings["zero_optimization"] = {"stage": 2, **zero}
    with engine_on_any_cpu(settings):
        pass


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (
            {"stage": 3},
            "zero_optimization.stage is 3, where DeepSpeed shards the parameters itself; use stage 0, 1 or 2",
        ),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer.device is 'cpu'"),
        ({"round_robin_gradients": True}, "zero_optimization.round_robin_gradients is on; switch it off"),
        ({"elastic_checkpoint": True}, "zero_optimization.elastic_checkpoint is on; switch it off"),
        ({"zenflow": ZENFLOW}, "zero_optimization.zenflow is on; switch it off"),
        ({"parameter_alignment": True}, "zero_optimization.parameter_alignment is on; switch it off"),
        ({"zero_quantized_gradients": True}, "zero_optimization.zero_quantized_gradients is on; switch it off"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_of_zero_are_refused(ranks: RankPool, zero: dict[str, Any], message: str) -> None:
    for error in ranks.errors(build, {}, zero, {}):
        assert "LayerWiseMuon with owned storage cannot train with this configuration" in error and message in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is on; switch it off"),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
            "communication_data_type is float32, but gradients travel as they are accumulated, in bfloat16",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
            "data_types.grad_accum_dtype is float16 and the model is trained in bfloat16; use bfloat16 or float32",
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads is on",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_elsewhere_are_refused(ranks: RankPool, changes: dict[str, Any], message: str) -> None:
    for error in ranks.errors(build, changes, {}, {}):
        assert message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "dense"}, "layout: input should be 'auto', 'padded' or 'compact'; found 'dense'"),
        ({"bucket_mb": 0.0}, "bucket_mb: input should be greater than 0; found 0.0"),
        ({"group_size": 3}, "group size 3 does not divide the 2 data-parallel ranks"),
        ({"policy": "stay"}, "'policy': only for \"storage\": \"zero\", but the storage is 'owned'"),
        ({"storage": "zero"}, "'bucket_mb': only for \"storage\": \"owned\", but the storage is 'zero'"),
        ({"storage": "mine"}, "storage: input should be 'zero' or 'owned'; found 'mine'"),
        ({"exclude": ["layers.0.wieght"]}, "exclude: 'layers.0.wieght' matches no parameter name; did you mean"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(ranks: RankPool, options: dict[str, Any], message: str) -> None:
    for error in ranks.errors(build, {}, {}, options):
        assert message in error


# Models


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MoE(hidden_size=8, expert=nn.Linear(8, 8), num_experts=2, ep_size=1)


def build_with_experts() -> None:
    model = Experts()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    with engine_for(config(), model, model_parameters=groups):
        pass


def build_pipeline() -> None:
    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.MSELoss())
    with engine_for({**config(), "zero_optimization": {"stage": 1}}, model):
        pass


def build_with_shards() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    with engine_for(config() | {"tensor_parallel": {"autotp_size": 2}}, model):
        pass


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (build_with_experts, "the model has DeepSpeed's expert layers"),
        (build_pipeline, "the model is a PipelineModule"),
        (build_with_shards, "tensor_parallel.autotp_size is 2: each rank holds a shard"),
    ],
    ids=["experts", "pipeline", "tensor parallel"],
)
def test_models_over_other_ranks_are_refused(ranks_to_spoil: RankPool, build: Any, message: str) -> None:
    for error in ranks_to_spoil.errors(build):
        assert message in error


def build_with_sparse_gradients() -> None:
    model = UnevenLM()
    model.embedding.sparse = True
    with engine_for(config(), model):
        pass


def test_sparse_gradients_are_refused(ranks: RankPool) -> None:
    for error in ranks.errors(build_with_sparse_gradients):
        assert "LayerWiseMuon: 'embedding' makes sparse gradients" in error


def refused_on_one_rank() -> None:
    options = {"exclude": ["nothing"]} if dist.get_rank() == 1 else {}
    with engine_for(config(**options)):
        pass


def test_what_one_rank_refuses_ends_all(ranks: RankPool) -> None:
    first, second = ranks.errors(refused_on_one_rank)
    assert "'nothing' matches no parameter name" in second and "rank 1 failed with" in first


# In training


class Stumbling(UnevenLM):
    """Its backward pass fails where ``stumbles`` is set, after some gradients have come."""

    stumbles = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.stumbles and x.requires_grad:
            x.register_hook(self.fail)
        x = x + self.layers(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())

    @staticmethod
    def fail(grad: Tensor) -> None:
        raise FloatingPointError("stumbled")


def stumble_and_go_on(stage: int) -> tuple[str, float]:
    """The second step's backward pass fails on rank 1; what the step says there, and how training goes on."""
    model = exact_sums(Stumbling())
    with engine_for(config(stage), model) as engine:
        train(engine, 1)
        model.stumbles = dist.get_rank() == 1
        loss = engine(*zero.batch_shares(7, dist.get_world_size())[dist.get_rank()])
        try:
            engine.backward(loss)
        except FloatingPointError:
            assert dist.get_rank() == 1
        try:
            engine.step()
        except RuntimeError as error:
            said = str(error)
        model.stumbles = False
        engine.optimizer.zero_grad()
        train(engine, range(1, 3))
        return said, difference(model, reference(3)[0])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_pass_that_fails_is_an_error_on_every_rank_and_training_can_go_on(
    ranks: RankPool, stage: int
) -> None:
    for said, different in ranks.run(stumble_and_go_on, stage):
        assert said.startswith("LayerWiseMuon: a backward pass ended in an exception") and "rank 1" in said
        assert different == 0.0


def change_the_model(stage: int, how: str) -> None:
    with engine_for(config(stage)) as engine:
        train(engine, 1)
        if how == "replaced" and dist.get_rank() == 0:
            engine.module.gate.weight = nn.Parameter(engine.module.gate.weight.detach().clone())
        elif how == "moved" and dist.get_rank() == 0:
            engine.module.gate.weight.data = engine.module.gate.weight.data.clone()
        train(engine, 1)


@pytest.mark.parametrize("how", ["replaced", "moved"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_was_changed_is_an_error_on_every_rank(ranks: RankPool, stage: int, how: str) -> None:
    for error in ranks.errors(change_the_model, stage, how):
        assert "LayerWiseMuon: parameter 'gate.weight'" in error and "make the optimizer after" in error


def offload(stage: int) -> None:
    with engine_for(config(stage)) as engine:
        engine.offload_states()


def test_offloading_states_is_an_error(ranks: RankPool) -> None:
    for error in ranks.errors(offload, 1):
        assert "owned storage cannot move its states" in error


# Checkpoints


def save(folder: str, stage: int, precision: str, options: dict[str, Any]) -> None:
    with engine_on_any_cpu(in_precision(precision, config(stage, **options))) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, tag="one")


def load(
    folder: str, stage: int, options: dict[str, Any], tag: str | None = None, universal: bool = False, **how: Any
) -> None:
    """Must fail; and then the engine must be as it was."""
    settings = config(stage, **options)
    settings["checkpoint"] = {"load_universal": universal}
    with engine_for(settings, UnevenLM(seed=5)) as engine:
        before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        rates = list(engine.get_lr())
        try:
            engine.load_checkpoint(folder, tag=tag, **how)
        except Exception as error:
            assert all(torch.equal(before[name], param) for name, param in engine.module.named_parameters())
            assert engine.get_lr() == rates and engine.global_steps == 0
            raise error


def save_with_zero(folder: str, stage: int) -> None:
    with engine_for(zero.config(stage)) as engine:
        zero.train(engine, 1)
        engine.save_checkpoint(folder, tag="one")


def load_with_zero(folder: str, stage: int) -> None:
    with engine_for(zero.config(stage)) as engine:
        engine.load_checkpoint(folder)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_checkpoint_of_the_other_storage_is_refused(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(save_with_zero, str(tmp_path / "zero"), stage)
    ranks.run(save, str(tmp_path / "owned"), stage, "fp32", {})
    for error in ranks.errors(load, str(tmp_path / "zero"), stage, {}):
        assert 'was not saved with "storage": "owned"' in error and "lwopt convert SRC DST --to universal" in error
    for error in ranks.errors(load_with_zero, str(tmp_path / "owned"), stage):
        assert 'was saved with "storage": "owned"; load it with that' in error


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_checkpoint_of_other_parameters_is_refused(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(save, str(tmp_path), stage, "fp32", {})
    for error in ranks.errors(load, str(tmp_path), stage, {"exclude": ["layers.2.weight"]}):
        assert (
            "holds other parameters: 'layers.2.weight' (41, 63) by adamw here, 'layers.2.weight' (41, 63) by" in error
        )


def test_a_checkpoint_of_another_layout_is_refused_with_what_to_do(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, str(tmp_path), 1, "fp32", {"layout": "padded"})
    for error in ranks.errors(load, str(tmp_path), 1, {"group_size": 1}):
        assert "is laid out otherwise" in error and "lwopt convert SRC DST --to universal" in error


def test_a_checkpoint_of_another_stage_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for saved_at in (0, 1):
        ranks.run(save, str(tmp_path / str(saved_at)), saved_at, "fp32", {})
    for error in ranks.errors(load, str(tmp_path / "0"), 1, {}):
        assert "was saved at ZeRO stage 0 and is loaded at stage 1" in error
    for error in ranks.errors(load, str(tmp_path / "1"), 0, {}):
        assert "was saved at ZeRO stage 1 or 2 and is loaded at stage 0" in error


def test_a_checkpoint_of_another_precision_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, str(tmp_path), 1, "bf16", {})
    for error in ranks.errors(load, str(tmp_path), 1, {}):
        assert "load it in the precision it was saved in" in error


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_checkpoint_of_another_number_of_ranks_is_refused_with_what_to_do(
    rank_pools: dict[int, RankPool], ranks: RankPool, tmp_path: Path
) -> None:
    rank_pools.setdefault(2, RankPool(2)).run(save, str(tmp_path), 1, "fp32", {})
    for error in ranks.errors(load, str(tmp_path), 1, {}):
        assert "was saved on 2 data-parallel ranks and is loaded on 4" in error
        assert "lwopt convert SRC DST --to universal" in error


def convert(folder: Path) -> Path:
    into = folder / "universal"
    names = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(folder / "one"), "output_folder": str(into / "one")}
    ds_to_universal.main(argparse.Namespace(**folders, **names, inject_missing_state=True))
    return into


def test_universal_checkpoints_that_cannot_be_loaded_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Those that DeepSpeed's converter made; of ours see test_owned_universal.py."""
    ranks.run(save, str(tmp_path), 1, "fp32", {})
    for error in ranks.errors(load, str(tmp_path), 1, {}, tag="one", universal=True):
        assert "is no universal checkpoint" in error and "lwopt convert --to universal" in error
    folder = convert(tmp_path)
    for error in ranks.errors(load, str(folder), 2, {"exclude": ["layers.2.weight"]}, universal=True):
        assert (
            "parameter 'layers.2.weight', which 'adamw' trains: expected the states ['exp_avg', 'exp_avg_sq']" in error
        )
    (folder / "one" / "zero" / "gate.weight" / "exp_avg.pt").unlink()
    for error in ranks.errors(load, str(folder), 2, {}, universal=True):
        assert (
            "parameter 'gate.weight', which 'muon' trains: expected the states ['momentum_buffer'], found []" in error
        )
