"""Checkpoints of other systems and of ours: read into one form, renamed, checked, written as another."""
