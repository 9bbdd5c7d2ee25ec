"""Sessions: folding and fusing change nothing, old opsets are right, errors name what is wrong."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("ml_dtypes")
import onnx
from onnx import TensorProto, helper, numpy_helper

import bedstone
from bedstone.frameworks.onnx import InferenceSession, enable, report
from bedstone.frameworks.onnx import recording as recording_module
from bedstone.frameworks.onnx import session as session_module

RANDOM = np.random.default_rng(0)


def constant(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def model(
    nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], shape: list[Any],
    opset: int = 17, outputs: tuple[str, ...] = ("y",),
) -> onnx.ModelProto:  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    ys = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", [x], ys, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = 8
    return made


def conv_bn_relu(opset: int = 17) -> onnx.ModelProto:
    vectors = {n: RANDOM.uniform(0.5, 2, 6).astype("f") for n in ("scale", "shift", "mean", "var")}
    return model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c", *vectors], ["b"]),
            helper.make_node("Relu", ["b"], ["y"]),
        ],
        [constant("w", RANDOM.standard_normal((6, 3, 3, 3)).astype("f")),
         *(constant(n, v) for n, v in vectors.items())],
        ["N", 3, 8, 8],
        opset,
    )  # fmt: skip


def expected(made: onnx.ModelProto, x: np.ndarray[Any, Any]) -> list[Any]:
    ort = pytest.importorskip("onnxruntime")
    return ort.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    ).run(None, {"x": x})  # fmt: skip


def test_normalisation_and_activation_become_part_of_the_convolution() -> None:
    made = conv_bn_relu()
    session = InferenceSession(made)
    x = RANDOM.standard_normal((2, 3, 8, 8)).astype("f")
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, expected(made, x)[0], rtol=1e-4, atol=1e-5)
    (line,) = session.report().lines
    assert line.operator == "Conv" and line.own and line.calls == 1
    assert len(session.notes) == 2
    (plan,) = [plan for _, plan in session.plans()]
    assert plan.problem.epilogue.bias and str(plan.problem.epilogue.activation) == "relu"


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 14, 15])
def test_batch_normalisation_is_right_at_every_opset(opset: int) -> None:
    x = RANDOM.standard_normal((2, 4, 3, 5)).astype("f")
    scale, shift, mean = (RANDOM.standard_normal(4).astype("f") for _ in range(3))
    variance = RANDOM.uniform(0.5, 2, 4).astype("f")
    names = ["scale", "shift", "mean", "var"]
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], epsilon=1e-3)
    values = (scale, shift, mean, variance)
    made = model([node], [constant(n, v) for n, v in zip(names, values)], [2, 4, 3, 5], opset)
    session = InferenceSession(made)
    (y,) = session.run(None, {"x": x})
    s, b, m, v = (a.reshape(1, -1, 1, 1).astype(np.float64) for a in values)
    np.testing.assert_allclose(y, (x - m) / np.sqrt(v + 1e-3) * s + b, rtol=1e-5, atol=1e-5)
    assert "reference" not in {line.algorithm for line in session.report().lines}


@pytest.mark.parametrize("after_conv", [True, False])
@pytest.mark.parametrize("spelling", ["clip_div", "hard_sigmoid", "sigmoid"])
def test_swish_patterns_are_one_node(spelling: str, after_conv: bool) -> None:
    source = "c" if after_conv else "x"
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"])] if after_conv else []
    constants = [constant("w", RANDOM.standard_normal((4, 4, 1, 1)).astype("f"))]
    if spelling == "clip_div":
        nodes += [
            helper.make_node("Add", [source, "three"], ["a"]),
            helper.make_node("Clip", ["a", "zero", "six"], ["k"]),
            helper.make_node("Mul", [source, "k"], ["m"]),
            helper.make_node("Div", ["m", "six"], ["y"]),
        ]
        constants += [constant(n, np.float32(v)) for n, v in
                      (("three", 3), ("zero", 0), ("six", 6))]  # fmt: skip
    else:
        op = "HardSigmoid" if spelling == "hard_sigmoid" else "Sigmoid"
        nodes += [
            helper.make_node(op, [source], ["k"]),
            helper.make_node("Mul", ["k", source], ["y"]),
        ]
    made = model(nodes, constants if after_conv else constants[1:], [1, 4, 5, 5])
    session = InferenceSession(made)
    x = 4 * RANDOM.standard_normal((1, 4, 5, 5)).astype("f")
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, expected(made, x)[0], rtol=1e-5, atol=1e-5)
    assert [line.operator for line in session.report().lines] == (
        ["Conv"] if after_conv else ["Activation"]
    )


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "MatMul"])
def test_a_block_of_scales_and_offsets_is_one_node(kind: str) -> None:
    """scale, offset, hard-swish, scale (negative), offset after a linear node."""
    numbers = {"s": 1.5, "t": -0.25, "u": -0.75, "v": 0.5}
    weights = (5, 5) if kind == "MatMul" else (5, 5, 3, 3)
    nodes = [
        helper.make_node(kind, ["x", "w"], ["c"]),
        helper.make_node("Mul", ["s", "c"], ["d"]),
        helper.make_node("Sub", ["d", "t"], ["e"]),
        helper.make_node("HardSwish", ["e"], ["f"]),
        helper.make_node("Mul", ["u", "f"], ["g"]),
        helper.make_node("Add", ["g", "v"], ["y"]),
    ]
    constants = [constant("w", RANDOM.standard_normal(weights).astype("f"))]
    constants += [constant(n, np.array([value], "f")) for n, value in numbers.items()]
    made = model(nodes, constants, [2, 5, 6, 5])
    session = InferenceSession(made)
    left = [step.node.op for step in session._steps]
    # A transposed convolution takes no activation: only what comes before goes into it.
    assert left == ([kind, "HardSwish", "Mul", "Add"] if kind == "ConvTranspose" else [kind])
    x = RANDOM.standard_normal((2, 5, 6, 5)).astype("f")
    got = session.run(None, {"x": x})[0]
    np.testing.assert_allclose(got, expected(made, x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Sigmoid", "Relu"])
def test_a_factor_that_an_activation_does_not_let_through_stays(kind: str) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node(kind, ["c"], ["a"]),
        helper.make_node("Mul", ["a", "s"], ["y"]),
    ]
    constants = [
        constant("w", RANDOM.standard_normal((4, 3, 3, 3)).astype("f")),
        constant("s", np.array([-2.0], "f")),
    ]
    made = model(nodes, constants, [1, 3, 7, 7])
    session = InferenceSession(made)
    assert [step.node.op for step in session._steps] == ["Conv", "Mul"]
    x = RANDOM.standard_normal((1, 3, 7, 7)).astype("f")
    got = session.run(None, {"x": x})[0]
    np.testing.assert_allclose(got, expected(made, x)[0], rtol=1e-5, atol=1e-5)


def test_a_gate_takes_the_sum_after_it() -> None:
    """x + x * gate is one multiplication by gate + 1."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Conv", ["p", "w"], ["q"]),
        helper.make_node("HardSigmoid", ["q"], ["gate"]),
        helper.make_node("Mul", ["x", "gate"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    made = model(nodes, [constant("w", RANDOM.standard_normal((6, 6, 1, 1)).astype("f"))],
                 [2, 6, 5, 5])  # fmt: skip
    session = InferenceSession(made)
    assert [step.node.op for step in session._steps] == ["GlobalAveragePool", "Conv", "Mul"]
    x = RANDOM.standard_normal((2, 6, 5, 5)).astype("f")
    got = session.run(None, {"x": x})[0]
    np.testing.assert_allclose(got, expected(made, x)[0], rtol=1e-5, atol=1e-5)


def test_a_value_that_others_read_is_not_fused_away() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Add", ["c", "r"], ["y"]),
    ]
    made = model(
        nodes, [constant("w", RANDOM.standard_normal((2, 2, 1, 1)).astype("f"))], [1, 2, 3, 3]
    )
    x = RANDOM.standard_normal((1, 2, 3, 3)).astype("f")
    np.testing.assert_allclose(
        InferenceSession(made).run(None, {"x": x})[0], expected(made, x)[0], rtol=1e-5, atol=1e-6
    )


def test_batch_is_dynamic_and_files_and_bytes_load(tmp_path: Path) -> None:
    made = conv_bn_relu(11)
    path = tmp_path / "m.onnx"
    onnx.save(made, str(path))
    sessions = [InferenceSession(s) for s in (made, made.SerializeToString(), str(path), path)]
    for batch in (1, 3, 0):
        x = RANDOM.standard_normal((batch, 3, 8, 8)).astype("f")
        results = [s.run(["y"], {"x": x})[0] for s in sessions]
        assert results[0].shape == (batch, 6, 8, 8)
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def test_arguments_and_metadata() -> None:
    made = conv_bn_relu()
    made.producer_name = "somebody"
    helper.set_model_props(made, {"character": "abc"})
    session = InferenceSession(
        made, None, providers=["CPUExecutionProvider"], provider_options=[{}]
    )
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.type, x.shape) == ("x", "tensor(float)", ["N", 3, 8, 8])
    assert y.name == "y"
    meta = session.get_modelmeta()
    assert meta.producer_name == "somebody" and meta.custom_metadata_map == {"character": "abc"}
    assert session.get_providers() == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("feed", "names", "words"),
    [
        ({}, None, r"x: got None, expected an array of tensor\(float\)"),
        ({"z": 0}, None, "input_feed: got 'z'"),
        ({"x": np.zeros((1, 3, 8, 8))}, None, r"x: got 'tensor\(double\)'"),
        ({"x": np.zeros((1, 3, 8), "f")}, None, r"x: got \(1, 3, 8\), expected shape"),
        ({"x": np.zeros((1, 4, 8, 8), "f")}, None, "expected shape"),
        ({"x": np.zeros((1, 3, 8, 8), "f")}, ["nothing"], "output_names: got 'nothing'"),
    ],
)
def test_a_wrong_feed_is_named(feed: dict[str, Any], names: Any, words: str) -> None:
    with pytest.raises(bedstone.InvalidDescriptor, match=words):
        InferenceSession(conv_bn_relu()).run(names, feed)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"\xff\xfenot a model")
    with pytest.raises(bedstone.InvalidDescriptor, match="an ONNX model"):
        InferenceSession(str(bad))
    with pytest.raises(FileNotFoundError):
        InferenceSession(str(tmp_path / "missing.onnx"))


