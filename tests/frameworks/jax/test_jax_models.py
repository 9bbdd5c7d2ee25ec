"""The residual networks of `bedstone bench model --framework jax`, at a small size."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax_cases import bj, clean, near  # noqa: E402, F401 (clean: of every test)

from bedstone import InvalidDescriptor  # noqa: E402
from bedstone.frameworks.jax import bench  # noqa: E402

# torchvision's documentation of the same networks
PARAMETERS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}


@pytest.mark.parametrize("name", PARAMETERS)
def test_as_many_parameters_as_published(name):
    made = bench.Network(name, "nchw", False).parameters(np.random.default_rng(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(made))
    assert count + bench.CLASSES == PARAMETERS[name]  # (no shift of the last layer)


@pytest.mark.parametrize("layout, training", [("nchw", False), ("nhwc", True)])
def test_both_sides_agree(monkeypatch, layout, training):
    monkeypatch.setattr(bench, "PICTURE", 32)
    monkeypatch.setitem(bench.STAGES, "resnet18", (1, 1, 0, 0))
    model = bench.Model("resnet18", 2, layout, "float32", training)
    results = []
    for side in ("native", "bedstone"):
        with model.side(side):
            results.append(model.result())
            model.step()
    near(*results, 1e-4)
    before = model.counts()
    with model.side("bedstone"):
        model.step()
    convolutions, poolings = 1 + 2 + 2 + 1, 1
    own, calls = (now - then for now, then in zip(model.counts(), before))
    assert own == calls == convolutions + poolings, model.taken()
    if training:
        for side in ("native", "bedstone"):
            first, now = (jax.tree.leaves(p)[0] for p in (model._first, model._trained[side]))
            assert not np.array_equal(first, now)
        with model.side("native"):
            model.step()
        for a, b in zip(*(jax.tree.leaves(model._trained[s]) for s in ("native", "bedstone"))):
            near(a, b, 1e-4)


def test_what_is_refused():
    for words in (("vgg", "nchw", "float32"), ("resnet18", "chwn", "float32"),
                  ("resnet18", "nchw", "float64")):  # fmt: skip
        with pytest.raises(InvalidDescriptor):
            bench.Model(words[0], 1, words[1], words[2], False)
