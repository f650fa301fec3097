"""A run handed over to whoever starts it: torchrun, Slurm, PyTorch's runtime, torchtitan, Megatron-LM."""

from pipeloom.export.hand_over import TARGETS, HandedOver, Refused, Written, hand_over

__all__ = ["TARGETS", "HandedOver", "Refused", "Written", "hand_over"]
