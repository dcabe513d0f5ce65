"""Megatron on CPU ranks, started by test_megatron.py with torchrun: its own model, optimizer, and code that loads.

``core KIND FOLDER TRUTH``: megatron-core alone loads FOLDER at DP 2, TP 2 and PP 2, and holds what is in TRUTH.
``training KIND FOLDER TRUTH STEPS OUT FLAGS``: Megatron's own entry, from its sources, does so through its
``load_checkpoint``, then trains STEPS steps and writes what its optimizer holds to OUT.

Only names of devices, CUDA's own calls and collectives that gloo lacks are replaced, before Megatron is imported.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
WIDTH, HEADS, GROUPS, SIZE, INNER, VOCABULARY, LENGTH, LAYERS = 32, 4, 2, 8, 48, 64, 16, 2
Truth = dict[str, dict[str, Tensor]]  # by parameter and state, whole


# CUDA on a CPU


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(device: Any) -> Any:
            return CPU if str(device).startswith("cuda") and isinstance(device, (str, torch.device)) else device

        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            index = isinstance(kwargs["device"], int)
            kwargs["device"] = CPU if index else moved(kwargs["device"])
        return func(*map(moved, args), **kwargs) if args and func is not torch.device else func(*args, **kwargs)


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Done:
    def wait(self, *_: Any) -> bool:
        return True


def kind_of_tensor(name: str, dtype: torch.dtype) -> type:
    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, Tensor) and value.dtype == dtype

        def __call__(cls, *given: Any) -> Tensor:
            values = given and isinstance(given[0], (list, tuple))
            return torch.tensor(*given, dtype=dtype) if values else torch.empty(*given, dtype=dtype)

    return Kind(name, (), {})


def pretend_cuda() -> None:
    OnCPU().__enter__()
    cuda, nothing, kind = torch.cuda, lambda *_, **__: None, Tensor.type

    def type_of(self: Tensor, *given: Any, **more: Any) -> Any:
        found = kind(self, *given, **more)
        return found if given or more or "cuda" in found else found.replace("torch.", "torch.cuda.", 1)

    Tensor.type = type_of
    Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    properties = types.SimpleNamespace(major=8, minor=0, total_memory=1 << 40, name="cpu", multi_processor_count=8)
    answers = {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **{"device_count": 8, "current_device": CPU, "get_device_capability": (8, 0), "get_device_name": "cpu"},
        **{"get_device_properties": properties, "is_current_stream_capturing": False, "mem_get_info": (1 << 40,) * 2},
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    silent = ("set_device", "synchronize", "empty_cache", "_lazy_init", "init", "manual_seed_all")
    for name in (*silent, "reset_peak_memory_stats"):
        setattr(cuda, name, nothing)
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda._lazy_call = lambda function, **_: function()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.default_generators = (torch.default_generator,)
    torch._C._cuda_setRNGState = torch.set_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    dtypes = {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32"}
    for name, dtype in {**dtypes, "Byte": "uint8", "Double": "float64"}.items():
        setattr(cuda, f"{name}Tensor", kind_of_tensor(name, getattr(torch, dtype)))


def pretend_nccl() -> None:
    all_gather, all_reduce = dist.all_gather, dist.all_reduce
    new_group, init = dist.new_group, dist.init_process_group

    def reduced(tensor: Tensor, op: Any, group: Any) -> Tensor:
        average = op == dist.ReduceOp.AVG
        all_reduce(tensor, op=dist.ReduceOp.SUM if average else op, group=group)
        return tensor.div_(dist.get_world_size(group)) if average else tensor

    def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        reduced(tensor, op, group)
        return Done() if async_op else None

    def scatter(
        output: Tensor, given: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        whole = reduced(given.clone(), op, group)
        output.copy_(whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)].view_as(output))
        return Done() if async_op else None

    def gather(output: Tensor, given: Tensor, group: Any = None, async_op: bool = False) -> Any:
        parts = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
        all_gather(parts, given.contiguous(), group=group)
        output.view(-1).copy_(torch.cat([part.view(-1) for part in parts]))
        return Done() if async_op else None

    def gather_uneven(outputs: list[Tensor], given: Tensor, group: Any = None, async_op: bool = False) -> Any:
        for rank, output in enumerate(outputs):
            if rank == dist.get_rank(group):
                output.copy_(given)
            if output.numel():
                dist.broadcast(output, src=rank if group is None else dist.get_global_rank(group, rank), group=group)
        return Done() if async_op else None

    @contextlib.contextmanager
    def coalesced(*_: Any, **__: Any) -> Iterator[Done]:
        yield Done()

    def on_gloo(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*given: Any, **more: Any) -> Any:
            more = {key: value for key, value in more.items() if key not in ("pg_options", "device_id")}
            return start(*[each for each in given if each not in ("nccl", "gloo")], **{**more, "backend": "gloo"})

        return started

    replaced = {
        **{"all_reduce": reduce, "all_gather": gather_uneven, "_coalescing_manager": coalesced},
        **dict.fromkeys(("reduce_scatter_tensor", "_reduce_scatter_base"), scatter),
        **dict.fromkeys(("all_gather_into_tensor", "_all_gather_base"), gather),
        **{"new_group": on_gloo(new_group), "init_process_group": on_gloo(init)},
    }
    for name, function in replaced.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)


class FusedAdam(torch.optim.Optimizer):
    """In place of Apex's and Transformer Engine's: like them it counts steps by group."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), step, lr = group["betas"], group["step"], group["lr"]
            for param in group["params"]:
                if param.grad is not None:
                    state, grad = self.state[param], param.grad.to(param.dtype)
                    first = state.setdefault("exp_avg", torch.zeros_like(param)).mul_(b1).add_(grad, alpha=1 - b1)
                    second = state.setdefault("exp_avg_sq", torch.zeros_like(param)).mul_(b2)
                    second.addcmul_(grad, grad, value=1 - b2)
                    root = (second / (1 - b2**step)).sqrt_().add_(group["eps"])
                    param.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, root, value=-lr / (1 - b1**step))


