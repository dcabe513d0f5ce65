"""What cannot work is refused by name when the engine is built, on every rank, and nothing hangs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.module_inject import auto_ep
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lwopt_backend.integrations import deepspeed_engine
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from lwopt_backend.plan import MACHINES
from lwopt_backend.plan.build import modelled_time
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, config, engine_for, train

ZERO = {"stage": 2, "reduce_bucket_size": 10_000}


ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False, "offload": False}


def build(settings: dict[str, Any]) -> None:
    with engine_for(settings):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {**ZERO, "round_robin_gradients": True}}, "round_robin_gradients is on; switch it off"),
        ({"zero_optimization": {**ZERO, "elastic_checkpoint": True}}, "elastic_checkpoint is on; switch it off"),
        ({"zero_optimization": {**ZERO, "zenflow": ZENFLOW}}, "zero_optimization.zenflow is on; switch it off"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is on; switch it off"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_unsupported_settings_are_refused_on_every_rank(ranks: RankPool, changes: dict[str, Any], message: str) -> None:
    for error in ranks.errors(build, config(2) | changes):
        assert message in error


def build_with_shards() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    with engine_for(config(2) | {"tensor_parallel": {"autotp_size": 2}}, model):
        pass


def test_tensor_parallel_shards_are_refused_on_every_rank(ranks_to_spoil: RankPool) -> None:
    for error in ranks_to_spoil.errors(build_with_shards):
        assert "tensor_parallel.autotp_size is 2: each rank holds a shard" in error


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", -0.1, "lr: input should be greater than or equal to 0; found -0.1"),
        ("ns_steps", 0, "ns_steps: input should be greater than or equal to 1; found 0"),
        ("momentum", 1.0, "momentum: input should be less than 1; found 1.0"),
        ("momentum", -0.5, "momentum: input should be greater than or equal to 0; found -0.5"),
        ("weight_decy", 0.1, "unknown key 'weight_decy'; did you mean 'weight_decay'?"),
        ("adamw", {"beta": [0.9, 0.95]}, "unknown key 'adamw.beta'; did you mean 'betas'?"),
        ("betas", [0.9, 0.95], "unknown key 'betas'; did you mean 'adamw.betas'?"),
        ("adamw", {"lr": "auto"}, "adamw.lr: input should be a valid number; found 'auto', which only Hugging Face's"),
        ("lr", "auto", "lr: input should be a valid number; found 'auto'"),
        ("include", ["*.nothing.*"], "include: '*.nothing.*' matches no parameter name"),
        ("exclude", ["layers.0.wieght"], "exclude: 'layers.0.wieght' matches no parameter name; did you mean"),
        ("exclude", ["*"], "none of the 11 trained parameters is a matrix"),
    ],
)
def test_wrong_options_are_refused_on_every_rank(ranks: RankPool, option: str, value: Any, message: str) -> None:
    for error in ranks.errors(build, config(2, **{option: value})):
        assert message in error


def test_a_model_without_matrices_trains_when_asked_for(ranks: RankPool) -> None:
    ranks.run(build, config(2, exclude=["*"], allow_no_matrix=True))


def errors_of_layer_wise(storage: str) -> list[str]:
    """What ``"type": "LayerWise"`` says to a setting, a parameter, and a checkpoint that cannot work."""
    options = {"matrix": {"name": "muon", "lr": 0.02}, "elementwise": {"name": "adamw", "lr": 3e-3}}
    entry = {"type": "LayerWise", "params": {**options, "storage": storage, "report": False}}
    settings = config(2) | {"optimizer": entry, "zero_optimization": {"stage": 2}}
    said = []
    for changes in ({"compile": {"deepcompile": True}}, {"optimizer": {**entry, "params": {"matrx": "muon"}}}):
        with pytest.raises(ValueError) as caught:
            build(settings | changes)
        said.append(str(caught.value))
    with engine_for(settings) as engine:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            engine.load_checkpoint("nowhere", tag=None if torch.distributed.get_rank() else "none")
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("storage", ["zero", "owned"])
def test_errors_of_layer_wise_say_layer_wise(ranks: RankPool, storage: str) -> None:
    for rank, (setting, option, checkpoint) in enumerate(ranks.run(errors_of_layer_wise, storage)):
        assert setting.startswith("LayerWise ") and "cannot train with this configuration:" in setting
        assert option.startswith("LayerWise: unknown key 'matrx'")
        assert checkpoint.startswith("LayerWise: rank 0 failed with" if rank else "the checkpoint 'nowhere/none'")


def build_with_auto_ep() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **sizes))
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    # It moves transformers' recorders of router outputs, in a way that transformers 5 does not know.
    auto_ep.AutoEP._retarget_transformers_output_recorders = lambda self, spec, replacement: None
    with engine_for(config(2) | {"expert_parallel": experts}, model):
        pass


def test_auto_ep_is_refused_on_every_rank(ranks_to_spoil: RankPool) -> None:
    for error in ranks_to_spoil.errors(build_with_auto_ep):
        assert "expert_parallel.enabled is true (AutoEP), whose expert layers were not tried" in error


class TensorParallel:
    """An mpu as Megatron's: all ranks share every matrix, each is a data-parallel rank of its own."""

    def __init__(self) -> None:
        groups = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
        self.alone = groups[torch.distributed.get_rank()]

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_data_parallel_group(self) -> Any:
        return self.alone

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0


