"""``torch.compile`` for the pieces of a stage."""

from functools import partial

import torch

from pipeloom.model.transformer import Transformer


def compile_pieces(stage: Transformer, backend: str) -> None:
    """Compile embedding, layers and head in place, each by itself (regional compilation); parameters keep their names.

    Equal layers share compiled code, so compile time does not depend on their number. Compilation happens at the first
    call, for static shapes.
    """
    # Four layers took 60 s to compile one by one, 152 s as one stage (docs/decisions/0012).
    for piece in (stage.embedding, *stage.layers.values(), stage.head):
        if piece is not None:
            # By default a second shape (evaluation) would cause a recompilation with symbolic sizes and slower code.
            piece.compile(backend=backend, dynamic=False)


as_written = partial(torch.compiler.set_stance, "force_eager")
"""Context manager in which compiled pieces run in eager mode, for shapes that are not worth compiling."""
