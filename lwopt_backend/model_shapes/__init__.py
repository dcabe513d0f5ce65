"""The parameters of a model, read without its weights: from shapes, from a configuration, from a checkpoint."""

from lwopt_backend.model_shapes.checkpoint import read_checkpoint
from lwopt_backend.model_shapes.hugging_face import read_hugging_face
from lwopt_backend.model_shapes.listed import read_shapes_json
from lwopt_backend.model_shapes.training import Training
from lwopt_backend.model_shapes.types import ModelShapes

__all__ = ["ModelShapes", "Training", "read_checkpoint", "read_hugging_face", "read_shapes_json"]
