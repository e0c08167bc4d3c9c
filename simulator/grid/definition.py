"""The definition of a grid of runs: a base configuration, series, values along an axis, seeds."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from shufl.learning.config import Config, dumps, load, read_named
from shufl.learning.given_objects import placeholders, with_objects
from shufl.learning.your_code import Carried
from shufl.protocol.validation import ConfigError, Record
from shufl.protocol.validation import shown as shown_given

Value = Annotated[bool | int | float | str, Field(description="numbers, or words")]

Settings = dict[str, Any]
"""Values by `section.key`, as `shufl run --set` takes them."""


class Series(Record):
    """A line of the plot.

    Attributes:
        name: in tables and plots.
        settings: of this line, added to the grid's.
        each: further settings, one table for each of the grid's values. Default: none.
        trainer: `shufl` plays the rounds of the configuration. `central` and `central-users` are
            references for a server that everybody trusts: DP-SGD by Opacus, of single records, with
            the same data, model and ε; or our users' updates, whose sum gets one noise. `plain` and
            `plain-users` have no privacy: SGD, or our algorithm without clipping or noise. If the
            axis changes only the privacy of a run, one plain run of each seed stands for all
            values. For `module:callable` see `Trainer`.
    """

    name: str
    settings: Settings = Field(default_factory=dict)
    each: tuple[Settings, ...] = Field((), strict=False)
    trainer: str = Field(
        "shufl",
        pattern="^(shufl|central|central-users|plain|plain-users|.+:.+)$",
        description="shufl, central, central-users, plain, plain-users, or module:callable",
    )


class Grid(Record):
    """A grid of runs; `load_grid` reads it.

    Attributes:
        title: of the page.
        about: Markdown, what the page says first.
        base: a configuration: a file, the name of one that ships with shufl, or its values.
        settings: of all points.
        across: the setting along the axis, `section.key`.
        label: of the axis.
        values: of the setting along the axis.
        seeds: each point is played once with each seed.
        series: the lines of the plot.
    """

    title: str
    about: str = ""
    base: str | dict[str, Any]
    settings: Settings = Field(default_factory=dict)
    across: str
    label: str
    values: tuple[Value, ...] = Field(min_length=1, strict=False)
    seeds: tuple[int, ...] = Field(min_length=1, strict=False)
    series: tuple[Series, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _fits_together(self) -> Grid:
        if self.across == "seed":
            raise ValueError("across must be another setting than seed, which seeds gives")
        own = (settings for series in self.series for settings in (series.settings, *series.each))
        twice = {self.across, "seed"}.intersection(set().union(self.settings, *own))
        if twice:
            raise ValueError(f"{min(twice)} must be given by values and seeds alone")
        for what, given in (
            ("values", self.values),
            ("seeds", self.seeds),
            ("names of series", tuple(series.name for series in self.series)),
        ):
            if len(set(given)) < len(given):
                raise ValueError(f"{what} must differ, got {', '.join(map(str, given))}")
        for series in self.series:
            if series.each and len(series.each) != len(self.values):
                raise ValueError(
                    f"each of series {series.name} must have a table for each of the "
                    f"{len(self.values)} values, got {len(series.each)}"
                )
        return self

    def varies(self, series: Series) -> bool:
        """Whether the axis changes what the series' runs do."""
        trains = ("privacy.rounds", "privacy.check_in_rate")
        private = self.across.startswith("privacy.") and self.across not in trains
        return series.trainer not in ("plain", "plain-users") or bool(series.each) or not private

    def points(self, objects: Mapping[str, Carried] = MappingProxyType({})) -> list[Point]:
        """All points, seed by seed, so that the first of each comes early.

        `objects` are those of your program, by the keys that they stand for.
        """
        return [
            self._point(series, index, seed, objects)
            for seed in self.seeds
            for series in self.series
            for index in range(len(self.values) if self.varies(series) else 1)
        ]

    def _point(
        self, series: Series, index: int, seed: int, objects: Mapping[str, Carried]
    ) -> Point:
        value = self.values[index]
        own = series.each[index] if series.each else {}
        settings = self.settings | series.settings | own | {self.across: value, "seed": seed}
        try:
            config = with_objects(load(self.base, settings), objects)
        except ConfigError as error:
            raise ConfigError(
                f"series {series.name}, {self.across} = {shown(value)}: {error}"
            ) from None
        simulation = config.simulation
        if (simulation.engine, simulation.workers) != ("vectorised", 1):
            raise ConfigError(
                f"series {series.name}: a run must have simulation.engine vectorised with one "
                f"worker, got {simulation.engine} with {simulation.workers}"
            )
        return Point(series.name, value, seed, series.trainer, config)


