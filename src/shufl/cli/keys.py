"""The commands that enrol the parties of a deployment: `shufl keys`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from shufl.accounting.lines import one_line
from shufl.shuffler.callers import Role, fingerprint_of
from shufl.shuffler.keys import (
    MAX_DAYS,
    Authority,
    Request,
    make_flower_key,
    read_certificate,
    write_new,
)

keys_app = typer.Typer(
    help="Make certificates. No private key leaves the machine it was made on.",
    no_args_is_help=True,
)


@keys_app.command("authority")
def authority_command(
    directory: Annotated[Path, typer.Argument(help="Where its key and certificate are written.")],
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 3650,
) -> None:
    """Make the authority that signs all requests of a deployment.

    Keep authority.key on no machine of the running system: whoever has it can enrol users.
    """
    with _one_line():
        _check_days(days)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        Authority.create(days).write(directory)
        typer.echo(str(directory / "authority.pem"))


@keys_app.command("request")
def request_command(
    directory: Annotated[
        Path, typer.Argument(help="Where NAME.key, which stays, and NAME.csr are written.")
    ],
    name: Annotated[str, typer.Option(help="Name of the credential and of its files.")],
) -> None:
    """Make a party's key on its own machine, and a request for the authority to sign."""
    with _one_line():
        request = Request.create(name)
        request.write(directory)
        typer.echo(str(directory / f"{name}.csr"))
        typer.echo(f"key {request.fingerprint}: the authority must be shown the same")


@keys_app.command("flower")
def flower_command(
    directory: Annotated[Path, typer.Argument(help="Where flower.key, which stays, is written.")],
) -> None:
    """Make the key that a node shows Flower's SuperLink, on the node's machine."""
    with _one_line():
        make_flower_key(directory)
        typer.echo(str(directory / "flower.pub"))


@keys_app.command("sign")
def sign_command(
    directory: Annotated[Path, typer.Argument(help="Where the authority is, and NAME.pem goes.")],
    request: Annotated[Path, typer.Argument(help="The NAME.csr that a party sent.")],
    role: Annotated[Role, typer.Option(help="What the certificate is for; not authority.")],
    host: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads the annotation)
        typer.Option(help="For a shuffler: a DNS name or IP address it is known by. Repeatable."),
    ] = None,
    users: Annotated[int, typer.Option(help="For a node: how many users report through it.")] = 0,
    days: Annotated[
        float, typer.Option(help="How long it is valid, at most as long as the authority.")
    ] = 365,
) -> None:
    """Sign a party's request, on the authority's machine.

    Send the certificate back with authority.pem, once the party has confirmed that its key is the
    one printed here.
    """
    with _one_line():
        _check_days(days)
        asked = Request.read(request)
        authority = Authority.read(directory)
        certificate = authority.sign(asked, role, hosts=host or (), users=users, days=days)
        path = directory / f"{asked.name}.pem"
        write_new(path, certificate)
        typer.echo(str(path))
        typer.echo(f"key {asked.fingerprint}: the party must have been shown the same")
        fingerprint = fingerprint_of(read_certificate(path))
        typer.echo(f"name {asked.name}, fingerprint {fingerprint}: either withdraws it")


def _check_days(days: float) -> None:
    if not 0 < days <= MAX_DAYS:
        raise ValueError(f"--days lies in (0, {MAX_DAYS}], got {days:g}")


@contextmanager
def _one_line() -> Iterator[None]:
    """Ends the command with one line if it fails."""
    try:
        yield
    except (OSError, ValueError) as error:
        wrong = str(error)
        if isinstance(error, FileExistsError):
            wrong = f"{error.filename} exists already"
        elif isinstance(error, OSError):
            wrong = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        typer.echo(f"keys: {one_line(wrong)}", err=True)
        raise typer.Exit(2) from None
