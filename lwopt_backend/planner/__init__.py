"""What `lwopt plan` and `lwopt rehearse` need: a model's shapes, its cost on a cluster, a rank without its GPU."""

EXPERTS = "*.experts.*"  # names of parameters that are spread over ``ep`` ranks
