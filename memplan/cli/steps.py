"""Commands that plan one step of the user."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from memplan import api
from memplan.cli import doors, factory
from memplan.cli.options import (
    Budget,
    FactoryArgument,
    PlanCommandOptions,
    StepCommandOptions,
    step_command,
)
from memplan.cli.output import (
    FAILED,
    FINDINGS,
    INFEASIBLE,
    check_extra,
    check_writable,
    exit_if_interrupted,
    print_error,
    print_result,
    progress,
    rows_done,
    save,
)
from memplan.errors import ReportError
from memplan.libraries import PlainStep
from memplan.planning.plan import Plan
from memplan.report.difference import Difference, Tolerance
from memplan.report.model import Report
from memplan.report.progress import Stages
from memplan.request import Request
from memplan.stages import PlannedJit
from memplan.units import Size


@step_command
def inspect(
    step: FactoryArgument,
    *,
    budget: Budget = None,
    options: StepCommandOptions,
    verify: Annotated[
        str | None,
        typer.Option(
            help="compile (the default), numbers (also run both steps and compare their results), "
            "or none."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace for ui.perfetto.dev to this file; needs the extra trace."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Draw memory over the step to this file; needs the extra plots."),
    ] = None,
) -> None:
    """Plan and compile one step and report its memory and time. Runs nothing unless --verify
    numbers.
    """
    check_extra(trace, "--trace", "perfetto", "trace", options.json, options.html)
    check_extra(png, "--png", "matplotlib", "plots", options.json, options.html, trace)
    if verify not in (None, "compile", "numbers", "none"):
        raise typer.BadParameter(
            f"{verify!r} is not one of compile, numbers, none.", param_hint="--verify"
        )
    with progress() as stage:
        plain = load_step(step, stage)
        planned = jitted(plain, budget, options, verify).plan(*plain.args)
        report = replace(planned.report, step=str(factory.parse(step)))
    print_result(report, options.json, options.html)
    for path, write in ((trace, report.save_trace), (png, report.save_png)):
        if path is not None:
            save(path, write)


@step_command
def doctor(step: FactoryArgument, *, budget: Budget = None, options: StepCommandOptions) -> None:
    """What to do first about the memory of one step, cheapest first, before any plan: bytes,
    seconds, lines.

    Exit code 0 if there is nothing to gain, 1 if there are findings.
    """
    with progress() as stage:
        plain = load_step(step, stage)
        request = options.of(plain)
        if options.donate is None:  # The doctor finds arguments that the step does not donate.
            request["donate_argnums"] = plain.options.get("donate_argnums")
        diagnosis = api.doctor(plain.function, plain.args, budget=_budget(plain, budget), **request)
    print_result(diagnosis, options.json, options.html)
    if not diagnosis.is_healthy:
        raise typer.Exit(FINDINGS)


@step_command
def check(
    step: FactoryArgument,
    *,
    against: Annotated[
        Path, typer.Option(help="The saved report, of --save or of `memplan inspect --json`.")
    ],
    bytes_percent: Annotated[
        float, typer.Option("--bytes", help="Percent by which the compiled bytes may rise.")
    ] = Tolerance.bytes,
    ms_percent: Annotated[
        float, typer.Option("--ms", help="Percent by which the predicted time may rise.")
    ] = Tolerance.ms,
    saves: Annotated[
        bool, typer.Option("--save", help="Write the new report to --against, whatever rose.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Plan the step within this: bytes, '16GiB' or '80%'. Default: the step as it is."
        ),
    ] = None,
    options: StepCommandOptions,
) -> None:
    """Compare a step with its saved report. Exit code 1 if its memory or time rose; shows which
    buffers grew.
    """
    tolerance = Tolerance(bytes_percent, ms_percent)
    if against in (options.json, options.html):
        raise typer.BadParameter("give it a file name of its own.", param_hint="--against")
    if saves:
        check_writable(against)
    old = None if saves and not against.exists() else _saved(against)
    with progress() as stage:
        plain = load_step(step, stage)
        if plain.request is not None:  # it is planned even if it names no budget
            report = jitted(plain, budget, options).plan(*plain.args).report
        else:
            report = api.report(plain.function, plain.args, budget=budget, **options.of(plain))
        new = replace(report, step=str(factory.parse(step)))
    if saves:
        print_result(new if old is None else Difference.of(old, new), options.json, options.html)
        save(against, new.save_json)
    elif old is not None:
        difference = Difference.of(old, new)
        difference.check_same()
        print_result(difference, options.json, options.html)
        rises = " and ".join(tolerance.exceeded_by(difference))
        if rises:
            print_error(
                f"{new.step} on {new.device}: {rises}. To accept it, run again with --save."
            )
            raise typer.Exit(FAILED)


@step_command
def compare(step: FactoryArgument, *, budget: Budget = None, options: StepCommandOptions) -> None:
    """Compile one step in several ways, with memplan and without, and show which fit. Exit code 3
    if none does.
    """
    with progress() as stage:
        plain = load_step(step, stage)
        comparison = rows_done(
            lambda: api.compare(
                plain.function, plain.args, budget=_budget(plain, budget), **options.of(plain)
            )
        )
    print_result(comparison, options.json, options.html)
    exit_if_interrupted(comparison.ended_by)
    if not comparison.any_fits:
        raise typer.Exit(FAILED if comparison.ended_by else INFEASIBLE)


@step_command
def curve(
    step: FactoryArgument,
    *,
    points: Annotated[
        int, typer.Option(min=1, help="Budgets, from the floor up to the plain step.")
    ] = 8,
    share: Annotated[
        list[float] | None,
        typer.Option(help="A budget, as a share of the plain step's peak; may be repeated."),
    ] = None,
    options: StepCommandOptions,
    png: Annotated[
        Path | None, typer.Option(help="Draw the curve into this file; needs the extra plots.")
    ] = None,
) -> None:
    """Step time against memory: plans for several budgets, and jax and XLA without a plan."""
    check_extra(png, "--png", "matplotlib", "plots", options.json, options.html)
    with progress() as stage:
        plain = load_step(step, stage)
        result = rows_done(
            lambda: api.curve(
                plain.function, plain.args, points=share or points, **options.of(plain)
            )
        )
    if png is not None:
        save(png, result.save_png)
    print_result(result, options.json, options.html)
    exit_if_interrupted(result.ended_by)


@step_command
def largest(
    step: FactoryArgument,
    *,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=LOW:HIGH[:STEP]",
            help="An integer argument of the factory, and its range.",
        ),
    ],
    budget: Budget = None,
    options: StepCommandOptions,
) -> None:
    """Find the largest size whose step fits."""
    name, low, high, stride = _size_range(vary)
    reference = factory.parse(step)

    def plain_step_of(size: int) -> PlainStep:
        return doors.plain_step(*factory.load(reference.with_arguments({name: size})))

    def make(size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        plain = plain_step_of(size)
        return plain.function, plain.args

    with progress():
        smallest = plain_step_of(low)
        frontier = rows_done(
            lambda: api.frontier(
                make,
                name=name,
                low=low,
                high=high,
                step=stride,
                budget=_budget(smallest, budget),
                **options.of(smallest),
            )
        )
    print_result(frontier, options.json, options.html)
    exit_if_interrupted(frontier.ended_by)


def _size_range(vary: list[str]) -> tuple[str, int, int, int]:
    """The name of a size, its bounds and its stride."""
    if len(vary) > 1:  # typer would silently take the last
        message = "--vary takes one size; search it for each value of the other."
        raise typer.BadParameter(message, param_hint="--vary")
    name, _, limits = vary[0].partition("=")
    bounds = limits.split(":")
    are_numbers = all(bound.strip().isdecimal() for bound in bounds)
    if not name.isidentifier() or len(bounds) not in (2, 3) or not are_numbers:
        message = f"{vary[0]!r} is not a range. Write batch=1:64 or image=224:1024:32."
        raise typer.BadParameter(message, param_hint="--vary")
    low, high, stride = map(int, (*bounds, "1")[:3])
    return name, low, high, stride


def jitted(
    step: PlainStep, budget: str | None, options: PlanCommandOptions, verify: str | None = None
) -> PlannedJit[..., Any]:
    """The step by `memplan.jit`, with the options of the command in the place of its own."""
    own = step.request or Request()
    return api.jit(
        step.function,
        budget=_budget(step, budget),
        verify=own.verify if verify is None else None if verify == "none" else verify,
        plan=saved_plan(step, budget, options),
        **options.of(step),
    )


def _budget(step: PlainStep, budget: str | None) -> Size:
    """The budget of the command, else the step's own."""
    return step.request.budget if budget is None and step.request is not None else budget


def saved_plan(step: PlainStep, budget: str | None, options: PlanCommandOptions) -> Plan | None:
    """The plan that the step follows; it holds for the options that it was made with alone."""
    if step.request is None or budget is not None or options.replaces:
        return None
    return step.request.plan


def _saved(path: Path) -> Report:
    try:
        return Report.load_json(path)
    except ReportError as error:
        raise ReportError(
            f"{error.message} --save writes a report where there is no file."
        ) from error


def load_step(step: str, stage: Stages) -> PlainStep:
    """The plain step of a factory, and its arguments."""
    reference = factory.parse(step)
    stage(f"loading {reference}")
    return doors.plain_step(*factory.load(reference))
