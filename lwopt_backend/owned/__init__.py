"""Owned storage: we hold the buffers of parameters and gradients ourselves, as Megatron-Core does."""
