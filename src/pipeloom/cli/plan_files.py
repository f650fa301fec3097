"""Files that ``pipeloom plan`` writes: a run file with its schedule, and start files."""

from dataclasses import replace
from math import ceil
from pathlib import Path

from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.checkpoint.checkpoint_folder import is_hugging_face
from pipeloom.cli.plan_request import RUN_FILE, Request
from pipeloom.config import RunConfig, with_pretrained
from pipeloom.config.file import format_run
from pipeloom.errors import ConfigError, UserError
from pipeloom.planner.plan import Plan
from pipeloom.planner.run_file import run_config
from pipeloom.predict.step import SimulatedStep
from pipeloom.runs.run_folder import SCHEDULE
from pipeloom.system.files import read_text, write_text
from pipeloom.terminal.guard import print_beside
from pipeloom.terminal.sections import Section
from pipeloom.terminal.words import count

_MOST_ORDERED = 200_000
"""Actions up to which the order of a layout is made again, in about a second."""


def write_layout(request: Request, best: SimulatedStep) -> bool:
    """Write a layout to the folders of ``--out`` and ``--export``, if they are given.

    Returns:
        Whether a program can start it, if start files are wanted.
    """
    options = request.options
    folder = options.out or options.export
    # The file of a cluster whose groups of nodes the layout has in another order.
    own = None if folder is None or best.cluster == request.question.cluster else folder / "run.cluster.toml"
    config = planned_run(request, best, request.cluster if own is None else str(own))
    moves = best.software.has_lanes and (best.knobs.moves.is_any or best.knobs.found is not None)
    # Places of moves and found orders follow from seconds that `pipeloom train` does not have.
    if folder is not None and moves:
        config = replace(config, schedule=replace(config.schedule, file=folder / SCHEDULE))
    if options.out is not None:
        # Before the files that belong to it.
        _write_run(options.out / RUN_FILE, config)
    if own is not None:
        _write_cluster(own, request, best)
    if folder is not None and best.software.has_lanes and (moves or options.out is not None):
        write_text(folder / SCHEDULE, best.schedule_text, parents=True)
    if options.out is not None and not options.json:
        from pipeloom.cli.launch import print_run

        print_run(config, best.cluster, options.out / RUN_FILE)
        if best.software.has_lanes:
            print(f"\nschedule: {options.out / SCHEDULE}; pipeloom train takes it as --schedule.file")
    if not options.json:
        _print_remarks(request, config, is_written=folder is not None)
    return options.export is None or _hand_over(request, config, best, options.export)


def _hand_over(request: Request, config: RunConfig, best: SimulatedStep, folder: Path) -> bool:
    """Write start files and print which; returns whether there are any."""
    from pipeloom.cli.launch import print_handed_over
    from pipeloom.export import hand_over

    done = hand_over(config, best.cluster, folder, _targets(request))
    if not request.options.json:
        print()
        print_handed_over(done)
    elif not done.written:
        for refused in done.refused:
            reasons = "; ".join(refused.reasons)
            print_beside(f"{refused.target.name}: {refused.target.program} cannot express this run: {reasons}")
    return bool(done.written)


def _print_remarks(request: Request, config: RunConfig, *, is_written: bool) -> None:
    """Print where the weights of a run are from, and what it lacks of the question."""
    if is_written and (lack := request.left_out(config)) is not None:
        print(f"\n{lack}")
    if config.checkpoint.init is not None and request.config is None:
        print(f"\nweights: of {config.checkpoint.init}; without checkpoint.init the run would begin from random ones")


def starting_programs(request: Request, best: SimulatedStep) -> list[str]:
    """The programs for which ``--export`` writes files that start a layout; empty also if that takes long to find out.

    The targets of the export decide, by the whole order of the layout.
    """
    # Before the file of an order that was found is written, its run has another order.
    if best.knobs.found is not None or len(best.trace.spans) > _MOST_ORDERED:
        return []
    from pipeloom.export.hand_over import starting

    try:
        config = planned_run(request, best, request.cluster)
        return [target.program for target in starting(config, best.cluster, _targets(request))]
    except ConfigError:  # raised again where the run is written: the answer is right
        return []


