"""DeepSpeed on a CPU without a compiler."""

from __future__ import annotations


def compile_nothing() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce; called before the first collective is set up.

    The op serves inference only, yet ``deepspeed.init_distributed`` builds it: without a compiler that fails, and
    a build that was killed leaves a lock on which every later run waits for ever. Does nothing on an accelerator.
    """
    import deepspeed.ops as ops
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
