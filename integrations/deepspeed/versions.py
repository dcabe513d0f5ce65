"""Whether the installed DeepSpeed is supported, and the undocumented names that are replaced or called here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lwopt_backend.config.options import install_command
from lwopt_backend.config.versions import VERSIONS

_LINKED = "_link_all_hp_params _lazy_init_hp_params_optimizer_state update_lp_params"
NAMES = {
    "deepspeed.runtime.engine:DeepSpeedEngine": "_do_optimizer_sanity_check _configure_lr_scheduler load_checkpoint "
    "allreduce_gradients zero_grad clip_fp32_gradients _get_zero_param_shapes _get_zero_ckpt_name "
    "zero_parameter_alignment zero_sub_group_size",
    "deepspeed.runtime.zero.utils": "ZERO_SUPPORTED_OPTIMIZERS",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": f"{_LINKED} get_param_id "
    "get_grad_norm_direct complete_grad_norm_calculation_for_cpu_offload copy_grads_in_partition "
    "update_offload_overflow_tracker independent_gradient_partition_epilogue reset_cpu_buffers step zero_grad",
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": f"{_LINKED} get_grads_for_norm clear_lp_grads step zero_grad",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": "_reassign_or_swap_out_partitioned_parameters "
    "checkpoint_event_prologue checkpoint_event_epilogue get_param_id partition_grads "
    "independent_gradient_partition_epilogue reset_cpu_buffers step zero_grad",
    "deepspeed.utils.tensor_fragment": "fragment_address get_full_hp_param set_full_hp_param",
    "deepspeed.runtime.base_optimizer:ZeROOptimizer": "clear_backward_seen_flag",
    "deepspeed.runtime.fp16.loss_scaler": "CreateLossScaler",
    "deepspeed.runtime.utils": "is_model_parallel_parameter",
    "deepspeed.moe.utils": "is_moe_param",
    "deepspeed.utils.bwc": "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size",
    "deepspeed.ops": "__compatible_ops__",
}


@functools.cache
def check() -> None:
    """Raises ImportError if the installed DeepSpeed is not supported, or lacks names that are used; lists them."""
    import deepspeed

    found, supported = deepspeed.__version__, VERSIONS["deepspeed"].supported
    install = install_command("deepspeed", supported)
    if not SpecifierSet(supported).contains(Version(found), prereleases=True):
        newer = Version(found).release > Version(VERSIONS["deepspeed"].tested[-1]).release
        raise ImportError(
            f"expected DeepSpeed {supported}, found {found}: "
            + ("a newer one may have moved methods" if newer else "an older one lacks methods")
            + f"; run: {install}"
            + (", or a newer lwopt_backend if there is one" if newer else "")
        )
    if lacks := list(_missing()):
        raise ImportError(
            f"DeepSpeed {found}: expected {', '.join(lacks)}, which lwopt_backend uses, found none. "
            f"Reinstall a supported version: {install} --force-reinstall --no-deps"
        )


def _missing() -> Iterator[str]:
    for place, names in NAMES.items():
        module, _, cls = place.partition(":")
        try:
            holder: Any = importlib.import_module(module)
        except ImportError:
            yield module
            continue
        if cls:
            holder = getattr(holder, cls, None)
        yield from (f"{module}.{f'{cls}.' if cls else ''}{name}" for name in names.split() if not hasattr(holder, name))
