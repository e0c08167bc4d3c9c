"""`shufl record`: a shuffler's public record of rounds, fetched and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shufl.cli import options

record_app = typer.Typer(
    help="A shuffler's public record of rounds: fetch it, check it.", no_args_is_help=True
)


@record_app.command("fetch")
def fetch_command(
    address: Annotated[str, typer.Argument(help="The shuffler's HOST:PORT.")],
    file: Annotated[Path, typer.Argument(help="Where the record is written.")],
    certificate: Annotated[
        Path,
        typer.Option(
            help="Any certificate of the shuffler's authority, NAME.pem, with NAME.key and "
            "authority.pem beside it."
        ),
    ],
) -> None:
    """Fetch a shuffler's record, and check it."""
    from shufl.shuffler import Credentials, ShufflerError
    from shufl.shuffler.record import verify
    from shufl.shuffler.wire.record_client import RecordClient

    try:
        options.check_file("FILE", file)
        credentials = Credentials.read(certificate.parent, certificate.stem)
        with RecordClient(address, credentials) as client:
            entries = list(client.entries())
        found = verify(entries)
        file.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
    except (OSError, ValueError, ShufflerError) as error:
        options.fail(error)
    typer.echo(f"{len(found)} lines, the last with hash {found[-1]['check'] if found else '–'}")


@record_app.command("verify")
def verify_command(
    file: Annotated[Path, typer.Argument(help="A record that was fetched.")],
    head: Annotated[
        str | None, typer.Option(help="A hash that was seen earlier and must be in the record.")
    ] = None,
    device: Annotated[
        Path | None,
        typer.Option(help="An owner's TOML file: each round of its ledger must be in the record."),
    ] = None,
) -> None:
    """Check that a record is whole, and holds what was seen of it elsewhere."""
    from shufl.shuffler.record import verify

    try:
        found = verify(options.read_text(file).splitlines())
        if head is not None and head not in {line["check"] for line in found}:
            raise ValueError(f"{file} has no line with the hash {head}")
        if device is not None:
            _compare(device, found)
    except (OSError, ValueError) as error:
        options.fail(error)
    typer.echo(f"{len(found)} lines follow each other")


def _compare(device: Path, found: list[dict[str, object]]) -> None:
    """Refuses a record in which a round is missing that the device was offered, or is another."""
    from shufl.clients.device import load_device

    opened = {
        (entry["run"], entry["round"]): entry["commitment"]
        for entry in found
        if entry["event"] == "opened"
    }
    for run, number, commitment in load_device(device, create=False).commitments():
        if opened.get((run, number)) != commitment:
            raise ValueError(
                f"round {number} of run {run}, which the device was offered, is not in the record, "
                "or is there with another key, model or plan"
            )
