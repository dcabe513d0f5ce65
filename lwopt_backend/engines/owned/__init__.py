"""Owned storage: buckets of whole parameters, of which each rank owns a part."""