class Anything(types.ModuleType):
    """Triton, of whose kernels none is run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *given: Any, **more: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not more else Anything("value")

    def __or__(self, other: Any) -> Any:
        return self


def pretend_triton() -> None:
    """For Emerging-Optimizers, which also needs a word of Python 3.12."""
    import torch._dynamo
    import torch.utils._triton  # notes now that there is no Triton

    torch.utils._triton.has_triton_package()
    torch.compile = lambda *given, **_: given[0] if given else lambda function: function
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    for name in ("triton", "triton.language"):
        module = sys.modules[name] = Anything(name)
        module.__spec__, module.__version__ = importlib.machinery.ModuleSpec(name, None), "3.0.0"
    sys.modules["triton"].language, sys.modules["triton.language"].constexpr = sys.modules["triton.language"], int


def prepared() -> None:
    pretend_triton()
    pretend_cuda()
    pretend_nccl()


def with_fused_adam() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.optimizer"):
            for key, value in list(vars(module).items()):
                if value in (torch.optim.AdamW, torch.optim.Adam):
                    setattr(module, key, FusedAdam)
            vars(module).update({k: False for k in ("USING_PYTORCH_OPTIMIZER",) if hasattr(module, k)})
            vars(module).update({k: True for k in ("HAVE_APEX_OR_TE",) if hasattr(module, k)})


# What Megatron's optimizer holds


def names_of(chunks: list[Any]) -> dict[int, str]:
    """Names with the layers' numbers in the whole model, by the parameter's id."""
    found = {}
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for name, param in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
            found[id(param)] = ".".join(parts)
    return found


def held(optimizer: Any) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
    """The model's parameter, the first of its elements that this rank's optimizer has, and its state."""
    for leaf in getattr(optimizer, "chained_optimizers", ()):
        yield from held(leaf)
    if hasattr(optimizer, "chained_optimizers") or optimizer.optimizer is None:
        return
    sharded = hasattr(optimizer, "shard_fp32_from_float16_groups")
    kinds = ("model_float16_groups", "shard_fp32_from_float16_groups") if sharded else ("float16_groups",) * 2
    kinds = kinds if sharded else (kinds[0], "fp32_from_float16_groups")
    for models, mains in zip(*(getattr(optimizer, kind) for kind in kinds)):
        for model, main in zip(models, mains):
            start = optimizer._get_model_param_range_map(model)["param"].start if sharded else 0
            state = {key: value for key, value in optimizer.optimizer.state[main].items() if key != "step"}
            yield model, start, {"fp32_param": main, **state}


def of_rank(whole: Tensor, name: str, param: Any) -> Tensor:
    """This tensor-parallel rank's part; of gate and up, of each of them."""
    from megatron.core import parallel_state as ranks

    rank, size = ranks.get_tensor_model_parallel_rank(), ranks.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(param, "tensor_model_parallel", False):
        return whole
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, param.partition_dim)[rank]


