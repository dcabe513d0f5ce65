"""DeepSpeed's checkpoints: its own of every ZeRO stage, those of our engines, and the universal format."""
