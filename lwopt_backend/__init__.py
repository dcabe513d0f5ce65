"""Layer-wise sharding for matrix optimizers: each whole matrix is updated once, by one data-parallel rank."""

__version__ = "0.1.0"
