"""From a spreadsheet: each refusal says what to write, until a model is trained."""

import datetime
import random
from pathlib import Path

import shufl


def write_export(path: str, patients: int = 400) -> None:
    """Makes up what a German Excel exports; who is old and heavy is ill, in the north above all."""
    draw = random.Random(1)
    lines = ["patient;age;weight;ward;admitted;ill"]
    for patient in range(patients):
        for _ in range(draw.randint(1, 20)):
            age, weight = draw.gauss(50, 15), draw.gauss(80, 20)
            ward = draw.choices(["Nord", "Süd", "Ost"], [50, 48, 2])[0]
            ill = (age - 50) / 15 + (weight - 80) / 20 + (ward == "Nord") > 0.5
            admitted = datetime.date(2024, 1, 1) + datetime.timedelta(draw.randrange(366))
            numbers = [
                f"{age:.1f}" if draw.random() < 0.98 else "",
                f"{weight:.1f}" if draw.random() < 0.98 else "k. A.",
                "1.0" if ill else "0.0",
            ]
            age_cell, weight_cell, ill_cell = (
                cell if cell == "k. A." else cell.replace(".", ",") for cell in numbers
            )
            cells = f"patient-{patient}", age_cell, weight_cell, ward, f"{admitted:%d.%m.%Y}"
            lines.append(";".join([*cells, ill_cell]))
    Path(path).write_text("\n".join(lines) + "\n", encoding="cp1252")


config = {
    "name": "spreadsheet",
    "privacy": {
        "check_in_rate": 0.5,
        "shuffler_blankets": "least-error",
        "accountant": "blanket",
        "target_epsilon": 4.0,
        "delta": 1e-5,
        "rounds": 20,
    },
    "data": {"most_records": 10},
    "model": {"name": "logistic-regression"},
    "training": {"learning_rate": 1.0, "evaluate_every": 5},
    "simulation": {"engine": "vectorised", "noise": "aggregate"},
}
table = {
    "file": "export.csv",
    "user": "patient",
    "label": "ill",
    "classes": 2,
    "mean": [50.0, 80.0, 180.0],  # of age, weight and admitted: public, as everything here
    "std": [15.0, 20.0, 100.0],
}
ANSWERS = [
    {"separator": ";"},
    {"missing": {"age": 50.0}},
    {"decimal": ","},
    {"missing_texts": ["k. A."]},
    {"drop": ["weight"]},
    {"categories": {"ward": ["Nord", "Süd"]}},
    {"encoding": "cp1252"},
    {"other": ["ward"]},
    {"dates": {"admitted": datetime.date(2024, 1, 1)}},
    {"date_format": "%d.%m.%Y"},
]

write_export(table["file"])
for answer in ANSWERS:
    try:
        shufl.run(config | {"data": config["data"] | {"dataset": table}})
    except shufl.ConfigError as error:
        print(f"refused: {error}")
        print(f"answer:  {answer}")
    table |= answer
run = shufl.run(config | {"data": config["data"] | {"dataset": table}})
print(f"{run.score_name} {run.score:.3f}, ε = {run.epsilon['blanket']:.3g}")
