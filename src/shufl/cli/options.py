"""Options that several commands have, what they may be, and how a mistake in one ends a command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
from click.core import ParameterSource
from pydantic_core import to_json

from shufl.protocol.text import one_line

if TYPE_CHECKING:
    from shufl.accounting import OpenPlan, PrivacyPlan

Users = Annotated[int | None, typer.Option("--n", help="Eligible users n.")]
Rate = Annotated[float | None, typer.Option("--gamma", help="Check-in rate γ in (0, 1].")]
Noise = Annotated[float | None, typer.Option("--noise", help="Noise multiplier z.")]
Mechanism = Annotated[
    str, typer.Option("--mechanism", help="How a report is made: gaussian or ldp-sgd.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds T.")]
Delta = Annotated[str, typer.Option("--delta", help='δ in (0, 1), or "1/n".')]
Adjacency = Annotated[str, typer.Option("--adjacency", help="replace or zero-out.")]
Participation = Annotated[
    str,
    typer.Option(
        "--participation",
        help="check-in, by a coin in each round, or allocation, once in every 1/γ rounds.",
    ),
]
Mixing = Annotated[
    str,
    typer.Option("--mixing", help="shuffle: reports in random order; sum: only their sum."),
]
CentralNoise = Annotated[
    float | None,
    typer.Option(
        "--central-noise", help="With --mixing sum: noise σ of shuffler and server, in clip norms."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Blankets = Annotated[
    float,
    typer.Option("--blankets", help="Expected blankets λ that the shuffler adds to each round."),
]


def needed(option: str, value: Any) -> Any:
    """The value of an option that must be given."""
    if value is None:
        raise ValueError(f"{option} is missing")
    return value


_FLAGS = {
    "users": "n",
    "check_in_rate": "gamma",
    "noise_multiplier": "noise",
    "shuffler_blankets": "blankets",
    "target_epsilon": "epsilon",
}


def flag_of(name: str) -> str:
    """The option of this command that gives a plan's value."""
    here = click.get_current_context().params
    return f"--{name if name in here else _FLAGS.get(name, name)}".replace("_", "-")


@contextmanager
def naming_flags() -> Iterator[None]:
    """Lets a mistake in a plan's value name the option that gave it."""
    from shufl.accounting import OpenPlan

    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name not in OpenPlan.model_fields:
            raise
        for other in ('"least-error" or ', " or left out"):  # what an option cannot say
            rest = rest.replace(other, "", 1)
        raise ValueError(f"{flag_of(name)} {rest}") from None


def open_plan(
    n: int | None,
    gamma: float | None,
    noise: float | None,
    rounds: int | None,
    delta: str,
    adjacency: str,
    blankets: float | str,
    mechanism: str = "gaussian",
    participation: str = "check-in",
    mixing: str = "shuffle",
    central_noise: float | None = None,
    **others: Any,
) -> OpenPlan:
    """The plan of these options, open where they are None; a mistake names its option."""
    from shufl.accounting import OpenPlan
    from shufl.protocol.mechanisms import MECHANISMS
    from shufl.protocol.validation import choice

    choice("--mechanism", mechanism, tuple(MECHANISMS))
    if mixing == "sum":
        others = {"cover": True} | others
        alone = others.get("accountant") in (None, "sum-central")
        noise = 0.0 if alone and noise is None and central_noise is not None else noise
    values = {
        "users": n,
        "check_in_rate": gamma,
        "noise_multiplier": noise,
        "rounds": rounds,
        "delta": number(delta),
        "adjacency": adjacency,
        "shuffler_blankets": blankets,
        "mechanism": mechanism,
        "participation": participation,
        "mixing": mixing,
        "central_noise": central_noise,
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    with naming_flags():
        return OpenPlan(**given, **others)


def whole_plan(*given: Any) -> PrivacyPlan:
    """The plan of the same options, unchecked, for a command that leaves none open."""
    plan = open_plan(*given)
    for name in plan.open:
        raise ValueError(f"{flag_of(name)} is missing")
    return plan.closed()


def number(text: str) -> Any:
    """The value of --delta, if it is a number; whether it fits is the plan's to say."""
    try:
        return float(text)
    except ValueError:
        return text


def warn_of_delta(plan: PrivacyPlan, rounds: int) -> None:
    """Prints a line where δ is too large to promise much, or too small for a plan."""
    from shufl.accounting import ideal_note, participation_note

    rate, delta = plan.check_in_rate, plan.delta
    for note in (participation_note(rate, rounds, delta), ideal_note(rounds, delta)):
        if note:
            typer.echo(f"warning: {note}", err=True)


def check_file(option: str, path: Path) -> None:
    """Refuses a file, before the work for it, that could not be written after it."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(
            f"{option} must be a file in a folder that is there and may be written, got {path}"
        )


def read_text(path: Path) -> str:
    """The text in a file, which must be UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}") from None


def check_alone(what: str, *allowed: str) -> None:
    """Refuses every option that was given but `allowed`: with `what` it has no effect."""
    context = click.get_current_context()
    for option in context.command.params:
        name = str(option.name)
        if name in allowed or isinstance(option, click.Argument):
            continue
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ValueError(
                f"{option.opts[0]} must be left out with {what}, got {context.params[name]}"
            )


def print_json(content: Any) -> None:
    """One JSON object on one line; JSON has no NaN and no infinity, so those become null."""
    typer.echo(to_json(content, inf_nan_mode="null").decode())


def fail(error: BaseException, code: int = 2) -> NoReturn:
    """One line on standard error, then exit; 2 is the code for a mistake in what was asked."""
    print_error(error)
    raise typer.Exit(code)


@contextmanager
def failing(*errors: type[Exception], code: int = 2) -> Iterator[None]:
    """Ends the command by `fail` at one of these errors."""
    try:
        yield
    except errors as error:
        fail(error, code)


def print_error(error: BaseException) -> None:
    """One line on standard error."""
    text = str(error)
    if isinstance(error, FileExistsError):
        text = f"{error.filename} exists already"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    typer.echo(f"error: {one_line(text) or type(error).__name__}", err=True)


_EXTRAS = {
    "shufl node": "node",
    **dict.fromkeys(
        ["shufl provision", "shufl register", "shufl rehearse", "shufl status"], "server"
    ),
}
_BROUGHT = {
    *("flwr", "jinja2", "matplotlib", "ray"),
    *("scikit-learn", "tensorboard", "torch", "torchvision"),
}


def missing_extra(error: ModuleNotFoundError, what: str) -> ImportError:
    """What to install for a command, or a name of `shufl`, whose import failed.

    Raises:
        ModuleNotFoundError: the same; no extra brings that module.
    """
    package, extra = str(error.name).partition(".")[0], _EXTRAS.get(what, "simulation")
    if package not in _BROUGHT:
        raise error
    return ImportError(
        f"{what} needs {package}, which is not installed: pip install 'shufl[{extra}]'"
    )
