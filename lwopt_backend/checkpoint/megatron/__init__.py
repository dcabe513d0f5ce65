"""Megatron's checkpoints: torch, torch_dist and fsdp_dtensor, read without Megatron; torch_dist written."""
