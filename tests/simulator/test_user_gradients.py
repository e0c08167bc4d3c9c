"""The clipped sum of many users' updates, by book-keeping or by vmap: that of one after another."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from nights import by_night
from shufl.learning import LocalTraining, ModuleState, local_update, user_updates
from shufl.learning import user_update as client_update
from shufl.learning.data.partition import Together
from shufl.learning.models import ModelMaker, logistic_regression, mlp, small_cnn
from shufl.learning.tasks import Form
from shufl.protocol.mechanisms import clip
from shufl.simulator.engines.book_keeping import Unsupported
from shufl.simulator.engines.gradient_forms import Clipping, squared_lengths_of
from shufl.simulator.engines.report_sum import sizes_to_try
from shufl.simulator.engines.user_gradients import (
    Computation,
    call_in,
    clipped_sum,
    clipped_sum_of_updates,
    fastest_method,
)

pytestmark = pytest.mark.slow

GRADIENT = LocalTraining()
METHODS = ["book-keeping", "vmap"]
PRECISIONS = ["float32", "bfloat16"]


def flat(updates):
    return torch.cat([update.flatten(1) for update in updates.values()], dim=1)


def seeds_of(users):
    return np.arange(len(users), dtype=np.uint64) + 7


def one_by_one(model, features, labels, *clip_norms, training=GRADIENT):
    """The same sums as the clients of the Flower engine would make them."""
    updates = [
        local_update(model, *records, training, seed)
        for *records, seed in zip(features, labels, seeds_of(labels).tolist(), strict=True)
    ]
    return [sum(clip(update, clip_norm) for update in updates) for clip_norm in clip_norms]


def together(
    model, features, labels, clip_norm, device,
    precision="float32", method=METHODS[0], training=GRADIENT,
):  # fmt: skip
    """Of users with a tensor of features and one of labels each."""
    own = copy.deepcopy(model).to(device)
    records = (torch.cat(list(each)).to(device) for each in (features, labels))
    sizes = np.array(list(map(len, labels)))
    computation = Computation(method, training, precision)
    total = clipped_sum_of_updates(
        computation, own, Together(*records, sizes), seeds_of(sizes), Clipping(clip_norm)
    )
    state = model.state_dict()
    assert all(torch.equal(state[name], now.cpu()) for name, now in own.state_dict().items())
    return total.cpu().numpy()


def assert_same_sum(
    model, features, labels, device, *clip_norms, training=GRADIENT, methods=METHODS
):
    sums = one_by_one(model, features, labels, *clip_norms, training=training)
    about = {"device": device, "training": training}
    for clip_norm, expected in zip(clip_norms, sums, strict=True):
        for method in methods:
            total = together(model, features, labels, clip_norm, method=method, **about)
            np.testing.assert_allclose(total, expected, rtol=2e-4, atol=2e-6 * clip_norm)


def assert_no_longer(clip_norm, model, features, labels, *how, excess=2e-5):
    """Returns what it has measured: one user's share."""
    share = together(model, features, labels, clip_norm, *how)
    assert np.linalg.norm(share.astype(float)) <= clip_norm * (1 + excess)
    return share


def zeroed(model):
    for parameter in model.parameters():
        parameter.data.zero_()
    return model.train()


@pytest.mark.parametrize("make", [mlp, small_cnn])
@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_user_updates_are_those_of_local_update(make, epochs, device):
    """0 epochs: fedsgd. Five records in batches of two: the last batch is short."""
    torch.manual_seed(1)
    model = make((1, 28, 28), 10)
    features, labels = torch.randn(4, 5, 1, 28, 28), torch.randint(0, 10, (4, 5))
    training = LocalTraining("fedavg" if epochs else "fedsgd", epochs, 0.2, 2)
    seeds = torch.arange(4)
    own, records = copy.deepcopy(model).to(device), (features.to(device), labels.to(device))
    updates = flat(user_updates(own, *records, training, seeds)).cpu()
    assert all(map(torch.equal, own.cpu().parameters(), model.parameters()))
    for user in range(4):
        alone = local_update(model, features[user], labels[user], training, seed=user)
        torch.testing.assert_close(updates[user], torch.from_numpy(alone), rtol=1e-4, atol=1e-6)


