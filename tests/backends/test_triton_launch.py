"""Compiling and laying out launches, without a GPU: sources, the cache of binaries, refusals."""

from ctypes import c_float, c_int32, c_uint64

import pytest

triton = pytest.importorskip("triton")
import triton_kernels as kernels  # noqa: E402

from bedstone.backends.triton import compile, launch, missing, runtime  # noqa: E402
from bedstone.plan import config  # noqa: E402
from bedstone.spec.dtypes import DType  # noqa: E402

pytestmark = pytest.mark.skipif(runtime.interpreting(), reason="TRITON_INTERPRET is set")


@pytest.fixture(autouse=True)
def no_cache():
    with config.config(cache_dir=""):
        yield


F32 = DType.float32
ARGUMENTS = {
    "x_ptr": launch.Pointer(0, F32),
    "y_ptr": launch.Pointer(1, F32),
    "n": launch.Scalar(100),
    **launch.factors(F32),
}


def prepared(architecture="sm_90", arguments=ARGUMENTS, constants=None):
    return launch.prepare(
        launch.target_device(architecture),
        kernels.scale_add_kernel,
        (2,),
        arguments,
        constants or {"BLOCK": 64},
        num_warps=2,
    )


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles_for_every_architecture_on_any_machine(architecture):
    (made,) = launch.launches_of(prepared(architecture))
    report = compile.inspect(made.source, architecture, made.binary)
    assert made.binary.architecture == architecture and made.binary.num_warps == 2
    assert report.registers > 0 and report.spilled_bytes == 0


def test_a_binary_is_compiled_once_and_found_on_disk(tmp_path, monkeypatch):
    with config.config(cache_dir=str(tmp_path)):
        first = launch.launches_of(prepared())[0].binary
        assert first.assembly and len(list((tmp_path / "triton").iterdir())) == 1
        monkeypatch.setattr(compile, "compile_source", lambda *_: pytest.fail("compiled again"))
        second = launch.launches_of(prepared())[0].binary
    assert second.code == first.code and not second.assembly


def test_a_damaged_record_is_compiled_again(tmp_path):
    with config.config(cache_dir=str(tmp_path)):
        code = launch.launches_of(prepared())[0].binary.code
        (file,) = (tmp_path / "triton").iterdir()
        file.write_text(file.read_text().replace('"shared"', '"shard"'))
        again = launch.launches_of(prepared())[0].binary
    assert again.code == code and again.assembly


def test_constants_options_and_alignment_are_part_of_the_key():
    source = launch.source_of(kernels.scale_add_kernel, ARGUMENTS, {"BLOCK": 64}, {})
    others = [
        launch.source_of(kernels.scale_add_kernel, ARGUMENTS, {"BLOCK": 128}, {}),
        launch.source_of(kernels.scale_add_kernel, ARGUMENTS, {"BLOCK": 64}, {"num_warps": 8}),
        launch.source_of(kernels.scale_add_kernel, ARGUMENTS, {"BLOCK": 64}, {}, aligned=False),
    ]
    keys = {s.key("sm_90") for s in [source, *others]} | {source.key("sm_80")}
    assert len(keys) == 5


def test_unaligned_pointers_are_not_read_in_wide_words():
    arguments = {**ARGUMENTS, "n": launch.Scalar(4096, divisor=16)}
    wide, narrow = (
        compile.compile_source(
            launch.source_of(kernels.scale_add_kernel, arguments, {"BLOCK": 1024}, {}, aligned=a),
            "sm_90",
        ).assembly["ptx"]
        for a in (True, False)
    )
    assert "ld.global.v4" in wide and "ld.global.v4" not in narrow


def test_an_empty_grid_needs_no_kernel():
    kernel = launch.prepare(
        launch.target_device("sm_90"), kernels.scale_add_kernel, (0, 4), ARGUMENTS, {"BLOCK": 64}
    )
    kernel([0, 0], 0, 1.0, 0.0, 0)
    assert launch.launches_of(kernel) == ()


def test_the_compilers_refusal_carries_its_reason():
    with pytest.raises(compile.CompileError, match="scale_add_kernel for sm_90"):
        prepared(constants={"BLOCK": 63})


def test_a_tma_map_becomes_an_address_sizes_and_strides():
    gluon = pytest.importorskip("triton.experimental.gluon.language")
    layout = gluon.NVMMASharedLayout.get_default_for([64, 64], gluon.bfloat16)
    view = launch.TensorMap(0, DType.bfloat16, (256, 128), (128, 1), (64, 64), layout)
    arguments = {"x_map": view, "y_ptr": launch.Pointer(1, DType.bfloat16)}
    kernel = launch.prepare(
        launch.target_device("sm_90"), kernels.copy_tile_kernel, (4, 2), arguments, {}
    )
    (made,) = launch.launches_of(kernel)
    assert made.binary.maps[0]["block_size"] == [64, 64]
    assert "cp.async.bulk.tensor.2d" in made.binary.assembly["ptx"]
    entry = made.binary.assembly["ptx"].split(".entry")[1].split(")")[0]
    assert entry.count(".param") == len(made._parameters)


class FakeDriver:
    """Stands for cuLaunchKernelEx and cuTensorMapReplaceAddress: notes what it was given."""

    def __init__(self):
        self.launches, self.addresses = [], []

    def attach(self, made):
        made._function, made._config_pointer = None, None
        made._launch = lambda config, function, parameters, extra: self.launches.append(
            (list(parameters), made._config.stream)
        )
        made._replace = lambda at, address: self.addresses.append(address)


def test_a_call_writes_addresses_factors_and_stream():
    arguments = {**ARGUMENTS, "y_ptr": launch.Scratch(F32, 64)}
    (made,) = launch.launches_of(prepared(arguments=arguments))
    fake = FakeDriver()
    fake.attach(made)
    made([4096, 0], 8192, 2.5, -1.0, 77)
    (cells, stream), types = fake.launches[0], (c_uint64, c_uint64, c_int32, c_float, c_float)
    values = [t.from_address(cell).value for t, cell in zip(types, cells)]
    assert values == [4096, 8192 + 64, 100, 2.5, -1.0] and stream == 77
    assert len(cells) == len(types) + 2


def test_an_unaligned_address_goes_to_the_fallback():
    ran = []
    made = launch.prepare(
        launch.target_device("sm_90"),
        kernels.scale_add_kernel,
        (2,),
        ARGUMENTS,
        {"BLOCK": 64},
        fallback=lambda: lambda *call: ran.append(call),
    )
    fake = FakeDriver()
    fake.attach(made)
    made([4096, 4096 + 4], 0, 1.0, 0.0, 0)
    assert ran == [([4096, 4100], 0, 1.0, 0.0, 0)] and not fake.launches
    made([4096, 8192], 0, 1.0, 0.0, 0)
    assert len(ran) == 1 and len(fake.launches) == 1


def test_the_default_fallback_is_compiled_without_the_assumption():
    (made,) = launch.launches_of(prepared())
    again = made._make_fallback()
    assert again.source.divisors["x_ptr"] == 4 and made.source.divisors["x_ptr"] == 16
    fake = FakeDriver()
    fake.attach(again)
    again([4, 8], 0, 1.0, 0.0, 0)
    assert len(fake.launches) == 1


def test_without_a_driver_the_backend_says_why():
    reason = missing()
    assert reason is None or "CUDA" in reason or "device" in reason