def test_fallback_says_why() -> None:
    node = helper.make_node("LeakyRelu", ["x"], ["y"], alpha=-0.5)
    session = InferenceSession(model([node], [], [2, 3]))
    x = np.array([[-1, 2, -3], [4, -5, 6]], "f")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], np.where(x < 0, -0.5 * x, x))
    (line,) = session.report().lines
    assert line.algorithm == "onnx reference" and "out of range" in line.reason
    assert "out of range" in str(session.report())


def test_subgraphs_see_outer_values() -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        y = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op, ["r", "r"], [name])], name, [], [y])

    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("ReduceSum", ["r"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "limit"], ["big"]),
        helper.make_node("If", ["big"], ["y"], then_branch=branch("t", "Add"),
                         else_branch=branch("e", "Mul")),
    ]  # fmt: skip
    session = InferenceSession(model(nodes, [constant("limit", np.float32(10))], [2, 2]))
    small, large = np.full((2, 2), 2, "f"), np.full((2, 2), 5, "f")
    np.testing.assert_array_equal(session.run(None, {"x": small})[0], small * small)
    np.testing.assert_array_equal(session.run(None, {"x": large})[0], large + large)


def test_enable_nests_and_serves_names_taken_before() -> None:
    ort = pytest.importorskip("onnxruntime")
    taken = ort.InferenceSession
    made = conv_bn_relu().SerializeToString()
    with enable():
        with enable():
            assert isinstance(taken(made), InferenceSession)
        assert isinstance(taken(made, providers=["CPUExecutionProvider"]), InferenceSession)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(taken(made)))
        thread.start()
        thread.join()
        assert isinstance(found[0], InferenceSession)
    native = taken(made, providers=["CPUExecutionProvider"])
    assert isinstance(native, taken) and not isinstance(native, InferenceSession)


