"""DeepSpeed's ZeRO: flat partitions, and at stage 0 copies. The step is in integrations/deepspeed."""
