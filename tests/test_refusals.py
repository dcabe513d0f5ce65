"""What cannot work under DeepSpeed is refused by name when the engine is built, on every rank, and nothing hangs."""

import copy
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_ep
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lwopt_backend.config.versions import VERSIONS
from lwopt_backend.integrations import deepspeed_zero
from lwopt_backend.integrations.deepspeed import versions
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.models import UnevenLM
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.test_zero_tensor_parallel import ModelParallel
from tests.zero import ADAMW, BF16, MUON, OWNED, build, config, engine_for, train

ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False, "offload": False}
NVME = {"device": "nvme", "nvme_path": "there"}
FP16 = {"fp16": {"enabled": True}}
OFFLOAD = "zero_optimization.offload_optimizer"
OFF = "is on; switch it off"
SUPPORTED, OLDEST = VERSIONS["deepspeed"].supported, VERSIONS["deepspeed"].tested[0]
AT_STAGE_0 = "zero_optimization.stage is 0 with a model trained in"


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **options}}


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


OF_BOTH: list[tuple[dict[str, Any], str]] = [
    (zero(round_robin_gradients=True), f"zero_optimization.round_robin_gradients {OFF}"),
    (zero(elastic_checkpoint=True), f"zero_optimization.elastic_checkpoint {OFF}"),
    (zero(zenflow=ZENFLOW), f"zero_optimization.zenflow {OFF}"),
    ({"compile": {"deepcompile": True}}, f"compile.deepcompile {OFF}"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, f"bf16.bf16_master_weights_and_grads {OFF}"),
]
OF_ZERO: list[tuple[dict[str, Any], str]] = [
    *(
        (section | zero(stage=stage), f"{kind}.{kind}_master_weights_and_grads {OFF}")
        for kind, stage in (("bf16", 1), ("bf16", 3), ("fp16", 1), ("fp16", 2), ("fp16", 3))
        for section in [{kind: {"enabled": True, f"{kind}_master_weights_and_grads": True}}]
    ),
    (zero(offload_optimizer=NVME), f"{OFFLOAD}.device is 'nvme'"),
    (zero(stage=3, offload_optimizer=NVME), f"{OFFLOAD}.device is 'nvme'"),
    (zero(stage=3, offload_param=NVME), "zero_optimization.offload_param.device is 'nvme'"),
    (zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5}), f"{OFFLOAD}.ratio is 0.5"),
    (zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}), f"{OFFLOAD}.super_offload is on"),
    (zero(stage=0) | BF16, f"{AT_STAGE_0} bfloat16: DeepSpeed then keeps full"),
    (zero(stage=0) | FP16, f"{AT_STAGE_0} float16: DeepSpeed then keeps full"),
    (zero(stage=0) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, f"{AT_STAGE_0} bfloat16"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype is float16"),
    (scheduler("ReduceLROnPlateau", factor=0.5), "call engine.step(lr_kwargs={'metrics': loss})"),
]
OF_OWNED: list[tuple[dict[str, Any], str]] = [
    (zero(stage=3), "zero_optimization.stage is 3, and DeepSpeed then shards the parameters; use stage 0, 1 or 2"),
    (zero(offload_optimizer={"device": "cpu"}), f"{OFFLOAD}.device is 'cpu'"),
    (zero(parameter_alignment=True), f"zero_optimization.parameter_alignment {OFF}"),
    (zero(zero_quantized_gradients=True), f"zero_optimization.zero_quantized_gradients {OFF}"),
    (BF16 | {"communication_data_type": "fp32"}, "communication_data_type is float32, but gradients are sent as"),
    (BF16 | {"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype is float16 and the model is"),
]
SETTINGS = [*(("zero", *row) for row in (*OF_BOTH, *OF_ZERO)), *(("owned", *row) for row in (*OF_BOTH, *OF_OWNED))]


@pytest.mark.parametrize(("storage", "changes", "message"), SETTINGS)
@on_ranks(2)
def test_settings_that_cannot_work_are_refused(storage: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(config(2, **(OWNED if storage == "owned" else {})) | zero() | changes)
    error = str(caught.value)
    assert message in error
    if "scheduler" in changes:
        assert (
            f"without a metric, found {changes['scheduler']['type']!r}" in error
            and "lr_scheduler=lambda optim" in error
        )
    elif storage == "owned":
        assert "LayerWiseMuon with owned storage does not support this configuration" in error


# What is wrong without a model is in test_doors.py.
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["*"]}, "none of the 11 trained parameters is a matrix"),
        (
            {"ns_method": "gram-newton-schulz"},
            "expected Hopper and Blackwell GPUs by NVIDIA for its kernels, found a device",
        ),
        ({**OWNED, "ns_method": "quack-kernels"}, "ns_method is 'quack-kernels': expected Ampere and"),
        ({**OWNED, "group_size": 3}, "group_size: expected a divisor of the 2 data-parallel ranks, found 3"),
        ({"clip_groups": {"a": {"params": "gate.*", "max_norm": 1.0}}}, "'clip_groups' is for fully_shard models and"),
        ({**OWNED, "clip_groups": {}}, "for plain models, but this optimizer is for DeepSpeed; leave it out"),
        ({**OWNED, "exclude": ["layers.0.wieght"]}, "exclude: 'layers.0.wieght' matches no parameter name; did you"),
    ],
)
@on_ranks(2)
def test_options_that_do_not_fit_the_model_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(config(2, **options))
    build(config(2, exclude=["*"], allow_no_matrix=True))