def test_clipped_sum_is_the_sum_of_clip_for_every_input(device):
    updates = torch.randn(8, 6) * 0.01
    updates[1] *= 1e4
    updates[2] = 0.0
    updates[3, 2] = float("nan")
    updates[4, 5] = float("-inf")
    updates[5] = 3e38  # finite; its squares overflow float32
    updates[6] = 1e-42
    expected = sum(clip(update.numpy(), 0.5) for update in updates)
    updates = updates.to(device)
    total = clipped_sum({"a": updates[:, :4].reshape(8, 2, 2), "b": updates[:, 4:]}, Clipping(0.5))
    np.testing.assert_allclose(total.cpu().numpy(), expected, rtol=1e-5, atol=1e-6)


class Functional(nn.Module):
    """Its own forward: a residual, a layer without a module, a sequence of positions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(14, 14)
        self.last = nn.Parameter(torch.randn(10, 14 * 14) / 14)

    def forward(self, records):
        rows = records.flatten(1, 2)
        return functional.linear((rows + torch.tanh(self.first(rows))).flatten(1), self.last)


class Attention(nn.Module):
    """torch's own transformer: positions, a first token, an encoder's layer."""

    def __init__(self, batch_first=True, dropout=0.0):
        super().__init__()
        self.patches, self.last = nn.Linear(14, 16), nn.Linear(16, 10)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(15, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, records):
        x = self.patches(functional.layer_norm(records, (1, 14, 14)).flatten(1, 2))
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        x = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.last(x[:, 0])


class Tokens(nn.Module):
    """Records are read as whole numbers; the positions of tokens are looked up too."""

    def __init__(self, padding=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(196, 4)
        self.last = nn.Linear(4, 10)
        self.padding = padding

    def forward(self, records):
        tokens = records.flatten(1).nan_to_num().long() % 9
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        of_tokens = functional.embedding(tokens, self.tokens.weight, self.padding)
        return self.last(torch.tanh(of_tokens + self.positions(positions)).mean(1))


def adapted():
    """A frozen trunk, and a low-rank adapter beside its second layer."""
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(196, 32), nn.Tanh())
    frozen, down, up = nn.Linear(32, 16), nn.Linear(32, 2, bias=False), nn.Linear(2, 16)
    model = nn.Sequential(trunk.requires_grad_(False), Sum(frozen.requires_grad_(False), down, up))
    return model.append(nn.Linear(16, 10))


class Sum(nn.Module):
    """What a frozen layer gives, and a low-rank one."""

    def __init__(self, frozen, down, up):
        super().__init__()
        self.frozen, self.down, self.up = frozen, down, up

    def forward(self, records):
        return torch.relu(self.frozen(records) + self.up(self.down(records)))


ARCHITECTURES = {
    "adapted": adapted,
    "logistic-regression": lambda: logistic_regression((1, 14, 14), 10),
    "mlp": lambda: mlp((1, 14, 14), 10),
    "own forward": Functional,
    "normalised": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3, padding="same", bias=False), nn.GroupNorm(3, 6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, stride=2, padding=1, padding_mode="circular"), nn.ReLU(),
        nn.Flatten(), nn.LayerNorm(196), nn.Linear(196, 10, bias=False), nn.GroupNorm(2, 10),
    ),
    "wide": lambda: nn.Sequential(  # the second convolution's gradients are not materialised
        nn.Conv2d(1, 64, 5, stride=3), nn.GELU(), nn.Conv2d(64, 96, 3, stride=2), nn.Flatten(),
        nn.Linear(96, 10),
    ),
    "attention": Attention,
    "attention with dropout": lambda: Attention(dropout=0.2),
    "mlp with dropout": lambda: nn.Sequential(
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(196, 32), nn.Dropout(0.5, inplace=True), nn.Tanh(),
        nn.Linear(32, 10),
    ),
    "tokens": lambda: Tokens(padding=2),
    "tokens, the last for padding": lambda: Tokens(padding=-1),
}  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [[1] * 8, [3] * 8, [3, 1, 17, 2, 4, 1, 5, 3]], ids=["one", "three", "unequal"]
)
@pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_the_sum_is_that_of_one_user_after_another(make, sizes, device):
    torch.manual_seed(0)
    model, given = make().train(), (Form((1, 14, 14), 10), GRADIENT, device)
    if len(set(sizes)) > 1:
        given += "float32", np.array(sizes)
    assert fastest_method(model, *given) == "book-keeping"
    scales = np.logspace(-6, 6, len(sizes))
    features = [
        float(scale) * torch.randn(n, 1, 14, 14) for scale, n in zip(scales, sizes, strict=True)
    ]
    labels = [torch.randint(0, 10, (n,)) for n in sizes]
    assert_same_sum(model, features, labels, device, 1e-3, 1.0, 1e4)


@pytest.mark.parametrize("batch", [2, 32])
def test_local_epochs_of_users_of_unequal_size_are_those_of_one_after_another(batch, device):
    torch.manual_seed(0)
    model, sizes = mlp((1, 4, 4), 3).train(), [3, 1, 7, 2, 4, 1, 5, 6]
    features = [torch.randn(n, 1, 4, 4) for n in sizes]
    labels = [torch.randint(0, 3, (n,)) for n in sizes]
    training = LocalTraining("fedavg", 2, 0.3, batch)
    about = {"training": training, "methods": ["vmap"]}
    assert_same_sum(model, features, labels, device, 0.3, **about)


@given(data=st.data())
def test_convolutions_of_every_kind(device, data):
    draw = data.draw
    groups, seed = draw(st.sampled_from([1, 2, 3])), draw(st.integers(0, 2**31))
    layer = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 24)),
        "kernel_size": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "stride": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "padding": (draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        "dilation": (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(**layer), nn.Flatten(), nn.LazyLinear(3)).train()
    users, records, height = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(5, 8)),
    )
    features = torch.randn(users, records, layer["in_channels"], height, 5)
    model(features[0])
    labels = torch.randint(0, 3, (users, records))
    assert (
        fastest_method(model, Form(tuple(features.shape[2:]), 3), GRADIENT, device)
        == "book-keeping"
    )
    assert_same_sum(model, features, labels, device, 0.5)


def by_frequency(model, x):
    return functional.embedding(x.gt(0).long(), model.table, scale_grad_by_freq=True)[..., 0]


BEFORE = {
    "mixes users": lambda _, x: x - x.mean(0),
    "starts without gradients": lambda _, x: x - x.mean(0),
    "mixes long batches": lambda _, x: x - x.mean(0) if len(x) > 100 else x,
    "mixes odd batches": lambda _, x: x.roll(1, 0) if len(x) % 2 else x,
    "mixes the end": lambda _, x: torch.cat([x[:-2], x[-2:].flip(0)]) if len(x) > 50 else x,
    "reorders": lambda _, x: x.flip(0),
    "keeps state": lambda model, x: model.keep(x),
    "keeps a list": lambda model, x: model.list.append(len(x)) or x,
    "adds to some records": lambda model, x: torch.cat([x[:4] + model.scale, x[4:]]),
    "looks up by frequency": by_frequency,
}
"""What odd models do before their first layer."""
AFTER = {
    "keeps a hidden layer": lambda model, x: model.keep(x),
    "used twice": lambda model, x: model.layer(x),
    "used elsewhere": lambda model, x: x @ model.layer.weight,
    "tied": lambda model, x: model.other(x),
}


class Odd(nn.Module):
    """Models that book-keeping must not be used for."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.list, self.scale = kind, [0], 1.0
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        if kind in ("parameter of no layer", "adds to some records"):
            self.scale = nn.Parameter(torch.ones(16))
        if kind == "looks up by frequency":
            self.table = nn.Parameter(torch.randn(2, 1))
        if kind == "tied":
            self.other = nn.Linear(16, 16, bias=False)
            self.other.weight = self.layer.weight
        if kind == "starts without gradients":
            nn.init.zeros_(self.last.weight)

    def keep(self, x):
        self.kept = x
        return x

    def forward(self, records):
        x = BEFORE.get(self.kind, lambda _, x: x)(self, records.flatten(1))
        x = torch.relu(self.layer(x) * self.scale)
        x = self.last(AFTER.get(self.kind, lambda _, x: x)(self, x))
        return x.flip(0) if self.kind == "reorders" else x


