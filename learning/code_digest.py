"""A digest of your own code that a run rests on, so that a change of it is noticed."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from shufl.learning.your_code import Carried, is_installed
from shufl.protocol.import_times import imported_at
from shufl.protocol.validation import ConfigError

_AHEAD = 60.0  # seconds: if a file is from further in the future, its time is of another clock
_SEEN: dict[str, tuple[ModuleSpec, str]] = {}
"""The texts that this process has imported, by module. A reload gives a module another spec."""


def code_digest(names: Iterable[str]) -> str:
    """SHA-256 (hexadecimal) of the code behind `names`, each `module:callable` or a `Carried`.

    This code is the named modules and the modules that they import, without installed packages.
    Comments and layout do not count, nor does what a function of a notebook reads: its globals,
    defaults, and other functions there. Nothing is imported. Without code of yours it is "".

    Raises:
        ConfigError: a module has changed since this process imported it.
    """
    texts: dict[str, str] = {}
    names = list(names)
    left = [name.partition(":")[0] for name in names if not isinstance(name, Carried)]
    for given in (name.value for name in names if isinstance(name, Carried)):
        if isinstance(given, functools.partial):
            texts["arguments"] = _without_places(repr((given.args, given.keywords)))
        for part in _parts(given):
            module = getattr(part, "__module__", None) or ""
            own = not (hasattr(given, "modules") or module.startswith("shufl."))
            # An object that is called may have settings.
            if own and part is type(given) and hasattr(given, "__dict__"):
                texts[f"a {module}.{part.__qualname__}"] = _without_places(repr(vars(given)))
            if module == "__main__":
                # A notebook has no file. A script is itself edited in order to resume a run.
                texts[f"__main__.{part.__qualname__}"] = _source(part)
                continue
            left.append(module)
            if not isinstance(given, type) and hasattr(given, "modules"):
                texts["object"] = _without_places(repr(given))
    while left:
        name = left.pop()
        if name in texts or (spec := _spec(name)) is None or not spec.has_location:
            continue
        if is_installed(path := Path(spec.origin or "")) or not path.is_file():
            continue
        code = path.read_bytes()
        texts[name] = code.hex()
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            # Compiled code has no tree. A syntax error is told when the module is imported.
            tree = ast.parse(code)
            with suppress(RecursionError):
                texts[name] = ast.unparse(tree)
            package = spec.name if spec.submodule_search_locations else spec.parent
            left += [*_imported(tree, package or ""), spec.parent or ""]
        if _has_changed(spec, path, texts[name]):
            raise ConfigError(
                f"{path} has changed since this process imported it: restart the process (of a "
                "notebook, the kernel)"
            )
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if texts else ""


def _spec(name: str) -> ModuleSpec | None:
    """The spec of a module, which says where it lies; None if it is not found."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, _, last = name.rpartition(".")
    places = getattr(_spec(parent), "submodule_search_locations", None) if parent else None
    if not last or (parent and not places):
        return None
    finders = (getattr(each, "find_spec", None) for each in sys.meta_path)
    found = (find(name, places) for find in finders if find is not None)
    return next((spec for spec in found if spec is not None), None)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The names that a module of this package imports; some are not modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            try:
                above = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # beyond the top: importing the module fails too
                continue
            yield from (above, *(f"{above}.{each.name}" for each in node.names))


def _has_changed(spec: ModuleSpec, path: Path, text: str) -> bool:
    """Whether the text that this process has imported differs from the file's text now."""
    if spec.name not in sys.modules:
        return False
    if spec.name not in _SEEN or _SEEN[spec.name][0] is not spec:
        newer = imported_at(spec.name) < path.stat().st_mtime < time.time() + _AHEAD
        _SEEN[spec.name] = spec, "" if newer else text
    return _SEEN[spec.name][1] != text


def _parts(given: Any) -> list[Any]:
    """The functions and classes of yours that make up an object."""
    given = given.func if isinstance(given, functools.partial) else given
    if not isinstance(given, type) and hasattr(given, "modules"):
        return list(dict.fromkeys(map(type, given.modules())))
    task = getattr(given, "task", given)  # of a dataset, or itself
    if hasattr(task, "metrics"):
        return [*_parts(task.loss), *_parts(task.metrics)]
    return [given if hasattr(given, "__qualname__") else type(given)]


def _source(part: Any) -> str:
    """The text of a function, or of a class's functions, if it is known."""
    kinds = part.__mro__ if isinstance(part, type) else ()
    own = [each for kind in kinds if kind.__module__ == "__main__" for each in vars(kind).values()]
    try:
        return "".join(map(_written, filter(inspect.isfunction, own or [part])))
    except OSError:
        return ""


def _written(function: Any) -> str:
    """The text of a function without comments and layout; of a lambda its own alone."""
    text = textwrap.dedent(inspect.getsource(function))
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a part of a statement
        return text
    if function.__name__ == "<lambda>":
        return " ".join(ast.unparse(e) for e in ast.walk(tree) if isinstance(e, ast.Lambda))
    return ast.unparse(tree)


def _without_places(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
