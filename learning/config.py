"""A run's configuration: TOML, validated before any work; every mistake is one clear line."""

from __future__ import annotations

import copy
import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from pydantic import Field, PlainValidator, model_validator

from shufl.learning.data.files import RecordFile
from shufl.protocol.plan import Times
from shufl.protocol.plan_fields import CheckInRate, Privacy, Rounds, Schedule, Users
from shufl.protocol.validation import (
    ConfigError,
    Count,
    Positive,
    Record,
    Seconds,
    read_toml,
    shown,
)

DATASETS = {
    "digits": "shufl.learning.data.datasets:digits",
    "mnist": "shufl.learning.data.datasets:mnist",
    "fashion-mnist": "shufl.learning.data.datasets:fashion_mnist",
    "cifar10": "shufl.learning.data.datasets:cifar10",
    "insteval": "shufl.learning.data.natural_datasets:insteval",
    "movielens": "shufl.learning.data.natural_datasets:movielens",
}
FIXED = set(DATASETS) - {"insteval", "movielens"}
"""Datasets that are the same everywhere; the files of the others are yours."""
FEATURES = {"scattering": "shufl.learning.data.scattering:whitened_scattering"}
ALGORITHMS = ("fedsgd", "fedavg", "fedprox")
Optimisers = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
]  # fmt: skip
"""The server's optimisers: classes of torch.optim that need only gradients."""
TASKS = {
    "classification": "shufl.learning.tasks:CLASSIFICATION",
    "regression": "shufl.learning.tasks:REGRESSION",
    "next-token": "shufl.learning.tasks:NEXT_TOKEN",
}
Scheme = Literal["natural", "iid", "by-label", "dirichlet", "repeated"]
"""How records come to users."""


class PrivacySection(Privacy):
    """The privacy plan without n; a run states these three values, whatever else is open."""

    check_in_rate: CheckInRate
    target_epsilon: Positive
    rounds: Rounds


_DATASET = f"one of {', '.join(DATASETS)}, module:callable, or a table with a file"


def _dataset(given: Any) -> str | RecordFile:
    if isinstance(given, Mapping):
        return RecordFile.checked("data.dataset", given)
    if isinstance(given, RecordFile) or (
        isinstance(given, str) and (given in DATASETS or re.fullmatch(".+:.+", given))
    ):
        return given
    raise ValueError(f"data.dataset must be {_DATASET}, got {shown(given)}")


if TYPE_CHECKING:
    _Dataset = str | RecordFile
else:  # with a union, pydantic's error would list what each part expects
    _Dataset = Annotated[Any, PlainValidator(_dataset)]


def _name_of(known: Iterable[str], default: str | None = None) -> Any:
    """A field for one of these names, or for the name of your own code."""
    return Field(
        default,
        pattern=f"^({'|'.join(known)}|.+:.+)$",
        description=f"one of {', '.join(known)}, or module:callable",
    )


def _table_of(what: str) -> Any:
    """A field for a table, which is empty by default."""
    return Field(default_factory=dict, description=f"a table of {what}")


class Data(Record):
    """A dataset, a map of its records to features, and its users.

    Attributes:
        task: what is learnt. Default: what the dataset says.
        users: how many users. Default: all that the dataset names; if it names none, as many as it
            has records.
        partition: how records come to users. Default: `natural` if the dataset names users, else
            `iid`.
        most_records: how many records of a user are used at most. Default: all.
    """

    dataset: _Dataset = Field(description=_DATASET)
    features: str | None = _name_of(FEATURES)
    task: str | None = _name_of(TASKS)
    users: Users | None = None
    partition: Scheme | None = None
    concentration: Positive = 0.5
    most_records: Count | None = None

    @property
    def users_by(self) -> str:
        """Where the users of a run come from, once the partition is decided."""
        if self.partition != "natural":
            return f"made by partition {self.partition}"
        if isinstance(self.dataset, RecordFile):
            return f"by column {self.dataset.user}"
        return "by Dataset.users"


