"""The check of models that classes of transformers compute, as problems of a configuration."""

from collections.abc import Callable

from pipeloom.config import RunConfig


def with_adapted_check(judge: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """``judge`` of a configuration, and whether its model runs in pieces, if classes of transformers compute it."""

    def both(config: RunConfig, *, is_model_known: bool) -> list[str]:
        text = config.model.adapted
        found = None
        if text is not None and config.model.file is not None and is_model_known:
            from pipeloom.model.adapted_check import check_adapted

            found = check_adapted(text)
        problems = judge(config, is_model_known=is_model_known)
        return problems if found is None else [*problems, f"model.file {config.model.file}: {found}"]

    return both
