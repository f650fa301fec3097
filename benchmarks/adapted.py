"""Gradients of adapted models of transformers beside those of the whole model, for each ``model_type``.

Run by ``make adapted``. Small random models in float64, on two pipeline ranks with two loops in one process; one stage
recomputes. Fails if fewer than ``LEAST_EQUAL`` types are equal. Types that pieces cannot compute have the reason of the
refusal.
"""

import sys

from adapted_types import largest_difference, small_config, text_of

from pipeloom.model.adapted_check import check_adapted

LEAST_EQUAL, TOLERANCE = 12, 1e-9
KINDS = (
    *("arcee", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "glm", "glm4"),
    *("gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "mixtral", "mpt"),
    *("nemotron", "olmo", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2_moe", "qwen3_moe", "seed_oss"),
    *("smollm3", "stablelm", "starcoder2", "xglm"),
)


def main() -> int:
    """Print a row for each type."""
    num_equal = 0
    for kind in KINDS:
        try:
            refusal = check_adapted(text_of(small_config(kind)))
            difference = float("inf") if refusal else largest_difference(kind)
        except Exception as error:
            refusal, difference = f"{type(error).__name__}: {error}", float("inf")
        num_equal += difference <= TOLERANCE
        words = "equal" if difference <= TOLERANCE else "differs"
        print(f"{kind:<20} " + (f"refused  {refusal:.120}" if refusal else f"{words:<8} {difference:.1e}"), flush=True)
    print(f"{num_equal} of {len(KINDS)} model types have the gradients of transformers to {TOLERANCE:.0e}")
    return 0 if num_equal >= LEAST_EQUAL else 1


if __name__ == "__main__":
    sys.exit(main())
