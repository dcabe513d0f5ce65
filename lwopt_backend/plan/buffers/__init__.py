"""Plain PyTorch's buckets: padded and compact layouts of matrices over shards."""
