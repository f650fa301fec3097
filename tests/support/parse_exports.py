"""What the parsers of other programs make of start commands: run in an environment that has these programs.

Reads commands as JSON from standard input, and prints an answer for each, as JSON: ``values``, or ``refused`` with the
words of the program. Neither program starts, and none needs a GPU.

    python parse_exports.py megatron CHECKOUT < commands.json
    python parse_exports.py torchtitan < commands.json
"""

import contextlib
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

Command = dict[str, Any]
"""``words`` behind the program's name, ``num_devices``, ``folder`` of the files."""
HOPPER = 9
"""Major compute capability, which Megatron-LM reads from the first GPU where there is one."""


def megatron(checkout: str) -> Callable[[Command], dict[str, Any]]:
    """Megatron-LM: ``parse_args``, ``validate_args``, and the configuration of its transformer."""
    sys.path.insert(0, checkout)
    import torch
    from megatron.training import arguments

    arguments.get_device_arch_version = lambda: HOPPER
    torch.cuda.get_device_capability = lambda: (HOPPER, 0)

    def parse(command: Command) -> dict[str, Any]:
        os.environ.update(RANK="0", WORLD_SIZE=str(command["num_devices"]))
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = command["connections"]
        sys.argv = ["pretrain_gpt.py", *command["words"]]
        args = arguments.validate_args(arguments.parse_args())
        # Its default kernel for rotary positions is Transformer Engine's, which needs a GPU to be installed.
        args.apply_rope_fusion = False
        config = arguments.core_transformer_config_from_args(args)
        # Without grouped queries the flag keeps its default, 1, which the transformer does not take.
        return {**vars(args), "layers_of_config": config.num_layers, "num_query_groups": config.num_query_groups}

    return parse


def torchtitan() -> Callable[[Command], dict[str, Any]]:
    """torchtitan: ``ConfigManager``, its axes, and the sizes of its batches."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    def parse(command: Command) -> dict[str, Any]:
        sys.path.insert(0, command["folder"])
        os.environ.update(command["environment"])
        try:
            config = ConfigManager().parse_args(command["words"])
        finally:
            sys.path.remove(command["folder"])
            sys.modules.pop("torchtitan_run", None)
            importlib.invalidate_caches()
        axes = ParallelDims.from_config(config.parallelism, command["num_devices"])
        replicas = axes.dp_replicate * axes.dp_shard
        left = config.training.global_batch_size % (config.training.local_batch_size * replicas)
        if left:
            raise ValueError(f"the global batch leaves {left} sequences")
        values = config.to_dict()
        values["recompute"] = type(config.activation_checkpoint).__qualname__
        return values

    return parse


def _plain(value: Any) -> Any:
    """A value as JSON; objects by their words."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def main(name: str, *places: str) -> None:
    """Print the answers."""
    warnings.simplefilter("ignore")
    # Programs print while they are imported and while they parse.
    with contextlib.redirect_stdout(io.StringIO()):
        parse = {"megatron": megatron, "torchtitan": torchtitan}[name](*places)
    answers = []
    for command in json.load(sys.stdin):
        words = io.StringIO()
        try:
            with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
                answers.append({"values": _plain(parse(command))})
        except (Exception, SystemExit) as error:
            answers.append({"refused": f"{type(error).__name__}: {error}\n{words.getvalue()[-2000:]}"})
    print(json.dumps(answers))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
