"""One optimizer over several modules that each have an optimizer, process groups and ranks of their own."""
