"""DeepSpeed: what the door, ``deepspeed_zero``, opens to."""
