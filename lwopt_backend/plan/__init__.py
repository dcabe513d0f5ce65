"""Plans: who owns which matrix, and which elements travel.

Pure functions of names and shapes, standard library only. Every rank computes the same plan on its own;
nothing here reads a tensor, a process group or the clock.
"""

from lwopt_backend.plan.build import plan_matrices
from lwopt_backend.plan.machine import MACHINES, Machine, StepTime, machine_of
from lwopt_backend.plan.matrix_plan import MatrixPlan
from lwopt_backend.plan.mesh import MeshLayout, Sharding
from lwopt_backend.plan.owners import POLICIES, Ownership
from lwopt_backend.plan.spread import plan_spread
from lwopt_backend.plan.spread_storage import ParameterPartition, Replicas
from lwopt_backend.plan.storage import FlatPartition, Fragment, Layout
from lwopt_backend.plan.transfer import Segment, Transfer
from lwopt_backend.plan.types import Atom, ParamSpec

__all__ = [
    "MACHINES",
    "POLICIES",
    "Atom",
    "FlatPartition",
    "Fragment",
    "Layout",
    "Machine",
    "MatrixPlan",
    "MeshLayout",
    "Ownership",
    "ParamSpec",
    "ParameterPartition",
    "Replicas",
    "Segment",
    "Sharding",
    "StepTime",
    "Transfer",
    "machine_of",
    "plan_matrices",
    "plan_spread",
]
