"""Seconds of a piece of a model by cause."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Seconds of a piece by cause, for one direction of one micro-batch.

    Attributes:
        matmul_s: products with weights.
        attention_s: scores, softmax and weighted sum.
        memory_s: norms, activations, residual stream, dropout, loss.
        tensor_s: tensor-parallel collectives.
        num_kernels: number of kernels that the host launches.
        num_collectives: number of tensor-parallel collectives, whose launch takes the host longer than a kernel's.
    """

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    tensor_s: float = 0.0
    num_kernels: float = 0.0
    num_collectives: float = 0.0

    def __add__(self, other: "Parts") -> "Parts":
        """The sums of both."""
        return Parts(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.tensor_s + other.tensor_s,
            self.num_kernels + other.num_kernels,
            self.num_collectives + other.num_collectives,
        )

    @property
    def device_s(self) -> float:
        """Seconds on the device."""
        return self.matmul_s + self.attention_s + self.memory_s + self.tensor_s