@pytest.mark.parametrize("storage", ["zero", "owned"])
@on_ranks(2)
def test_errors_of_layer_wise_say_layer_wise(storage: str) -> None:
    options = {"matrix": {"name": "muon", "lr": 0.02}, "elementwise": {"name": "adamw", "lr": 3e-3}}
    entry = {"type": "LayerWise", "params": {**options, "storage": storage, "report": False}}
    settings = config(2) | {"optimizer": entry} | zero()
    with pytest.raises(ValueError, match="^LayerWise .*does not support this configuration; change:"):
        build(settings | {"compile": {"deepcompile": True}})
    with pytest.raises(ValueError, match="^LayerWise: unknown key 'matrx'"):
        build(settings | {"optimizer": {**entry, "params": {"matrx": "muon"}}})
    says = "LayerWise: rank 0 failed with" if dist.get_rank() else "the checkpoint 'nowhere/none'"
    with engine_for(settings) as engine, pytest.raises((ValueError, RuntimeError), match=f"^{says}"):
        engine.load_checkpoint("nowhere", tag=None if dist.get_rank() else "none")


# Models and ranks
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHT = "'layers.0.weight' of shape (63, 24)"
ON_OWNED = config(2, **OWNED) | zero()


def shards(settings: dict[str, Any], vocabulary: int = 32) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **SIZES))
    build(settings | {"tensor_parallel": {"autotp_size": 2}}, model)


def shards_by_an_mpu(settings: dict[str, Any], **marks: Any) -> None:
    model, mpu = UnevenLM(), ModelParallel(dist.get_world_size())
    vars(model.layers[0].weight).update(marks)
    mpu.get_tensor_model_parallel_world_size = lambda: marks.get("ranks", 2)
    build(settings, model, mpu=mpu)


def marked(**marks: Any) -> Callable[..., None]:
    return partial(shards_by_an_mpu, **marks)


def shards_without_marks(settings: dict[str, Any]) -> None:
    build(settings, UnevenLM(seed=dist.get_rank()), mpu=ModelParallel(dist.get_world_size()))


def shards_marked_on_one_rank(settings: dict[str, Any]) -> None:
    model = UnevenLM(seed=dist.get_rank())
    shared = UnevenLM().state_dict()
    model.load_state_dict({**shared, "embedding.weight": model.embedding.weight})
    if dist.get_rank():
        vars(model.embedding.weight).update(tensor_model_parallel=True, partition_dim=0)
    build(settings, model, mpu=ModelParallel(dist.get_world_size()))


def experts_by_auto_ep(settings: dict[str, Any]) -> None:
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **SIZES))
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    # It moves transformers' recorders of router outputs, in a way that transformers 5 does not know.
    with mock.patch.object(auto_ep.AutoEP, "_retarget_transformers_output_recorders"):
        build(settings | {"expert_parallel": experts}, model)


def experts(settings: dict[str, Any]) -> None:
    model = nn.Sequential(MoE(hidden_size=8, expert=nn.Linear(8, 8), num_experts=2, ep_size=1))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    build(settings, model, model_parameters=groups)


