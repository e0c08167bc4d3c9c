"""Masks of dropout: their law, what they depend on, and that both ways to compute have the same."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shufl.learning import LocalTraining, SeededDropout, as_keys, local_update, user_updates

USERS, RECORDS = 40, 5


def masks(seeds, places, step=0, p=0.25, calls=1, width=50):
    """1 where an entry is kept, of each record and call."""
    with SeededDropout(seeds, places, step):
        given = [functional.dropout(torch.ones(len(places), width), p) for _ in range(calls)]
    return torch.stack([(each > 0).double() for each in given])


def test_an_entry_is_kept_with_probability_1_less_p_and_scaled():
    with SeededDropout(torch.arange(400), torch.zeros(400, dtype=torch.int64)):
        dropped = functional.dropout(torch.ones(400, 50), 0.2)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    kept = (dropped > 0).double()
    assert abs(float(kept.mean()) - 0.8) < 5 * (0.16 / kept.numel()) ** 0.5
    assert (kept.mean(0) - 0.8).abs().max() < 5 * (0.16 / 400) ** 0.5  # each place
    assert (kept.mean(1) - 0.8).abs().max() < 5 * (0.16 / 50) ** 0.5  # each user


def test_users_records_steps_and_calls_have_masks_of_their_own():
    here, there = torch.zeros(300, dtype=torch.int64), torch.arange(300)
    seed = as_keys(np.array([2**64 - 3], dtype=np.uint64))[0]
    first, second = masks(seed, there, calls=2)
    others = [
        second,
        masks(seed, there, step=1)[0],
        masks(seed + 1, there)[0],
        masks(seed, there + 1)[0],
        masks(here + there, here)[0],
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([first, other]).flatten(1))[0, 1])) < 0.05
    assert torch.equal(first, masks(seed, there)[0])
    columns = torch.corrcoef(first.T).fill_diagonal_(0.0)
    assert columns.abs().max() < 5 / 300**0.5  # entries of a record are independent


def test_what_is_not_of_records_or_not_dropped_is_left_to_torch():
    given = torch.ones(4, 9)
    with SeededDropout(torch.arange(3), torch.arange(3)):
        torch.manual_seed(1)
        other = functional.dropout(given, 0.5)
        assert torch.equal(functional.dropout(given, 0.5, training=False), given)
    torch.manual_seed(1)
    assert torch.equal(other, functional.dropout(given, 0.5))


class Attends(nn.Module):
    """torch's own attention by three of its ways, with dropout."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.mixed, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, records):
        x = self.encoder(records)
        q, bias = self.mixed(x)[:, None], torch.arange(6.0) / 9
        x = functional.scaled_dot_product_attention(q, q, q, bias.expand(6, 6), dropout_p=0.2)
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.2)
        return self.last(x[:, 0].mean(1))


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("fedavg", 2, 0.3, 2)])
def test_users_together_have_the_masks_of_each_alone(training):
    torch.manual_seed(0)
    model = Attends().train()
    features, labels = torch.randn(USERS, RECORDS, 6, 8), torch.randint(3, (USERS, RECORDS))
    seeds = np.arange(USERS, dtype=np.uint64) + 2**63
    together = user_updates(model, features, labels, training, as_keys(seeds))
    flat = torch.cat([each.flatten(1) for each in together.values()], dim=1).numpy()
    for user in range(0, USERS, 7):
        alone = local_update(model, features[user], labels[user], training, int(seeds[user]))
        other = local_update(model, features[user], labels[user], training, int(seeds[user]) + 1)
        np.testing.assert_allclose(flat[user], alone, rtol=1e-3, atol=1e-5)
        assert np.linalg.norm(other - alone) > 0.05 * np.linalg.norm(alone)


def test_attention_with_dropout_is_torchs_own_where_nothing_is_dropped():
    """By a chance so small that no entry is dropped."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 2, 6, 8)
    mask = torch.rand(6, 6) < 0.8
    mask.fill_diagonal_(True)
    for about in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.7}):
        expected = functional.scaled_dot_product_attention(q, k, v, **about)
        with SeededDropout(torch.arange(4), torch.arange(4)):
            ours = functional.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, **about)
        torch.testing.assert_close(ours, expected)


class Checkpointed(nn.Module):
    """Computes its first half again in the backward, if asked to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), nn.Linear(16, 3)
        self.again = True

    def forward(self, records):
        if not self.again:
            return self.last(self.first(records))
        return self.last(checkpoint(self.first, records, use_reentrant=False))


def test_what_is_computed_again_has_the_masks_of_the_first_time():
    torch.manual_seed(0)
    model = Checkpointed().train()
    features, labels = torch.randn(9, 8), torch.arange(9) % 3
    update = local_update(model, features, labels, LocalTraining(), 11)
    model.again = False
    torch.manual_seed(11)
    functional.cross_entropy(model(features), labels).backward()  # torch's own masks, of this seed
    expected = torch.cat([each.grad.flatten() for each in model.parameters()])
    np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-7)
