"""Moving a run to this package: another optimizer's state into ours, and momentum between its two forms."""

from lwopt_backend.migration.checkpoints import SOURCES, from_checkpoint
from lwopt_backend.migration.loading import change_momentum_form, load_named_state
from lwopt_backend.migration.momentum import convert_momentum, convert_named_momentum

__all__ = [
    "SOURCES",
    "change_momentum_form",
    "convert_momentum",
    "convert_named_momentum",
    "from_checkpoint",
    "load_named_state",
]