def stages(settings: dict[str, Any]) -> None:
    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.MSELoss())
    build(settings | {"zero_optimization": {"stage": 1}}, model)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (shards, config(3), "tensor parallelism of 2 at zero_optimization.stage 3; use stage 0, 1 or 2"),
        (shards, ON_OWNED, 'tensor parallelism of 2; use "storage": "zero"'),
        (partial(shards, vocabulary=33), config(2), "is an unequal shard of (33, 16) by AutoTP"),
        (marked(), ON_OWNED, 'tensor parallelism of 2; use "storage": "zero"'),
        (marked(tensor_model_parallel=True), config(2), f"{WEIGHT} is marked as tensor-parallel"),
        (marked(sequence_parallel=True), config(2), f"{WEIGHT} is marked sequence"),
        (shards_without_marks, config(2), "'embedding.weight': expected a mark of tensor parallelism"),
        (shards_marked_on_one_rank, config(2), "'embedding.weight': expected a mark of tensor parallelism"),
        (marked(ranks=1), config(2), "mpu.get_model_parallel_world_size() is 2, of which 1"),
        (experts_by_auto_ep, config(2), "expert_parallel.enabled is true (AutoEP), which is not tested"),
        (experts, ON_OWNED, "the model has DeepSpeed's expert layers"),
        (stages, ON_OWNED, "the model is a PipelineModule"),
    ],
)
def test_models_over_other_ranks_are_refused(
    ranks_to_spoil: RankPool, make: Callable[..., None], settings: dict[str, Any], message: str
) -> None:
    for error in ranks_to_spoil.errors(make, settings):
        assert message in error


def tags_for_deepspeeds_own_muon() -> None:
    model = UnevenLM()
    model.lm_head.weight.use_muon = False
    model.layers[0].weight.use_muon = True
    build(config(2), model)


def parameters_of_another_model() -> None:
    build(config(2), model_parameters=[*UnevenLM().parameters()])


def another_optimizer_on_our_param_groups() -> None:
    """As Accelerate does to an optimizer object where the configuration offloads."""
    settings = config(2)
    options = settings.pop("optimizer")["params"]
    model = UnevenLM()
    groups = LayerWiseMuon(model.parameters(), **options).param_groups
    own = [{"params": group["params"], "lr": group["lr"], "from_group": group["from_group"]} for group in groups]
    build(settings, model, optimizer=torch.optim.AdamW(own))


def smaller_partitions_than_planned() -> None:
    with engine_for(config(2)) as engine:
        binding = engine.basic_optimizer._binding
        plan = binding.plans[0]
        longer = replace(plan.layout, partition_numel=plan.layout.partition_numel + 2)
        binding.units[0] = replace(binding.units[0], plan=replace(plan, layout=longer))
        train(engine, 1)


def offloading_states() -> None:
    with engine_for(ON_OWNED) as engine:
        engine.offload_states()


def state_of_other_partitions() -> None:
    with engine_for(config(2)) as engine:
        train(engine, 1)
        state = engine.basic_optimizer.state_dict()
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"][:-2]
        engine.basic_optimizer.load_state_dict(state)


def other_options_on_rank_1(settings: dict[str, Any], **changes: Any) -> None:
    settings = copy.deepcopy(settings)
    options = settings.pop("optimizer")["params"]
    if dist.get_rank() == 1:
        options |= changes
    model = UnevenLM()
    build(settings, model, optimizer=LayerWiseMuon(model.parameters(), **options))


def storage_other_than_planned_on_rank_1() -> None:
    with engine_for(config(2)) as engine:
        if dist.get_rank() == 1:
            engine.module.layers[5].weight._hp_mapping.hp_fragment_address.start += 1
        train(engine, 1)


