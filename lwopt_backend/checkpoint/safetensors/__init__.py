"""Weights as safetensors."""