@pytest.mark.parametrize("kind", [*BEFORE, *AFTER, "parameter of no layer"])
def test_other_models_are_left_to_vmap(kind):
    torch.manual_seed(0)
    given = Form((1, 4, 4), 3), GRADIENT, "cpu", "float32", np.ones(101, dtype=np.int64)
    assert fastest_method(Odd("plain").train(), *given) == "book-keeping"
    assert fastest_method(Odd(kind).train(), *given) == "vmap"


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_models_that_draw_random_numbers_are_refused(draw):
    class Draws(nn.Linear):
        def forward(self, records):
            return super().forward(records * draw())

    with pytest.raises(RuntimeError, match="other updates than one by one: the model draws random"):
        fastest_method(Draws(4, 3).train(), Form((4,), 3), GRADIENT)


def test_models_that_compute_in_fewer_digits_are_refused():
    class Rounds(nn.Sequential):
        def forward(self, records):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(records).float()

    torch.manual_seed(0)
    model = Rounds(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
    with pytest.raises(RuntimeError, match=r"one by one: the model .* rounds \(as bfloat16 does\)"):
        fastest_method(model.train(), Form((64,), 10), GRADIENT)


class Bag(nn.EmbeddingBag):
    """Gets numbers."""

    def forward(self, records):
        return super().forward(records.gt(0).long())


class SparseWords(nn.Module):
    """An embedding and a bag of one, with sparse gradients or with dense ones."""

    def __init__(self, input_shape, classes, sparse):
        super().__init__()
        self.words = nn.Embedding(2, 3, sparse=sparse)
        self.bag = Bag(2, 3, sparse=sparse)
        self.linear = nn.Linear(3, classes)

    def forward(self, records):
        return self.linear(self.words(records.gt(0).long()).mean(1) + self.bag(records))


@pytest.mark.parametrize("training", [GRADIENT, LocalTraining("fedavg", local_epochs=2)])
def test_sparse_gradients_are_the_dense_ones(training):
    form, name = Form((4,), 3), f"{__name__}:SparseWords"
    sparse, dense = (
        ModelMaker(name, form, 0, {"sparse": each})().train() for each in (True, False)
    )
    features, labels = torch.randn(5, 3, 4), torch.randint(3, (5, 3))
    users = list(zip(features, labels, strict=True))
    expected = [local_update(dense, *each, training, 0) for each in users]
    alone = [local_update(sparse, *each, training, 0) for each in users]
    np.testing.assert_array_equal(alone, expected)
    together = flat(user_updates(sparse, features, labels, training, torch.zeros(5).long()))
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-6)
    fastest_method(sparse, form, training)
    sparse.words.sparse = True  # as a function of torch's may be called
    assert np.array_equal(local_update(sparse, features[0], labels[0], training, 0), expected[0])


