"""What a model is to the ledger: sizes, the matrices that follow from them, and where sizes can be read."""

from .count import active_from_total, active_parameters, count_parameters, layer_parameters, narayanan_parameters
from .load import known_model, read_shape
from .parts import Block, Part, blocks
from .shape import Latent, Mixture, ModelShape, Vision

__all__ = [
    "Block",
    "Latent",
    "Mixture",
    "ModelShape",
    "Part",
    "Vision",
    "active_from_total",
    "active_parameters",
    "blocks",
    "count_parameters",
    "known_model",
    "layer_parameters",
    "narayanan_parameters",
    "read_shape",
]
