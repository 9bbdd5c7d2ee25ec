"""The C library through ctypes: the conformance harness, bad arguments, callers side by side."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading

import c_binding as c
import numpy as np
import pytest
from c_algorithm import CLibrary, describe, run
from c_fixtures import library_folder

import bedstone
from bedstone.backends.cpu.library import interface
from bedstone.cli import main as command
from bedstone.compat.c import build as building
from bedstone.compat.c import header
from bedstone.compat.c.archive import exported
from bedstone.spec.problem import parse_problem
from bedstone.testing import problems
from bedstone.testing.conformance import Job
from bedstone.testing.harness import Case

PRIMITIVES = ("convolution", "pooling", "softmax", "activation", "tensor_ops")
# Of the curated problems, every so many-th; all of them in the slow run.
EVERY = {"convolution": 4, "pooling": 4, "softmax": 2, "activation": 2, "tensor_ops": 2}
DRAWN = 12
GARBAGE_CALLS = 3000


@pytest.fixture(scope="module")
def library():
    return c.Library(library_folder("native") / "libbedstone.so")


# Values ------------------------------------------------------------------------------------------


def conform(library, primitive, every, drawn):
    algorithm = CLibrary(library)
    chosen = problems.curated(primitive)[::every] + problems.draw_distinct(primitive, drawn, 7)
    taken = [p for p in chosen if algorithm.supports(p, None) is None]
    assert len(taken) > len(chosen) // 4
    for problem in taken:
        for case in Job(algorithm.name, problem).cases():
            run(case, algorithm)


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_conformance(library, primitive):
    conform(library, primitive, EVERY[primitive], DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_whole_conformance(library, primitive):
    conform(library, primitive, 1, 200)


# Enough channels and patches for Winograd's method; windows of one piece and of several.
TRANSFORMED = (
    "n6c96h9w11k96r3p1",
    "n2c128h24k128r3 bias",
    "n3c70h7k130r3ph2_1pw0_3 mode=convolution",
    "n4c300h8k64r3p1",
    "n2c128h10w12k128r3p1g2",
    "n3c128h14k128r5p2",
    pytest.param("n4c160h14w20k160r7s5p3", marks=pytest.mark.slow),
    "n4c64h16k64r9p4",
)
WHOLE = TRANSFORMED[:2]  # these in all variants, the others in some
SOME = (("integers", 0.0), ("special", 2.0))


class Transformed(CLibrary):
    """Errors of a transformed tile are relative to its largest sums."""

    error_scale = "tile"


@pytest.mark.parametrize("dtype", interface.DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("shape", TRANSFORMED)
def test_winograd(library, shape, direction, dtype):
    word, _, options = shape.partition(" ")
    if direction == "backward_data":
        options = options.replace("bias", "")
    line = f"convolution {direction} {word} {dtype} {options}".strip()
    problem, algorithm = parse_problem(line), Transformed(library)
    for case in Job(algorithm.name, problem).cases():
        # (Where float64 overflows, the reference's order of summation is no judge.)
        whole = shape in WHOLE and (case.fill, dtype) != ("extreme", "float64")
        if whole or (case.fill, case.beta) in SOME:
            run(case, algorithm)
    # The same by the definition, which takes outputs with other strides: near, but not the same.
    layout = "y=NHWC" if direction == "forward" else "x=NHWC"
    other = parse_problem(f"{line} {layout}")
    found, expected = computed(library, problem), computed(library, other)
    dims = problem.operands[-1].desc.dims
    found = found.reshape(dims)
    expected = np.moveaxis(expected.reshape(dims[0], *dims[2:], dims[1]), -1, 1)
    assert not np.array_equal(found, expected)
    bound = {"float32": 1e-4, "float64": 1e-12}[dtype]
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


LARGER = (
    "convolution forward n2c64h20k72r3p1 float32",
    "convolution forward n3c40h21k50r3p1u2 float32",
    "convolution backward_data n3c40h21k50r3p1u2 float32",
    "convolution backward_data n2c40h21k50r7 float32",
    "convolution backward_filter n3c40h21k50r3p1 float64",
    "convolution backward_filter n3c64h21k50r3p1 float32 x=NHWC w=NHWC y=NHWC",
    "convolution forward n2c520h9k300r3p1 float32",
    "pooling forward n2c70h33r3u2p1 float32 mode=max x=NHWC y=NHWC",
    "softmax forward 7x300x9x9 float32",
    "tensor_ops transform 5x33x40x41 float32 y=NHWC",
)


@pytest.mark.parametrize("line", LARGER)
def test_results_do_not_depend_on_threads(library, line):
    problem = parse_problem(line)
    for threads in (1, 3):
        algorithm = CLibrary(library, threads)
        run(Case(problem, algorithm.name, "random", 1.0, 0.0, "end"), algorithm)
    outputs = [computed(library, problem, threads) for threads in (1, 2, 5)]
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def computed(library, problem, threads=2, seed=1):
    """The output of a problem on random operands, as memory."""
    random = np.random.default_rng(seed)
    arrays = []
    for operand in problem.operands:
        low, high = operand.desc.offset_range()
        assert low == 0
        arrays.append(random.uniform(-1, 1, high + 1).astype(str(operand.desc.dtype)))
    algorithm = CLibrary(library, threads)
    kernel = algorithm.build(problem, None)
    space = c.Workspace(algorithm.workspace(problem, None))
    kernel([a.ctypes.data for a in arrays], space.address, 1.0, 0.0, 0)
    assert space.intact()
    return arrays[-1]


def test_two_callers_at_once(library):
    lines = LARGER * 2
    alone = [computed(library, parse_problem(line), 2, 3) for line in lines]
    together = [None] * len(lines)

    def call(number):
        together[number] = computed(library, parse_problem(lines[number]), 2, 3)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(lines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, other in zip(alone, together):
        assert np.array_equal(one, other)


AFTER_FORK = """
import os, sys
sys.path.insert(0, {here!r})
import numpy as np, c_binding as c
library = c.Library({path!r})
y = np.zeros(1 << 20, np.float32)
def fill(value):
    library.call("tensor_set", value, 0.0, *c.operand(y), 4)
    return bool((y == value).all())
