"""Files of a deployment's sites: what a node's file says, and how such files are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from shufl.protocol.validation import ConfigError, Count, Record, read_file
from shufl.shuffler import Credentials
from shufl.shuffler.wire.channel import check_address

_Address = Annotated[str, AfterValidator(check_address)]
_Addresses = Annotated[
    tuple[_Address, ...], Field(min_length=1, strict=False, description="a list of HOST:PORT")
]


class SiteFile(Record):
    """A site's file; paths in it are relative to it.

    Attributes:
        shufflers: HOST:PORT of every shuffler; node i reports to the (i mod k)-th of k.
        certificate: path of the site's NAME.pem for the shufflers, with NAME.key beside it.
        digest: of the configuration's data, where a node has `simulated` data: every machine
            loads them anew, and must get the same. Empty: not compared.
    """

    shufflers: _Addresses
    certificate: str
    digest: str = ""

    @property
    def credentials(self) -> Credentials:
        """What the shufflers ask for."""
        path = Path(self.certificate)
        try:
            return Credentials.read(path.parent, path.stem)
        except OSError as error:
            raise ConfigError(f"certificate: {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"certificate: {error}") from error


class NodeSite(SiteFile):
    """`node.toml`.

    Attributes:
        number: the node's, from 0.
        users: for how many users it speaks.
        config: path of the run's configuration, with the plan that this node agrees to.
        input_shape, input_type, outputs, label_shape, label_type: as in `Form`; of features where
            the configuration maps records.
        data: what gives a user's records, by the user's number from 0, as features and labels:
            `module:callable`; or a folder with `0.npz` and so on (arrays `features` and
            `labels`); or a `.csv` or `.parquet` file with the columns that the configuration names;
            or `simulated`, the configuration's dataset.
        first_user: of `simulated` data: which of the dataset's users is this node's first.
        device: path of the file with the owner's limits and ledger.
        socket: path of the Unix socket over which Flower's messages come.
        superlink: HOST:PORT where its SuperNode reaches the server.
    """

    number: int = Field(ge=0, description="a whole number, at least 0")
    users: Count
    config: str
    input_shape: tuple[Count, ...] = Field(strict=False, description="a list of whole numbers")
    input_type: Literal["float32", "int64"] = "float32"
    outputs: Count
    label_shape: tuple[Count, ...] = Field((), strict=False, description="a list of whole numbers")
    label_type: Literal["float32", "int64"] = "int64"
    data: str
    first_user: int = Field(0, ge=0, description="a whole number, at least 0")
    device: str
    socket: str
    superlink: _Address


def check_cover(cover: bool) -> None:
    """Refuses a plan under which a node's traffic shows who checked in.

    The server's code runs on every node's machine, where any account sees how much is sent: so
    without cover the server learns who checked in, and no accountant but `local` holds.

    Raises:
        ConfigError: the plan has no cover.
    """
    if not cover:
        raise ConfigError(
            "privacy.cover must be true on real machines, got false: the server's code on a node "
            "would see from its traffic who checked in"
        )


def role_of(folder: Path) -> str:
    """What a site's folder is of: `server`, `shuffler` or `node`.

    Raises:
        ConfigError: it is of none, or of several.
    """
    files = "server.toml", "shuffler.toml", "node.toml"
    found = [name for name in files if (folder / name).exists()]
    if len(found) != 1:
        raise ConfigError(
            f"a site's folder holds exactly one of {', '.join(files)}, {folder} holds "
            f"{' and '.join(found) or 'none'}"
        )
    return found[0].removesuffix(".toml")


_PATHS = ("certificate", "config", "device", "nodes", "socket")
_AnySite = TypeVar("_AnySite", bound=SiteFile)


def load_site(path: Path, kind: type[_AnySite]) -> _AnySite:
    """Reads a site's file; a mistake is a ConfigError of one line."""
    content, folder = read_file(path), path.absolute().parent
    for key in _PATHS:
        if isinstance(content.get(key), str):
            content[key] = str(folder / content[key])
    return kind.checked(path, content)
