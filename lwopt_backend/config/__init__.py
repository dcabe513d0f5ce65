"""Options: what users write, checked; the rules by name; param groups."""
