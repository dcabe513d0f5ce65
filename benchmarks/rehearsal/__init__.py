"""One rank of a planned world runs its engine's own step without a GPU, compared with the plan's figures."""
