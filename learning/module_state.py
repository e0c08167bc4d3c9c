"""Records all that a module holds and puts it back, so that no update sees other users' records.

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
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn


class StateError(RuntimeError):
    """A module holds something that cannot be compared, or that cannot be put back."""


class _Unset:
    """Stands for what an empty slot holds."""


_VALUES = {type(None), bool, int, float, complex, str, bytes, range, slice, torch.Size}
_UNCHANGING = (
    type, types.ModuleType, types.GenericAlias, logging.Logger, re.Pattern, PurePath, np.generic,
    np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo,
    torch.iinfo, torch._C.ScriptFunction, torch._C.ScriptMethod, torch._C.ConcreteModuleType,
    torch._C.ParameterDict, torch._C.BufferDict, torch._C.ModuleDict,
)  # fmt: skip
"""Types whose objects never change, or hold nothing of a record. Classes and Python modules lie
outside a model: `shufl.learning.model_trial` looks for models that keep something there."""

_Contents = tuple[Any, ...]
_Dict = dict[Any, Any]
_CACHE = type(functools.lru_cache(len))
_NOTHING: _Dict = {}
_VIEWS = type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items())
_LOCKS = "lock", "RLock"
_Slot = types.MemberDescriptorType


class ModuleState:
    """What a module holds at this moment.

    This is its parameters, its buffers and whatever else can be reached from its attributes:
    tensors and arrays by value; the contents of containers, objects, closures and default
    arguments; the states of generators of random numbers. The caches of its functions are emptied.

    Raises:
        StateError: something of it cannot be compared.
    """

    def __init__(self, module: nn.Module):
        self._empty: list[tuple[str, Any]] = []  # most dictionaries of a module: twice as fast
        self._lists: list[tuple[str, Any, _Contents]] = []
        self._dicts: list[tuple[str, _Dict, _Contents, _Contents]] = []
        self._objects: list[tuple[str, Any, type, _Dict | None, list[tuple[_Slot, Any]]]] = []
        self._cells: list[tuple[str, types.CellType, Any]] = []
        self._caches: list[tuple[str, Any]] = []
        self._scripts: list[tuple[str, Any, _Dict]] = []
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor, int, bool, Any]] = []
        self._arrays: list[tuple[str, np.ndarray, np.ndarray, bytes]] = []
        self._values: list[tuple[str, Any, bytes]] = []
        seen: dict[int, Any] = {}  # by id; while the objects are kept, no id is used again
        left: list[tuple[str, Any]] = [("", module)]
        while left:
            path, held = left.pop()
            unchanging = type(held) in _VALUES or isinstance(held, _UNCHANGING)
            if not unchanging and id(held) not in seen:
                seen[id(held)] = held
                left += self._note(path, held)
        self._tensors.sort(key=lambda noted: noted[1]._base is not None)  # views after their bases

    def restore(self) -> list[str]:
        """Puts back what has changed.

        Returns:
            The names of what had changed, such as `hidden` or `encoder.cache`.

        Raises:
            StateError: something cannot be put back; everything else has been.
        """
        changed: list[str] = []
        for path, held, kind, own, slots in self._objects:
            if type(held) is not kind:
                changed.append(path)
                held.__class__ = kind
            if own is not None and held.__dict__ is not own:
                changed.append(path)
                held.__dict__ = own
            for slot, value in slots:
                if _held_in(slot, held) is not value:
                    changed.append(f"{path}.{slot.__name__}")
                    if value is _Unset:
                        slot.__delete__(held)
                    else:
                        slot.__set__(held, value)
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
        for path, cache in self._caches:
            if cache.cache_info().currsize:
                changed.append(path)
                cache.cache_clear()
        for path, script, tensors in self._scripts:
            for name, each in tensors.items():
                if script.getattr(name) is not each:
                    changed.append(f"{path}.{name}")
                    script.setattr(name, each)
        for path, *tensor in self._tensors:
            if _restore_tensor(*tensor):
                changed.append(path)
        for path, array, value, content in self._arrays:
            if array.tobytes() != content:
                changed.append(path)
                array[...] = value
        stuck = []
        for path, held, value in self._values:
            if _pickled(path, held) != value:
                changed.append(path)
                if not _write(held, pickle.loads(value)):
                    stuck.append(f"{path[1:]} ({type(held).__name__})")
        if stuck:
            raise StateError(f"{', '.join(stuck)} changes and cannot be put back")
        return [re.sub(r"_(parameters|buffers|modules|c)\.", "", path[1:]) for path in changed]

    def _note(self, path: str, held: Any) -> Iterator[tuple[str, Any]]:
        """Notes one object; yields what it refers to, with the paths."""
        if isinstance(held, torch.jit.ScriptModule):
            _ = held.forward  # at the first use, the module keeps it in itself
        own = getattr(held, "__dict__", None)
        slots = [(slot, _held_in(slot, held)) for slot in _slots(type(held))]
        if isinstance(held, torch.Tensor) and _is_plain(held):
            hooks, trained = held._backward_hooks, held.requires_grad
            value = held.detach().clone()
            self._tensors.append((path, held, value, held.data_ptr(), trained, hooks))
            yield from ((path, each) for each in (hooks, held._base))
        elif isinstance(held, np.ndarray) and not held.dtype.hasobject:
            self._arrays.append((path, held.view(np.ndarray), np.array(held), held.tobytes()))
        elif isinstance(held, (dict, list, deque, set)) and not held:
            self._empty.append((path, held))
        elif isinstance(held, dict):
            keys, values = tuple(held), tuple(held.values())
            self._dicts.append((path, held, keys, values))
            yield from ((path, key) for key in keys)
            yield from ((f"{path}.{key}", value) for key, value in zip(keys, values, strict=True))
        elif isinstance(held, (list, deque, set)):
            self._lists.append((path, held, tuple(held)))
            yield from ((path, each) for each in held)
        elif isinstance(held, (tuple, frozenset)):
            yield from ((path, each) for each in held)
        elif isinstance(held, types.CellType):
            self._cells.append((path, held, _contents(held)))
            yield path, _contents(held)
        elif isinstance(held, _CACHE):
            held.cache_clear()
            self._caches.append((path, held))
            yield path, held.__wrapped__
        elif (parts := _parts(held)) is not None:
            yield from ((path, each) for each in parts)
        elif _is_of_python_alone(held):
            pass
        elif type(held).__name__ not in _LOCKS:
            self._values.append((path, held, _pickled(path, held)))
            if isinstance(held, torch._C.ScriptModule):
                self._scripts.append((path, held, tensors := _scripted(held, tensors=True)))
                yield from ((f"{path}.{name}", each) for name, each in tensors.items())
        if own is not None or slots:
            own = own if isinstance(own, dict) else None
            self._objects.append((path, held, type(held), own, slots))
            yield path, own
            yield from ((f"{path}.{slot.__name__}", value) for slot, value in slots)


def _parts(held: Any) -> Iterable[Any] | None:
    """What a function, a method, a reference or a view refers to; None if it is none of these."""
    if isinstance(held, types.MethodType):
        return held.__self__, held.__func__
    if isinstance(held, types.FunctionType):
        return held.__closure__, held.__defaults__, held.__kwdefaults__
    if isinstance(held, functools.partial):
        return held.func, held.args, held.keywords
    if isinstance(held, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return (held.__self__,)  # an object, or a Python module
    if isinstance(held, weakref.ReferenceType):
        return (held(),)
    if isinstance(held, types.MappingProxyType):  # like a view, it cannot be changed itself
        return (*held.keys(), *held.values())
    return tuple(held) if isinstance(held, _VIEWS) else None


def _slots(kind: type) -> list[_Slot]:
    """The slots of a class; they also find a value that a property of the same name hides."""
    each = (vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base))
    return [slot for slots in each for slot in slots if isinstance(slot, _Slot)]


def _held_in(slot: _Slot, held: Any) -> Any:
    try:
        return slot.__get__(held)
    except AttributeError:
        return _Unset


def _is_of_python_alone(held: Any) -> bool:
    """Whether an object has nothing but its `__dict__` and its slots.

    Then it is no larger than these. A larger one holds something of C, which Python does not see.
    """
    kind = type(held)
    more = sum(getattr(kind, name) > 0 for name in ("__dictoffset__", "__weakrefoffset__"))
    return kind.__basicsize__ <= object.__basicsize__ + 8 * (more + len(_slots(kind)))


def _restore_tensor(
    tensor: torch.Tensor, value: torch.Tensor, place: int, trained: bool, hooks: Any
) -> bool:
    """Puts a tensor back; returns whether it had changed."""
    moved = tensor.data_ptr() != place or tensor.shape != value.shape
    changed = moved or not _equal(tensor.detach(), value)
    if changed:
        try:
            if moved:
                raise RuntimeError
            tensor.data.copy_(value)
        except RuntimeError:  # it was moved, or several of its entries lie in one place
            tensor.data = value.clone()
    if tensor.requires_grad != trained or tensor._backward_hooks is not hooks:
        changed = True
        tensor.requires_grad_(trained)
        tensor._backward_hooks = hooks
    if tensor.is_leaf:
        tensor.grad = None
    return changed


def _write(held: Any, value: Any) -> bool:
    """Gives an object the state of a copy; returns whether there is a way to."""
    if isinstance(held, random.Random):
        held.setstate(value.getstate())
    elif isinstance(held, (np.random.RandomState, torch.Generator)):
        held.set_state(value.get_state())
    elif isinstance(held, np.random.Generator):
        held.bit_generator.state = value.bit_generator.state
    elif isinstance(held, bytearray):
        held[:] = value
    elif isinstance(held, torch._C.ScriptModule):
        for name, now in _scripted(held).items():
            if pickle.dumps(now) != pickle.dumps(value[name]):
                held.setattr(name, value[name])
    else:
        return False
    return True


def _pickled(path: str, held: Any) -> bytes:
    try:
        return pickle.dumps(_scripted(held) if isinstance(held, torch._C.ScriptModule) else held)
    except Exception as error:  # whatever the object's own way of pickling raises
        kind = type(held).__name__
        raise StateError(f"{path[1:]} ({kind}) has no state that can be compared") from error


def _scripted(held: Any, tensors: bool = False) -> _Dict:
    """What a module of TorchScript keeps itself, by name: its tensors, or everything else."""
    kind: Any = torch._C.ConcreteModuleType
    names = kind.from_jit_type(held._type()).get_attributes()
    found = {name: held.getattr(name) for name in names}
    return {name: each for name, each in found.items() if torch.is_tensor(each) is tensors}


def _same(held: Collection[Any], contents: _Contents) -> bool:
    """Whether these are the same objects in the same order."""
    return len(held) == len(contents) and all(map(operator.is_, held, contents))


def _differ(key: Any, before: _Dict, after: _Dict) -> bool:
    return key not in before or key not in after or before[key] is not after[key]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that is not yet set
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are the same, those of NaN too."""
    whole = _WHOLE.get(one.element_size(), torch.int64)
    bits = (each.resolve_conj().resolve_neg().reshape(-1).view(whole) for each in (one, other))
    empty = one.is_meta and type(one) is torch.Tensor  # torch.equal may compare a subclass
    return empty or torch.equal(*bits)


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # types to compare bits in, by bytes