def error_of(make: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
        make(*args, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


OF_ANOTHER_OPTIMIZER = (
    "^ValueError: AdamW: expected the engine's parameters, found the param groups of LayerWise or LayerWiseMuon, "
)
UNTRAINABLE: Any = [
    (tags_for_deepspeeds_own_muon, "1 parameters, the first is 'layers.0.weight', carry use_muon=True"),
    (parameters_of_another_model, r"group 0, position 0: the parameter of shape \(37, 24\) is not in the model"),
    (another_optimizer_on_our_param_groups, OF_ANOTHER_OPTIMIZER),
    (smaller_partitions_than_planned, r"^RuntimeError: muon: expected \d+ planned elements, found \d+"),
    (offloading_states, "offloading: expected .storage.: .zero., found .owned."),
    (state_of_other_partitions, "param group 0: expected number of elements of 'momentum_buffer' 2546, the ch"),
]


@pytest.mark.parametrize(("make", "message"), UNTRAINABLE)
@on_ranks(2)
def test_what_cannot_be_trained_is_an_error_on_every_rank(make: Callable[[], None], message: str) -> None:
    assert re.search(message, error_of(make))


@on_ranks(2)
def test_a_failure_on_one_rank_stops_the_others_with_its_message() -> None:
    """When an engine of either storage is built; and before the first exchange, where storage is not as planned."""
    for settings in (config(2), ON_OWNED):
        error = error_of(other_options_on_rank_1, settings, include=["nowhere"])
        if dist.get_rank() == 1:
            assert "include: 'nowhere' matches no parameter name" in error
        else:
            assert error.startswith("RuntimeError: LayerWiseMuon: rank 1 failed with ValueError(")
    planned = "RuntimeError: parameter 'layers.5.weight': expected Fragment(rank=1"
    assert ("rank 1 failed", planned)[dist.get_rank()] in error_of(storage_other_than_planned_on_rank_1)


def test_an_optimizer_belongs_to_its_engine() -> None:
    optimizer = LayerWiseMuon(UnevenLM().parameters(), **MUON, adamw=ADAMW)
    with pytest.raises(RuntimeError, match="LayerWiseMuon: expected an engine; pass it to deepspeed.initialize"):
        optimizer.step()
    with pytest.raises(TypeError, match="cannot be copied or pickled; use state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(
        (NotImplementedError, RuntimeError, ValueError), match="expected all param groups in the constructor"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


# Which DeepSpeed is supported, and what one that is not, or that lacks names, is told
def installed() -> tuple[str, str]:
    return deepspeed.__version__, str(Path(deepspeed.__file__).parent)


def test_ranks_run_the_deepspeed_that_was_asked_for(ranks: RankPool) -> None:
    """scripts/versions.py says which one it wants tested; without it, it is the one that pip installed."""
    asked = os.environ.get("DEEPSPEED_UNDER_TEST") or importlib.metadata.version("deepspeed")
    assert deepspeed.__version__ == asked
    assert ranks.run(installed) == [installed()] * 2


def test_names_that_are_missing_are_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check()  # this one has them all
    versions.check.cache_clear()
    monkeypatch.delattr(DeepSpeedEngine, "zero_sub_group_size")
    monkeypatch.setitem(versions.NAMES, "deepspeed.gone", "anything")
    missing = "deepspeed.runtime.engine.DeepSpeedEngine.zero_sub_group_size, deepspeed.gone, "
    with pytest.raises(
        ImportError, match=f"DeepSpeed {deepspeed.__version__}: expected {missing}.*deepspeed{SUPPORTED}"
    ):
        deepspeed_zero.register()


OLDER, NEWER = "an older one lacks methods", "a newer one may have moved methods"
REASONS = {"0.18.9": OLDER, "0.19.6": OLDER, "0.20.0rc1": NEWER, "0.20.0+cuda": NEWER, "1.0": NEWER}
WRONG_ON_CPUS = {  # what 0.19.7 does there, by the settings that make it
    "zero_optimization.stage is 3 on a CPU, where DeepSpeed 0.19.7 uses parameters before all": config(3),
    "zero_optimization.contiguous_gradients is false on a CPU, where DeepSpeed 0.19.7 does not reduce": config(1),
}


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (OLDEST, f"{OLDEST}+local", "0.19.99", "0.19.9.dev0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        versions.check.__wrapped__()
    for version, reason in REASONS.items():
        monkeypatch.setattr(deepspeed, "__version__", version)
        with pytest.raises(ImportError) as raised:
            versions.check.__wrapped__()
        message = str(raised.value)
        assert f"expected DeepSpeed {SUPPORTED}, found {version}: {reason}" in message
        assert f"pip install 'deepspeed{SUPPORTED}'" in message
        assert ("a newer lwopt_backend" in message) == (reason == NEWER)


@pytest.mark.parametrize("message", WRONG_ON_CPUS)
@on_ranks(2)
def test_what_the_oldest_gets_wrong_on_cpus_is_refused_with_it_only(message: str) -> None:
    """What is refused depends on DeepSpeed's version."""
    settings = copy.deepcopy(WRONG_ON_CPUS[message])
    settings["zero_optimization"]["contiguous_gradients"] = False
    if deepspeed.__version__ != "0.19.7":
        build(settings)
    with mock.patch.object(deepspeed, "__version__", "0.19.7"), pytest.raises(Exception, match=re.escape(message)):
        build(settings)
