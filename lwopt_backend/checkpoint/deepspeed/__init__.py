"""DeepSpeed's checkpoints: its own of every ZeRO stage, those of this package's engines, and the universal format."""
