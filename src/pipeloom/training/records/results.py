"""What a training run returns: its summary, folder and traces."""

from dataclasses import dataclass
from pathlib import Path

from pipeloom.terminal.words import count, seconds
from pipeloom.trace import Trace


@dataclass(frozen=True)
class RunSummary:
    """Results of a run.

    If a run resumes after its last step, only validation and what follows are computed. Measurements of steps are then
    read from the files of the earlier process if its settings were the same, and are ``None`` otherwise.

    Attributes:
        num_parameters: of the whole model.
        steps: optimizer steps done, including those before the checkpoint that the run resumed from.
        tokens: read in these steps.
        traced_step: step whose trace was kept; ``None`` without trace.
        train_loss: of the last step, nats per token; ``None`` if no metrics have it.
        validation_loss: over ``training.validation_batches`` batches, nats per token; ``None`` without validation.
        unigram_loss: loss of token frequencies alone, nats per token, on the validated tokens, or on the whole
            validation text without validation.
        step_time_s: median over the steps of this run with its last layout; ``None`` without steps.
        predicted_step_time_s: simulated before the first step, from profiled costs; ``None`` without prediction, and
            where a restart has changed the layout since.
        tokens_per_s: at the median step time; ``None`` without it.
        exchange_s: seconds of the traced step spent in tensor-parallel collectives, mean over the ranks; traces count
            them as compute. ``None`` without tensor parallelism, and on CUDA, where the host does not wait for them.
        live_bytes: for each pipeline rank, peak bytes held for backwards in the traced step, including activations that
            other ranks evicted to it; maximum over replicas. Zeros where not counted: with training.compile, unless
            activations are moved. Empty if this process traced no step.
        bubble_fraction: measured idle share of the ranks in the traced step, 0..1; ``None`` without trace.
        predicted_bubble_fraction: the same, from the predicted trace.
        corpus_sha256: fingerprint of the text.
        peak_stage_bytes: peak bytes of swapped stages on the device, over all steps; ``None`` if none is swapped.
        swap_s: seconds of the traced step with a swap under way, summed over both directions.
        swap_hidden_s: the part of ``swap_s`` that overlaps with compute.
        shared_cores: cores of rank 0's host, if fewer than its processes, which compute on them; else ``None``.
    """

    num_parameters: int
    steps: int
    tokens: int
    traced_step: int | None
    train_loss: float | None
    validation_loss: float | None
    unigram_loss: float
    step_time_s: float | None
    predicted_step_time_s: float | None
    tokens_per_s: float | None
    exchange_s: float | None
    live_bytes: tuple[int, ...]
    bubble_fraction: float | None
    predicted_bubble_fraction: float | None
    corpus_sha256: str
    peak_stage_bytes: int | None = None
    swap_s: float | None = None
    swap_hidden_s: float | None = None
    shared_cores: int | None = None


@dataclass(frozen=True, repr=False)
class RunResult:
    """Result of ``train``.

    Attributes:
        folder: of the run, with its metrics, checkpoints, weights and report; ``pipeloom.load_run`` reads its
            ``config.toml``.
        summary: complete on rank 0.
        measured: trace of the traced step, on rank 0; ``None`` if no step was traced.
        predicted: predicted trace of a step, on rank 0; ``None`` without prediction.
    """

    folder: Path
    summary: RunSummary
    measured: Trace | None
    predicted: Trace | None

    def __repr__(self) -> str:
        """Folder, steps, loss, and the step time with its prediction."""
        summary = self.summary
        loss = "" if summary.train_loss is None else f", training loss {summary.train_loss:.4f}"
        step = "" if summary.step_time_s is None else f", {seconds(summary.step_time_s)} a step"
        predicted = summary.predicted_step_time_s
        also = "" if predicted is None or not step else f" ({seconds(predicted)} predicted)"
        return f"RunResult({self.folder}: {count(summary.steps, 'step')}{loss}{step}{also})"
