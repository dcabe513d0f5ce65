"""Checkpoints of this and other systems: read into one form, renamed, checked, written as another."""
