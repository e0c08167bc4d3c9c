"""Models that keep something of the records they have seen: in themselves, or elsewhere."""

import collections
import functools
import math
import random

import numpy as np
import torch
from torch import nn


class Model(nn.Module):
    """A linear model; `seen` takes a record's mean and gives what to add to it."""

    def __init__(self, shape=(4,), classes=3, **options):
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes)
        self.start(**options)

    def start(self):
        pass

    def forward(self, records):
        x = records.flatten(1)
        return self.layer(x + self.seen(x.detach().mean(0)) if self.training else x)


class Attribute(Model):
    hidden = None

    def seen(self, mean):
        before, self.hidden = self.hidden, mean
        return 0 if before is None else before


class List(Model):
    def start(self):
        self.bank = []

    def seen(self, mean):
        self.bank.append(mean)
        return sum(self.bank)


class Nested(Model):
    def start(self):
        self.caches = {"deep": ({"queue": collections.deque([torch.zeros(4)], 3)},)}

    def seen(self, mean):
        queue = self.caches["deep"][0]["queue"]
        queue.append(mean)
        return sum(queue)


class RunningMean(Model):
    def start(self):
        self.mean = torch.zeros(4)

    def seen(self, mean):
        self.mean.mul_(0.9).add_(mean, alpha=0.1)
        return self.mean.clone()


class ByData(Model):
    def seen(self, mean):
        self.layer.bias.data.add_(mean[:3])
        return 0


class NewParameter(Model):
    def seen(self, mean):
        weight = self.layer.weight.detach() + mean
        self.layer.weight = nn.Parameter(weight)
        return 0


class ArrayOfNumpy(Model):
    def start(self):
        self.sums = np.zeros(4, dtype=np.float32)

    def seen(self, mean):
        self.sums += mean.numpy()
        return torch.from_numpy(self.sums.copy())


class Counter(Model):
    calls = 0

    def seen(self, mean):
        self.calls += 1
        return float(self.calls)


class Hook(Model):
    """A closure that a hook of a layer has, and a default argument."""

    def start(self):
        last = torch.zeros(4)

        def add(module, inputs, before=[]):  # noqa: B006
            nonlocal last
            before.append(last)
            given = inputs[0] + last + sum(before)
            last = inputs[0].detach().mean(0)
            return (given,)

        self.layer.register_forward_pre_hook(add)

    def seen(self, mean):
        return 0


class Plain:
    """An object that is no module."""

    def __init__(self):
        self.module = nn.Linear(4, 4)


class Object(Model):
    def start(self):
        self.helper = [Plain()]

    def seen(self, mean):
        with torch.no_grad():
            self.helper[0].module.bias.add_(mean)
        return self.helper[0].module.bias.detach().clone()


class Generators(Model):
    def start(self):
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_numpy = np.random.default_rng(1)
        self.of_python = random.Random(1)

    def seen(self, mean):
        drawn = torch.randn(4, generator=self.of_torch)
        return drawn + self.of_numpy.normal() + self.of_python.random()


class Grad(Model):
    def seen(self, mean):
        before = self.layer.bias.grad
        self.layer.bias.grad = mean[:3].clone()
        return 0 if before is None else before.sum()


class Masked(Model):
    def start(self):
        self.sums = np.ma.zeros(4, dtype=np.float32)

    def seen(self, mean):
        self.sums += mean.numpy()
        return torch.from_numpy(np.array(self.sums))


class Slots:
    __slots__ = ("value",)


class Slotted(Model):
    """A slot of an object's base, and an object that is a dictionary's key."""

    def start(self):
        self.held, key = type("Both", (Slots,), {})(), Plain()
        self.held.value, key.value, self.keys = 0, 0, {key: None}

    def seen(self, mean):
        (key,) = self.keys
        before, self.held.value, key.value = self.held.value + key.value, mean, mean
        return before


class BoundMethod(Model):
    def start(self):
        bank = []
        self.add, self.all = bank.append, bank.__iter__

    def seen(self, mean):
        self.add(mean)
        return sum(self.all())


class OwnCache(Model):
    def start(self):
        self.first = functools.lru_cache(lambda key: self.now)

    def seen(self, mean):
        self.now = mean
        return self.first("now")


class OtherDictionary(Model):
    def start(self):
        self.helper = Plain()
        self.helper.value = 0

    def seen(self, mean):
        before, self.helper.__dict__ = self.helper.value, {"value": mean}
        return before


class OtherClass(Model):
    def seen(self, mean):
        if mean.norm() > 3:
            self.__class__ = Attribute
        return 0


class GradientHook(Model):
    def start(self):
        bank = []

        def add(gradient):
            bank.append(gradient.clone())
            return sum(bank)

        self.layer.weight.register_hook(add)

    def seen(self, mean):
        return 0


class View(Model):
    def start(self):
        self.mean = torch.zeros(1).expand(4)

    def seen(self, mean):
        self.mean._base.add_(mean[0])
        return self.mean.clone()


IN_THE_MODULE = (
    Attribute, List, Nested, RunningMean, ByData, NewParameter, ArrayOfNumpy, Counter, Hook,
    Object, Generators, Grad, Masked, Slotted, BoundMethod, OwnCache, OtherDictionary, OtherClass,
    GradientHook, View,
)  # fmt: skip

NOT_TOGETHER = NewParameter, Grad, GradientHook  # which vmap computes in another way


class GlobalGenerators(Model):
    """Draws from the generators that Python and numpy share."""

    def seen(self, mean):
        return random.random() + np.random.rand()


class Draws(Model):
    """Has its own kind of dropout, by torch's generator."""

    def seen(self, mean):
        return torch.rand(4)


class OfClass(Model):
    bank: list = []  # noqa: RUF012

    def seen(self, mean):
        self.bank.append(mean)
        return sum(self.bank)


class FirstOfClass(Model):
    """Keeps the first records that are none of the trial at which a model is built."""

    first = None

    def seen(self, mean):
        if FirstOfClass.first is None and mean.std() > 0:
            FirstOfClass.first = mean
        return 0 if FirstOfClass.first is None else FirstOfClass.first


_seen = {}


class Global(Model):
    def seen(self, mean):
        before = _seen.get("mean", 0)
        _seen["mean"] = mean
        return before


class Cache(Model):
    def seen(self, mean):
        return _cached(bool(mean.std() > 0), Value(mean))


class Value:
    """Is equal to any other, as far as a cache can tell."""

    def __init__(self, mean):
        self.mean = mean

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


@functools.lru_cache
def _cached(varies, value):
    return value.mean


class Unseeded(Model):
    def seen(self, mean):
        return float(np.random.default_rng().normal())
