"""A task and an algorithm of one's own: the 90 % quantile of waiting times, by FedProx with steps
that shrink, for hospitals' wards of unequal size."""

import numpy as np

import shufl


def pinball(outputs, labels):
    """The loss whose minimum is the 90 % quantile: one number a record."""
    over = labels - outputs
    return (0.9 * over).maximum(-0.1 * over).sum(1)


def coverage(outputs, labels):
    """How many waited no longer than the model says: to be 0.9."""
    return {"coverage": (labels <= outputs).float().mean()}


def shrinking_fedprox(parameters, gradients, start, state, learning_rate, proximal=0.1):
    """SGD that stays near the round's model, with a step of learning_rate / √t."""
    steps = state["steps"] + 1 if state else next(iter(start.values())).new_ones(())
    rate = learning_rate / steps.sqrt()
    new = {
        name: own - rate * (gradients[name] + proximal * (own - start[name]))
        for name, own in parameters.items()
    }
    return new, {"steps": steps}


def waits() -> shufl.Dataset:
    """Made-up waiting times in hours, which grow with how full a ward is; 1 to 40 a ward."""
    draw = np.random.default_rng(1)
    wards = np.repeat(np.arange(300), draw.integers(1, 41, 300))
    full = draw.random((len(wards) + 1000, 1)).astype("float32")
    hours = (full * draw.exponential(1.0, full.shape)).astype("float32")
    n = len(wards)
    task = shufl.Task(pinball, coverage, score="coverage")
    return shufl.Dataset(full[:n], hours[:n], full[n:], hours[n:], users=wards, task=task)


if __name__ == "__main__":
    changes = {
        "privacy.check_in_rate": 0.5,
        "privacy.accountant": "blanket",
        "privacy.noise_multiplier": "",
        "privacy.shuffler_blankets": "least-error",
        "privacy.target_epsilon": 4.0,
        "privacy.rounds": 30,
        "privacy.minimum_batch": "",
        "model.name": "logistic-regression",
        "training.algorithm": "own_algorithm:shrinking_fedprox",
        "training.algorithm_options": {"proximal": 0.05},
        "training.local_epochs": 2,
        "training.optimiser_options": {"momentum": 0.5},
        "simulation.engine": "vectorised",
        "simulation.noise": "aggregate",
    }
    run = shufl.run("quickstart", changes, dataset=waits)
    print(f"{run.score_name} {run.score:.3f}, ε = {run.epsilon['blanket']:.3g}")