@pytest.mark.parametrize("training", [GRADIENT, LocalTraining("fedavg", local_epochs=1)])
def test_a_parameter_may_be_a_single_number(training):
    class Tempered(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(16, 3))
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, records):
            return self[1](self[0](records)) * self.temperature

    torch.manual_seed(0)
    model = Tempered().train()
    assert fastest_method(model, Form((1, 4, 4), 3), training) == "vmap"
    features, labels = torch.randn(5, 2, 1, 4, 4), torch.randint(0, 3, (5, 2))
    about = {"training": training, "methods": ["vmap"]}
    assert_same_sum(model, features, labels, "cpu", 0.5, **about)


def test_a_sequence_along_the_first_axis_and_local_epochs_are_left_to_vmap():
    torch.manual_seed(0)
    model = Attention(batch_first=False).train()
    assert fastest_method(model, Form((1, 14, 14), 10), GRADIENT) == "vmap"
    model = mlp((1, 4, 4), 3).train()
    assert fastest_method(model, Form((1, 4, 4), 3), LocalTraining("fedavg")) == "vmap"


@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize("make", [mlp, small_cnn])
def test_an_update_that_is_not_finite_counts_as_zero_and_harms_no_other(make, records, device):
    torch.manual_seed(0)
    model = make((1, 28, 28), 10).train()
    features, labels = torch.randn(9, records, 1, 28, 28), torch.randint(0, 10, (9, records))
    features[1, 0, 0, 3, 4] = float("nan")
    features[2] = float("inf")
    features[3] *= 1e37  # scores, or a product, beyond float32
    features[4] *= 1e20  # squares beyond float32
    features[5] *= 1e-30
    features[6] = 0.0
    assert_same_sum(model, features, labels, device, 0.5)
    only = [1, 2]
    assert not together(model, features[only], labels[only], 0.5, device).any()


