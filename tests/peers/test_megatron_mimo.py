"""A MimoModel of megatron-core's, trained on CPUs and saved by its own dist_checkpointing: every tensor is read."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint
from tests.peers.stand_ins import on_cpus, without_triton
from tests.support.checkpoint_contents import params_of, same
from tests.support.command_line import succeeds
from tests.support.ranks import RankPool, gathered

WIDTH, VOCABULARY, IMAGE, LENGTH, PATCHES, STEPS = 32, 64, 63, 12, 5, 3  # IMAGE is the token of a patch
ENCODER, LANGUAGE = "images", "language"
ARGUMENTS = {"num_layers": 2, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
ARGUMENTS |= {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
ARGUMENTS |= {"untie_embeddings_and_output_weights": True}
Truth = dict[str, dict[str, Any]]


def grid_of(first: int, ranks: int) -> Any:
    """Data-parallel ranks, with every group that Megatron asks for."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    grid = HyperCommGrid([1, 1, 1, ranks], ["tp", "cp", "pp", "dp"], rank_offset=first, backend="gloo")
    grid.register_view("expert", [1, 1, 1, ranks], ["expt_tp", "ep", "pp", "expt_dp"], shared_dims=["pp"])
    for dims in (["tp"], ["cp"], ["pp"], ["dp"], ["dp", "cp"], ["tp", "pp"], ["tp", "cp", "dp", "pp"]):
        grid.create_pg(dims)
    for dims in (["ep"], ["expt_dp"], ["expt_tp", "ep", "pp"]):
        grid.create_pg(dims, view="expert")
    return grid


def groups_of(grid: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not grid.is_current_rank_in_grid():
        return None
    dims = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "dp_cp": ["dp", "cp"], "mp": ["tp", "pp"]}
    dims |= {"intra_dist_opt": ["tp", "cp", "dp", "pp"]}
    found = {name: grid.get_pg(of) for name, of in dims.items()}
    expert = {"ep": "ep", "expt_dp": "expt_dp", "tp_ep_pp": ["expt_tp", "ep", "pp"]}
    found |= {name: grid.get_pg(of, view="expert") for name, of in expert.items()}
    return ProcessGroupCollection(**found, pos_embd=None, embd=None)


