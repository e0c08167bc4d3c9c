"""A shuffler that somebody else has started, and with whose operator a run has credentials."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shufl.shuffler import (
    ControlClient,
    Credentials,
    IntakeClient,
    Refusal,
    RoundHeader,
    ShufflerError,
    ShufflerRefused,
    report_length,
    sealed_length,
)
from shufl.shuffler.callers import Role, caller_of
from shufl.simulator.section import ConfigError

if TYPE_CHECKING:
    from shufl.simulator.experiment import Experiment

_SECONDS = 10.0  # to answer before a run is begun


@dataclass(frozen=True)
class OutsideShuffler:
    """Where it is, and what this run may do there.

    Attributes:
        address: `HOST:PORT`.
        control: the server's credentials.
        submit: the credentials that all nodes share, as in a simulation.
    """

    address: str
    control: Credentials
    submit: Credentials
    alive: ClassVar[bool] = True  # as far as this machine knows; one that is away may come back

    @classmethod
    def of(cls, experiment: Experiment) -> OutsideShuffler | None:
        """The one that the configuration names, which has agreed to this experiment's plan.

        Raises:
            ConfigError: credentials that do not fit, or a shuffler that does not answer or refuses.
        """
        keys = experiment.config.shuffler
        if keys.address is None:
            return None
        submit = _credentials("node", keys.node_certificate)
        node = caller_of(submit.certificate)
        if node is not None and node.users < experiment.plan.users:
            raise ConfigError(
                f"shuffler.node_certificate is for {node.users} users, the run has "
                f"{experiment.plan.users}"
            )
        found = cls(keys.address, _credentials("server", keys.server_certificate), submit)
        try:
            found._try(experiment)
        except (ShufflerError, ValueError) as error:
            raise ConfigError(f"shuffler.address: {error}") from error
        return found

    def _try(self, experiment: Experiment) -> None:
        """Makes a run of this plan and ends it, and asks for a round as a node."""
        plan, sealing = experiment.plan, experiment.config.shuffler.sealing
        length = sealed_length(report_length(experiment.parameters), sealing)
        run_id = f"check-{uuid.uuid4()}"
        with (
            ControlClient(self.address, self.control, _SECONDS) as control,
            IntakeClient(self.address, self.submit, _SECONDS) as intake,
        ):
            digest = control.create_run(run_id, plan.to_json().encode(), length)
            try:
                intake.commitment(RoundHeader(run_id, 1, "", digest, ""))
            except ShufflerRefused as refused:
                if refused.reason is not Refusal.UNKNOWN_ROUND:
                    raise
            finally:
                control.end_run(run_id)


def _credentials(role: str, certificate: str | None) -> Credentials:
    """What lies in the files of a certificate, of the role that it must have."""
    key, path = f"shuffler.{role}_certificate", Path(certificate or "")
    try:
        if path.suffix != ".pem":
            raise ValueError(f"the file of a certificate is called NAME.pem, got {path}")
        found = Credentials.read(path.parent, path.stem)
        caller = caller_of(found.certificate)
        if caller is None or caller.role is not Role(role):
            raise ValueError(f"{path} is no {role}'s certificate, or has expired")
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    return found
