"""Plans: who owns which matrix, and which elements are exchanged.

Pure functions of names and shapes, standard library only. Every rank computes the same plan independently; nothing here
reads a tensor, a process group or the clock.
"""

from lwopt_backend.plan.atoms import Atom, Cut, TrainedParam
from lwopt_backend.plan.cost import MACHINES, Machine, StepTime
from lwopt_backend.plan.exchange import Segment, Transfer
from lwopt_backend.plan.layouts import FlatPartition, Fragment, Layout, ParameterPartition, Replicas
from lwopt_backend.plan.mesh import MeshLayout, Sharding, TensorShards
from lwopt_backend.plan.owners import POLICIES, MatrixPlan, Ownership, plan_copies, plan_matrices, plan_spread

__all__ = [
    "MACHINES",
    "POLICIES",
    "Atom",
    "Cut",
    "FlatPartition",
    "Fragment",
    "Layout",
    "Machine",
    "MatrixPlan",
    "MeshLayout",
    "Ownership",
    "TrainedParam",
    "ParameterPartition",
    "Replicas",
    "Segment",
    "Sharding",
    "StepTime",
    "TensorShards",
    "Transfer",
    "plan_copies",
    "plan_matrices",
    "plan_spread",
]
