"""All that a module holds, and the way back to it, so that no user's update sees another's records.

A forward may leave something behind: a hidden state, a list of records, a running mean, a cache, a
parameter that it wrote. One model object serves many users, one after another.
"""

from __future__ import annotations

import functools
import logging
import operator
import pickle
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


class StateError(RuntimeError):
    """A module holds something that cannot be compared, or that cannot be put back."""


_UNCHANGING = (
    type(None), bool, int, float, complex, str, bytes, range, slice, np.generic, type,
    types.ModuleType, types.BuiltinFunctionType, logging.Logger, re.Pattern,
    weakref.ReferenceType, type(threading.Lock()), type(threading.RLock()),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Values that never change, or hold nothing of a record. What a class or a Python module holds is
outside a model; `simulator.trial` refuses models that keep something there."""


class ModuleState:
    """What a module holds at this moment.

    Its parameters, its buffers and whatever else can be reached from its attributes: tensors and
    arrays, by value; what is in containers, objects, closures and default arguments; the states of
    generators of random numbers.

    Raises:
        StateError: something of it cannot be compared.
    """

    def __init__(self, module: nn.Module):
        self._empty: list[tuple[str, Any]] = []  # most dictionaries of a module
        self._lists: list[tuple[str, Any, tuple]] = []
        self._dicts: list[tuple[str, dict, tuple, tuple]] = []
        self._cells: list[tuple[str, types.CellType, Any]] = []
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor, int, bool]] = []
        self._values: list[tuple[str, Any, bytes]] = []
        seen: dict[int, Any] = {}  # by id; the objects too, or an id might be used again
        left: list[tuple[str, Any]] = [("", module)]
        while left:
            path, held = left.pop()
            if not isinstance(held, _UNCHANGING) and id(held) not in seen:
                seen[id(held)] = held
                left += self._note(path, held)

    def restore(self) -> list[str]:
        """Puts back what has changed.

        Returns:
            The names of what had changed, such as `hidden` or `encoder.cache`.

        Raises:
            StateError: something of it cannot be put back.
        """
        changed = []
        for path, held in self._empty:
            if held:
                changed.append(path)
                held.clear()
        for path, held, contents in self._lists:
            if not _same(held, contents):
                changed.append(path)
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(contents)
        for path, held, keys, values in self._dicts:
            if not (_same(held, keys) and _same(held.values(), values)):
                before = dict(zip(keys, values, strict=True))
                differ = (key for key in {**before, **held} if _differ(key, before, held))
                changed += [f"{path}.{key}" for key in differ]
                held.clear()
                held.update(before)
        for path, cell, contents in self._cells:
            if _contents(cell) is not contents:
                changed.append(path)
                cell.cell_contents = contents
        for path, tensor, value, place, trained in self._tensors:
            moved = tensor.data_ptr() != place or tensor.shape != value.shape
            if moved or not _equal(tensor.detach(), value):
                changed.append(path)
                if moved:
                    tensor.data = value.clone()
                else:
                    tensor.data.copy_(value)
            if tensor.requires_grad != trained:
                changed.append(path)
                tensor.requires_grad_(trained)
            if tensor.is_leaf:
                tensor.grad = None
        for path, held, value in self._values:
            if _pickled(path, held) != value:
                changed.append(path)
                _write(path, held, pickle.loads(value))
        return [re.sub(r"_(parameters|buffers|modules)\.", "", path[1:]) for path in changed]

    def _note(self, path: str, held: Any) -> Iterator[tuple[str, Any]]:
        """Notes one object; yields what it refers to, with the paths."""
        if isinstance(held, torch.Tensor) and _is_plain(held):
            value = held.detach().clone()
            self._tensors.append((path, held, value, held.data_ptr(), held.requires_grad))
        elif isinstance(held, (dict, list, deque, set)) and not held:
            self._empty.append((path, held))
        elif isinstance(held, dict):
            keys, values = tuple(held), tuple(held.values())
            self._dicts.append((path, held, keys, values))
            yield from ((f"{path}.{key}", value) for key, value in zip(keys, values, strict=True))
        elif isinstance(held, (list, deque, set)):
            self._lists.append((path, held, tuple(held)))
            yield from ((path, each) for each in held)
        elif isinstance(held, (tuple, frozenset)):
            yield from ((path, each) for each in held)
        elif isinstance(held, types.CellType):
            self._cells.append((path, held, _contents(held)))
            yield path, _contents(held)
        elif isinstance(held, types.MethodType):
            yield from ((path, each) for each in (held.__self__, held.__func__))
        elif isinstance(held, types.FunctionType):
            parts = held.__closure__, held.__defaults__, held.__kwdefaults__
            yield from ((path, each) for each in parts)
        elif isinstance(held, functools.partial):
            yield from ((path, each) for each in (held.func, held.args, held.keywords))
        elif isinstance(held, _GENERATORS) or not hasattr(held, "__dict__"):
            self._values.append((path, held, _pickled(path, held)))
        if hasattr(held, "__dict__"):
            yield path, held.__dict__


_GENERATORS = random.Random, np.random.RandomState, np.random.Generator, torch.Generator


def _write(path: str, held: Any, value: Any) -> None:
    if isinstance(held, random.Random):
        held.setstate(value.getstate())
    elif isinstance(held, np.random.RandomState):
        held.set_state(value.get_state())
    elif isinstance(held, np.random.Generator):
        held.bit_generator.state = value.bit_generator.state
    elif isinstance(held, torch.Generator):
        held.set_state(value.get_state())
    elif isinstance(held, (np.ndarray, bytearray)) and len(held) == len(value):
        held[:] = value
    else:
        raise StateError(f"{path[1:]} ({type(held).__name__}) changes and cannot be put back")


def _pickled(path: str, held: Any) -> bytes:
    try:
        return pickle.dumps(held)
    except Exception as error:  # whatever the object's own way of pickling raises
        kind = type(held).__name__
        raise StateError(f"{path[1:]} ({kind}) is nothing whose state can be compared") from error


def _same(held: Collection[Any], contents: tuple) -> bool:
    """Whether these are the same objects in the same order."""
    return len(held) == len(contents) and all(map(operator.is_, held, contents))


def _differ(key: Any, before: dict, after: dict) -> bool:
    return key not in before or key not in after or before[key] is not after[key]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that is not yet set
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are the same, those of NaN too."""
    whole = _WHOLE.get(one.element_size(), torch.int64)
    return torch.equal(*(each.reshape(-1).view(whole) for each in (one, other)))


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # types to compare bits in, by bytes
