"""Every round's numbers in a tracker: MLflow here; with W&B, trackio or Neptune as many lines."""

import mlflow

import shufl


def log(run: shufl.RunResult, model) -> None:
    """Logs the round that has just ended; text and tables stay in metrics.jsonl."""
    row = run.metrics[-1]
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    mlflow.log_metrics(numbers, step=row["round"])


if __name__ == "__main__":
    changes = {"simulation.engine": "vectorised", "privacy.rounds": 5}
    with mlflow.start_run(run_name="quickstart") as tracked:
        run = shufl.run("quickstart", changes, on_round=log)
        mlflow.log_params({"rounds": run.plan.rounds, "n": run.plan.users})
    history = mlflow.MlflowClient().get_metric_history(tracked.info.run_id, "epsilon")
    print(f"{len(history)} rounds, the last with ε = {history[-1].value:.3g}")
