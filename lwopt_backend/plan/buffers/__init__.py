"""Owned buffers: padded and compact layouts of matrices over shards."""