class Model(Record):
    """A model by name or `module:callable`, and its keyword arguments."""

    name: str
    options: dict[str, Any] = _table_of("the model's keyword arguments")


Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, description="a number in [0, 1)")]

# Beyond 3e38 a float32 model cannot step.
LearningRate = Annotated[
    float, Field(gt=0, le=1e30, allow_inf_nan=False, description="a number in (0, 1e30]")
]


class Training(Record):
    """Local computation and the server's optimiser."""

    algorithm: str = _name_of(ALGORITHMS, default="fedsgd")
    algorithm_options: dict[str, Any] = _table_of("the algorithm's keyword arguments")
    local_epochs: Count = 1
    local_learning_rate: LearningRate = 0.1
    local_batch_size: Count = 32
    optimiser: Optimisers = "sgd"
    optimiser_options: dict[str, Any] = _table_of("keyword arguments of torch.optim's class")
    learning_rate: LearningRate
    schedule: Schedule = "constant"
    averaging: Decay = 0.0
    aggregator: str = Field(
        "mean", pattern="^(mean|.+:.+)$", description="mean, or module:callable"
    )
    evaluate_every: Count = 1
    checkpoint_every: Count = 10


Precision = Literal["float32", "bfloat16"]


class Simulation(Record):
    """The engine, and the keys of all engines; keys of another engine are ignored or refused.

    Attributes:
        noise, device, precision, records_per_chunk, workers, silent: of the vectorised engine.
        nodes, cpus_per_node, round_timeout: of the Flower engine. With a `cpus_per_node` below 1,
            several processes of nodes share a CPU.
    """

    engine: Literal["flower", "vectorised"] = "flower"
    noise: Literal["report", "aggregate"] = "report"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "float32"
    records_per_chunk: int | None = Field(
        default=None, ge=1, le=10**6, description="a whole number from 1 to 10^6"
    )
    workers: Count = 1
    silent: float = Field(default=0.0, ge=0, lt=1, description="a number in [0, 1)")
    nodes: int = Field(default=20, ge=1, le=10**6, description="a whole number from 1 to 10^6")
    cpus_per_node: float = Field(
        default=1.0, ge=0.1, allow_inf_nan=False, description="a number, at least 0.1"
    )
    round_timeout: Seconds = 600.0

    @model_validator(mode="after")
    def _engine_fits(self) -> Simulation:
        """Refuses keys that change what is computed, but that only the vectorised engine knows."""
        if self.engine == "vectorised":
            return self
        for key in ("noise", "device", "precision", "silent"):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default:
                raise ValueError(
                    f"simulation.{key} must be {default} for engine {self.engine}, got {value!r}"
                )
        return self


class Shuffler(Record):
    """How reports travel."""

    sealing: Literal["x25519", "mlkem768-x25519"] = "x25519"
    number: int = Field(default=1, ge=1, le=64, description="a whole number from 1 to 64")


class About(Record):
    """What a run is for, and whom to ask: the report says it, and no number depends on it."""

    purpose: str | None = Field(None, description="text")
    contact: str | None = Field(None, description="text")


