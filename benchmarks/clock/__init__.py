"""A step of all ranks of a planned world on one clock: records of ranks, the clock, and what is shown of it."""