assert fill(1.0)
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if fill(2.0 + number) and fill(9.0) else 1)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
assert fill(5.0)
print("done")
"""


def test_after_a_fork(library):
    path = str(library_folder("native") / "libbedstone.so")
    program = AFTER_FORK.format(here=os.path.dirname(__file__), path=path)
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert answer.stdout == "done\n", answer.stderr


def test_number_of_threads(library):
    assert library.status("set_num_threads", 2) == "success"
    assert library.get_num_threads() == 2
    assert library.status("set_num_threads", interface.MAX_THREADS + 1) == "bad_threads"
    assert library.get_num_threads() == 2
    assert library.status("set_num_threads", 0) == "success"
    assert library.get_num_threads() == len(os.sched_getaffinity(0))


# Bad arguments -----------------------------------------------------------------------------------


def convolution_call(dtype="float32", **changes):
    """Arguments of a forward convolution by name, some of them changed."""
    problem = parse_problem(f"convolution forward n2c4h6k6r3p1 {dtype}")
    arrays = {n: np.ones(d.dims, dtype) for n, d in
              (("x", problem.x), ("w", problem.w), ("y", problem.y))}  # fmt: skip
    given = {"conv": c.convolution(problem.conv), "alpha": 1.0}
    for name in ("x", "w"):
        given[name], given[f"{name}_data"] = c.operand(arrays[name])
    given |= {"bias": 0, "beta": 0.0}
    given["y"], given["y_data"] = c.operand(arrays["y"])
    given |= {"workspace": np.zeros(1 << 20, np.uint8), "bytes": 1 << 20, "threads": 1}
    return given | changes


def changed(desc, **changes):
    """A descriptor with members changed: name=value, or name=(index, value)."""
    for name, value in changes.items():
        if isinstance(value, tuple):
            getattr(desc, name)[value[0]] = value[1]
        else:
            setattr(desc, name, value)
    return desc


def tensor_of(*dims, dtype="float32"):
    return c.tensor(np.empty(dims, dtype))


def conv_of(**changes):
    return changed(convolution_call()["conv"], **changes)


BAD_CONVOLUTIONS = {
    "null conv": ({"conv": 0}, "null_pointer"),
    "null x": ({"x": 0}, "null_pointer"),
    "null x data": ({"x_data": 0}, "null_pointer"),
    "null y data": ({"y_data": 0}, "null_pointer"),
    "dtype": ({"x": changed(tensor_of(2, 4, 6, 6), dtype=2)}, "bad_dtype"),
    "two dtypes": ({"w": tensor_of(6, 4, 3, 3, dtype="float64")}, "bad_dtype"),
    "rank 2": ({"x": tensor_of(2, 4)}, "bad_rank"),
    "rank 6": ({"x": tensor_of(2, 4, 6, 6, 1, 1)}, "bad_rank"),
    "two ranks": ({"w": tensor_of(6, 4, 3)}, "bad_rank"),
    "negative dim": ({"x": changed(tensor_of(2, 4, 6, 6), dims=(0, -1))}, "bad_dims"),
    "enormous dims": ({"x": changed(tensor_of(2, 4, 6, 6), dims=(0, 1 << 60))}, "bad_dims"),
    "enormous strides": (
        {"x": changed(tensor_of(2, 4, 6, 6), strides=(0, -(1 << 62)))},
        "bad_strides",
    ),  # fmt: skip
    "overlapping y": ({"y": changed(tensor_of(2, 6, 6, 6), strides=(2, 5))}, "bad_strides"),
    "y without stride": ({"y": changed(tensor_of(2, 6, 6, 6), strides=(0, 0))}, "bad_strides"),
    "channels": ({"w": tensor_of(6, 3, 3, 3)}, "mismatch"),
    "dims of y": ({"y": tensor_of(2, 6, 6, 5)}, "mismatch"),
    "images of y": ({"y": tensor_of(3, 6, 6, 6)}, "mismatch"),
    "groups of none": ({"conv": conv_of(groups=0)}, "bad_window"),
    "groups": ({"conv": conv_of(groups=3)}, "mismatch"),
    "stride 0": ({"conv": conv_of(stride=(1, 0))}, "bad_window"),
    "dilation 0": ({"conv": conv_of(dilation=(0, 0))}, "bad_window"),
    "enormous stride": ({"conv": conv_of(stride=(0, 1 << 40))}, "bad_window"),
    "window": ({"conv": conv_of(dilation=(0, 9))}, "bad_window"),
    "mode": ({"conv": conv_of(mode=2)}, "bad_enum"),
    "threads": ({"threads": -1}, "bad_threads"),
    "many threads": ({"threads": 257}, "bad_threads"),
    "workspace": ({"bytes": 64}, "small_workspace"),
    "null workspace": ({"workspace": 0}, "small_workspace"),
}


@pytest.mark.parametrize("changes, status", BAD_CONVOLUTIONS.values(), ids=BAD_CONVOLUTIONS)
def test_bad_convolution(library, changes, status):
    given = convolution_call(**changes)
    y = given["y_data"]
    before = np.copy(y) if isinstance(y, np.ndarray) else None
    assert library.status("convolution_forward", *given.values()) == status
    assert before is None or np.array_equal(before, y)


def test_the_good_convolution_is_taken(library):
    given = convolution_call()
    assert library.status("convolution_forward", *given.values()) == "success"
    assert given["y_data"][0, 0, 3, 3] == 36.0


def test_negative_padding_is_refused(library):
    conv = conv_of()
    conv.padding[1][0] = -1
    given = convolution_call(conv=conv)
    assert library.status("convolution_forward", *given.values()) == "bad_window"


def test_bad_activation(library):
    x, y = np.ones(5, np.float32), np.empty(5, np.float32)

    def status(kind, alpha=0.0, beta=0.0):
        desc = c.STRUCTURES["bs_activation"](alpha, beta, kind)
        return library.status("activation_forward", desc, 1.0, *c.operand(x), 0.0, *c.operand(y), 1)

    kinds = c.NUMBER["bs_activation_kind"]
    assert status(len(kinds)) == status(-1) == "bad_enum"
    assert status(kinds["elu"], -1.0) == "bad_coefficient"
    assert status(kinds["clip"], 1.0, 0.0) == "bad_coefficient"
    assert status(kinds["relu"], float("nan")) == "bad_coefficient"
    assert status(kinds["hard_sigmoid"], float("inf")) == "bad_coefficient"
    assert status(kinds["clip"], 0.0, float("inf")) == "success"


def test_bad_pooling_and_softmax(library):
    x, y = np.ones((1, 2, 6, 6), np.float32), np.empty((1, 2, 3, 3), np.float32)
    pool = c.pooling(bedstone.spec.pooling.PoolingDesc.of("max", 2))

    def status(desc, out=y, threads=1):
        operands = *c.operand(x), 0.0, *c.operand(out)
        return library.status("pooling_forward", desc, 1.0, *operands, threads)

    assert status(pool) == "success"
    assert status(pool, np.empty((1, 2, 4, 3), np.float32)) == "mismatch"
    assert status(changed(pool, mode=3)) == "bad_enum"
    assert status(changed(pool, mode=0, window=(0, 0))) == "bad_window"
    operands = *c.operand(x), 0.0, *c.operand(np.empty_like(x))
    assert library.status("softmax_forward", 3, 0, 1.0, *operands, 1) == "bad_enum"
    assert library.status("softmax_forward", 1, 2, 1.0, *operands, 1) == "bad_enum"
    other = *c.operand(x), 0.0, *c.operand(y)
    assert library.status("softmax_forward", 1, 0, 1.0, *other, 1) == "mismatch"


def test_garbage_gives_a_status(library):
    """No data: whatever the descriptors say, a call ends with a status (or has nothing to do)."""
    random = np.random.default_rng(5)
    interesting = [
        0,
        1,
        2,
        3,
        5,
        7,
        64,
        -1,
        -2,
        1 << 31,
        1 << 40,
        1 << 62,
        -(1 << 63),
        (1 << 63) - 1,
    ]

    def garbage(ctype):
        name = ctype.replace("const ", "").rstrip("*")
        if name in c.STRUCTURES:
            if random.random() < 0.05:
                return 0
            record = c.STRUCTURES[name]()
            words = np.frombuffer(record, np.int64)
            words[:] = random.choice(interesting, words.size)
            if random.random() < 0.8:  # else the numbers that are checked last are never reached
                small = random.random(words.size) < 0.9
                words[small] = random.integers(0, 4, small.sum())
            if name == "bs_tensor":
                record.dtype, record.rank = random.integers(0, 2), random.integers(0, 7)
            return record
        if ctype.endswith("*"):
            return keep if name in ("int64_t", "size_t") else 0
        if ctype == "double":
            return float(random.choice([0.0, 1.0, float("nan"), float("inf")]))
        return int(random.choice([0, 1, 2, -1, 300]))

    keep = np.zeros(64, np.int64)
    names = [n for n, (result, _) in interface.FUNCTIONS.items() if result == "bs_status"]
    seen = set()
    for number in range(GARBAGE_CALLS):
        name = names[number % len(names)]
        if name == "bs_set_num_threads":
            continue
        arguments = [garbage(ctype) for ctype, _ in interface.FUNCTIONS[name][1]]
        seen.add(library.status(name.removeprefix("bs_"), *arguments))
    assert {"success", "null_pointer", "bad_dims", "bad_rank", "bad_window"} <= seen


def test_the_largest_accepted_sizes_do_not_overflow(library):
    """Shapes at the limits either are refused or say a size that holds their tables."""
    big = 1 << 30
    for x, w, y in (
        ((1, 1, big), (1, 1, 1), (1, 1, big)),
        ((1, big, 1), (1, big, 1), (1, 1, 1)),
        ((1, 1, 1), (big, 1, 1), (1, big, 1)),
        ((big, 1, 1), (1, 1, 1), (big, 1, 1)),
    ):
        tensors = [c.STRUCTURES["bs_tensor"]() for _ in range(3)]
        for tensor, dims in zip(tensors, (x, w, y)):
            tensor.rank, tensor.dims[:3] = 3, dims
            tensor.strides[:3] = dims[1] * dims[2], dims[2], 1
        conv = c.convolution(bedstone.spec.convolution.ConvolutionDesc.of(1))
        size = ctypes.c_size_t()
        for direction in range(3):
            library.call("convolution_workspace_size", direction, conv, *tensors, 256,
                         ctypes.addressof(size))  # fmt: skip
            assert big < size.value < 1 << 50


def test_status_strings(library):
    for value, sentence in enumerate(interface.STATUSES.values()):
        assert library.status_string(value).decode() == sentence
    assert library.status_string(-7).decode() == library.status_string(99).decode()
    assert library.version().decode() == bedstone.__version__


def test_descriptor(library):
    problem = parse_problem("tensor_ops set 2x3x4 float64")
    desc = c.STRUCTURES["bs_tensor"]()
    dims = np.array(problem.y.dims)
    library.call("tensor_init", desc, 1, 3, dims, 0)
    assert bytes(desc) == bytes(describe(problem.y))
    library.call("tensor_init", desc, 1, 3, dims, np.array([1, 2, 6]))
    assert list(desc.strides)[:3] == [1, 2, 6]
    assert library.status("tensor_init", desc, 1, 9, dims, 0) == "bad_rank"
    assert library.status("tensor_init", desc, 1, 3, -dims, 0) == "bad_dims"


# What is built -----------------------------------------------------------------------------------


def test_only_its_functions_are_exported(library):
    if not shutil.which("nm") or not shutil.which("readelf"):
        pytest.skip("nm and readelf are not installed")
    path = library_folder("native") / "libbedstone.so"
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True)
    names = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert names == set(interface.FUNCTIONS)
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(\w+)", dynamic))
    assert needed <= {"libc", "libm", "libpthread"}
    assert "NODELETE" in dynamic and "TEXTREL" not in dynamic


def test_header_is_the_tables():
    text = (library_folder("native") / "bedstone.h").read_text()
    for name in interface.FUNCTIONS:
        assert len(re.findall(rf"\b{name}\(", text)) == 1
    assert set(header.FUNCTIONS) == set(interface.FUNCTIONS)
    assert set(header.STRUCTS) == set(interface.STRUCTS)
    assert set(header.ENUMS) == set(header.PREFIXES) == set(interface.ENUMS)
    for value, name in enumerate(interface.STATUSES):
        assert f"{header.status_constant(name)} = {value}," in text
    constants = re.findall(r"^    (BS_\w+) =", text, re.MULTILINE)
    assert len(set(constants)) == len(constants)


@pytest.mark.parametrize("language, standard", [("c", "c99"), ("c", "c11"), ("c++", "c++11")])
def test_header_compiles(language, standard, tmp_path):
    program = shutil.which("cc" if language == "c" else "c++")
    if program is None:
        pytest.skip(f"no {language} compiler is installed")
    sizes = {name: ctypes.sizeof(c.STRUCTURES[name]) for name in interface.STRUCTS}
    lines = ['#include "bedstone.h"', '#include "bedstone.h"']
    lines += [
        f"typedef char size_{n}[sizeof({n}) == {size} ? 1 : -1];" for n, size in sizes.items()
    ]
    source = tmp_path / "header.c"
    source.write_text("\n".join([*lines, "int main(void) { return 0; }", ""]))
    words = [
        program,
        "-x",
        language,
        f"-std={standard}",
        "-pedantic",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    words += ["-fsyntax-only", "-I", library_folder("native"), source]
    answer = subprocess.run(words, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_objects_for_other_processors(cpu):
    code, triple = building._backend().library_object(cpu)
    assert code[:4] == b"\x7fELF"
    machine = int.from_bytes(code[18:20], "little")
    assert machine == {"x86_64": 62, "aarch64": 183}[triple.split("-")[0]]
    assert {name.decode() for name in exported(code)} == set(interface.FUNCTIONS)


def test_without_a_linker(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert command(["build-c", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "libbedstone.so was not written" in said.err
    assert "libbedstone.a" in said.out
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bedstone.h", "bedstone.pc", "libbedstone.a",
    ]  # fmt: skip


def test_the_plain_linker_serves(tmp_path, monkeypatch):
    if not shutil.which("ld"):
        pytest.skip("ld is not installed")
    find = shutil.which
    monkeypatch.setattr(
        building.shutil, "which", lambda name: find(name) if name.endswith("ld") else None
    )
    assert building.build(tmp_path).linker == "ld"
    library = c.Library(tmp_path / "libbedstone.so")
    y = np.zeros(7, np.float32)
    library.call("tensor_set", 3.0, 0.0, *c.operand(y), 1)
    assert (y == 3.0).all()


def test_mistakes_on_the_command_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command(["build-c", "--out", str(tmp_path / "file")]) == 2
    assert "a folder to write to" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(["build-c", "--out", str(tmp_path), "--cpu", "z80"])
    with pytest.raises(bedstone.BedstoneError, match="z80"):
        building.build(tmp_path, "z80")