@dataclass(frozen=True)
class Point:
    """One run of a grid.

    Attributes:
        series, value, seed: its place in the grid.
        trainer: as in `Series`.
        config: of the run.
    """

    series: str
    value: int | float | str
    seed: int
    trainer: str
    config: Config

    @property
    def key(self) -> str:
        """The name of its folder, unique for its series and configuration."""
        words, value = (
            re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
            for text in (self.series, shown(self.value))
        )
        own = hashlib.sha256(f"{self.series} {self.digest}".encode()).hexdigest()[:10]
        return f"{words}_{value}_{self.seed}_{own}"

    @property
    def own_code(self) -> list[str]:
        """The names of your own code in configuration and trainer: each is `module:callable`."""
        return self.config.own_code + [self.trainer] * (":" in self.trainer)

    @property
    def digest(self) -> str:
        """A digest of trainer and configuration, hexadecimal."""
        numbers = dumps(self.config.model_copy(update={"about": None}))
        return hashlib.sha256(f"{self.trainer} {numbers}".encode()).hexdigest()[:10]

    @property
    def apart_from_seed(self) -> tuple[str, str]:
        """Trainer and configuration without the seed: points that differ in it alone are equal."""
        return self.trainer, dumps(self.config.model_copy(update={"seed": 0}))

    def __str__(self) -> str:
        return f"{self.series}, {shown(self.value)}, seed {self.seed}"


def shown(value: float | str) -> str:
    """A value of the axis, as tables show it."""
    return str(value) if isinstance(value, str | bool) else f"{value:g}"


def grid_over(
    base: str | Mapping[str, Any],
    over: Mapping[str, Iterable[Any]],
    seeds: Iterable[int],
    changes: Settings,
    objects: Mapping[str, Carried],
) -> tuple[str, Grid]:
    """A grid of all combinations of values, and its name.

    Args:
        base: a configuration, as for `load`.
        over: values by `section.key`; the last key is the axis, the others make the series.
        seeds: each combination is played once with each.
        changes: values of all points, by `section.key`.
        objects: of your program, by the keys that they stand for.

    Raises:
        ConfigError: one line that says what is wrong.
    """
    if not isinstance(over, Mapping) or not over:
        raise ConfigError(f"over must be a dict of lists of values by section.key, got {over!r}")
    values = {}
    for key, given in over.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(f"over must have a list of values of {key}, got {given!r}")
        values[key] = [each.item() if isinstance(each, np.generic) else each for each in given]
        if not values[key] or not all(isinstance(each, int | float | str) for each in values[key]):
            raise ConfigError(
                f"over must have a list of numbers, words, true or false for {key}, got "
                f"{shown_given(values[key])}; of a table, over takes each key"
            )
    *lines, across = values
    *of_lines, along = values.values()
    series = []
    for combination in itertools.product(*of_lines):
        own = dict(zip(lines, combination, strict=True))
        name = ", ".join(f"{key.rpartition('.')[2]} = {shown(value)}" for key, value in own.items())
        series.append({"name": name or "shufl", "settings": own})
    settings = placeholders(objects, changes | dict.fromkeys(values, ""))
    settings = {key: value for key, value in settings.items() if key not in values}
    name = load(base, settings).name
    axes = " and ".join(key.rpartition(".")[2] for key in values)
    content = {
        "title": f"{name} over {axes}",
        "base": base,
        "settings": {"simulation.engine": "vectorised"} | settings,
        "across": across,
        "label": across,
        "values": along,
        "seeds": list(seeds),
        "series": series,
    }
    return f"{name} over {axes}".replace(" ", "-"), Grid.checked("over", content)


def load_grid(source: str) -> tuple[str, Grid]:
    """A grid and its name; `source` is a TOML file, or the name of one that ships with shufl."""
    content = read_named(source, "experiments", "an experiment")
    return Path(source).stem, Grid.checked(source, content)
