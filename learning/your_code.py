"""Your code: found by a name, carried to other processes, with one line for each error."""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shufl.protocol import text
from shufl.protocol.validation import ConfigError

if TYPE_CHECKING:
    import torch

CODE_ERRORS = (Exception, SystemExit)
"""What your code may raise. SystemExit, of `sys.exit()`, would end the command without a word."""

MOVED = {
    f"shufl.simulator.data.held_out:{name}": f"shufl.learning.data.datasets:held_out_{name}"
    for name in ("mnist", "fashion_mnist")
}
"""Names in configurations of 0.1.0, which published results use, and their present names."""

_CARRIED = "object:"  # begins the name of an object
_DEPTH = 1000  # Python's usual limit of recursion
_OURS = Path(__file__).parents[1]
Kinds = tuple[type[BaseException], ...]
_OF_IMPORTS = ImportError, AttributeError, NameError, SyntaxError


def make_importable(folders: Iterable[str | Path]) -> None:
    """Lets your modules in these folders be imported; installed packages come first."""
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)


class Carried(str):
    """An object of your program, under the name that stands for it in a configuration.

    It travels to other processes by cloudpickle, together with the functions and classes of a
    notebook. A process unpacks it at the first use, because your modules may have to be made
    importable before. After `put_in_ray` it travels as a reference.
    """

    _packed: Any

    def __new__(cls, name: str, value: Any = None, packed: Any = None) -> Carried:
        """Takes the object itself, or `packed`: its bytes from `_pack`, or Ray's reference."""
        self = super().__new__(cls, name if is_carried(name) else _CARRIED + name)
        self._packed = packed
        if packed is None:
            self.value = value
        return self

    @functools.cached_property
    def value(self) -> Any:
        """The object."""
        import cloudpickle

        packed, self._packed = self._packed, None  # a process outside Ray may get the object next
        if not isinstance(packed, bytes):
            import ray

            packed = ray.get(packed)
        return cloudpickle.loads(packed)

    def put_in_ray(self) -> None:
        """Stores the object in the running Ray, once for all processes that it is sent to."""
        import ray

        self._packed = ray.put(self._pack())

    def _pack(self) -> bytes:
        """Raises ConfigError if the object holds something that cannot leave this process."""
        import cloudpickle

        with your_code(f"{self} cannot be sent to another process"):
            packed: bytes = cloudpickle.dumps(self.value)
        return packed

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (str(self), None, self._pack() if self._packed is None else self._packed)

    __hash__ = object.__hash__  # two objects of one name are two

    def __eq__(self, other: object) -> bool:
        return self is other


def is_carried(name: str) -> bool:
    """Whether a name in a configuration stands for an object of your program."""
    return name.startswith(_CARRIED)


def find(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """The object that a name in a configuration stands for, imported if need be.

    Args:
        kind: what the name is, for an error: a key such as `data.dataset`.
        name: a key of `known`, `module:callable`, or a `Carried`.
        known: objects by name, or again `module:callable`.

    Raises:
        ConfigError: the name is none of these, or the import fails.
    """
    if isinstance(name, Carried):
        return name.value
    if is_carried(name):
        raise ConfigError(
            f"{kind} {name} is an object of a Python program: give it to shufl.resume or "
            "shufl.load_run again"
        )
    meant = known.get(name, MOVED.get(name, name))
    if not isinstance(meant, str):
        return meant
    if ":" not in meant:
        raise ConfigError(
            f"{kind} must be one of {', '.join(known)}, or module:callable, got {name}"
        )
    if meant.startswith("__main__:"):
        raise ConfigError(
            f"{kind} {name} is of a notebook or script, which other processes cannot import: give "
            "shufl.run or shufl.grid the object itself, or put it in a module"
        )
    with your_code(f"{kind} {name} could not be imported", quote=_OF_IMPORTS), usual_settings():
        return pkgutil.resolve_name(meant)


def call_named(kind: str, name: str, *given: Any, **options: Any) -> Any:
    """Calls a function of yours, which every process imports at the first call; see `find`."""
    return find(kind, name, {})(*given, **options)


@contextmanager
def your_code(failure: str, quote: Kinds = (BaseException,)) -> Iterator[None]:
    """Runs your code in a `with` block; every error of it becomes one line.

    Args:
        failure: the beginning of the line: what has failed.
        quote: the kinds of errors whose text the line quotes; of any other error it names the kind
            and the place. `()` is for code that has users' records: an error might quote one.

    Raises:
        ConfigError: the code raised an error. A ConfigError of the code comes out as it is.
    """
    try:
        yield
    except ConfigError:
        raise
    except CODE_ERRORS as error:
        raise ConfigError(f"{failure}: {one_line(error, quote)}") from error


def one_line(error: BaseException, quote: Kinds = (BaseException,)) -> str:
    """The text of an exception in one printable line; its kind if it has no text.

    If it comes from your code, the line ends with the file and the line number. `quote` is as for
    `your_code`.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    quoted = isinstance(error, quote)
    if isinstance(error, TypeError) and frames:  # our own call did not fit: no record is quoted
        quoted = quoted or Path(frames[-1][0].f_code.co_filename).is_relative_to(_OURS)
    said = text.one_line(str(error)) if quoted else ""
    if isinstance(error, SystemExit):
        code = repr(error.code) if quoted or isinstance(error.code, int | None) else "…"
        said = f"it calls sys.exit({code})"
    elif not quoted and isinstance(error, OSError) and isinstance(error.errno, int):
        said = os.strerror(error.errno)  # the system's text: the error's own may quote a record
    said = said or type(error).__name__
    for frame, line in reversed(frames):
        path = Path(frame.f_code.co_filename)
        if path.is_file() and not is_installed(path):
            return f"{said} ({path.name}, line {line})"
    return said


def is_installed(path: Path) -> bool:
    """Whether a file belongs to Python, an installed package or shufl; otherwise it is yours."""
    installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    others = sysconfig.get_path("stdlib"), _OURS
    return bool(installed) or any(path.is_relative_to(other) for other in others)


@contextmanager
def usual_settings() -> Iterator[None]:
    """Gives Python, numpy and torch the global settings that they start with, in a `with` block.

    So settings of your program, or of a module of yours at its import, do not change a run; at the
    end they are put back. Torch's settings for speed and for determinism stay as they are.
    """
    import torch

    device = torch.get_default_device()
    with (
        np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
        torch.inference_mode(False),
        torch.enable_grad(),
        ExitStack() as stack,
    ):
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(_set_device, device)
        sys.setrecursionlimit(max(_DEPTH, sys.getrecursionlimit()))
        torch.set_default_dtype(torch.float32)
        if device.type != "cpu":
            torch.set_default_device(None)
            if torch.get_default_device().type != "cpu":  # one of a `with` block
                stack.enter_context(torch.device("cpu"))
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _set_device(device: torch.device) -> None:
    import torch

    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)
