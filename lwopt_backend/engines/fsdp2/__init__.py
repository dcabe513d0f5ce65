"""FSDP2: parameters are DTensors, and a rank has a box of each."""
