"""How each engine stores parameters: what a rank steps, and what it saves."""
