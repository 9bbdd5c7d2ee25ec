"""ctypes over the C library, from the same tables that made its header: for tests."""

from __future__ import annotations

import ctypes

import numpy as np

from bedstone.backends.cpu.library import interface

CTYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
    "bs_status": ctypes.c_int32,
    "const char*": ctypes.c_char_p,
}


def _structure(name):
    members = []
    for field in interface.STRUCTS[name]:
        ctype = CTYPES[field.ctype]
        for n in reversed(field.count):
            ctype = ctype * n
        members.append((field.name, ctype))
    return type(name, (ctypes.Structure,), {"_fields_": members})


STRUCTURES = {name: _structure(name) for name in interface.STRUCTS}
NUMBER = {
    enum: {name: value for value, name in enumerate(names)}
    for enum, names in interface.ENUMS.items()
}


class Library:
    """Its functions by their names without bs_; `call` raises what a status says."""

    def __init__(self, path):
        self.handle = ctypes.CDLL(str(path))
        for name, (result, parameters) in interface.FUNCTIONS.items():
            function = getattr(self.handle, name)
            function.restype = CTYPES[result]
            function.argtypes = [CTYPES.get(ctype, ctypes.c_void_p) for ctype, _ in parameters]
            setattr(self, name.removeprefix("bs_"), function)

    def call(self, name, *arguments):
        """Call a function that must succeed."""
        status = getattr(self, name)(*(pointer(a) for a in arguments))
        if status:
            raise RuntimeError(f"{name}: {self.status_string(status).decode()}")

    def status(self, name, *arguments):
        """The status's name."""
        return list(interface.STATUSES)[getattr(self, name)(*(pointer(a) for a in arguments))]


def pointer(argument):
    """The address of a structure or of an array's element [0, ..., 0]; other values as they are."""
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return argument


def tensor(array):
    """The descriptor of a NumPy array (whose data pointer is that of element [0, ..., 0])."""
    desc = STRUCTURES["bs_tensor"]()
    desc.dtype = interface.DTYPES.index(str(array.dtype))
    desc.rank = array.ndim
    for axis, (dim, stride) in enumerate(zip(array.shape, array.strides)):
        desc.dims[axis], desc.strides[axis] = dim, stride // array.itemsize
    return desc


def operand(array):
    """(descriptor, data)."""
    return tensor(array), array


def convolution(conv):
    """bs_convolution of a spec.ConvolutionDesc."""
    desc = STRUCTURES["bs_convolution"]()
    for axis in range(conv.axes):
        desc.stride[axis], desc.dilation[axis] = conv.stride[axis], conv.dilation[axis]
        desc.padding[axis][:] = conv.padding[axis]
    desc.groups, desc.mode = conv.groups, NUMBER["bs_convolution_mode"][conv.mode]
    return desc


def pooling(pool):
    """bs_pooling of a spec.PoolingDesc."""
    desc = STRUCTURES["bs_pooling"]()
    for axis in range(pool.axes):
        desc.window[axis], desc.stride[axis] = pool.window[axis], pool.stride[axis]
        desc.dilation[axis] = pool.dilation[axis]
        desc.padding[axis][:] = pool.padding[axis]
    desc.mode = NUMBER["bs_pooling_mode"][pool.mode]
    return desc


def activation(act):
    """bs_activation of a spec.ActivationDesc."""
    return STRUCTURES["bs_activation"](
        act.alpha, act.beta, NUMBER["bs_activation_kind"][act.kind]
    )  # fmt: skip


class Workspace:
    """Aligned memory of exactly the size asked for, between guard bytes."""

    GUARD = 64

    def __init__(self, size):
        self.size = size
        self.memory = np.full(size + 2 * self.GUARD, 0xA5, np.uint8)

    @property
    def address(self):
        return self.memory.ctypes.data + self.GUARD

    def intact(self):
        """Whether the guards are as they were."""
        ends = self.memory[: self.GUARD], self.memory[self.GUARD + self.size :]
        return all((end == 0xA5).all() for end in ends)
