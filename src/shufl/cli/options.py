"""Options that several commands have, what they may be, and how a mistake in one ends a command."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
from click.core import ParameterSource
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_json

from shufl.protocol.plan_fields import Privacy, Users
from shufl.protocol.text import one_line
from shufl.protocol.validation import words_of

if TYPE_CHECKING:
    from shufl.accounting import OpenPlan, PrivacyPlan

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

PLAN = (
    *("users", "check_in_rate", "noise_multiplier", "shuffler_blankets", "rounds", "delta"),
    *("adjacency", "mechanism", "categories", "local_epsilon", "participation", "mixing"),
    "central_noise",
)
"""The values that decide what a plan costs."""

_USERS: Any = Annotated[Users, Field(title="n, the eligible users")]
_VALUES = {"users": FieldInfo.from_annotation(_USERS), **Privacy.model_fields}


def plan_options(
    *names: str, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each of these values of a plan, named as a configuration does.

    The command's first argument is a dictionary of the values that were given. What is in
    `defaults` stands for a value that was not given; None takes the configuration's default away.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**options: Any) -> None:
            given = {name: options.pop(name) for name in names}
            command({name: it for name, it in given.items() if it is not None}, **options)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        made = [*(_option_of(name, defaults) for name in names), *own]
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in made]
        )
        return called

    return decorated


def _option_of(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    """The option of a plan's value, as a parameter of a command's function."""
    field, flag = _VALUES[name], f"--{name}".replace("_", "-")
    flags = [flag, "-n"] if name == "users" else [flag]
    default, is_flag = defaults.get(name, field.default), field.annotation is bool
    words = "" if is_flag else f": {_sayable(field.description or words_of(field.annotation))}"
    known = is_flag or default in (None, PydanticUndefined)
    says = f"{field.title}{words}." + ("" if known else f" Default: {default}.")
    about: dict[str, Any] = {} if is_flag else {"parser": _value, "metavar": "VALUE"}
    option = typer.Option(*flags, help=says, show_default=False, **about)
    kind: Any = Annotated[bool | None if is_flag else str | None, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=defaults.get(name), annotation=kind)


def _value(text: str) -> Any:
    """The number that an option says, or else its text; whether it fits is the plan's to say."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _sayable(words: str) -> str:
    """What a value may be, without what an option cannot say."""
    return words.replace('"least-error" or ', "", 1).replace(" or left out", "", 1)


def group(about: str) -> typer.Typer:
    """A command that has commands of its own."""
    return typer.Typer(
        add_completion=False, suggest_commands=False, help=about, no_args_is_help=True
    )


def open_plan(given: dict[str, Any]) -> OpenPlan:
    """The plan of the options that were given; all others are open, or have their defaults."""
    from shufl.accounting import OpenPlan

    cover = {"cover": True} if given.get("mixing") == "sum" else {}
    return OpenPlan(**cover | given)


def whole_plan(given: dict[str, Any]) -> PrivacyPlan:
    """The plan of these options, unchecked, for a command that leaves none open."""
    if given.get("mixing") == "sum" and "central_noise" in given:
        given = {"accountant": "sum-central"} | given  # the users need no noise
    plan = open_plan(given)
    for name in plan.open:
        raise ValueError(f"{name} is missing; shufl calibrate finds what is left out")
    return plan.closed()


def warn_of_delta(check_in_rate: float, rounds: int, delta: float) -> None:
    """Prints a line where δ is too large to promise much, or too small for a plan."""
    from shufl.accounting import ideal_note, participation_note

    for note in (participation_note(check_in_rate, rounds, delta), ideal_note(rounds, delta)):
        if note:
            typer.echo(f"warning: {note}", err=True)


def check_file(option: str, path: Path, new: bool = False) -> None:
    """Refuses a file, before the work for it, that could not be written after it.

    With `new` it also refuses a file that is there: whoever wrote it may still need it.
    """
    if new and path.is_file():
        raise ValueError(f"{option} must be a new file, {path} exists already")
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
    values = click.get_current_context().params
    for name, option in _given_options().items():
        if name not in allowed:
            raise ValueError(f"{option} must be left out with {what}, got {values[name]}")


def _given_options() -> dict[str, str]:
    """The options that the command was given, by the names of their values."""
    if (context := click.get_current_context(silent=True)) is None:
        return {}
    return {
        str(each.name): each.opts[0]
        for each in context.command.params
        if isinstance(each, click.Option)
        and context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
    }


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
    """One line on standard error, with an option that was given in the place of its key."""
    text = str(error)
    key, must, allowed = text.partition(" must ")
    if must and (option := _given_options().get(key.rpartition(".")[2])):
        text = f"{option}{must}{allowed}"
    if isinstance(error, FileExistsError):
        text = f"{error.filename} exists already"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    typer.echo(f"error: {one_line(text) or type(error).__name__}", err=True)


_OF_SERVERS = {"shufl provision", "shufl register", "shufl rehearse", "shufl status"}


def missing_extra(error: ModuleNotFoundError, what: str) -> ImportError:
    """What to install for a command, or a name of `shufl`, whose import failed."""
    package = str(error.name).partition(".")[0]
    extra = "server" if what in _OF_SERVERS else "simulation"
    extra = "node" if what == "shufl node" else extra
    return ImportError(
        f"{what} needs {package}, which is not installed: pip install 'shufl[{extra}]'"
    )