class Config(Record):
    """A whole run; `load` reads it, and `dumps` writes it back."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="at most 100 letters, digits, '.', '_' or '-'",
    )
    seed: Literal["system"] | Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0,
        description='a whole number in [0, 2^63), or "system" for the operating system\'s entropy',
    )
    privacy: PrivacySection
    data: Data
    model: Model
    training: Training
    simulation: Simulation = Field(default_factory=Simulation)
    shuffler: Shuffler = Field(default_factory=Shuffler)
    window: Times | None = None
    about: About | None = None

    @property
    def data_seed(self) -> int:
        """Seed of the partition and the initial model, which no privacy rests on."""
        return 0 if self.seed == "system" else self.seed

    @property
    def own_code(self) -> list[str]:
        """The names that stand for your own code: each is `module:callable`."""
        data, training = self.data, self.training
        own = data.dataset, data.features, data.task, training.algorithm, training.aggregator
        return [name for name in (*own, self.model.name) if isinstance(name, str) and ":" in name]

    @model_validator(mode="after")
    def _one_step(self) -> Config:
        """Randomised response needs one gradient step of the model `histogram`: the estimate."""
        if self.privacy.mechanism != "randomised-response":
            return self
        needed = {
            "privacy.rounds": 1, "model.name": "histogram", "training.algorithm": "fedsgd",
            "training.learning_rate": 1.0, "training.optimiser": "sgd",
            "training.optimiser_options": {}, "training.schedule": "constant",
            "training.averaging": 0.0, "training.aggregator": "mean", "simulation.engine": "flower",
        }  # fmt: skip
        for key, value in needed.items():
            section, name = key.split(".")
            if (given := getattr(getattr(self, section), name)) != value:
                raise ValueError(
                    f"{key} must be {value} with mechanism randomised-response, got {given}"
                )
        return self


def load(
    source: str | Mapping[str, Any], changes: list[str] | Mapping[str, Any] | None = None
) -> Config:
    """Reads and validates a configuration.

    Args:
        source: a TOML file, the name of one that ships with shufl (`quickstart`), or its values.
        changes: values by `section.key`; or a list of `section.key=value`, each value in TOML (a
            bare word is a string). An empty value leaves the key out.

    Raises:
        ConfigError: one line naming the key, what it was given, and what is allowed.
    """
    content = values_of(source)
    given = changes.items() if isinstance(changes, Mapping) else map(_parsed, changes or [])
    for key, value in given:
        _change(content, key, value)
    _make_absolute(content, Path.cwd())
    name = "the configuration" if isinstance(source, Mapping) else source
    config = Config.checked(name, content)
    training = config.training
    for key, options in (
        ("model.options", config.model.options),
        ("training.algorithm_options", training.algorithm_options),
        ("training.optimiser_options", training.optimiser_options),
    ):
        try:  # options alone may hold values of any kind
            tomli_w.dumps(options)
        except TypeError as error:
            raise ConfigError(f"{name}: {key} must hold values that TOML has: {error}") from None
    return config


def values_of(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration as they are given; `source` is as for `load`."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    content = read_named(source)
    _make_absolute(content, Path(source).parent)  # paths in a file are relative to it
    return content


def _make_absolute(content: dict[str, Any], folder: Path) -> None:
    """Makes the path of a file of records absolute, so that other folders find it too."""
    data = content.get("data")
    dataset = data.get("dataset") if isinstance(data, dict) else None
    if isinstance(dataset, dict) and isinstance(dataset.get("file"), str):
        dataset["file"] = str((folder / dataset["file"]).absolute())


def dumps(config: Config) -> str:
    """The configuration as TOML; `load` reads it back to the same values."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their names, joined with dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


def shipped(folder: str = "") -> dict[str, Path]:
    """The TOML files in `shufl.configs`, or in a folder below it, by name."""
    there = Path(str(importlib.resources.files("shufl.configs"))) / folder
    return {path.stem: path for path in sorted(there.glob("*.toml"))}


def read_named(source: str, folder: str = "", what: str = "a configuration") -> dict[str, Any]:
    """The values of a TOML file, or of the one that ships under that name."""
    known, path = shipped(folder), Path(source)
    try:
        return read_toml(path if path.is_file() else known.get(source, path))
    except OSError as error:
        raise ConfigError(
            f"{source or 'an empty name'} cannot be read: {error.strerror}; {what} is a TOML file "
            f"or one of {', '.join(known)}"
        ) from error


def _parsed(override: str) -> tuple[str, Any]:
    """Key and value of `section.key=value`."""
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"an override must look like section.key=value, got {override!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # a bare word, or TOML nested too deeply
        return key, value.strip()


def _change(content: dict[str, Any], key: str, value: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"a change must be of section.key, got {key!r}")
    *sections, last = key.strip().split(".")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ConfigError(f"override {key.strip()}: {section} is not a section")
    if isinstance(value, str) and not value:
        content.pop(last, None)
    else:
        content[last] = value
