"""A run's configuration: TOML, validated before any work; every mistake is one clear line."""

from __future__ import annotations

import copy
import importlib.resources
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from shufl.accounting import validation
from shufl.accounting.mechanisms import MECHANISMS
from shufl.accounting.validation import ClipNorm, Count, Positive, Probability
from shufl.server.aggregators import AGGREGATORS
from shufl.server.words import Schedule
from shufl.simulator.engine_table import ENGINES
from shufl.simulator.names import ACCOUNTANTS, DATASETS, FEATURES, PARTITIONS
from shufl.simulator.section import ConfigError, Section

Blankets = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Privacy(Section):
    """The privacy plan, but for n. See `shufl.accounting.PrivacyPlan`."""

    check_in_rate: float = Field(ge=1e-12, le=1, description="a number in [1e-12, 1]")
    clip_norm: ClipNorm = 1.0
    noise_multiplier: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a number above 0, or left out to be found from target_epsilon and rounds",
    )
    mechanism: Literal[(*MECHANISMS, "randomised-response")] = "gaussian"  # type: ignore[valid-type]
    categories: int | None = Field(
        None, description="a whole number of categories, with mechanism randomised-response only"
    )
    local_epsilon: float | None = Field(
        None, description="a number in [1e-9, 20], with mechanism randomised-response only"
    )
    adjacency: Literal["replace", "zero-out"] = "replace"
    accountant: Literal[ACCOUNTANTS] = "theorem3"  # type: ignore[valid-type]
    target_epsilon: Positive
    delta: Literal["1/n"] | Probability = Field("1/n", description='"1/n" or a number in (0, 1)')
    rounds: int = Field(ge=1, le=10**9, description="a whole number from 1 to 10^9")
    minimum_batch: int | None = Field(
        None, ge=1, description="a whole number from 1 to the number of users"
    )
    shuffler_blankets: Literal["least-error"] | Blankets = Field(
        0.0, description='a number from 0 to 10^7, or "least-error" to be found from target_epsilon'
    )
    cover: bool = Field(False, description="true or false")
    least_present: int | None = Field(
        None, ge=1, description="a whole number from 1 to the number of users"
    )

    @model_validator(mode="after")
    def _mechanism_fits(self) -> Privacy:
        """Refuses what the mechanism does not have."""
        response = self.mechanism == "randomised-response"
        if response and self.categories is None:
            raise ValueError("privacy.categories must be given with mechanism randomised-response")
        others = {"clip_norm": 1.0, "noise_multiplier": None}
        own = {"categories": None, "local_epsilon": None}
        for key, default in (others if response else own).items():
            if getattr(self, key) != default:
                raise ValueError(
                    f"privacy.{key} must be left out with mechanism {self.mechanism}, "
                    f"got {getattr(self, key):g}"
                )
        return self


class Data(Section):
    """A dataset and a map of its records, by name or `module:callable`; its users."""

    dataset: str = Field(
        pattern=f"^({'|'.join(DATASETS)}|.+:.+)$",
        description=f"one of {', '.join(DATASETS)}, or module:callable",
    )
    features: str | None = Field(
        None,
        pattern=f"^({'|'.join(FEATURES)}|.+:.+)$",
        description=f"one of {', '.join(FEATURES)}, or module:callable",
    )
    users: int | None = Field(None, ge=1, le=10**12, description="a whole number from 1 to 10^12")
    partition: Literal[PARTITIONS] = "iid"  # type: ignore[valid-type]
    concentration: Positive = 0.5


class Model(Section):
    """A model by name or `module:callable`, and its keyword arguments."""

    name: str
    options: dict[str, Any] = Field(
        default_factory=dict, description="a table of the model's keyword arguments"
    )


Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, description="a number in [0, 1)")]

# Beyond 3e38 a float32 model cannot step.
LearningRate = Annotated[
    float, Field(gt=0, le=1e30, allow_inf_nan=False, description="a number in (0, 1e30]")
]


class Training(Section):
    """Local computation and the server's optimiser."""

    algorithm: Literal["fedsgd", "fedavg"] = "fedsgd"
    local_epochs: Count = 1
    local_learning_rate: LearningRate = 0.1
    local_batch_size: Count = 32
    aggregator: Literal[tuple(AGGREGATORS)] = "mean"  # type: ignore[valid-type]
    optimiser: Literal["sgd", "adam"] = "sgd"
    learning_rate: LearningRate
    momentum: Decay = 0.0
    schedule: Schedule = "constant"
    averaging: Decay = 0.0
    evaluate_every: Count = 1
    checkpoint_every: Count = 10


class _Choice(Section):
    engine: Literal[tuple(ENGINES)] = "flower"  # type: ignore[valid-type]


