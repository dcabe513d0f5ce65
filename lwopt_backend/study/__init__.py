"""Studies: what a model would cost on a cluster, planned without either."""
