"""The model behind `lwopt plan`: a model's shapes, and its cost on a cluster."""

EXPERTS = "*.experts.*"  # names of parameters that are spread over ``ep`` ranks
