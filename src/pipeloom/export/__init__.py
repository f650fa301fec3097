"""Export of a run as start files: torchrun, Slurm, PyTorch's pipeline runtime, torchtitan, Megatron-LM."""

from pipeloom.export.hand_over import TARGETS, HandedOver, Refused, Written, hand_over, usual_targets

__all__ = ["TARGETS", "HandedOver", "Refused", "Written", "hand_over", "usual_targets"]
