"""Your code: what belongs to it, and that none is used that its file no longer has."""

import functools
import importlib
import linecache
import os
import sys
import time

import pytest
import torch

from shufl.learning.code_digest import code_digest
from shufl.learning.models import ModelMaker
from shufl.learning.tasks import Form
from shufl.learning.your_code import Carried
from shufl.protocol.validation import ConfigError

FILES = {
    "ours/__init__.py": "",
    "ours/net.py": "import json\nfrom torch import nn\nfrom .sizes import WIDTH\n"
    "def net(shape, outputs):\n    from ours import late\n    return nn.Linear(WIDTH, outputs)\n",
    "ours/sizes.py": "WIDTH = 3\n",
    "ours/late.py": "",
    "ours/other.py": "",
}
FORM = Form((3,), 2)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A package of yours, in a folder where modules are found."""
    (tmp_path / "ours").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [each for each in sys.modules if each.partition(".")[0] == "ours"]:
        del sys.modules[name]


def digest():
    return code_digest(["ours.net:net", "digits"])


def test_the_digest_is_of_the_module_and_of_what_it_imports_of_your_own(place):
    before = digest()
    assert "ours" not in sys.modules and code_digest(["digits"]) == ""
    (place / "ours/other.py").write_text("X = 1\n")
    net = place / "ours/net.py"
    net.write_text("# the same\n" + net.read_text().replace("WIDTH, outputs", "WIDTH,  outputs"))
    assert digest() == before
    digests = {before}
    for name in ("net", "sizes", "late", "__init__"):
        with (place / f"ours/{name}.py").open("a") as file:
            file.write("Y = 2\n")
        digests.add(digest())
    assert len(digests) == 5


def test_a_module_that_has_changed_since_it_was_imported_is_refused_until_it_is_loaded_anew(place):
    ModelMaker("ours.net:net", FORM, 0)()
    digest()
    (place / "ours/sizes.py").write_text("WIDTH = 4\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"sizes.py has changed since .*: restart the proc"):
            digest()
    importlib.reload(sys.modules["ours.sizes"])
    digest()


def test_a_change_before_the_first_run_is_seen_too(place):
    importlib.import_module("ours.net")
    sizes = place / "ours/sizes.py"
    sizes.write_text("WIDTH = 4\n")
    os.utime(sizes, (time.time() + 1, time.time() + 1))  # the system's clock of files is coarse
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"sizes.py has changed"):
            digest()


def test_every_process_must_have_the_code_that_the_run_began_with(place):
    before = code_digest(["ours.net:net"])
    ModelMaker("ours.net:net", FORM, 0, {}, before)()
    with pytest.raises(ConfigError, match=r"model ours.net:net: its code has changed since"):
        ModelMaker("ours.net:net", FORM, 0, {}, "0" * 64)()


def test_an_objects_code_is_that_of_its_class_or_its_layers(place, monkeypatch):
    from torch import nn

    def of(given):
        return code_digest([Carried("it", given)])

    assert of(importlib.import_module("ours.net").net) == code_digest(["ours.net:net"])
    made = [nn.Sequential(nn.Linear(2, 2), kind()) for kind in (nn.ReLU, nn.ReLU, nn.Tanh)]
    assert of(made[0]) == of(made[1]) != of(made[2])

    def one():
        return 1

    def another():
        return 2

    for each in (one, another):  # as in a notebook
        each.__module__, each.__qualname__ = "__main__", "net"
    assert of(one) == of(one) != of(another)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from ...common import net\nexcept ImportError:\n    pass\n",
        f"TABLE = {' + '.join(['1'] * 2000)}\n",
    ],
    ids=["relative", "deep"],
)
def test_what_python_imports_has_a_digest(place, text):
    (place / "ours/late.py").write_text(text)
    before = digest()
    (place / "ours/late.py").write_text(text + "Y = 2\n")
    assert digest() != before


def test_a_file_from_the_future_is_the_one_that_was_imported(place):
    os.utime(place / "ours/net.py", (time.time() + 3600,) * 2)
    ModelMaker("ours.net:net", FORM, 0)()
    before = digest()
    assert digest() == before


def test_a_module_that_says_where_others_lie_is_the_same_after_its_import(place):
    (place / "more").mkdir()
    (place / "more/ours_elsewhere.py").write_text("X = 3\n")
    says = f"import sys\nsys.path.append({str(place / 'more')!r})\nimport ours_elsewhere\n"
    (place / "ours/late.py").write_text(says)
    ModelMaker("ours.net:net", FORM, 0)()
    importlib.import_module("ours.late")
    code = digest()
    for _ in range(2):
        ModelMaker("ours.net:net", FORM, 0, code=code)()
    del sys.modules["ours_elsewhere"]


def cells(text):
    """A notebook's `net`, of this text, which is where `inspect` looks for it."""
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    names = {"__name__": "__main__", "nn": torch.nn}
    exec(compile(text, name, "exec"), names)
    return names["net"]


@pytest.mark.parametrize(
    ("text", "alike", "other"),
    [
        ("net = lambda shape, k: nn.Linear(3, k)\n", "net = ( lambda shape, k:\n nn.Linear(3,k))\n",
         "net = lambda shape, k: nn.Linear(3, 2)\n"),
        ("def net(shape, k):\n    return nn.Linear(3, k)\n",
         "def net(shape,k):  # the same\n    return nn.Linear( 3, k )\n",
         "def net(shape, k):\n    return nn.Linear(3, 2)\n"),
    ],
    ids=["lambda", "function"],
)  # fmt: skip
def test_layout_in_a_notebook_does_not_count_and_code_does(text, alike, other):
    of = [code_digest([Carried("net", cells(each))]) for each in (text, alike, other)]
    assert of[0] == of[1] != of[2]


def test_whatever_may_be_called_has_a_digest_and_so_have_the_arguments_of_a_partial():
    assert code_digest([Carried("join", "x".join)]) == code_digest([Carried("join", str.join)])
    given = [functools.partial(torch.nn.Linear, 3, width) for width in (2, 2, 3)]
    of = [code_digest([Carried("net", each)]) for each in given]
    assert of[0] == of[1] != of[2]
