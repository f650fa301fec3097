"""The training loop of one rank."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import chain, islice
from statistics import median_high
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.analysis.summary import summarize
from pipeloom.checkpoint.checkpoint_folder import Cause, CheckpointInfo, list_checkpoints, run_of, step_of
from pipeloom.config import RunConfig
from pipeloom.data.text import Data
from pipeloom.data.windows import resumed
from pipeloom.errors import PeerLostError, RunError, WrongRankError
from pipeloom.execute.executor import StepResult
from pipeloom.execute.processes.world import World
from pipeloom.measure.stages import Profile
from pipeloom.runs import run_folder
from pipeloom.runs.run_folder import RunFolder, put_aside
from pipeloom.runs.run_start import go_back
from pipeloom.runs.sample import format_sample
from pipeloom.runs.traced_step import BEGINS
from pipeloom.system.files import strict_json
from pipeloom.terminal.guard import print_beside
from pipeloom.trace import Trace, to_chrome
from pipeloom.training.again import NEVER, Again
from pipeloom.training.automatic.division import Division
from pipeloom.training.automatic.profiled_step import predicted_traces, update_s
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.checkpoints.contents import checkpoint_info
from pipeloom.training.checkpoints.saving import Saving
from pipeloom.training.health.replicas import Damage, Health
from pipeloom.training.health.slow_ranks import SlowRanks
from pipeloom.training.health.spikes import Spikes
from pipeloom.training.inference.sample import sample_text
from pipeloom.training.inference.trained import load_trained
from pipeloom.training.inference.validation import Validation
from pipeloom.training.loading import Loading
from pipeloom.training.optimizers.averaging import make_averaging
from pipeloom.training.optimizers.declared_state import DeclaredState
from pipeloom.training.optimizers.optimizer import WholeUpdates, learning_rate, make_optimizer
from pipeloom.training.optimizers.updates_within import make_updates
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.pretrained import origin_of
from pipeloom.training.records.earlier import Measured, of_attempts, read_earlier
from pipeloom.training.records.loggers import MetricLog
from pipeloom.training.records.noted import Noted
from pipeloom.training.records.progress import StepProgress
from pipeloom.training.records.results import RunResult, RunSummary
from pipeloom.training.records.step_metrics import StepMeter
from pipeloom.training.records.step_profile import StepProfiles
from pipeloom.training.records.traced import TracedSteps
from pipeloom.training.schedules import schedules_by_replica
from pipeloom.training.session import shared_cores


class Trainer:
    """One rank of a training run, from a resolved configuration. Rank 0 alone writes to the run folder.

    Args:
        config: resolved.
        world: all ranks.
        data: of the run.
        folder: of the run.
        quiet: whether no progress is printed.
        begun_s: start of the run on the host's monotonic clock; ``None`` for now.
        again: where states are kept, and which one to resume from.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        data: Data,
        folder: RunFolder,
        *,
        quiet: bool = False,
        begun_s: float | None = None,
        again: Again = NEVER,
    ) -> None:
        self._again, self._quiet, self._config, self._data, self._folder = again, quiet, config, data, folder
        self._noted = Noted(config, world, folder)
        self._world = world = self._noted.world
        with self._noted.failing():
            self._pipeline = Pipeline(config, world, log=self._noted.log)
            is_whole = self._pipeline.store is None  # swapped stages get their optimizer state one by one
            self._validation = Validation(config, world, data, self._pipeline)
            self._optimizer = make_optimizer(config.optimizer, self._pipeline.data_parallel.parts, begins=is_whole)
            self._declared = DeclaredState(config.optimizer, self._optimizer, self._pipeline.data_parallel.parts)
            self._updates = make_updates(config.optimizer, self._optimizer, self._pipeline)
            self._averaging = make_averaging(config, world, self._pipeline, self._updates)
            self._checkpoints = Checkpoints(
                config,
                world,
                self._pipeline,
                self._optimizer,
                folder.path,
                tokenizer=data.tokenizer,
                origin=origin_of(config.checkpoint.start, data.tokenizer.files()) if world.rank == 0 else None,
                noted=self._noted.checkpoint,
            )
            self._saving = Saving(config, world, folder, self, begun_s)
            # Steps, sequences and tokens before this process: those of the checkpoint, or none.
            if again.before is not None and again.step is not None:
                self._done = self._checkpoints.recall(again.before, again.step)
            elif config.checkpoint.resume is not None:
                self._done = self._checkpoints.restore(config.checkpoint.resume)
            else:
                self._done = checkpoint_info(config, data, 0, 0, 0)
            if not self._done.step and config.checkpoint.init is not None:
                # Without the optimizer, whose state begins anew.
                load_trained(config, world, self._pipeline, data.tokenizer)
            if again.folder is not None:
                self._checkpoints.prepare_kept(again.folder, self._done.step)
            name, done = (data.corpus_sha256, str(config.data.path)), self._done
            windows = resumed(data.train, name, done.sequences, done.sources, done.data["text"])
            num_steps = config.training.known_steps - self._done.step
            self._loading = Loading(windows, config.layout.step_size, self._done.step + 1, num_steps)
            self._traced = TracedSteps(config, world, folder, self._done.step)
            self._meter, self._profiles = StepMeter(config, world), StepProfiles(config, world, folder.path)
            self._sums: Sequence[float] = ()
            self._spikes, self._slow = Spikes(config.training), SlowRanks(config, world, folder)
            self._since = again.since if again.is_again else self._done.step
            self._measured = of_attempts(folder, self._since, self._done.step) if again.is_again else Measured()
            self._profile: Profile | None = None
            self._health = Health(config, world, self._pipeline, self._optimizer, self._done.step)
            self._problem: str | None = None
            self._back_to: int | None = None
            self._division, self._first_sequence = Division(config, world), self._done.sequences

    def run(self) -> RunResult:
        """Train, validate, sample, and write the results.

        Raises:
            RunError: the run failed.
            Interrupted: a signal ended it.
        """
        with self._noted.ended(), self._saving.signals:
            try:
                return self._run()
            except PeerLostError:
                raise  # the thread would wait for the lost process, too
            except RunError:
                self._saving.settle()
                raise
            finally:
                self._loading.close()

    def _run(self) -> RunResult:
        config, is_writer = self._config, self._world.rank == 0
        if is_writer:
            self._write_run()
            for name, text in self._data.tokenizer.files().items():
                self._folder.write(name, text, is_needed=False)
        self._noted.warn()
        has_steps = self._done.step < config.training.known_steps
        if has_steps:
            self._predict()
        self._health.note()
        measured = self._measured
        with (
            StepProgress(config.training.known_steps, is_shown=is_writer and not self._quiet) as progress,
            MetricLog(config, self._folder.path) as log,
        ):
            step = self._done.step
            while step < config.training.known_steps:
                step += 1
                self._saving.begin_step()
                self._noted.begin_step(step)
                begin, exchanged_s = time.perf_counter(), self._pipeline.exchange_s
                with self._profiles.of(step):
                    loss, grad_norm, result = self._step(step)
                self._declared.check()
                if self._back_to is not None:
                    step, self._back_to = self._back_to, None
                    continue
                # The whole step with the optimizer, as in the prediction.
                step_s = (time.perf_counter() - begin) / config.layout.most_updates
                line = self._metrics(step, (loss, grad_norm), step_s)
                if is_writer:
                    self._folder.add_metrics(line | ({BEGINS: True} if step == self._since + 1 else {}))
                    log.add(line)
                validation, speed = line.get("validation_loss"), line["tokens_per_s"]
                progress.show(step, loss=loss, grad_norm=grad_norm, tokens_per_s=speed, validation_loss=validation)
                measured.loss = loss
                measured.times_s.append(step_s)
                measured.peak_stage_bytes = max(measured.peak_stage_bytes, result.held.swapped_bytes)
                if self._traced.is_candidate(step):
                    own = result.trace, result.held.live_bytes, self._pipeline.exchange_s - exchanged_s
                    self._traced.keep(step, step_s, own, measured)
                self._saving.after_step(step)
                self._keep(step)
                if measured.traced_step is not None:  # whose schedule is that of the prediction
                    self._use(self._division.again(self._config, step, self._folder.add_warning))
        self._saving.end()
        self._settle()
        self._folder.close()
        if not has_steps:
            self._measured = self._end_again()
        return RunResult(self._folder.path, self._finish(), self._measured.trace, self._measured.predicted)

    def _metrics(self, step: int, values: tuple[float, float], step_s: float) -> dict[str, Any]:
        """The metrics of a step, with its validation if one is due; on rank 0 complete. Collective."""
        config, (loss, grad_norm) = self._config, values
        speed = config.layout.update_size * config.data.seq_len / step_s
        lr = learning_rate(config.optimizer, step - 1, config.training.known_steps)
        line: dict[str, Any] = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr}
        line |= {"tokens_per_s": speed, "step_time_s": step_s}
        if self._world.rank == 0:
            line |= self._meter.metrics(self._sums, speed)
        if self._problem is not None:
            line["skipped"] = self._problem
        if self._validation.is_due(step) and (validation := self._validate(self._saving.ends_now)) is not None:
            line["validation_loss"] = validation
        return line

    def _end_again(self) -> Measured:
        """Finish a run that has no steps left: measurements of the process that did them, on rank 0."""
        config, resume = self._config, self._config.checkpoint.resume
        assert resume is not None
        run = run_of(resume)
        is_own = self._world.from_first(run is not None and run.resolve() == self._folder.path.resolve())
        # This run's folder gets a checkpoint even though no step was left.
        if config.checkpoint.final != "none" and not is_own:
            self.write(config.training.known_steps, "end", in_background=False)
        if self._world.rank > 0:
            return Measured()
        found = read_earlier(self._folder, config)
        if found.config is not None:  # the settings that name the measured and the traced steps
            checkpoint = replace(config.checkpoint, resume=found.config.checkpoint.resume)
            output = replace(config.output, trace_step=found.config.output.trace_step)
            self._folder.write_config(replace(config, checkpoint=checkpoint, output=output))
        return found

    def write(self, step: int, cause: Cause, *, in_background: bool) -> bool:
        """Write a checkpoint; returns whether a thread writes it while training continues."""
        self._settle()
        info = replace(self._info(step), cause=cause)
        # Broken weights put every step out of range: their checkpoints must not replace those from before.
        self._checkpoints.removes_old = self._problem is None
        if in_background:
            return self._checkpoints.begin(info)
        self._checkpoints.save(info)
        return False

    def _keep(self, step: int) -> None:
        """Keep the state in shared memory, if it is due."""
        folder, every = self._again.folder, self._config.restart.known_keep_every
        if folder is None or step % every or step == self._config.training.known_steps:
            return
        self._settle()
        self._checkpoints.keep(self._info(step))
        # All ranks have a state of their own before this one, since they exchanged numbers between the two.
        if self._world.rank == 0 and step - self._done.step >= 2 * every:
            self._again.leave_before()

    def ended(self, *, waits: bool) -> float | None:
        """Seconds that the thread wrote for; ``None`` if there is none, or it still writes. Raises its error."""
        return self._checkpoints.ended(waits=waits)

    def _info(self, step: int) -> CheckpointInfo:
        sequences = (step - self._done.step) * self._config.layout.step_size
        tokens = self._done.tokens + sequences * self._config.data.seq_len
        info = checkpoint_info(self._config, self._data, step, self._done.sequences + sequences, tokens)
        return replace(info, sources=self._loading.position, base=info.base or self._done.base)

    def _predict(self) -> None:
        """Profile the stages, their collectives and the update on this machine, and simulate the step.

        Collectives are timed while all ranks compute. The reverse effect, that collectives slow down compute on shared
        cores, is not modelled. Weights and optimizer state stay unchanged.
        """
        # Predicted before, by the processes that failed: nothing should come between a failure and the next step.
        if not self._config.training.predict or self._again.is_again:
            return
        # Any batch will do, of windows that no thread reads: step time does not depend on the tokens.
        windows = self._data.validation.batch(0, self._config.layout.batch_size)
        with self._noted.measuring:
            profile = self._pipeline.profile(self._pipeline.batch(windows))
            within_s, behind_s = self._updates.seconds(self._world)
            average_s = 0.0 if self._averaging is None else self._averaging.seconds()
        self._use(self._division.measured(self._config, profile, self._print_line))
        if profile is None:  # on all ranks but 0
            return
        self._profile = profile.with_costs(update_s=within_s)
        traces = self._measured.predicted_by_replica = self._traces_by_replica()
        # All replicas wait for the slowest one; the trace is that of the first one alone.
        self._measured.predicted = traces[0]
        self._measured.predicted_s = update_s(
            self._config.layout, traces, behind_s, average_s, hides_average=self._config.optimizer.outer_delayed
        )
        self._folder.write(run_folder.PREDICTED_TRACE, to_chrome(traces[0], "predicted", self._measured.predicted_s))

    def _traces_by_replica(self) -> list[Trace]:
        """The predicted step of each replica, or one for all; empty without a profile."""
        if self._profile is None:
            return []
        schedules = schedules_by_replica(self._config) if self._profile.others else [self._pipeline.schedule]
        return predicted_traces(schedules, self._profile)

    def _use(self, config: RunConfig) -> None:
        """Continue with another division of the batch among the replicas. Collective."""
        if config.layout == self._config.layout:
            return
        self._config = config
        self._pipeline.divide(config)
        self._measured.predicted_by_replica = self._traces_by_replica()
        self._slow.forget(config.layout)
        if self._world.rank == 0:
            self._write_run()

    def _write_run(self) -> None:
        """Write what the run does: resolved, with what it chose by measuring; the schedule is that of the trace."""
        self._folder.write_config(self._config, is_needed=False)
        if self._measured.traced_step is None:
            self._folder.write(run_folder.SCHEDULE, self._pipeline.schedule_text, is_needed=False)

    def _step(self, step: int) -> tuple[float, float, StepResult]:
        """Do one optimizer step, counted from 1; returns loss, gradient norm, and this rank's result."""
        config = self._config
        lr = learning_rate(config.optimizer, step - 1, config.training.known_steps)
        with self._noted.reading:
            windows = self._loading.take()
        exchanged_s = self._pipeline.exchange_s
        result, values = self._work(windows, step, lr)
        # One all-reduce for loss, gradient norm and votes.
        own = (
            values,
            self._slow.own(result, self._pipeline.exchange_s - exchanged_s),
            self._health.own(),
            self._meter.own(result, self._loading.waited_s, self._pipeline.loads),
            self._saving.votes(),
        )
        sums = iter(self._world.sum([*chain(*own)]))
        (loss, *each), seconds, changed, self._sums, votes = (list(islice(sums, len(part))) for part in own)
        squares = sum(each)
        self._slow.take(step, seconds, self._measured.predicted_by_replica)
        self._division.note(seconds)
        self._saving.count(votes)
        if (damage := self._health.judge(step, changed, windows)) is not None:
            self._mend(damage)
            return loss, squares**0.5, result
        # Judged by the sums, so that all ranks do the same; one rank alone would leave the others waiting.
        self._problem = self._spikes.problem(step, loss, squares**0.5)
        if self._problem is not None and config.training.on_spike != "stop":
            self._pass_over(step, self._problem)
            return loss, squares**0.5, result
        if self._problem is not None and math.isfinite(loss + squares):
            raise RunError(f"{self._problem}; training.on_spike skip or rollback continues without such a step")
        if not math.isfinite(loss + squares):
            raise RunError(
                f"the loss of step {step} is {loss}, its gradient norm {squares**0.5}; "
                "try a lower --optimizer.lr or a longer --optimizer.lr-warmup-steps"
            )
        # Without a gradient only weight decay would change the weights.
        if squares == 0:
            raise RunError(
                f"the gradient norm of step {step} is exactly 0 and its loss {loss}, so no weight would change; "
                "the weights are damaged or far too large (resume from an older checkpoint, try a lower "
                "--optimizer.lr), gradients vanish in training.dtype (try --training.dtype float32), or the model "
                "predicts every token of the text with certainty"
            )
        grad_norm = squares**0.5
        with self._noted.updating:
            (self._averaging or self._updates).end_step(each, lr)
            if self._pipeline.loads is not None:
                self._pipeline.loads.move_biases()
        self._health.note()
        return loss, grad_norm, result

    def _work(self, windows: npt.NDArray[np.int64], step: int, lr: float) -> tuple[StepResult, list[float]]:
        """Forwards and backwards of a step; its result, and this rank's shares of the loss and of squared norms."""
        if self._averaging is not None:
            return self._averaging.step(windows, step)
        self._updates.begin_step(lr)
        result = self._pipeline.train_step(self._pipeline.batch(windows))
        return result, [self._pipeline.counted_loss(result), *self._updates.squares()]

    def _pass_over(self, step: int, problem: str) -> None:
        """Leave weights and moments as they are, or go back to those of the newest checkpoint. Collective."""
        if self._config.training.on_spike == "skip":
            assert isinstance(self._updates, WholeUpdates)
            self._updates.skip_step()
            self._warn(f"{problem}; its batch is left out")
        else:
            self._go_back(step, problem)

    def _mend(self, damage: Damage) -> None:
        """Go back to a checkpoint from before a damage, or end the run. Collective."""
        self._saving.settle()
        if self._world.rank == 0:
            for checkpoint in list_checkpoints(self._folder.path):
                if (step_of(checkpoint) or 0) > damage.good_step:
                    put_aside(checkpoint)
        if self._config.training.on_spike == "rollback":
            self._go_back(damage.step, damage.words)
            return
        self._checkpoints.forget_kept(damage.good_step)
        self._warn(damage.words)
        advice = "" if self._config.restart.times else "; training.on_spike rollback would go back"
        raise WrongRankError(
            damage.rank,
            f"{damage.words}; checkpoints of later steps than {damage.good_step} may have it and are called *.damaged"
            f"{advice}",
        )

    def _go_back(self, step: int, problem: str) -> None:
        """Go back to the newest checkpoint, and leave out the batches since. Collective."""
        self._saving.settle()
        newest = self._saving.newest_whole()
        if newest is None:
            raise RunError(f"{problem}; there is no checkpoint to go back to (training.on_spike rollback)")
        done = self._checkpoints.restore(newest)
        self._loading.extend(step - done.step)
        sequences = self._first_sequence + self._loading.taken * self._config.layout.step_size
        self._done, self._back_to = replace(done, sequences=sequences), done.step
        self._since = min(self._since, done.step)
        self._health.go_back(done.step)
        if self._world.rank == 0:
            go_back(self._folder, done.step)
        self._warn(f"{problem}; back to step {done.step}, without the batches since")

    def _print_line(self, text: str) -> None:
        if not self._quiet:
            print_beside(text, sys.stdout)

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            self._folder.add_warning(text)

    def _finish(self) -> RunSummary:
        config, measured = self._config, self._measured
        if self._again.is_again and self._world.rank == 0:
            measured.read_prediction(self._folder)
        # The median ignores the slow first step; of two middle steps it is one of them, not their mean.
        step_time_s = median_high(measured.times_s) if measured.times_s else None
        (num_parameters,) = self._world.sum([self._pipeline.num_counted_parameters])
        summary = RunSummary(
            num_parameters=round(num_parameters),
            steps=config.training.known_steps,
            tokens=self._info(config.training.known_steps).tokens,
            traced_step=measured.traced_step,
            train_loss=measured.loss,
            validation_loss=self._validate(),
            unigram_loss=self._validation.unigram_loss(),
            step_time_s=step_time_s,
            predicted_step_time_s=measured.predicted_s,
            tokens_per_s=None if step_time_s is None else config.layout.update_size * config.data.seq_len / step_time_s,
            exchange_s=measured.exchange_s,
            live_bytes=measured.live_bytes,
            bubble_fraction=_bubble_fraction(measured.trace),
            predicted_bubble_fraction=_bubble_fraction(measured.predicted),
            corpus_sha256=self._data.corpus_sha256,
            shared_cores=shared_cores(config),
            **({} if self._pipeline.store is None else measured.swapping()),
        )
        if self._world.rank == 0:
            # Only now: a run without steps left keeps the earlier summary until it has one of its own.
            self._folder.begin(keeps_measured=measured.config is not None)
            self._folder.write(run_folder.SUMMARY, strict_json(asdict(summary), indent=2) + "\n")
        if config.training.sample_tokens:
            sample = sample_text(self._pipeline, self._world, self._data, config)
            if self._world.rank == 0:
                self._folder.write(run_folder.SAMPLE, format_sample(sample))
        self._pipeline.close()
        return summary

    def _validate(self, gives_up: Callable[[], bool] | None = None) -> float | None:
        # Deferred updates of the last step come before.
        self._updates.settle()
        with nullcontext() if self._averaging is None else self._averaging.common():
            return self._validation.loss(gives_up)

    def _settle(self) -> None:
        """Do what the steps so far owe: deferred updates, a delayed average; check the state. Collective."""
        self._updates.settle()
        if self._averaging is not None:
            self._averaging.settle()
        self._declared.check(again=True)


def _bubble_fraction(trace: Trace | None) -> float | None:
    return None if trace is None else summarize(trace).bubble_fraction
