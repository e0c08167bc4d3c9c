"""`shufl shuffler`, `shufl keys` and `shufl record`: a shuffler, its callers, its public record."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from shufl.cli import options
from shufl.protocol.files import write_whole
from shufl.shuffler.callers import Role
from shufl.shuffler.credentials import fingerprint_of, read_certificate
from shufl.shuffler.keys import Authority, Request, check_days, make_flower_key


def shuffler_command(
    config: Annotated[Path, typer.Option(help="TOML file; see docs/shuffler.md for the keys.")],
    exit_with_parent: Annotated[
        bool, typer.Option(help="Shut down when standard input ends or the parent is gone.")
    ] = False,
) -> None:
    """Run the shuffler: collect sealed reports, release each batch in random order.

    Certificates say who may do what (`shufl keys`).
    """
    from shufl.shuffler import ShufflerError
    from shufl.shuffler.serving import serve

    with options.failing(ShufflerError, ValueError, OSError):
        serve(config, exit_with_parent)


keys_app = options.group("Make certificates. No private key leaves the machine it was made on.")


@keys_app.command("authority")
def authority_command(
    directory: Annotated[Path, typer.Argument(help="Where its key and certificate are written.")],
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 3650,
) -> None:
    """Make the authority that signs all requests of a deployment.

    Keep authority.key on no machine of the running system: whoever has it can enrol users.
    """
    with options.failing(OSError, ValueError):
        check_days(days)
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
    with options.failing(OSError, ValueError):
        request = Request.create(name)
        request.write(directory)
        typer.echo(str(directory / f"{name}.csr"))
        typer.echo(f"key {request.fingerprint}: the authority must be shown the same")


@keys_app.command("renew")
def renew_command(
    directory: Annotated[Path, typer.Argument(help="Where NAME.key is, and NAME.csr is written.")],
    name: Annotated[str, typer.Option(help="Name of the credential and of its files.")],
) -> None:
    """Ask for another certificate for the same key, before the present one ends.

    The authority knows the key, and is shown nothing. A key that may have been stolen is not
    renewed: move NAME.* away, and `shufl keys request` another.
    """
    with options.failing(OSError, ValueError):
        request = Request.renew(directory, name)
        typer.echo(str(directory / f"{name}.csr"))
        typer.echo(f"key {request.fingerprint}, as before")


@keys_app.command("flower")
def flower_command(
    directory: Annotated[Path, typer.Argument(help="Where flower.key, which stays, is written.")],
) -> None:
    """Make the key that a node shows Flower's SuperLink, on the node's machine."""
    with options.failing(OSError, ValueError):
        make_flower_key(directory)
        typer.echo(str(directory / "flower.pub"))
        fingerprint = hashlib.sha256((directory / "flower.pub").read_bytes()).hexdigest()
        typer.echo(f"key {fingerprint}: the authority must be shown the same")


@keys_app.command("sign")
def sign_command(
    directory: Annotated[Path, typer.Argument(help="Where the authority is, and NAME.pem goes.")],
    request: Annotated[Path, typer.Argument(help="The NAME.csr that a party sent.")],
    role: Annotated[Role, typer.Option(help="What the certificate is for; not authority.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="For a shuffler: a DNS name or IP address it is known by. Repeatable."),
    ] = None,
    users: Annotated[int, typer.Option(help="For a node: how many users report through it.")] = 0,
    shuffler: Annotated[
        str, typer.Option(help="For a node: the only shuffler that takes its reports, by name.")
    ] = "",
    days: Annotated[
        float, typer.Option(help="How long it is valid, at most as long as the authority.")
    ] = 365,
) -> None:
    """Sign a party's request, on the authority's machine.

    Send the certificate back with authority.pem, once the party has confirmed that its key is the
    one printed here.
    """
    with options.failing(OSError, ValueError):
        check_days(days)
        asked = Request.read(request)
        authority = Authority.read(directory)
        certificate = authority.sign(
            asked, role, hosts=host or (), users=users, shuffler=shuffler, days=days
        )
        path = directory / f"{asked.name}.pem"
        write_whole(path, certificate, must_be_new=True)
        typer.echo(str(path))
        typer.echo(f"key {asked.fingerprint}: the party must have been shown the same")
        fingerprint = fingerprint_of(read_certificate(path))
        typer.echo(f"name {asked.name}, fingerprint {fingerprint}: either withdraws it")


record_app = options.group("A shuffler's public record of rounds: fetch it, check it.")


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
    from shufl.shuffler.public_record import verify
    from shufl.shuffler.wire.control_client import RecordClient

    with options.failing(OSError, ValueError, ShufflerError):
        options.check_file("FILE", file)
        credentials = Credentials.read(certificate.parent, certificate.stem)
        with RecordClient(address, credentials) as client:
            entries = list(client.entries())
        found = verify(entries)
        file.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
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
    from shufl.shuffler.public_record import verify

    with options.failing(OSError, ValueError):
        found = verify(options.read_text(file).splitlines())
        if head is not None and head not in {line["check"] for line in found}:
            raise ValueError(f"{file} has no line with the hash {head}")
        if device is not None:
            _compare(device, found)
    typer.echo(f"{len(found)} lines follow each other")


def _compare(device: Path, found: list[dict[str, object]]) -> None:
    """Refuses a record that lacks a round offered to the device, or has another one instead."""
    from shufl.clients.device_ledger import load_device

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
