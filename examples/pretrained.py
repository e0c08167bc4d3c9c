"""A transformer of Hugging Face whose LoRA adapter learns, by peft, which reviews are favourable.

It needs `pip install transformers peft datasets`. Nothing is downloaded: the reviews are made up,
and the model has random weights. For a pretrained one write
`BertForSequenceClassification.from_pretrained(folder)`, and take its own tokeniser.
"""

import random

import datasets
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import shufl

GOOD = ["good", "great", "fine", "lovely", "superb"]
BAD = ["bad", "poor", "awful", "dull", "dreadful"]
OTHER = ["the", "a", "film", "play", "book", "was", "and", "I", "found", "it", "plot", "cast"]
WORDS = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
TOKENS, AUTHORS = 12, 3000


def load_tokeniser() -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def write_reviews(authors: int, seed: int) -> datasets.Dataset:
    """Makes reviews up: 1 to 4 of each author, as a table of text, label and author."""
    draw = random.Random(seed)
    rows = []
    for author in range(authors):
        for _ in range(draw.randint(1, 4)):
            label = draw.randrange(2)
            told = draw.choices((BAD, GOOD)[label], k=3) + draw.choices(OTHER, k=draw.randint(2, 9))
            draw.shuffle(told)
            rows.append({"text": " ".join(told), "label": label, "author": f"author-{author}"})
    return datasets.Dataset.from_list(rows)


def reviews() -> shufl.Dataset:
    """Columns of `datasets`, as they are: token ids, labels, and whose each review is."""
    tokeniser = load_tokeniser()

    def as_tokens(rows):
        return tokeniser(rows["text"], padding="max_length", truncation=True, max_length=TOKENS)

    train, test = (
        write_reviews(authors, seed).map(as_tokens, batched=True)
        for authors, seed in ((AUTHORS, 1), (200, 2))
    )
    return shufl.Dataset(
        train["input_ids"],
        train["label"],
        test["input_ids"],
        test["label"],
        classes=2,
        users=train["author"],
    )


def adapted():
    """The model, frozen but for the factors B of its adapter and the last layer.

    The adapter adds B·A to a weight. If both were trained, their noises would multiply, and the
    product of the users' mean factors is not the mean of their products. So A stays as it was drawn
    (Sun et al. 2024, "Improving LoRA in privacy-preserving federated learning": FFA-LoRA).
    """
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        initializer_range=0.2,  # random weights of the usual 0.02 pass hardly anything on
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"])
    model = get_peft_model(BertForSequenceClassification(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


class Reader(torch.nn.Module):
    """The adapted model for ids alone: it makes the mask of padding itself."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.bert = adapted()

    def forward(self, tokens):
        return self.bert(tokens, attention_mask=(tokens != 0)[:, None, None])


if __name__ == "__main__":
    changes = {
        "privacy.check_in_rate": 0.5,
        "privacy.accountant": "blanket",
        "privacy.noise_multiplier": "",
        "privacy.shuffler_blankets": "least-error",
        "privacy.target_epsilon": 4.0,
        "privacy.rounds": 30,
        "privacy.minimum_batch": "",
        "training.evaluate_every": 10,
        "simulation.engine": "vectorised",
        "simulation.noise": "aggregate",
    }
    run = shufl.run("quickstart", changes, dataset=reviews, model=Reader)
    print(f"{run.score_name} {run.score:.3f}, ε = {run.epsilon['blanket']:.3g}")
    run.model.bert.save_pretrained("adapter")  # peft's own files, for PeftModel.from_pretrained