@pytest.mark.parametrize("precision", PRECISIONS)
@given(
    size=st.integers(-25, 25),
    difference=st.integers(-9, 0),
    clip_exponent=st.integers(-4, 4),
    pairs=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_a_users_share_is_at_most_the_clip_norm_however_its_records_cancel(
    device, precision, size, difference, clip_exponent, pairs, seed
):
    """Each pair's output gradients are opposite, its inputs differ by 10^difference of their size.

    A norm from sums of products that cancel is noise, or negative: small where the sum is large.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 64), nn.Linear(64, 2)).train()
    zeroed(model[1])
    model[2].bias.data.zero_()
    base, clip_norm = torch.randn(1, 2 * pairs, 100) * 10.0**size, 10.0**clip_exponent
    base[:, 1::2] = base[:, ::2]
    features = base * (1 + 10.0**difference * torch.randn(base.shape))
    labels = torch.tensor([[0, 1] * pairs])
    share = assert_no_longer(clip_norm, model, features, labels, device, precision)
    (expected,) = one_by_one(model, features, labels, clip_norm)
    # Not clipped: the same gradient, if not rounding.
    if precision == "float32" and np.linalg.norm(expected) < clip_norm / 2:
        scale = 1e-5 * float(features.abs().max())
        np.testing.assert_allclose(share, expected, rtol=1e-3, atol=scale)


class Words(nn.Sequential):
    """Looks up what a record has, which must be whole numbers from 0 to `words` - 1."""

    def __init__(self, words=5):
        super().__init__(nn.Embedding(words, 4), nn.Linear(4, 2))

    def forward(self, records):
        return self[1](self[0](records.long()).mean(1))


@pytest.mark.parametrize("difference", [1.0, 1e-3, 1e-6])
def test_a_users_share_is_at_most_the_clip_norm_however_its_words_cancel(difference, device):
    torch.manual_seed(0)
    model = Words()
    model[0].weight.data *= difference
    assert fastest_method(model, Form((6,), 2), GRADIENT, device) == "book-keeping"
    features = torch.randint(5, (9, 1, 6)).repeat(1, 4, 1).float()
    labels = torch.arange(2).repeat(9, 2)
    assert_same_sum(model, features, labels, device, 0.01)
    for user in range(9):
        assert_no_longer(0.01, model, features[[user]], labels[[user]], device)


@pytest.mark.parametrize("size", [1, 10, 64, 65, 127, 784, 1009, 8192, 2**20])
def test_squared_lengths_err_by_4e_6_at_most(size, device):
    """However many squares there are; equal ones are rounded alike."""
    torch.manual_seed(size)
    equal = (torch.rand(40, 1) + 0.5).expand(40, size)[: max(2, 2**22 // size)]
    uneven = torch.randn(len(equal), size) * torch.logspace(-6, 6, size)
    for vectors in (equal, uneven, equal.cumsum(1)):
        exact = vectors.double().square().sum(1)
        measured = squared_lengths_of(vectors.to(device)).cpu()
        torch.testing.assert_close(measured, exact, rtol=4e-6, atol=0.0)


def test_a_share_is_at_most_the_clip_norm_where_its_sum_is_rounded_one_way(device):
    """60 equal products, then 60 opposite ones, 2 % smaller: each sum so far is rounded alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(512, 512), nn.Linear(512, 2)).train()
    labels = torch.arange(2).repeat_interleave(60)[None]
    features = torch.ones(1, 120, 512)
    features[:, 60:] *= 0.977
    for one, other in torch.rand(10, 2) + 0.5:
        zeroed(model)[2].weight.data[0] = one
        assert_no_longer(0.01, model, other * features, labels, device)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clip_norm", [1e-3, 3e-5, 4e-7, 3e-7, 1e-7])
def test_a_share_is_at_most_the_clip_norm_where_its_scale_is_hardly_a_float32(
    method, clip_norm, device, precision
):
    """The smallest float32 are 1.4e-45 apart: rounded to the nearest, a scale may be doubled."""
    model = logistic_regression((1, 4, 4), 3).train()
    for size in torch.linspace(1.0, 2.9, 20):
        features = (size * 1e38).expand(1, 1, 1, 4, 4)
        labels = torch.zeros(1, 1, dtype=torch.int64)
        how = device, precision, method
        assert_no_longer(clip_norm, model, features, labels, *how, excess=1e-5)


