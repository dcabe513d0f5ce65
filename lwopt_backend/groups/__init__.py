"""Rules by name, their options, and the param groups in which they train parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

Group = Mapping[str, Any]  # a param group, or what a rule gives to one: its name as "rule", and its options
Groups = Sequence[Group]
