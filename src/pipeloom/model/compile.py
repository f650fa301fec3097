"""``torch.compile`` for the pieces of a stage."""

from functools import partial

import torch

from pipeloom.model.transformer import Transformer


def compile_pieces(stage: Transformer, backend: str) -> None:
    """Compile embedding, layers and head, each by itself, in place; parameters keep their names.

    Layers that are alike run the same code, so that it takes the same time for any number of them; the whole stage as
    one would be traced layer by layer. Nothing is compiled before the first call; shapes are taken to be fixed.
    """
    # Each piece alone: four layers took 60 s to compile, as one stage 152 s (docs/decisions/0012).
    for piece in (stage.embedding, *stage.layers.values(), stage.head):
        if piece is not None:
            # By default a second shape (evaluation) would make torch.compile
            # start over with symbolic sizes and slower code.
            piece.compile(backend=backend, dynamic=False)


as_written = partial(torch.compiler.set_stance, "force_eager")
"""Makes a context in which compiled pieces run as they are written: for shapes that are not worth compiling for."""