@pytest.mark.parametrize("size", [1e12, 1e15, 1e18])
def test_a_share_is_at_most_the_least_clip_norm_where_scaled_gradients_are_hardly_float32(size):
    """With a clip norm of 1e-30 some are 1.4 times as long."""
    model = nn.Linear(1, 2, bias=False)
    features, labels = torch.full((1, 1, 1), size), torch.ones(1, 1, dtype=torch.int64)
    for score in torch.linspace(0.0, 80.0, 161).tolist():
        model.weight.data = torch.tensor([[0.0], [score / size]])
        assert_no_longer(1e-18, model, features, labels, "cpu")


@pytest.mark.parametrize(
    ("width", "records"),
    [
        (1, 1), (10, 3), (97, 1), (128, 3),
        *by_night((1, 3), (10, 1), (64, 1), (64, 3), (97, 3), (128, 1)),
    ],
)  # fmt: skip
def test_a_share_is_at_most_the_clip_norm_whatever_the_width_of_huge_records(
    width, records, device
):
    """Scaled to the clip norm, the gradient of the layer's output is hardly a float32."""
    model = nn.Linear(width, 10, bias=False)
    labels = torch.ones(1, records, dtype=torch.int64)
    for size in (1e36, 1e37, 1e38):
        features = torch.full((1, records, width), size / width**0.5)
        for clip_norm in (1e-3, 1e-5, 1e-7):
            for score in torch.linspace(0.0, 80.0, 41).tolist():
                zeroed(model).weight.data[1] = score / size / width**0.5
                assert_no_longer(clip_norm, model, features, labels, device)


@pytest.mark.parametrize(
    ("clip_norm", "records", "precision"),
    [
        (1e-2, 1, "float32"), (1e-2, 2, "float32"), (1e-5, 1, "float32"), (1e-5, 2, "float32"),
        (1e-5, 2, "bfloat16"),
    ],
)  # fmt: skip
def test_a_share_is_at_most_the_clip_norm_where_gradients_are_hardly_float32(
    clip_norm, records, device, precision
):
    """Of the layer's output, at records so large that their products are not small."""

    class Faint(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x.flatten(1)) * 1e-20 * 1e-20)

    model = Faint(nn.Linear(784, 64), nn.Linear(64, 3)).train()
    assert fastest_method(model, Form((784,), 3), GRADIENT) == "book-keeping"
    zeroed(model)
    for exponent in np.linspace(-4, 2, 7):
        model[1].weight.data[0] = 10.0**exponent
        for size in np.logspace(34, 38, 5):
            features = torch.full((1, records, 784), size, dtype=torch.float32)
            labels = torch.zeros(1, records, dtype=torch.int64)
            assert_no_longer(clip_norm, model, features, labels, device, precision)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [mlp, small_cnn])
def test_bfloat16_gives_float32_updates_near_those_of_float32(make, method, device):
    torch.manual_seed(0)
    model, labels = make((1, 28, 28), 10).train(), torch.randint(0, 10, (64, 2))
    features = torch.rand(64, 2, 1, 28, 28) + labels[:, :, None, None, None] / 5
    exact, near = (
        together(model, features, labels, 1.0, device, precision, method)
        for precision in PRECISIONS
    )
    assert near.dtype == np.float32
    assert 1e-4 < np.linalg.norm(near - exact) / np.linalg.norm(exact) < 0.1
    own, records = model.to(device), (features.to(device), labels.to(device))
    updates = user_updates(own, *records, GRADIENT, torch.arange(64), call_in("bfloat16"))
    assert {update.dtype for update in updates.values()} == {torch.float32}


