"""The network: a transformer and its stages. Independent of ranks and schedules."""

from pipeloom.model.adapted import AdaptedStage
from pipeloom.model.cross_entropy import SplitVocabulary
from pipeloom.model.key_values import KeyValueCache
from pipeloom.model.split import build_stage, stage_pieces
from pipeloom.model.tensor_parallel import TensorParallel, TensorSlice
from pipeloom.model.transformer import TIED_NAME, Transformer, num_pieces
from pipeloom.model.visible_keys import Documents

StageModule = Transformer | AdaptedStage
"""A range of a model's pieces."""

__all__ = [
    "TIED_NAME",
    "Documents",
    "KeyValueCache",
    "SplitVocabulary",
    "StageModule",
    "TensorParallel",
    "TensorSlice",
    "Transformer",
    "build_stage",
    "num_pieces",
    "stage_pieces",
]
