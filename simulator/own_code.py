"""The reader's own modules that a run rests on: which they are, and whether they have changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from shufl.imports import imported_at
from shufl.simulator.section import Carried, ConfigError, is_of_others

_SEEN: dict[str, tuple[ModuleSpec, str]] = {}
"""What this process has imported, by the modules' names. A reload makes another spec."""


def code_digest(names: Iterable[str]) -> str:
    """SHA-256 (hexadecimal) of the code behind `names`, each `module:callable` or a `Carried`.

    These are the modules named, and what they import that is the reader's own: no installed
    package. Comments and layout do not count. Nothing is imported for it. Without such code "".

    Raises:
        ConfigError: a module has changed since this process imported it.
    """
    texts: dict[str, str] = {}
    left = [name.partition(":")[0] for name in names if not isinstance(name, Carried)]
    for given in (name.value for name in names if isinstance(name, Carried)):
        for part in _parts(given):
            left.append(part.__module__)
            if part.__module__ == "__main__":  # of a notebook; a script is changed to resume it
                texts[f"__main__.{part.__qualname__}"] = _source(part)
            elif not isinstance(given, type) and hasattr(given, "modules"):
                texts["object"] = re.sub(r" at 0x[0-9a-f]+", "", repr(given))
    while left:
        name = left.pop()
        if name in texts or (spec := _spec(name)) is None or not spec.has_location:
            continue
        if is_of_others(path := Path(spec.origin or "")) or not path.is_file():
            continue
        code = path.read_bytes()
        try:
            tree = ast.parse(code)
            texts[name] = ast.unparse(tree)
        except (SyntaxError, ValueError):  # compiled; or whoever imports it will hear of it
            texts[name] = code.hex()
        else:
            package = spec.name if spec.submodule_search_locations else spec.parent
            left += [*_imported(tree, package or ""), spec.parent or ""]
        if _has_changed(spec, path, texts[name]):
            raise ConfigError(
                f"{path} has changed since this process imported it: restart the process (of a "
                "notebook, the kernel)"
            )
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if texts else ""


def _spec(name: str) -> ModuleSpec | None:
    """Where a module lies; None: nowhere, or built in."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, _, last = name.rpartition(".")
    places = getattr(_spec(parent), "submodule_search_locations", None) if parent else None
    return PathFinder.find_spec(name, places) if last and (places or not parent) else None


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The names of what a module of this package imports, some of which are no modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            above = resolve_name("." * node.level + (node.module or ""), package)
            yield from (above, *(f"{above}.{each.name}" for each in node.names))


def _has_changed(spec: ModuleSpec, path: Path, text: str) -> bool:
    """Whether this process has imported another text than the file has now."""
    if spec.name not in sys.modules:
        return False
    if spec.name not in _SEEN or _SEEN[spec.name][0] is not spec:
        newer = path.stat().st_mtime > imported_at(spec.name)
        _SEEN[spec.name] = spec, "" if newer else text
    return _SEEN[spec.name][1] != text


def _parts(given: Any) -> list[Any]:
    """The functions and classes of the reader's that make up an object."""
    given = getattr(getattr(given, "task", None), "loss", given)
    given = given.func if isinstance(given, functools.partial) else given
    if not isinstance(given, type) and hasattr(given, "modules"):
        return list(dict.fromkeys(map(type, given.modules())))
    return [given] if hasattr(given, "__qualname__") else []


def _source(part: Any) -> str:
    """The text of a function, or of a class's functions, if it is known."""
    kinds = part.__mro__ if isinstance(part, type) else ()
    own = [each for kind in kinds if kind.__module__ == "__main__" for each in vars(kind).values()]
    try:
        return "".join(map(inspect.getsource, filter(inspect.isfunction, own or [part])))
    except OSError:
        return ""