def build_with_an_mpu() -> None:
    with engine_for(config(2), mpu=TensorParallel()):
        pass


def test_model_parallelism_by_mpu_is_refused_on_every_rank(ranks_to_spoil: RankPool) -> None:
    for error in ranks_to_spoil.errors(build_with_an_mpu):
        assert "mpu.get_model_parallel_world_size() is 2: each rank holds a shard, and the matrix rule needs" in error


def build_with_deepspeed_tags() -> None:
    model = UnevenLM()
    model.lm_head.weight.use_muon = False
    model.layers[0].weight.use_muon = True
    with engine_for(config(2), model):
        pass


def test_tags_for_deepspeeds_own_muon_are_refused(ranks: RankPool) -> None:
    for error in ranks.errors(build_with_deepspeed_tags):
        assert "1 parameters, the first is 'layers.0.weight', carry use_muon=True" in error


def build_with_foreign_parameter() -> None:
    with engine_for(config(2), model_parameters=[*UnevenLM().parameters()]):
        pass


def test_parameters_of_another_model_are_refused(ranks: RankPool) -> None:
    for error in ranks.errors(build_with_foreign_parameter):
        assert "param group 0, position 0: the parameter of shape (37, 24) is not in the model" in error


def build_with_other_options_on_rank_1(changes: dict[str, Any]) -> None:
    settings = config(2)
    options = settings.pop("optimizer")["params"]
    if torch.distributed.get_rank() == 1:
        options |= changes
    model = UnevenLM()
    with engine_for(settings, model, optimizer=LayerWiseMuon(model.parameters(), **options)):
        pass


def build_with_another_model_on_rank_1() -> None:
    model = UnevenLM()
    if torch.distributed.get_rank() == 1:
        model.lm_head = nn.Linear(24, 38, bias=False)
    with engine_for(config(2), model):
        pass


def test_ranks_that_plan_differently_all_stop_and_name_the_first_parameter(ranks: RankPool) -> None:
    for error in ranks.errors(build_with_another_model_on_rank_1):
        assert "rank 0 has 'lm_head.weight 37x24 float32 adamw', rank 1 has 'lm_head.weight 38x24" in error


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"weight_decay": 0.3}, "matrix.weight_decay: 0.1 on rank 0, 0.3 on rank 1"),
        ({"adamw": {**ADAMW, "eps": 0.3}}, "elementwise.eps: 1e-08 on rank 0, 0.3 on rank 1"),
        ({"exclude": ["layers.2.*"]}, "exclude: () on rank 0, ('layers.2.*',) on rank 1"),
    ],
)
def test_ranks_with_other_options_all_stop_and_show_both(ranks: RankPool, changes: dict[str, Any], found: str) -> None:
    for error in ranks.errors(build_with_other_options_on_rank_1, changes):
        assert error == f"RanksDisagree: LayerWiseMuon: ranks differ in {found}; give all ranks the same"


