"""Every kind of array: where it lies, how it is laid out, and what is refused, in words."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

import bedstone
from bedstone.arrays import ArrayRef, as_array_ref, as_caller_kind, empty_like_kind
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.tensor import TensorDesc


def refused(match, array, argument="x"):
    with pytest.raises(InvalidDescriptor, match=match):
        as_array_ref(array, argument)


def numpy_of(ref):
    """What a reference says, read through its pointer alone."""
    desc = ref.desc
    low, high = desc.offset_range()
    size = desc.dtype.itemsize
    raw = (ctypes.c_char * ((high - low + 1) * size)).from_address(ref.pointer + low * size)
    flat = np.frombuffer(raw, desc.dtype.numpy)[-low:]
    strides = tuple(s * size for s in desc.strides)
    return np.lib.stride_tricks.as_strided(flat, desc.dims, strides)


class TestNumPy:
    @pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i8", "i4", "u1"])
    def test_dtypes(self, dtype):
        x = np.arange(6).astype(dtype).reshape(2, 3)
        ref = as_array_ref(x)
        assert (ref.pointer, ref.desc.dims, ref.desc.strides) == (x.ctypes.data, (2, 3), (3, 1))
        assert ref.desc.dtype.numpy == x.dtype and ref.owner is x
        assert (ref.device_kind, ref.device_index, ref.readonly, ref.stream) == ("cpu", 0, False, 0)

    def test_bfloat16(self):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        x = np.ones((2, 3), ml_dtypes.bfloat16)
        assert as_array_ref(x).desc == TensorDesc((2, 3), (3, 1), DType.bfloat16)

    def test_any_strides(self):
        x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
        for view in (
            x[::-1], x[:, ::2, ::-1], x.transpose(2, 0, 1), x[1:2],
            np.broadcast_to(x, (2, 3, 4, 5)),
            np.lib.stride_tricks.sliding_window_view(x, 2, axis=1),
        ):  # fmt: skip
            ref = as_array_ref(view)
            assert np.array_equal(numpy_of(ref), view)
        assert as_array_ref(x[:, :, ::-1]).desc.strides == (20, 5, -1)

    def test_readonly(self):
        x = np.zeros(3, np.float32)
        x.flags.writeable = False
        assert as_array_ref(x).readonly
        assert as_array_ref(np.broadcast_to(np.float32(1), (3,))).readonly

    def test_zero_dimensions_become_one(self):
        assert as_array_ref(np.array(2.5, np.float32)).desc == TensorDesc((1,), (1,), "float32")
        scalar = as_array_ref(np.float64(2.5))
        assert scalar.desc.dims == (1,) and numpy_of(scalar)[0] == 2.5
        assert scalar.readonly  # a result written there would be lost

    def test_empty(self):
        assert as_array_ref(np.zeros((0, 3), np.float32)).desc.size == 0

    def test_subclasses(self):
        class Mine(np.ndarray):
            pass

        x = np.ones((2, 2), np.float32).view(Mine)
        assert as_array_ref(x).pointer == x.ctypes.data
        assert as_array_ref(np.ones(3, np.float32).view(np.ma.MaskedArray)).desc.dims == (3,)

    def test_foreign_byte_order(self):
        refused("x .dtype.: got '>f4', expected the machine's own byte order", np.zeros(3, ">f4"))

    def test_unaligned_memory(self):
        x = np.zeros(13, np.uint8)[1:].view(np.float32)
        refused("x .address.: got .* a multiple of the element size", x)

    def test_strides_of_half_an_element(self):
        x = np.zeros(8, [("a", "f4"), ("b", "f2")])["a"]
        refused("x .*: got", x)

    @pytest.mark.parametrize("dtype", ["c8", "i2", "b1", "O", "U3", "M8[s]"])
    def test_other_dtypes(self, dtype):
        refused("w .dtype.: got .*expected one of .'float32'", np.zeros(3, dtype), "w")

    def test_rank_nine(self):
        refused("x .dims.: got .*1 to 8", np.zeros((1,) * 9, np.float32))


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch")

    @pytest.mark.parametrize(
        "name", ["float32", "float64", "float16", "bfloat16", "int64", "uint8"]
    )
    def test_dtypes(self, name):
        x = self.torch.ones((2, 3), dtype=getattr(self.torch, name))
        ref = as_array_ref(x)
        assert (ref.pointer, ref.desc) == (x.data_ptr(), TensorDesc((2, 3), (3, 1), name))
        assert not ref.readonly and ref.owner is x

    def test_strides_and_offset(self):
        x = self.torch.arange(60.0).reshape(3, 4, 5)
        for view in (x[1:, :, 2:4], x.permute(2, 0, 1), x[:1].expand(7, 4, 5), x.unfold(1, 2, 1)):
            ref = as_array_ref(view)
            assert np.array_equal(numpy_of(ref), view.numpy())
        last = self.torch.zeros(2, 3, 4, 5).to(memory_format=self.torch.channels_last)
        assert as_array_ref(last).desc.layout == "NHWC"

    def test_scalars_gradients_parameters_subclasses(self):
        torch = self.torch
        assert as_array_ref(torch.tensor(1.0)).desc.dims == (1,)
        assert as_array_ref(torch.ones(2, requires_grad=True)).desc.dims == (2,)
        assert as_array_ref(torch.nn.Parameter(torch.ones(2))).desc.dims == (2,)

        class Mine(torch.Tensor):
            pass

        mine = torch.ones(2, requires_grad=True).as_subclass(Mine)
        assert as_array_ref(mine).pointer == mine.data_ptr()

    def test_refusals(self):
        torch = self.torch
        refused("x .layout.: got 'torch.sparse_coo'", torch.eye(3).to_sparse())
        refused("x .device.: got 'meta', expected cpu or cuda", torch.ones(3, device="meta"))
        refused("x .dtype.: got 'complex64'", torch.ones(3, dtype=torch.complex64))
        refused("x .dtype.: got 'bool'", torch.ones(3, dtype=torch.bool))
        negated = torch.tensor([1 + 2j]).conj().imag
        refused("x .sign.: got .*resolve_neg", negated)
        assert numpy_of(as_array_ref(negated.resolve_neg())) == [-2.0]


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        self.jax = pytest.importorskip("jax")

    @pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "uint8"])
    def test_dtypes(self, name):
        x = self.jax.numpy.arange(6).reshape(2, 3).astype(name)
        ref = as_array_ref(x)
        assert ref.desc == TensorDesc((2, 3), (3, 1), name)
        assert ref.readonly
        assert np.array_equal(numpy_of(ref), np.asarray(x))

    def test_scalars_and_tracers(self):
        assert as_array_ref(self.jax.numpy.float32(2)).desc.dims == (1,)

        def traced(x):
            refused("x: got 'DynamicJaxprTracer'|x: got 'JitTracer'|x: got", x)
            return x

        self.jax.jit(traced)(self.jax.numpy.ones(3))

    def test_results_are_jax_arrays(self):
        x = self.jax.numpy.array([[-1.0, 2.0]], "float32")
        y = bedstone.activation(x, "relu")
        assert isinstance(y, self.jax.Array) and y.tolist() == [[0.0, 2.0]]

    def test_cannot_be_written(self):
        x = self.jax.numpy.ones((2, 3), "float32")
        with pytest.raises(InvalidDescriptor, match="y: got 'a read-only array'"):
            bedstone.activation(np.ones((2, 3), np.float32), "relu", out=x)


class TestPaddle:
    @pytest.fixture(autouse=True)
    def paddle(self):
        self.paddle = pytest.importorskip("paddle")

    @pytest.mark.parametrize(
        "name", ["float32", "float64", "float16", "bfloat16", "int64", "uint8"]
    )
    def test_dtypes(self, name):
        x = self.paddle.arange(6, dtype="float32").reshape([2, 3]).astype(name)
        ref = as_array_ref(x)
        assert ref.desc == TensorDesc((2, 3), (3, 1), name)
        if name != "bfloat16":
            assert np.array_equal(numpy_of(ref), x.numpy())

    def test_views_and_scalars(self):
        x = self.paddle.arange(6, dtype="float32").reshape([2, 3])
        turned = x.transpose([1, 0])
        assert np.array_equal(numpy_of(as_array_ref(turned)), turned.numpy())
        assert as_array_ref(self.paddle.to_tensor(2.0)).desc.dims == (1,)
        sparse = self.paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], [2, 2])
        with pytest.raises(InvalidDescriptor, match="dense"):
            as_array_ref(sparse)

    def test_results_are_paddle_tensors(self):
        y = bedstone.activation(self.paddle.to_tensor([[-1.0, 2.0]]), "relu")
        assert isinstance(y, self.paddle.Tensor) and y.tolist() == [[0.0, 2.0]]


class Exporter:
    """A stranger that speaks DLPack."""

    def __init__(self, array, versioned=True, device=None):
        self.array, self.versioned, self.device = array, versioned, device
        self.exports = 0

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.exports += 1
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


class TestDLPack:
    @pytest.mark.parametrize("versioned", [True, False])
    def test_a_stranger(self, versioned):
        x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1]
        exporter = Exporter(x, versioned)
        ref = as_array_ref(exporter)
        assert np.array_equal(numpy_of(ref), x) and ref.pointer == x.ctypes.data
        assert ref.desc.strides == (12, -4, 1) and not ref.readonly

    @pytest.mark.parametrize("versioned", [True, False])
    def test_memory_lives_as_long_as_the_reference(self, versioned):
        x = np.arange(5, dtype=np.float64)
        watched = Exporter(x.copy(), versioned)
        ref = as_array_ref(watched)
        del watched
        gc.collect()
        assert np.array_equal(numpy_of(ref), x)
        del ref
        gc.collect()

    def test_read_only_is_kept(self):
        x = np.zeros(3, np.float32)
        x.flags.writeable = False
        assert as_array_ref(Exporter(x)).readonly

    def test_dtypes_that_bedstone_has_not(self):
        refused("x .dtype.: got 'DLPack type 5, 64 bits'", Exporter(np.zeros(3, np.complex64)))
        refused("x .dtype.: got 'DLPack type 0, 16 bits'", Exporter(np.zeros(3, np.int16)))

    def test_bfloat16(self):
        torch = pytest.importorskip("torch")
        x = torch.ones(3, dtype=torch.bfloat16)
        assert as_array_ref(Exporter(x)).desc.dtype is DType.bfloat16

    def test_zero_dimensions(self):
        assert as_array_ref(Exporter(np.array(1.0))).desc.dims == (1,)

    def test_an_exporter_that_fails(self):
        class Busy:
            def __dlpack__(self, **options):
                raise BufferError("in use")

        refused("x: got 'Busy', expected an array .*in use", Busy())

    def test_results_through_a_stranger(self):
        y = np.zeros((1, 3), np.float32)
        bedstone.activation(np.array([[-1, 0, 2]], np.float32), "relu", out=Exporter(y))
        assert y.tolist() == [[0, 0, 2]]


class TestInterfaces:
    def make(self, **changes):
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        interface = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (x.ctypes.data, False),
            "version": 3,
        }

        class Holder:
            keep = x
            __array_interface__ = {**interface, **changes}

        return Holder()

    def test_array_interface(self):
        ref = as_array_ref(self.make())
        assert ref.desc == TensorDesc((2, 3), (3, 1), "float32") and not ref.readonly
        ref = as_array_ref(self.make(strides=(4, 8), data=(64, True)))
        assert ref.desc.strides == (1, 2) and ref.readonly and ref.pointer == 64

    def test_refusals(self):
        refused("x .dtype.: got '>f4'", self.make(typestr=">f4"))
        refused("x .strides.: got", self.make(strides=(13, 4)))

    def test_cuda_array_interface(self):
        class OnGpu:
            __cuda_array_interface__ = {
                "shape": (4,), "typestr": "<f2", "data": (4096, False), "version": 3, "stream": 7,
            }  # fmt: skip

            def __dlpack_device__(self):
                return 2, 1

        ref = as_array_ref(OnGpu())
        assert (ref.pointer, ref.device_kind, ref.device_index, ref.stream) == (4096, "cuda", 1, 7)
        assert ref.desc == TensorDesc((4,), (1,), "float16")

    @pytest.mark.parametrize(
        "thing", [None, 3, 2.5, "text", [1.0, 2.0], (1.0,), b"bytes", object()]
    )
    def test_what_is_no_array(self, thing):
        refused(f"bias: got '{type(thing).__name__}', expected an array", thing, "bias")

    def test_a_reference_is_its_own(self):
        ref = ArrayRef(64, TensorDesc((3,), (1,), "float32"))
        assert as_array_ref(ref) is ref


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_new_arrays_have_the_caller_s_kind_and_layout(layout, kind):
    if kind == "torch":
        torch = pytest.importorskip("torch")
        prototype = torch.zeros(1, dtype=torch.float64)
    else:
        prototype = np.zeros(1)
    desc = TensorDesc.packed((2, 3, 4, 5), "float32", layout)
    made = empty_like_kind(prototype, desc)
    assert type(made) is type(prototype)
    ref = as_array_ref(made)
    assert (ref.desc, ref.readonly) == (desc, False)
    assert as_caller_kind(prototype, made) is made
