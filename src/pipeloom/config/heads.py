"""How the numbers of attention heads fit a model's width."""


def head_problems(
    hidden: int, heads: int, kv_heads: int | None, *, is_rotary: bool, names: tuple[str, str, str]
) -> list[str]:
    """What is wrong with the heads, one sentence each.

    Args:
        hidden: width of the residual stream.
        heads: query heads; below 1 nothing is found, as that is a problem of its own.
        kv_heads: key and value heads; ``None`` for as many as query heads.
        is_rotary: whether heads are turned by pairs of dims.
        names: of the three, in messages.
    """
    width, query, key_value = names
    if heads < 1:
        return []
    problems: list[str] = []
    if hidden % heads:
        problems.append(f"{query} must divide {width}, found {heads} and {hidden}")
    elif is_rotary and (hidden // heads) % 2:
        problems.append(f"llama's rotary positions need an even {width} / {query}, found {hidden} / {heads}")
    if kv_heads is not None and kv_heads > 0 and heads % kv_heads:
        problems.append(f"{key_value} must divide {query}, found {kv_heads} and {heads}")
    return problems
