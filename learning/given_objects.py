"""Objects of your program, in the places of names in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shufl.learning.config import Config
from shufl.learning.your_code import Carried, is_carried, your_code
from shufl.protocol.validation import ConfigError

_KEYS = {
    "dataset": "data.dataset",
    "features": "data.features",
    "task": "data.task",
    "model": "model.name",
    "algorithm": "training.algorithm",
    "aggregator": "training.aggregator",
}
"""By argument, the key that it stands for."""


def carried(*given: Any) -> dict[str, Carried]:
    """Objects by the keys that they stand for.

    Args:
        given: the objects, in the order of `_KEYS`; None: there is none.

    Raises:
        ConfigError: a dataset is a function that fails.
    """
    objects = {}
    for (argument, key), thing in zip(_KEYS.items(), given, strict=True):
        if thing is None:
            continue
        if isinstance(thing, str):
            raise ConfigError(
                f"{argument}= takes an object; a name goes into changes: {{'{key}': {thing!r}}}"
            )
        name = str(getattr(thing, "__qualname__", type(thing).__name__))
        if argument == "dataset" and callable(thing):
            with your_code(f"dataset {name} could not be made", quote=()):
                thing = thing()
        objects[key] = Carried(name, thing)
    return objects


def placeholders(objects: Mapping[str, Carried], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, after names that stand for objects until `with_objects` puts these there.

    Raises:
        ConfigError: a change is of a key that an object stands for.
    """
    stand: dict[str, Any] = {}
    for argument, key in _KEYS.items():
        if key not in objects:
            continue
        stand[key] = str(objects[key])
        taken = [key]
        if argument == "model":
            stand["model.options"] = {}  # the configuration's are of another model
            if isinstance(objects[key].value, nn.Module):  # it is built already
                taken.append("model.options")
        for change in map(str.strip, map(str, changes)):
            own = any(change == each or change.startswith(f"{each}.") for each in taken)
            if own or change == key.partition(".")[0]:
                raise ConfigError(
                    f"changes must not have {change}: the argument {argument}= stands for it"
                )
    return stand | dict(changes)


def with_objects(config: Config, objects: Mapping[str, Carried]) -> Config:
    """The configuration with these objects in the places of their names.

    Raises:
        ConfigError: the configuration has the name of something else there.
    """
    for key, thing in objects.items():
        section, name = key.split(".")
        named = getattr(getattr(config, section), name)
        if not is_carried(str(named)):
            raise ConfigError(f"{key} of this run is {named}, not an object")
        kept = thing if str(thing) == str(named) else Carried(named, thing.value)
        changed = getattr(config, section).model_copy(update={name: kept})
        config = config.model_copy(update={section: changed})
    return config


def objects_in(config: Config) -> dict[str, Carried]:
    """The objects that a configuration has, by the keys that they stand for."""
    objects = {}
    for key in _KEYS.values():
        section, name = key.split(".")
        if isinstance(thing := getattr(getattr(config, section), name), Carried):
            objects[key] = thing
    return objects
