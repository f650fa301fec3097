"""Data files of models, clusters and training programs: by name from this folder, or by path."""

from pipeloom.catalog.cluster_files import CLUSTERS, cluster_to_toml, load_cluster
from pipeloom.catalog.model_files import ModelFile, load_model, read_model
from pipeloom.catalog.program_files import load_software, load_spread
from pipeloom.catalog.reading import find_name, names, source_of

__all__ = [
    "CLUSTERS",
    "ModelFile",
    "cluster_to_toml",
    "find_name",
    "load_cluster",
    "load_model",
    "load_software",
    "load_spread",
    "names",
    "read_model",
    "source_of",
]
