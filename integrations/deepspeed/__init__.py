"""DeepSpeed: the implementation of ``deepspeed_zero``, which users import."""
