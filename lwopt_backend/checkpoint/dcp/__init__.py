"""Folders of torch.distributed.checkpoint, and FSDP2's checkpoints in them."""
