"""How each engine stores parameters, and steps and saves what a rank has of them."""
