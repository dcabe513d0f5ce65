"""Plans: who owns which matrix, and which elements travel.

Pure functions of names and shapes, standard library only. Every rank computes the same plan on its own;
nothing here reads a tensor, a process group or the clock.
"""

from lwopt_backend.plan.build import MatrixPlan, plan_matrices
from lwopt_backend.plan.machine import MACHINES, Machine, StepTime
from lwopt_backend.plan.owners import POLICIES, Ownership
from lwopt_backend.plan.storage import FlatPartition, Fragment
from lwopt_backend.plan.transfer import Segment, Transfer
from lwopt_backend.plan.types import Atom, ParamSpec

__all__ = [
    "MACHINES",
    "POLICIES",
    "Atom",
    "FlatPartition",
    "Fragment",
    "Machine",
    "MatrixPlan",
    "Ownership",
    "ParamSpec",
    "Segment",
    "StepTime",
    "Transfer",
    "plan_matrices",
]
