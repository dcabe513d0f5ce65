"""What today's product says wrongly of the models beside this file, and does not say to be unclear: expected failures.

By the reason, and by the model, the names of weights, as globs.
"""

WITHOUT_EXAMPLE: dict[str, dict[str, str]] = {}

WITH_EXAMPLE: dict[str, dict[str, str]] = {}