def _targets(request: Request) -> tuple[str, ...]:
    """The target of the program of ``--for``; empty for all that can express the run."""
    launcher = request.question.launcher
    return () if launcher.is_own else (launcher.name,)


def _write_run(file: Path, config: RunConfig) -> None:
    """Write a run file, which has settings to fill in.

    Raises:
        UserError: there is one with other settings, perhaps filled in.
    """
    text = format_run(config)
    if file.exists() and read_text(file) != text:
        raise UserError(f"{file} exists and is not the run of this layout; move it, or name another folder with --out")
    write_text(file, text, parents=True)


def planned_run(request: Request, best: SimulatedStep, cluster: str) -> RunConfig:
    """The run of a layout, on a cluster of that name or file.

    With the steps of the tokens that were given. The model of a Hugging Face folder starts from the weights of the
    folder, and has its tokenizer.
    """
    config = run_config(best, request.model, cluster, request.software)
    if cluster == request.cluster:  # a file that was written has the changes
        config = replace(config, machine=config.machine.with_changes(request.what_if))
    if request.config is not None:
        config = _over(request.config, config, has_model=request.options.model is not None)
    elif config.model.file is not None and is_hugging_face(config.model.file):
        config = replace(config, checkpoint=replace(config.checkpoint, init=config.model.file))
    if request.training is not None:
        steps = ceil(request.training.needed_tokens(best.run.global_batch) / (best.run.global_batch * best.run.seq))
        config = replace(config, training=replace(config.training, steps=steps))
    return with_pretrained(config)


def write_page(request: Request, answer: Plan, file: Path) -> None:
    """Write the answer as a page, with the step of the layout that ``--row`` selects."""
    from pipeloom.cli.plan_text import plan_sections
    from pipeloom.cli.simulate_text import memory_table
    from pipeloom.report.answer import answer_page

    question, number = request.question, request.options.row
    head, *sections = plan_sections(answer, request.training, request.goal)
    step = answer.rows[number - 1] if answer.best is not None else None
    reasons, run_file = sections[1:], ""
    if step is not None:
        title, table = memory_table(step)
        reasons = [Section(title, parts=[table]), *reasons]
        # Of another order of the nodes there is no file yet.
        if step.cluster == question.cluster:
            run_file = format_run(planned_run(request, step, request.cluster))
    where = count(question.num_devices, "device")
    title = f"Plan: {question.shape.name or 'a model'} on {where} of {question.cluster.name}"
    if step is not None:
        title += f", row {number}"
    about = str(head.parts[0])
    above = [Section(parts=head.parts[1:]), *sections[:1]]
    page = answer_page(title, about, answer=above, step=step, reasons=reasons, run_file=run_file)
    write_text(file, page, "the page", parents=True)


def _write_cluster(file: Path, request: Request, best: SimulatedStep) -> None:
    note = (
        f"{request.cluster} with its groups of nodes in the order that `pipeloom plan` chose, for the ranks in order."
    )
    write_text(file, cluster_to_toml(best.cluster, {"": [note]}), parents=True)
    if not request.options.json:
        print(f"\nwritten: {file}, with the groups of nodes in the order that was chosen")


def _over(config: RunConfig, planned: RunConfig, *, has_model: bool) -> RunConfig:
    """A run's settings with the planned ones, and with the model of the question if a flag set it."""
    own, model = planned.training, planned.model if has_model else config.model
    if config.model.known_balance == "batch" and planned.model.balance is not None:
        # Backwards of the planned order do not wait for the loads of the whole batch.
        model = replace(model, balance=planned.model.balance)
    schedule = planned.schedule
    if schedule.device_budget is not None:  # the home of swapped stages belongs to the machine, not to the layout
        schedule = replace(schedule, swap_folder=config.schedule.swap_folder)
    return replace(
        config,
        layout=planned.layout,
        schedule=schedule,
        model=model,
        machine=planned.machine,
        data=replace(config.data, seq_len=planned.data.seq_len),
        training=replace(config.training, dtype=own.dtype, matmul_dtype=own.matmul_dtype, device=own.device),
    )
