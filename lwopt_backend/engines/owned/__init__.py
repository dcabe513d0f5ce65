"""What pickles call by its earlier name: the folder was called so before it was ``engines/buffers``."""
