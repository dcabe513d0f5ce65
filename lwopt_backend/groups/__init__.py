"""Rules by name, their options, and the param groups in which they train parameters."""
