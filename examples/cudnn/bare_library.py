"""A program of the time of cuDNN v1 that loads the shared library itself, by ctypes.

Results come through pointers and every call returns a status, as in C. Only the line that loads
the library is different here:

    - libcudnn = ctypes.cdll.LoadLibrary("libcudnn.so")
    + from bedstone.compat.cudnn_v1 import library as libcudnn

It computes a strided convolution of one group of channels at a time, as Caffe's layers did: the
descriptors describe parts of larger tensors, and the pointers point into them.

    python examples/cudnn/bare_library.py
"""

import ctypes
from ctypes import byref

import numpy as np

from bedstone.compat.cudnn_v1 import library as libcudnn

libcudnn.cudnnCreate.restype = ctypes.c_int  # as such programs declare what they call
libcudnn.cudnnCreate.argtypes = [ctypes.c_void_p]

NCHW, FLOAT, CROSS_CORRELATION, NO_ACCUMULATE, FORWARD = 0, 0, 1, 1, 0
GROUPS, FLOAT_BYTES = 2, 4


def check(status):
    """Stop at the first call that fails."""
    if status != 0:
        raise RuntimeError(f"cuDNN status {status}")


def grouped_convolution(x, w, pad, stride):
    """y of images x (N, C, H, W) and filters w (K, C / GROUPS, R, S)."""
    n, c, h, width = x.shape
    k, _, r, s = w.shape
    handle, image, filters, convolution, output = (ctypes.c_void_p() for _ in range(5))
    check(libcudnn.cudnnCreate(byref(handle)))
    check(libcudnn.cudnnCreateTensor4dDescriptor(byref(image)))
    check(libcudnn.cudnnCreateTensor4dDescriptor(byref(output)))
    check(libcudnn.cudnnCreateFilterDescriptor(byref(filters)))
    check(libcudnn.cudnnCreateConvolutionDescriptor(byref(convolution)))
    # One group's channels of every image: the stride between images stays the whole image's.
    strides = (c * h * width, h * width, width, 1)
    dims = (n, c // GROUPS, h, width)
    check(libcudnn.cudnnSetTensor4dDescriptorEx(image, FLOAT, *dims, *strides))
    check(libcudnn.cudnnSetFilterDescriptor(filters, FLOAT, k // GROUPS, c // GROUPS, r, s))
    check(
        libcudnn.cudnnSetConvolutionDescriptor(
            convolution, image, filters, pad, pad, stride, stride, 1, 1, CROSS_CORRELATION
        )
    )
    sizes = [ctypes.c_int() for _ in range(4)]
    check(libcudnn.cudnnGetOutputTensor4dDim(convolution, FORWARD, *map(byref, sizes)))
    _, kg, p, q = (size.value for size in sizes)
    y = np.empty((n, k, p, q), np.float32)
    strides = (k * p * q, p * q, q, 1)
    check(libcudnn.cudnnSetTensor4dDescriptorEx(output, FLOAT, n, kg, p, q, *strides))
    for group in range(GROUPS):
        x_offset = group * (c // GROUPS) * h * width * FLOAT_BYTES
        w_offset = group * w.size // GROUPS * FLOAT_BYTES
        y_offset = group * kg * p * q * FLOAT_BYTES
        check(
            libcudnn.cudnnConvolutionForward(
                handle,
                image, ctypes.c_void_p(x.ctypes.data + x_offset),
                filters, ctypes.c_void_p(w.ctypes.data + w_offset),
                convolution,
                output, ctypes.c_void_p(y.ctypes.data + y_offset),
                NO_ACCUMULATE,
            )
        )  # fmt: skip
    check(libcudnn.cudnnDestroyConvolutionDescriptor(convolution))
    check(libcudnn.cudnnDestroyFilterDescriptor(filters))
    check(libcudnn.cudnnDestroyTensor4dDescriptor(output))
    check(libcudnn.cudnnDestroyTensor4dDescriptor(image))
    check(libcudnn.cudnnDestroy(handle))
    return y


def main():
    """Compute it and return (y, x, w), for whoever wants to compare."""
    random = np.random.default_rng(0)
    x = random.standard_normal((4, 16, 27, 27)).astype(np.float32)
    w = random.standard_normal((32, 8, 5, 5)).astype(np.float32)
    y = grouped_convolution(x, w, pad=2, stride=2)
    print("y:", y.shape, "sum of squares:", f"{float((y.astype(np.float64) ** 2).sum()):.6g}")
    return y, x, w


if __name__ == "__main__":
    main()