def test_a_failure_on_one_rank_stops_the_others_with_its_message(ranks: RankPool) -> None:
    first, second = ranks.errors(build_with_other_options_on_rank_1, {"include": ["nowhere"]})
    assert "include: 'nowhere' matches no parameter name" in second
    assert first.startswith("RuntimeError: LayerWiseMuon: rank 1 failed with ValueError(")


def step_after_storage_moved() -> None:
    with engine_for(config(2)) as engine:
        if torch.distributed.get_rank() == 1:
            engine.module.layers[5].weight._hp_mapping.hp_fragment_address.start += 1
        train(engine, 1)


def test_storage_other_than_planned_stops_all_ranks_before_the_first_exchange(ranks: RankPool) -> None:
    first, second = ranks.errors(step_after_storage_moved)
    assert second.startswith("RuntimeError: parameter 'layers.5.weight': planned Fragment(rank=1")
    assert "rank 1 failed" in first


def step_with_smaller_partitions_than_planned() -> None:
    with engine_for(config(2)) as engine:
        binding = engine.basic_optimizer._binding
        layout = binding.plans[0].layout
        binding.plans[0] = replace(binding.plans[0], layout=replace(layout, partition_numel=layout.partition_numel + 2))
        train(engine, 1)


def test_partitions_smaller_than_planned_stop_all_ranks(ranks: RankPool) -> None:
    for error in ranks.errors(step_with_smaller_partitions_than_planned):
        assert re.match(r"RuntimeError: muon: planned \d+ elements a rank, found \d+", error)


def modelled_on_this_device() -> bool:
    with engine_for(config(2)) as engine:
        plan = engine.basic_optimizer._binding.plans[0].matrices
        return plan.modelled[0][1] == modelled_time(plan, MACHINES["cpu"])


def test_policies_are_compared_on_the_kind_of_machine_that_trains(ranks: RankPool) -> None:
    assert all(ranks.run(modelled_on_this_device))


def step_without_engine() -> None:
    LayerWiseMuon(UnevenLM().parameters()).step()


def test_an_optimizer_without_an_engine_does_not_step(ranks: RankPool) -> None:
    for error in ranks.errors(step_without_engine):
        assert "this LayerWiseMuon has no engine; give it to deepspeed.initialize" in error


def announced(settings: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    logger, warn = deepspeed_engine.logger, deepspeed_engine.logger.warning
    logger.warning = lambda message, *args: lines.append(message)
    try:
        build(settings)
    finally:
        logger.warning = warn
    return [line for line in lines if "gradient_clipping" in line]


def test_deepspeeds_default_clipping_is_announced_once(ranks: RankPool) -> None:
    settings = config(2)
    del settings["gradient_clipping"]
    first, second = ranks.run(announced, settings)
    assert len(first) == 1
    assert "clips gradients at its default norm of 1.0; set it to 0" in first[0]
    assert second == []
    assert ranks.run(announced, config(2, clip=0.0)) == [[], []]


def later_group() -> None:
    optimizer = LayerWiseMuon(UnevenLM().parameters(), **MUON, adamw=ADAMW)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


def test_no_param_group_is_added_later(ranks: RankPool) -> None:
    for error in ranks.errors(later_group):
        assert "takes no param group after it was made" in error


def build_adamw_on_our_groups() -> None:
    """As Accelerate does to an optimizer object where the configuration offloads."""
    settings = config(2)
    options = settings.pop("optimizer")["params"]
    model = UnevenLM()
    groups = LayerWiseMuon(model.parameters(), **options).param_groups
    own = [{"params": group["params"], "lr": group["lr"], "from_group": group["from_group"]} for group in groups]
    with engine_for(settings, model, optimizer=torch.optim.AdamW(own)):
        pass


def test_another_optimizer_on_our_param_groups_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(build_adamw_on_our_groups):
        assert error.startswith("ValueError: AdamW was built on the param groups of LayerWise or LayerWiseMuon, ")