def test_a_model_that_cannot_take_bfloat16_is_found(device):
    class OnlyFloat32(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            column = torch.zeros_like(scores, dtype=torch.int64)
            return torch.zeros_like(scores, dtype=x.dtype).scatter(1, column, scores)

    model = OnlyFloat32(4, 3).train()
    assert fastest_method(model, Form((4,), 3), GRADIENT, device) == "book-keeping"
    with pytest.raises(RuntimeError, match="scatter"):
        fastest_method(model, Form((4,), 3), GRADIENT, device, "bfloat16")


class OnAnotherDevice(FakeTensorMode):
    """Tensors that have a device and a shape but no values; those of two devices do not mix.

    Every question about a value has the same answer, of a mask one is left, and all differ.
    """

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def __deepcopy__(self, memo):
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answer
        if func is torch.ops.aten._unique2.default:
            return args[0].flatten(), torch.zeros_like(args[0]), args[0].flatten()
        if func is torch.ops.aten.index.Tensor:
            masks = [index is not None and index.dtype == torch.bool for index in args[1]]
            chosen = [
                index.new_zeros(1, dtype=torch.int64) if mask else index
                for index, mask in zip(args[1], masks, strict=True)
            ]
            args = args[0], chosen
        return super().__torch_dispatch__(func, types, args, kwargs)


BY_DAY = ["normalised", "tokens"]


@pytest.mark.parametrize("sizes", [np.array([1, 6, 2, 3]), *by_night(np.full(4, 3))])
@pytest.mark.parametrize("answer", [False, *by_night(True)])
@pytest.mark.parametrize("method", [METHODS[0], *by_night(*METHODS[1:])])
@pytest.mark.parametrize(
    "name", [*BY_DAY, *by_night(*(each for each in ARCHITECTURES if each not in BY_DAY))]
)
def test_everything_is_computed_where_the_model_is(name, method, answer, sizes, monkeypatch):
    """On "meta", the one device beside the CPU that every build of torch can differentiate on."""
    monkeypatch.setattr(ModuleState, "restore", lambda _: [])  # compares values: there are none
    with OnAnotherDevice(answer), torch.device("meta"):
        model = ARCHITECTURES[name]().train()
        labels = torch.zeros(4, 3, dtype=torch.int64)
        features = torch.zeros(4, 3, 1, 14, 14)
        with torch.device("cpu"):  # what is made anywhere comes from there
            records = Together(features.flatten(0, 1), labels.flatten(), sizes)
            total = clipped_sum_of_updates(
                Computation(method, GRADIENT), model, records, seeds_of(sizes), Clipping(1.0)
            )
            epochs = LocalTraining("fedavg", 1, 0.1, 2)
            order = torch.zeros(1, 4, 3, dtype=torch.int64)  # made of the seeds' values
            monkeypatch.setattr(client_update, "record_orders", lambda *_: order)
            monkeypatch.setattr(torch.Tensor, "numpy", lambda *_, **__: np.full(4, 3))
            updates = user_updates(model, features, labels, epochs, torch.arange(4))
        assert total.device.type == "meta"
        assert {update.device.type for update in updates.values()} == {"meta"}


class FirstAxis(nn.Linear):
    def forward(self, records):
        return super().forward(records.unsqueeze(0)).squeeze(0)


class LessTheMean(nn.Linear):
    def forward(self, records):
        return super().forward(records - records.mean(0))


@pytest.mark.parametrize("kind", [FirstAxis, LessTheMean])
@pytest.mark.parametrize(
    "sizes", [[500, *[5] * 30], [*[1] * 400, 2, 3], [*[3] * 9, 4]], ids=["large", "small", "few"]
)
def test_the_trial_of_unequal_users_has_several_at_once(kind, sizes):
    """Whoever comes first in the data: a model that mixes users would pass with one alone."""
    tried = sizes_to_try(np.array(sizes), len(sizes), 256)
    given = Form((4,), 3), GRADIENT, "cpu", "float32", tried
    assert fastest_method(nn.Linear(4, 3).train(), *given) == "book-keeping"
    if kind is FirstAxis:
        assert fastest_method(kind(4, 3).train(), *given) == "vmap"
    else:  # users of fewer records are filled up with others, which would enter the mean
        with pytest.raises(RuntimeError, match="lets records of a batch change each other's"):
            fastest_method(kind(4, 3).train(), *given)


def test_a_layer_whose_first_axis_is_not_that_of_records_is_no_gradient_of_anybody():
    records = Together(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), np.array([1, 2]))
    computation, seeds = Computation("book-keeping", GRADIENT), seeds_of(records.sizes)
    with pytest.raises(Unsupported, match="first axis"):
        clipped_sum_of_updates(computation, FirstAxis(4, 3), records, seeds, Clipping(1.0))
