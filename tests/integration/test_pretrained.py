"""Models of transformers with adapters of peft, on columns of datasets, in both engines."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import shufl
from shufl.learning.parameters import sent, trained

pytestmark = pytest.mark.nightly

pretrained = pytest.importorskip(
    "pretrained", reason="peft is not installed: make nightly installs it", exc_type=ImportError
)

CHANGES = {
    **{"privacy.rounds": 2, "privacy.target_epsilon": 1e9, "privacy.noise_multiplier": 1e-3},
    **{"privacy.minimum_batch": 1, "privacy.check_in_rate": 0.3, "data.most_records": 3},
    **{"training.learning_rate": 0.3, "simulation.nodes": 2, "privacy.delta": 1e-3},
}


def test_the_example_learns_and_keeps_its_adapter_as_peft_does(tmp_path):
    # transformers imports torchvision, which shufl.learning mends beside a CPU wheel of torch.
    start = (
        f"import runpy, shufl.learning; runpy.run_path({pretrained.__file__!r}, None, '__main__')"
    )
    command = [sys.executable, "-c", start]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    told = re.search(r"^accuracy (0\.\d+), ε = (\d[\d.]*)", ended.stdout, re.MULTILINE)
    assert told and float(told[1]) > 0.65 and float(told[2]) <= 4.0
    model = pretrained.adapted()
    model.load_adapter(tmp_path / "adapter", "kept")
    kept = [each for name, each in model.named_parameters() if "lora_B.kept" in name]
    assert len(kept) == 4 and all(each.any() for each in kept)


def run(tmp_path, engine, dataset, model):
    changes = CHANGES | {"simulation.engine": engine}
    return shufl.run(
        "quickstart", changes, dataset=dataset, model=model, runs=tmp_path, progress=False
    )


@pytest.mark.usefixtures("shared_ray")
def test_both_engines_train_the_factor_b_and_the_last_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "AUTHORS", 60)
    dataset, model = pretrained.reviews(), pretrained.Reader((pretrained.TOKENS,), 2)
    one, other = (
        run(tmp_path, engine, dataset, model).model for engine in ("vectorised", "flower")
    )
    names = trained(one).keys()
    assert {name.split(".")[-3] for name in names} == {"lora_B", "modules_to_save"}
    assert names == trained(model).keys() <= sent(one).keys()
    for name, value in trained(one).items():
        np.testing.assert_allclose(value.detach(), trained(other)[name].detach(), atol=2e-3)
        assert not torch.equal(value, model.get_parameter(name))
    assert all(
        torch.equal(value, model.get_parameter(name))
        for name, value in one.named_parameters()
        if name not in names
    )


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_columns_of_any_format_are_read(kind):
    table = pretrained.write_reviews(9, seed=1)
    texts = pretrained.load_tokeniser()(table["text"][:], padding="max_length", max_length=12)
    table = table.add_column("ids", texts["input_ids"]).with_format(kind)
    ids, labels = table["ids"], table["label"]
    given = shufl.Dataset(ids, labels, ids, labels, classes=2, users=table["author"])
    assert given.train_features.tolist() == texts["input_ids"]
    assert given.train_features.dtype == given.test_labels.dtype == torch.int64
    assert given.users.tolist() == [int(author.split("-")[1]) for author in table["author"][:]]
    with pytest.raises(shufl.ConfigError, match="train_features must be numbers, got text"):
        shufl.Dataset(table["text"], labels, table["text"], labels, classes=2)


def test_a_language_model_is_trained_as_it_is(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    texts = np.random.default_rng(0).integers(20, size=(1150, 9), dtype=np.int32)
    train, test = texts[:50], texts[50:]  # more than are evaluated at once
    dataset = shufl.Dataset(
        train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], classes=20, task="next-token"
    )
    ended = run(tmp_path, "vectorised", dataset, model)
    assert 0 < ended.metrics[-1]["perplexity"] < 40
    assert type(ended.model) is type(model)
    assert not torch.equal(ended.model.lm_head.weight, model.lm_head.weight)
