"""Every round's numbers in a tracker: MLflow, or W&B if you call `python tracker.py wandb`.

It needs `pip install mlflow-skinny`, or `pip install wandb`. Others take as many lines.
"""

import sys

import shufl

CHANGES = {"simulation.engine": "vectorised", "privacy.rounds": 5}


def numbers_of(run: shufl.RunResult) -> dict[str, float]:
    """Of the round that has just ended; text and tables stay in metrics.jsonl."""
    row = run.metrics[-1]
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def with_mlflow() -> list[float]:
    import mlflow

    def log(run, model):
        mlflow.log_metrics(numbers_of(run), step=run.metrics[-1]["round"])

    with mlflow.start_run(run_name="quickstart") as tracked:
        run = shufl.run("quickstart", CHANGES, on_round=log)
        mlflow.log_params({"rounds": run.plan.rounds, "n": run.plan.users})
    history = mlflow.MlflowClient().get_metric_history(tracked.info.run_id, "epsilon")
    return [each.value for each in history]


def with_wandb() -> list[float]:
    import wandb

    told = []

    def log(run, model):
        tracked.log(numbers_of(run), step=run.metrics[-1]["round"])
        told.append(run.metrics[-1]["epsilon"])

    # Offline: the numbers stay in the folder wandb, until `wandb sync` sends them.
    with wandb.init(project="shufl", name="quickstart", mode="offline") as tracked:
        run = shufl.run("quickstart", CHANGES, on_round=log)
        tracked.config.update({"rounds": run.plan.rounds, "n": run.plan.users})
    return told


if __name__ == "__main__":
    epsilons = with_wandb() if "wandb" in sys.argv else with_mlflow()
    print(f"{len(epsilons)} rounds, the last with ε = {epsilons[-1]:.3g}")
