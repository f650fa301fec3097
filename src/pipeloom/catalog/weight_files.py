"""Tensors of weight files, as Hugging Face's models name and arrange them, and the parameters that they contain.

A tensor of a file contains one parameter, or several side by side, as GPT-2's ``c_attn`` contains the matrices of
queries, keys and values. In the names ``*`` is the number of a layer, and ``#`` that of an expert. Sources are
transformers 4 and 5: ``models/*/modeling_*.py``.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYERS = "layers.*."
"""Beginning of the names of a layer's parameters."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a weight file.

    Attributes:
        name: in the file.
        parameters: names of the parameters that it contains, joined along their first dim, the outputs of a matrix.
        is_transposed: whether the file has inputs before outputs, as the Conv1D of GPT-2.
    """

    name: str
    parameters: tuple[str, ...]
    is_transposed: bool = False

    def each(self, mark: str, numbers: Iterable[int]) -> "list[FileTensor]":
        """The tensor with these numbers in place of a mark; itself where it has none."""
        if mark not in self.name:
            return [self]
        return [
            FileTensor(
                self.name.replace(mark, str(number)),
                tuple(name.replace(mark, str(number)) for name in self.parameters),
                self.is_transposed,
            )
            for number in numbers
        ]

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape in the file, from the shapes of parameters by name."""
        first, *others = (shapes[name] for name in self.parameters)
        joined = (first[0] + sum(shape[0] for shape in others), *first[1:])
        return joined[::-1] if self.is_transposed else joined


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The tensors in the weight files of an architecture.

    Attributes:
        prefix: beginning of most names; files of the model without its head lack it.
        tensors: all of them; one whose parameters a model lacks is not in its files.
        buffers: tensors that older files contain, and that are no weights.
        tied: name of the head's matrix in files of tied models that contain the matrix twice.
    """

    prefix: str
    tensors: tuple[FileTensor, ...]
    buffers: tuple[str, ...] = ()
    tied: str = "lm_head.weight"

    def named_as_in(self, names: Collection[str]) -> "WeightFiles":
        """The same tensors with the names of a folder's files, which lack the prefix in files of the headless model."""
        if any(name.startswith(self.prefix) for name in names):
            return self
        tensors = (replace(one, name=one.name.removeprefix(self.prefix)) for one in self.tensors)
        buffers = (name.removeprefix(self.prefix) for name in self.buffers)
        return replace(self, tensors=tuple(tensors), buffers=tuple(buffers))

    def of_model(self, parameters: Sequence[str], num_layers: int) -> list[FileTensor]:
        """The tensors of a model's files.

        Args:
            parameters: names of all parameters of the model; each is in exactly one tensor.
            num_layers: of the model.
        """
        present, found = set(parameters), list[FileTensor]()
        experts = {int(number[1]) for name in parameters if (number := _EXPERT.search(name)) is not None}
        for tensor in self.tensors:
            every = [one for layer in tensor.each("*", range(num_layers)) for one in layer.each("#", sorted(experts))]
            found += [one for one in every if present.issuperset(one.parameters)]
        placed = [name for one in found for name in one.parameters]
        assert sorted(placed) == sorted(parameters), f"no tensor, or two, for {present.symmetric_difference(placed)}"
        return found

    def is_buffer(self, name: str, num_layers: int) -> bool:
        """Whether a tensor of a file is none of the weights."""
        return any(name == buffer.replace("*", str(layer)) for buffer in self.buffers for layer in range(num_layers))


def _modules(names: Mapping[str, str], *, is_transposed: bool = False) -> list[FileTensor]:
    """Weights and biases: modules of a layer in the file -> modules here, several separated by spaces."""
    return [
        FileTensor(
            f"{theirs}.{kind}",
            tuple(f"{LAYERS}{one}.{kind}" for one in ours.split()),
            is_transposed and kind == "weight",
        )
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    ]