def config_of(width: int, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    options: dict[str, Any] = {"num_layers": 2, "hidden_size": width, "num_attention_heads": 4, "bf16": True}
    options |= dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
    options |= dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False)
    options |= dict.fromkeys(("persist_layer_norm", "apply_rope_fusion", "gradient_accumulation_fusion"), False)
    options |= {"use_cpu_initialization": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    return TransformerConfig(**{**options, "init_method_std": 0.3, **more})


def model_of(grids: dict[str, Any], groups: dict[str, Any]) -> Any:
    """CLIP's vision tower and a projection, before a GPT; on each rank the modules whose grid has it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    gpt = {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "num_query_groups": 2}
    gpt |= {"activation_func": torch.nn.functional.silu, "ffn_hidden_size": 48}
    language = ModuleSpec(
        module=GPTModel,
        params={
            "config": config_of(WIDTH, **gpt),
            "transformer_layer_spec": get_gpt_layer_local_spec(normalization="RMSNorm"),
            "vocab_size": VOCABULARY,
            "max_sequence_length": LENGTH,
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": False,
            "parallel_output": False,
            "pg_collection": groups[LANGUAGE],
        },
    )
    tower = {"transformer_config": config_of(WIDTH // 2), "transformer_layer_spec": get_vit_layer_with_local_spec()}
    tower |= {"patch_dim": 4, "img_h": 8, "img_w": 8, "pg_collection": groups[ENCODER], "ln_pre_impl": WrappedTorchNorm}
    project = {"config": config_of(WIDTH, ffn_hidden_size=WIDTH), "projector_type": "mlp", "input_size": WIDTH // 2}
    project |= {"submodules": MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)}
    vision = ModuleSpec(
        module=VisionModalitySubmodules,
        params={"pg_collection": groups[ENCODER]},
        submodules={
            "encoders": {"clip": ModuleSpec(module=CLIPViTModel, params=tower)},
            "input_projections": [
                ModuleSpec(module=MultimodalProjector, params={**project, "pg_collection": groups[ENCODER]})
            ],
        },
    )
    torch.manual_seed(5)
    return MimoModel(MimoModelConfig(language, {ENCODER: vision}, {ENCODER: IMAGE}, grids))


def wrap(model: Any, groups: dict[str, Any], distributed: bool) -> None:
    """The modules, as Megatron's trainer does: in 16 bits, in data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    def in_parallel(name: str, module: Any, config: Any) -> Any:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        half = Float16Module(config, module)
        half.forward = partial(half.forward, fp32_output=name == LANGUAGE)
        return DistributedDataParallel(config, settings, half, pg_collection=groups[name])

    if model.language_model is not None:
        model.language_model = in_parallel(LANGUAGE, model.language_model, model.language_model.config)
    for name, module in model.modality_submodules.items():
        config = module.encoders["clip"].config
        model.modality_submodules[name] = in_parallel(name, module, config)


def optimizer_of(model: Any, kind: str) -> Any:
    from megatron.core.models.mimo.optimizer import get_mimo_optimizer
    from megatron.core.optimizer import OptimizerConfig

    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bf16": True, "clip_grad": 1.0}
    options |= {"params_dtype": torch.bfloat16, "use_distributed_optimizer": kind == "distributed adam"}
    muon = kind == "muon"
    options |= {"optimizer": "muon" if muon else "adam", "use_layer_wise_distributed_optimizer": muon}
    return get_mimo_optimizer(model, OptimizerConfig(**options))


def step(model: Any, optimizer: Any, number: int, colocated: bool) -> None:
    """With the gradients of a batch, or with random ones where the modules are on different ranks."""
    for module in model._active_ddp_modules():
        module.zero_grad_buffer()
    optimizer.zero_grad()
    drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
    if colocated:
        tokens = torch.randint(IMAGE, (2, LENGTH), generator=drawn)
        tokens[:, :PATCHES] = IMAGE
        images = torch.randn(2, 3, 8, 8, generator=drawn).bfloat16()
        labels = torch.randint(IMAGE, (2, LENGTH), generator=drawn)
        inputs = {ENCODER: {"clip": {"x": images}}}
        loss, _ = model(tokens, torch.arange(LENGTH).expand(2, -1), labels=labels, modality_inputs=inputs)
        loss.float().mean().backward()
    else:
        for param in model.parameters():
            param.main_grad.copy_(torch.randn(param.shape, generator=drawn))
    for module in model._active_ddp_modules():
        module.finish_grad_sync()
    assert optimizer.step()[0]


def live(model: Any, optimizer: Any) -> list[tuple[str, str, int, Tensor]]:
    """What this rank has: parameter, key, the place of the first element in the whole, elements. They are read in the
    modules and torch's optimizers, without Megatron's code for checkpoints."""
    found = []
    for module, info in optimizer.module_infos.items():
        if not info.is_active:
            continue
        wrapped = model.language_model if module == LANGUAGE else model.modality_submodules[module]
        names = {param: f"{module}.{name}" for name, param in wrapped.module.module.named_parameters()}
        found += [(name, "weight", 0, param.detach().clone()) for param, name in names.items()]
        for inner in info.optimizer.chained_optimizers:
            is_flat = hasattr(inner, "shard_fp32_from_float16_groups")  # a DistributedOptimizer's
            kinds = ("model_float16", "shard_fp32_from_float16") if is_flat else ("float16", "fp32_from_float16")
            of_groups = zip(*(getattr(inner, f"{kind}_groups") for kind in kinds))
            in_groups = [(param, group) for group in inner.optimizer.param_groups for param in group["params"]]
            decays = {param: torch.tensor(group["wd_mult"] != 0) for param, group in in_groups}
            for weight, master in (pair for of_group in of_groups for pair in zip(*of_group)):
                start = inner._get_model_param_range_map(weight)["param"].start if is_flat else 0
                state = {"fp32": master, "decays": decays[master], **inner.optimizer.state[master]}
                found += [(names[weight], key, start, value.detach().clone()) for key, value in state.items()]
    return found


def whole(of_ranks: list[list[tuple[str, str, int, Tensor]]]) -> Truth:
    """All parts, in the shapes of the weights; NaN where there is none."""
    shapes = {name: part.shape for rank in of_ranks for name, key, _, part in rank if key == "weight"}
    found: Truth = {}
    for name, key, start, part in (each for rank in of_ranks for each in rank):
        of_name = found.setdefault(name, {})
        if not part.ndim:
            of_name[key] = part.item()
            continue
        empty = torch.full((shapes[name].numel(),), torch.nan, dtype=part.dtype)
        of_name.setdefault(key, empty.view(shapes[name])).view(-1)[start : start + part.numel()] = part.flatten()
    return found


def saved(folder: str, kind: str, colocated: bool) -> Truth:
    """On a rank: train a model, with both modules on all ranks or each on its own, and save it."""
    with without_triton(), on_cpus():
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        parallel_state.initialize_model_parallel()
        world = dist.get_world_size()
        places = {ENCODER: (0, world), LANGUAGE: (0, world)} if colocated else {ENCODER: (0, 1), LANGUAGE: (1, 1)}
        grids = {name: grid_of(*place) for name, place in places.items()}
        groups = {name: groups_of(grid) for name, grid in grids.items()}
        model = model_of(grids, groups)
        wrap(model, groups, distributed=kind == "distributed adam")
        optimizer = optimizer_of(model, kind)
        for number in range(STEPS):
            step(model, optimizer, number, colocated)
        metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if kind == "distributed adam":
            metadata |= {"distrib_optim_sharding_type": "fully_reshardable"}
            metadata |= {"distrib_optim_fully_reshardable_mem_efficient": False}
        said = {"optimizer": kind.split()[-1], "data_parallel_size": world, **ARGUMENTS}
        state: dict[str, Any] = {"args": argparse.Namespace(**said), "checkpoint_version": 3.0, "iteration": STEPS}
        state["model"] = model.sharded_state_dict(metadata=metadata)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        with mock.patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False):  # it starts a process
            dist_checkpointing.save(state, folder, content_metadata=metadata)
        filesystem_async._results_queue = None
        gc.collect()  # and ends it
        return whole(gathered(live(model, optimizer)))


