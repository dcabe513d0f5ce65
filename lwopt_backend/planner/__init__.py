"""What `lwopt plan` needs: a model's shapes, and what it would cost on a cluster."""

EXPERTS = "*.experts.*"  # names of parameters that are spread over ``ep`` ranks
