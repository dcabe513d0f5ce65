"""What torch.distributed.checkpoint writes: its folders, and FSDP2's checkpoints in them."""