class Simulation(*(engine.keys for engine in ENGINES.values()), _Choice):  # type: ignore[misc]
    """The engine, and the keys of all engines; those that are not the chosen one's are ignored."""

    @model_validator(mode="after")
    def _engine_fits(self) -> Simulation:
        """Refuses, of the other engines' keys, those that must not be ignored."""
        for name, engine in ENGINES.items():
            for key in engine.not_ignored if name != self.engine else ():
                value, default = getattr(self, key), type(self).model_fields[key].default
                if value != default:
                    raise ValueError(
                        f"simulation.{key} must be {default} for engine {self.engine}, "
                        f"got {value!r}"
                    )
        return self


class Shuffler(Section):
    """How reports travel: through shufflers of the run, or through one that is there already."""

    sealing: Literal["x25519", "mlkem768-x25519"] = "x25519"
    number: int = Field(1, ge=1, le=64, description="a whole number from 1 to 64")
    address: str | None = Field(None, description="HOST:PORT of a shuffler that is running")
    server_certificate: str | None = Field(None, description="the path of a NAME.pem")
    node_certificate: str | None = Field(None, description="the path of a NAME.pem")

    @model_validator(mode="after")
    def _outside(self) -> Shuffler:
        """Refuses an address without credentials, or beside shufflers of the run."""
        given = {name: getattr(self, name) for name in ("server_certificate", "node_certificate")}
        for name, value in given.items():
            if (value is None) != (self.address is None):
                one, other = ("address", name) if value is None else (name, "address")
                raise ValueError(f"shuffler.{one} needs shuffler.{other}")
        if self.address is not None and self.number > 1:
            raise ValueError(f"shuffler.number must be 1 with shuffler.address, got {self.number}")
        return self

    def with_absolute_paths(self) -> Shuffler:
        """The same, for a run folder from which a run goes on wherever it is started."""
        paths = ("server_certificate", "node_certificate")
        given = {name: path for name in paths if (path := getattr(self, name)) is not None}
        return self.model_copy(
            update={name: str(Path(path).absolute()) for name, path in given.items()}
        )


class Config(Section):
    """A whole run; `load` reads it, and `dumps` writes it back."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="at most 100 letters, digits, '.', '_' or '-'",
    )
    seed: Literal["system"] | Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0,
        description='a whole number in [0, 2^63), or "system" for the operating system\'s entropy',
    )
    privacy: Privacy
    data: Data
    model: Model
    training: Training
    simulation: Simulation = Field(default_factory=Simulation)
    shuffler: Shuffler = Field(default_factory=Shuffler)

    @model_validator(mode="after")
    def _one_step(self) -> Config:
        """With randomised response the estimate is one gradient step of the model `histogram`."""
        if self.privacy.mechanism != "randomised-response":
            return self
        needed = {
            **{"privacy.rounds": 1, "model.name": "histogram", "training.algorithm": "fedsgd"},
            **{"training.learning_rate": 1.0, "training.optimiser": "sgd"},
            **{"training.schedule": "constant", "training.averaging": 0.0},
            **{"training.aggregator": "mean", "simulation.engine": "flower"},
        }
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
        changes: values by `section.key`; or `section.key=value`, the values in TOML (a bare word
            is a string). An empty one leaves the key out.

    Raises:
        ConfigError: one line naming the key, what it was given, and what is allowed.
    """
    content = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else _read(source)
    given = changes.items() if isinstance(changes, Mapping) else map(_parsed, changes or [])
    for key, value in given:
        _change(content, key, value)
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        name = "the configuration" if isinstance(source, Mapping) else source
        raise ConfigError(f"{name}: {validation.first_mistake(error, Config)}") from None


def dumps(config: Config) -> str:
    """The configuration as TOML; `load` reads it back to the same values."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def shipped() -> list[str]:
    """Names of the configurations that ship with shufl."""
    folder = importlib.resources.files("shufl.configs")
    return sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".toml"))


def _find(source: str) -> Path:
    if source in shipped() and not Path(source).exists():
        return Path(str(importlib.resources.files("shufl.configs") / f"{source}.toml"))
    return Path(source)


def _read(source: str) -> dict[str, Any]:
    try:
        return validation.read_toml(_find(source))
    except OSError as error:
        raise ConfigError(
            f"{source or 'an empty name'} cannot be read: {error.strerror}; a configuration is a "
            f"TOML file or one of {', '.join(shipped())}"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _parsed(override: str) -> tuple[str, Any]:
    """Key and value of `section.key=value`."""
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"an override must look like section.key=value, got {override!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # no TOML, or more than is read
        return key, value.strip()


def _change(content: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.strip().split(".")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ConfigError(f"override {key.strip()}: {section} is not a section")
    if value == "":
        content.pop(last, None)
    else:
        content[last] = value
