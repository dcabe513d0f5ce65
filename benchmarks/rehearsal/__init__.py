"""One rank of a planned world runs its engine's own step without a GPU, beside the plan's figures."""