LLAMA_WEIGHTS = WeightFiles(
    prefix="model.",
    tensors=(
        FileTensor("model.embed_tokens.weight", ("embedding.tokens.weight",)),
        *_modules(
            {
                "model.layers.*.self_attn.q_proj": "attention.query",
                "model.layers.*.self_attn.k_proj": "attention.key",
                "model.layers.*.self_attn.v_proj": "attention.value",
                "model.layers.*.self_attn.o_proj": "attention.output",
                "model.layers.*.mlp.gate_proj": "feed_forward.gate",
                "model.layers.*.mlp.up_proj": "feed_forward.up",
                "model.layers.*.mlp.down_proj": "feed_forward.down",
                "model.layers.*.self_attn.q_norm": "attention.query_norm",
                "model.layers.*.self_attn.k_norm": "attention.key_norm",
                "model.layers.*.input_layernorm": "attention_norm",
                "model.layers.*.post_attention_layernorm": "feed_forward_norm",
            },
        ),
        FileTensor("model.norm.weight", ("head.norm.weight",)),
        FileTensor("lm_head.weight", ("head.output.weight",)),
    ),
    buffers=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
"""Files of the llama architecture and of those that add to it; the layers may have biases."""

_OWN_EXPERT = f"{LAYERS}feed_forward.experts.#"


def _expert_files(block: str, gate: str, up: str, down: str) -> WeightFiles:
    """Files of llama with experts, whose block and matrices have these names."""
    names = {gate: "gate", up: "up", down: "down"}
    return replace(
        LLAMA_WEIGHTS,
        tensors=(
            *LLAMA_WEIGHTS.tensors,
            FileTensor(f"model.layers.*.{block}.gate.weight", (f"{LAYERS}feed_forward.router.weight",)),
            *(
                FileTensor(f"model.layers.*.{block}.experts.#.{theirs}.weight", (f"{_OWN_EXPERT}.{ours}.weight",))
                for theirs, ours in names.items()
            ),
        ),
    )


MIXTRAL_WEIGHTS = _expert_files("block_sparse_moe", "w1", "w3", "w2")
"""Files of Mixtral; transformers 5 has one tensor of all experts in memory, and writes these."""
QWEN3_MOE_WEIGHTS = _expert_files("mlp", "gate_proj", "up_proj", "down_proj")
"""Files of Qwen3-MoE."""

_OLMO2_NORMS = {
    "model.layers.*.post_attention_layernorm.weight": f"{LAYERS}attention_norm.weight",
    "model.layers.*.post_feedforward_layernorm.weight": f"{LAYERS}feed_forward_norm.weight",
}
OLMO2_WEIGHTS = replace(
    LLAMA_WEIGHTS,
    tensors=(
        *(one for one in LLAMA_WEIGHTS.tensors if "layernorm" not in one.name),
        *(FileTensor(theirs, (ours,)) for theirs, ours in _OLMO2_NORMS.items()),
    ),
)
"""Files of OLMo 2, whose norms follow attention and the feed-forward block."""

_GEMMA_NORMS = {
    "model.layers.*.input_layernorm.weight": f"{LAYERS}attention_norm.weight",
    "model.layers.*.post_attention_layernorm.weight": f"{LAYERS}attention_post_norm.weight",
    "model.layers.*.pre_feedforward_layernorm.weight": f"{LAYERS}feed_forward_norm.weight",
    "model.layers.*.post_feedforward_layernorm.weight": f"{LAYERS}feed_forward_post_norm.weight",
}
GEMMA_WEIGHTS = replace(
    LLAMA_WEIGHTS,
    tensors=(
        *(one for one in LLAMA_WEIGHTS.tensors if "layernorm" not in one.name),
        *(FileTensor(theirs, (ours,)) for theirs, ours in _GEMMA_NORMS.items()),
    ),
)
"""Files of Gemma 2 and 3, with norms before and behind attention and the feed-forward block."""

GPT2_WEIGHTS = WeightFiles(
    prefix="transformer.",
    tensors=(
        FileTensor("transformer.wte.weight", ("embedding.tokens.weight",)),
        FileTensor("transformer.wpe.weight", ("embedding.positions.weight",)),
        *_modules(
            {
                "transformer.h.*.attn.c_attn": "attention.query attention.key attention.value",
                "transformer.h.*.attn.c_proj": "attention.output",
                "transformer.h.*.mlp.c_fc": "feed_forward.up",
                "transformer.h.*.mlp.c_proj": "feed_forward.down",
            },
            is_transposed=True,
        ),
        *_modules(
            {"transformer.h.*.ln_1": "attention_norm", "transformer.h.*.ln_2": "feed_forward_norm"},
        ),
        FileTensor("transformer.ln_f.weight", ("head.norm.weight",)),
        FileTensor("transformer.ln_f.bias", ("head.norm.bias",)),
        FileTensor("lm_head.weight", ("head.output.weight",)),
    ),
    buffers=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
"""Files of GPT-2."""