def test_enable_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "onnxruntime" else find(n, *a)
    )
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    with enable():
        import onnxruntime

        assert onnxruntime.InferenceSession is InferenceSession
        assert onnxruntime.get_device() == "CPU"
    assert "onnxruntime" not in sys.modules


def test_report_sums_over_sessions_and_threads_agree() -> None:
    session = InferenceSession(conv_bn_relu())
    x = RANDOM.standard_normal((1, 3, 8, 8)).astype("f")
    first = session.run(None, {"x": x})[0]
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(session.run(None, {"x": x})[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, first)
    assert session.report().calls == 5 and session.report().own_calls == 5
    assert report().calls >= 5


def test_a_recorded_run_computes_what_the_first_did_and_writes_to_nobodys_memory() -> None:
    session = InferenceSession(conv_bn_relu())
    feeds = [RANDOM.standard_normal((1, 3, 8, 8)).astype("f") for _ in range(5)]
    feeds.append(np.asfortranarray(feeds[0]))
    want = [InferenceSession(session._graph.model).run(None, {"x": x})[0] for x in feeds]
    kept = [x.copy() for x in feeds]
    got = [session.run(None, {"x": x})[0] for x in feeds]
    assert session._recordings
    for value, expectation, x, before in zip(got, want, feeds, kept):
        np.testing.assert_array_equal(value, expectation)
        np.testing.assert_array_equal(x, before)
        assert value.flags.writeable and value.flags.owndata


def test_constant_weights_are_packed_once_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights that are inputs, or find no room, are packed in each call.

    Room of -1: on some CPUs this filter is read as it lies, which takes none.
    """
    made = []
    prepare = bedstone.Plan.prepare

    def noted(plan: bedstone.Plan, *arguments: Any) -> bedstone.PreparedPlan:
        made.append(plan.problem)
        return prepare(plan, *arguments)

    monkeypatch.setattr(bedstone.Plan, "prepare", noted)
    w = RANDOM.standard_normal((32, 32, 3, 3)).astype("f")
    for constants, room, count in (({"w": w}, 1 << 20, 1), ({}, 1 << 20, 0), ({"w": w}, -1, 0)):
        monkeypatch.setattr(recording_module, "PACKED_MAX", room)
        proto = model(
            [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)],
            [constant(*item) for item in constants.items()], [1, 32, 8, 8],
        )  # fmt: skip
        if not constants:
            value = helper.make_tensor_value_info("w", TensorProto.FLOAT, w.shape)
            proto.graph.input.append(value)
        made.clear()
        session = InferenceSession(proto)
        for factor in (1, 2, 3):
            x = RANDOM.standard_normal((1, 32, 8, 8)).astype("f")
            other = {} if constants else {"w": factor * w}
            (y,) = session.run(None, {"x": x, **other})
            want = bedstone.convolution(x, other.get("w", w), padding=1)
            np.testing.assert_array_equal(y, want)
        assert session._recordings and len(made) == count


GLUE_NODES = [
    helper.make_node("Shape", ["x"], ["dims"]),
    helper.make_node("Gather", ["dims", "zero"], ["n"]),
    helper.make_node("Concat", ["n", "rest"], ["wanted"], axis=0),
    helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]),
    helper.make_node("Reshape", ["t", "wanted"], ["r"]),  # no view of a transposed array
    helper.make_node("Softmax", ["r"], ["s"], axis=-1),
    helper.make_node("Mul", ["s", "s"], ["m"]),
    helper.make_node("Slice", ["m", "zero", "one", "one"], ["slice"]),  # a view
    helper.make_node("ReduceMean", ["m"], ["mean"], axes=[1], keepdims=1),
    helper.make_node("Sub", ["slice", "mean"], ["d"]),
    helper.make_node("Concat", ["d", "d"], ["y"], axis=1),
]
GLUE_CONSTANTS = [
    constant("zero", np.array([0], np.int64)),
    constant("one", np.array([1], np.int64)),
    constant("rest", np.array([-1, 24], np.int64)),
]


def test_recordings_by_shape_and_threads() -> None:
    made = model(GLUE_NODES, GLUE_CONSTANTS, ["N", 3, 4, "W"])
    session = InferenceSession(made)
    for shape in [(1, 3, 4, 6), (2, 3, 4, 8), (1, 3, 4, 6), (2, 3, 4, 8)] * 3:
        x = RANDOM.standard_normal(shape).astype("f")
        with bedstone.config(num_threads=2):
            (y,) = session.run(None, {"x": x})
        np.testing.assert_allclose(y, expected(made, x)[0], rtol=1e-5, atol=1e-7)
    assert len(session._recordings) == 2
    with bedstone.config(num_threads=1):
        for _ in range(2):
            session.run(None, {"x": x})
    assert len(session._recordings) == 3
    for width in range(2, 10):
        for _ in range(2):
            session.run(None, {"x": np.ones((3, 3, 4, 2 * width), np.float32)})
    assert len(session._recordings) == session_module.RECORDINGS_MOST


def test_shapes_that_depend_on_values_are_not_recorded() -> None:
    made = model(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Cast", ["r"], ["n"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["data", "n"], ["y"]),
        ],
        [constant("data", np.arange(6, dtype=np.float32))],
        [2],
    )
    session = InferenceSession(made)
    for dims in ((2, 3), (3, 2), (1, 6), (2, 3), (6, 1)):
        assert session.run(None, {"x": np.array(dims, np.float32)})[0].shape == dims
    assert not session._recordings


@pytest.mark.parametrize("bias", [False, True])
def test_a_transposed_convolution_and_a_pool_with_indices_are_recorded(bias: bool) -> None:
    inputs = ["p", "w", "b"] if bias else ["p", "w"]
    made = model(
        [
            helper.make_node(
                "MaxPool", ["x"], ["p", "where"], kernel_shape=[2, 2], strides=[2, 2]
            ),
            helper.make_node("ConvTranspose", inputs, ["up"], strides=[2, 2]),
            helper.make_node("Cast", ["where"], ["places"], to=TensorProto.FLOAT),
            helper.make_node("Identity", ["places"], ["out"]),
            helper.make_node("HardSwish", ["up"], ["y"]),
        ],
        [constant("w", RANDOM.standard_normal((3, 4, 2, 2)).astype("f")),
         constant("b", RANDOM.standard_normal(4).astype("f"))],
        [1, 3, 8, 8], outputs=("y", "out"),
    )  # fmt: skip
    session = InferenceSession(made)
    for _ in range(4):
        x = RANDOM.standard_normal((1, 3, 8, 8)).astype("f")
        for got, want in zip(session.run(None, {"x": x}), expected(made, x)):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert session._recordings


NETWORKS = {
    "ch_PP-OCRv4_rec_infer.onnx": (1, 3, 48, 160),
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": (1, 3, 48, 192),
    "ch_PP-OCRv4_det_infer.onnx": (1, 3, 96, 160),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_pretrained_networks_give_onnxruntimes_numbers(name: str) -> None:
    package = pytest.importorskip("rapidocr_onnxruntime")
    ort = pytest.importorskip("onnxruntime")
    path = str(Path(package.__file__).parent / "models" / name)
    page = pytest.importorskip("skimage").data.page()
    _, _, height, width = NETWORKS[name]
    x = (page[60 : 60 + height, 40 : 40 + width].astype("f") / 127.5 - 1)[None, None]
    x = np.ascontiguousarray(np.broadcast_to(x, NETWORKS[name]))
    want = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    session = InferenceSession(path)
    for _ in range(3):  # the later ones recorded
        for got, value in zip(session.run(None, {"x": x}), want):
            assert np.max(np.abs(value)) > 0.1
            assert np.max(np.abs(got - value)) <= 1e-4 * np.max(np.abs(value))
    assert session._recordings
    own = [line for line in session.report().lines if line.own]
    assert {"Conv"} <= {line.operator for line in own}
    assert not [x for x in session.report().lines if x.operator == "Conv" and not x.own]
