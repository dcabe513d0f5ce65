"""Which parameters go to which rule, decided from a model's structure, and which matrices they are."""