MAP = """
def mine(name, tensor, model):
    return {name.replace("images.encoders.clip", "vision").replace("language.", "text."): tensor}
"""


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "apart"])
@pytest.mark.parametrize("kind", ["adam", "distributed adam", "muon"])
def test_every_tensor_of_a_mimo_model_is_read(
    ranks_to_spoil: RankPool, tmp_path: Path, kind: str, colocated: bool
) -> None:
    """As it was in memory; also of one module by itself, and under other names."""
    step, names = tmp_path / "iter_0000003", tmp_path / "names.py"
    step.mkdir()
    names.write_text(MAP)
    truth = ranks_to_spoil.run(saved, str(step), kind, colocated)[0]
    assert (len(truth), sum(name.startswith(ENCODER) for name in truth)) == (48, 33)
    found = formats.read(step)
    assert_equal(found, truth)
    for name, of_name in params_of(found).items():
        assert same(of_name["weight"], truth[name]["weight"]), name
        assert (found.groups[of_name["group"]]["wd_mult"] != 0) == truth[name]["decays"], name
    for module in (ENCODER, LANGUAGE):
        succeeds("convert", step, tmp_path / module, "--to", "dcp", "--module", module)
        succeeds("diff", step, tmp_path / module, "--module", module)
        of_module = {name.removeprefix(f"{module}."): of for name, of in truth.items() if name.startswith(module)}
        assert_equal(formats.read(tmp_path / module), of_module)
    succeeds("convert", step, tmp_path / "mapped", "--to", "universal", "--map", f"{names}:mine")
    succeeds("diff", step, tmp_path / "mapped", "--map", f"{names}:mine")
    new = {name: name.replace("images.encoders.clip", "vision").replace("language.", "text.") for name in truth}
    assert_equal(formats.read(tmp_path / "mapped"), {new[name]: of_name for name, of_name in truth.items()})
    family = ("--module", LANGUAGE, "--source-names", "megatron-core", "--names", "hf-llama")
    succeeds("convert", step, tmp_path / "llama", "--to", "safetensors", *family)
    read = load_file(tmp_path / "llama" / "model.safetensors")
    halves = [read[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert len(read) == 3 + 2 * 9
    assert torch.equal(torch.cat(halves), truth["language.decoder.layers.1.mlp.linear_fc1.weight"]["weight"])


def assert_equal(found: Checkpoint, truth: Truth) -> None:
    """Masters, states and counts, bit for bit."""
    assert found.params.keys() == truth.keys()
    for name, of_name in truth.items():
        param = found.params[name]
        states = {key: tensor.read() for key, tensor in param.states.items() if key != "fp32"}
        here = {"fp32": param.best.read(), **states, **({} if param.step is None else {"step": param.step})}
        assert same(here, {key: value for key, value in of_name.items() if key not in ("weight", "decays")}), name