def check(chunks: list[Any], optimizer: Any, truth: Truth) -> None:
    """All ranks' optimizers together hold ``truth``, to the bit; and the model the masters, rounded."""
    names, seen = names_of(chunks), set()
    for param, start, state in held(optimizer):
        name = names[id(param)]
        assert torch.equal(param, of_rank(truth[name]["fp32_param"], name, param).to(param.dtype)), name
        assert state.keys() == truth[name].keys(), (name, state.keys())
        for key, tensor in state.items():
            expected = of_rank(truth[name][key], name, param).flatten()[start : start + tensor.numel()]
            assert torch.equal(tensor.flatten(), expected), (name, key)
            seen.add((name, key))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, seen)
    assert set().union(*ranks) == {(name, key) for name, of in truth.items() for key in of}


def whole(chunks: list[Any], optimizer: Any) -> Truth:
    """What all data-parallel ranks hold together."""
    names, found = names_of(chunks), {}
    mine = [
        (names[id(p)], p.shape, start, {k: t.detach().clone() for k, t in of.items()})
        for p, start, of in held(optimizer)
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for name, shape, start, state in [entry for of_rank in ranks for entry in of_rank]:
        for key, tensor in state.items():
            flat = found.setdefault(name, {}).setdefault(key, torch.full(shape, torch.nan)).view(-1)
            flat[start : start + tensor.numel()] = tensor.flatten()
    return found


# megatron-core alone


def core(kind: str, folder: str, truth: Truth) -> None:
    class OrthogonalizedOptimizer(torch.optim.Optimizer):
        """Emerging-Optimizers 0.1's, which no package index has; to load, only its groups and states are needed."""

        def __init__(self, params: Any, lr: float, momentum_beta: float, *, weight_decay: float, **_: Any) -> None:
            super().__init__(params, dict(lr=lr, momentum_beta=momentum_beta, weight_decay=weight_decay))

    package = "emerging_optimizers.orthogonalized_optimizers"
    for name in (package.partition(".")[0], package, f"{package}.muon_utils"):
        sys.modules[name] = Anything(name)
    sys.modules[package].OrthogonalizedOptimizer = OrthogonalizedOptimizer

    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ranks
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    with_fused_adam()
    dist.init_process_group("gloo")
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2)):
        ranks.initialize_model_parallel(tensor, pipeline)
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            **{"num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": INNER, "num_attention_heads": HEADS},
            **{"num_query_groups": GROUPS, "normalization": "RMSNorm", "gated_linear_unit": True},
            **{"activation_func": torch.nn.functional.silu, "add_bias_linear": False, "bf16": True},
            **{"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline},
            **{"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "persist_layer_norm": False},
        )
        module = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=ranks.is_pipeline_first_stage(),
            post_process=ranks.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        sharded = kind == "adam"
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
        model = DistributedDataParallel(config, buffers, Float16Module(config, module))
        options = OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, use_distributed_optimizer=sharded)
        options.params_dtype = torch.bfloat16
        if sharded:
            optimizer = get_megatron_optimizer(options, [model])
        else:
            optimizer = get_megatron_muon_optimizer(options, [model], layer_wise_distributed_optimizer=True)
        wanted: dict[str, Any] = {"model": module.sharded_state_dict()}
        metadata = dist_checkpointing.load_content_metadata(folder)
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted["model"], is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load(wanted, folder)  # with its default strictness
        module.load_state_dict(loaded["model"], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
        check([model], optimizer, truth)
        if dist.get_rank() == 0:
            print(f"{kind} held at tp {tensor}, pp {pipeline}", flush=True)
        ranks.destroy_model_parallel()


# Megatron's own training, from its sources

FLAGS = {
    **{"num-layers": LAYERS, "hidden-size": WIDTH, "ffn-hidden-size": INNER, "num-attention-heads": HEADS},
    **{"num-query-groups": GROUPS, "kv-channels": SIZE, "normalization": "RMSNorm", "position-embedding-type": "rope"},
    **{"seq-length": LENGTH, "max-position-embeddings": LENGTH, "vocab-size": 61, "make-vocab-size-divisible-by": 2},
    **{"micro-batch-size": 1, "global-batch-size": 4, "train-iters": 10, "weight-decay": 0.1, "clip-grad": 1.0},
    **{"lr": 0.01, "min-lr": 0.001, "lr-decay-style": "linear", "lr-decay-iters": 10, "save-interval": 100},
    **{"attention-dropout": 0, "hidden-dropout": 0, "tokenizer-type": "NullTokenizer", "transformer-impl": "local"},
    **{"distributed-backend": "gloo", "ckpt-format": "torch_dist", "seed": 1, "distributed-timeout-minutes": 2},
}
SWITCHES = ["bf16", "group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear"]
SWITCHES += ["no-gradient-accumulation-fusion", "no-persist-layer-norm", "no-bias-swiglu-fusion", "no-bias-gelu-fusion"]
SWITCHES += [
    "no-bias-dropout-fusion",
    "no-masked-softmax-fusion",
    "no-rope-fusion",
    "no-check-for-nan-in-loss-and-grad",
]


def batch(step: int, number: int) -> Tensor:
    """Sample ``number`` of a step."""
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randint(0, VOCABULARY - 2, (1, LENGTH + 1), generator=generator)


def training(kind: str, folder: str, truth: Truth, steps: int, out: str, flags: list[str]) -> None:
    given = [word for key, value in FLAGS.items() for word in (f"--{key}", str(value))]
    optimizer = ["--optimizer", kind] + ["--use-distributed-optimizer"] * (kind != "dist_muon")
    sys.argv[1:] = [*given, *(f"--{switch}" for switch in SWITCHES), *optimizer, "--load", folder, *flags]
    import emerging_optimizers.orthogonalized_optimizers  # noqa: F401
    from megatron.core import parallel_state as ranks
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import arguments, global_vars, initialize
    from megatron.training import training as entry

    initialize._compile_dependencies = lambda *_, **__: None
    with_fused_adam()
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    args.padded_vocab_size = VOCABULARY
    global_vars.set_global_variables(args, build_tokenizer=False)
    initialize.initialize_megatron()

    def model_of(pre_process: bool = True, post_process: bool = True, **_: Any) -> Any:
        return GPTModel(
            arguments.core_transformer_config_from_args(args),
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )

    order = [model_of, ModelType.encoder_or_decoder]
    setup = entry.setup_model_and_optimizer
    model, optimizer, schedule = setup(
        *(order if next(iter(inspect.signature(setup).parameters)) != "model_type" else order[::-1])
    )
    if truth:
        check(model, optimizer, truth)
    if dist.get_rank() == 0:
        print(f"{kind} held after {args.iteration} steps of {args.consumed_train_samples} samples", flush=True)
    config = get_model_config(model[0])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    share = ranks.get_data_parallel_world_size()
    for step in range(args.iteration, args.iteration + steps):
        samples = iter([batch(step, number) for number in range(ranks.get_data_parallel_rank(), 4, share)])

        def forward(given: Any, chunk: Any) -> Any:
            tokens = next(given)
            above = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
            losses = chunk(
                tokens[:, :-1].contiguous(), torch.arange(LENGTH)[None], above, labels=tokens[:, 1:].contiguous()
            )
            return losses, lambda found: (found.float().mean(), {})

        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            **{"forward_step_func": forward, "data_iterator": samples, "model": model, "forward_only": False},
            **{"num_microbatches": 4 // share, "seq_length": LENGTH},
            micro_batch_size=1,
        )
        assert optimizer.step()[0]
        schedule.step(increment=4)
    if steps:
        found = whole(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(found, out)


if __name__ == "__main__":
    prepared()
    what, kind, folder, truth, *rest = sys.argv[1:]
    known = torch.load(truth, weights_only=True) if truth else {}
    core(kind, folder, known) if what == "core" else training(kind, folder, known, int(rest[0]), rest[1], rest[2:])
    dist.barrier()
    os._exit(0)  # threads that Megatron started would wait
