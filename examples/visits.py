"""Natural users from a CSV file: patients with unequally many visits, each protected as a whole."""

import csv
import random
from pathlib import Path

import shufl

COLUMNS = ["patient", "age", "weight", "ill"]


def write_visits(path: str, patients: int = 400) -> None:
    """Makes visits up: patients come 1 to 20 times; who is old and heavy is ill."""
    draw = random.Random(1)
    with Path(path).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for patient in range(patients):
            for _ in range(draw.randint(1, 20)):
                age, weight = draw.gauss(50, 15), draw.gauss(80, 20)
                ill = (age - 50) / 15 + (weight - 80) / 20 > 0
                rows.writerow([f"patient-{patient}", age, weight, int(ill)])


write_visits("visits.csv")
run = shufl.run(
    {
        "name": "visits",
        "privacy": {
            "check_in_rate": 0.5,
            "clip_norm": 1.0,
            "shuffler_blankets": "least-error",  # found, with the noise, for the target
            "accountant": "blanket",
            "target_epsilon": 4.0,
            "delta": 1e-5,
            "rounds": 20,
        },
        "data": {
            "dataset": {
                "file": "visits.csv",
                "user": "patient",
                "label": "ill",
                "features": ["age", "weight"],
                "classes": 2,
                "mean": [50.0, 80.0],  # public, not estimated from the visits
                "std": [15.0, 20.0],
                "test": 0.2,  # of the patients
            },
            "most_records": 10,
        },
        "model": {"name": "logistic-regression"},
        "training": {"learning_rate": 1.0, "evaluate_every": 5},
        "simulation": {"engine": "vectorised", "noise": "aggregate"},
    }
)
print(
    f"{run.score_name} {run.score:.3f}, ε = {run.epsilon['blanket']:.3g} for every pair of patients"
)
