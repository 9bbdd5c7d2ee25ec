"""A program of the time of cuDNN v2: a small network trained through a ctypes wrapper module.

Such programs drive a module `libcudnn` whose functions have the C names, return what C writes
through pointers, and take device pointers. Only the import line is different here:

    - import libcudnn
    + from bedstone.compat import cudnn_v2 as libcudnn

The data are NumPy arrays in main memory; on a GPU they would be device arrays, with a handle made
by `libcudnn.cudnnCreate(device="cuda")`. The network tells which way stripes run, in four classes.

    python examples/cudnn/wrapper_style.py
"""

import numpy as np

from bedstone.compat import cudnn_v2 as libcudnn

CLASSES, BATCH, SIZE, CHANNELS, WINDOW = 4, 32, 12, 8, 3
STEPS, RATE, MOMENTUM = 80, 0.05, 0.8

NCHW = libcudnn.cudnnTensorFormat["CUDNN_TENSOR_NCHW"]
FLOAT = libcudnn.cudnnDataType["CUDNN_DATA_FLOAT"]
CROSS_CORRELATION = libcudnn.cudnnConvolutionMode["CUDNN_CROSS_CORRELATION"]
SAME_C = libcudnn.cudnnAddMode["CUDNN_ADD_SAME_C"]
MAX = libcudnn.cudnnPoolingMode["CUDNN_POOLING_MAX"]
RELU = libcudnn.cudnnActivationMode["CUDNN_ACTIVATION_RELU"]
ACCURATE = libcudnn.cudnnSoftmaxAlgorithm["CUDNN_SOFTMAX_ACCURATE"]
INSTANCE = libcudnn.cudnnSoftmaxMode["CUDNN_SOFTMAX_MODE_INSTANCE"]
FASTEST = libcudnn.cudnnConvolutionFwdPreference["CUDNN_CONVOLUTION_FWD_PREFER_FASTEST"]


class Tensor:
    """Data, its gradient, and the descriptor of both."""

    def __init__(self, *dims):
        self.data = np.zeros(dims, np.float32)
        self.grad = np.zeros(dims, np.float32)
        self.desc = libcudnn.cudnnCreateTensorDescriptor()
        libcudnn.cudnnSetTensor4dDescriptor(self.desc, NCHW, FLOAT, *dims)


class Convolution:
    """A convolution with bias: parameters, descriptors, algorithm and workspace."""

    def __init__(self, handle, x, outputs, window, random):
        self.handle, self.x = handle, x
        channels = x.data.shape[1]
        scale = np.sqrt(2.0 / (channels * window * window))
        self.w = (random.standard_normal((outputs, channels, window, window)) * scale).astype("f")
        self.dw, self.speed = np.zeros_like(self.w), np.zeros_like(self.w)
        self.filter_desc = libcudnn.cudnnCreateFilterDescriptor()
        libcudnn.cudnnSetFilter4dDescriptor(self.filter_desc, FLOAT, *self.w.shape)
        self.desc = libcudnn.cudnnCreateConvolutionDescriptor()
        libcudnn.cudnnSetConvolution2dDescriptor(self.desc, 0, 0, 1, 1, 1, 1, CROSS_CORRELATION)
        self.y = Tensor(
            *libcudnn.cudnnGetConvolution2dForwardOutputDim(self.desc, x.desc, self.filter_desc)
        )
        self.bias = Tensor(1, outputs, 1, 1)
        described = (handle, x.desc, self.filter_desc, self.desc, self.y.desc)
        self.algo = libcudnn.cudnnGetConvolutionForwardAlgorithm(*described, FASTEST, 0)
        size = libcudnn.cudnnGetConvolutionForwardWorkspaceSize(*described, self.algo)
        self.workspace = np.empty(size, np.uint8)

    def forward(self):
        libcudnn.cudnnConvolutionForward(
            self.handle, 1.0, self.x.desc, self.x.data, self.filter_desc, self.w, self.desc,
            self.algo, self.workspace, self.workspace.nbytes, 0.0, self.y.desc, self.y.data,
        )  # fmt: skip
        libcudnn.cudnnAddTensor(
            self.handle, SAME_C, 1.0, self.bias.desc, self.bias.data, 1.0, self.y.desc, self.y.data
        )

    def backward(self):
        y, x = self.y, self.x
        libcudnn.cudnnConvolutionBackwardBias(
            self.handle, 1.0, y.desc, y.grad, 0.0, self.bias.desc, self.bias.grad
        )
        libcudnn.cudnnConvolutionBackwardFilter(
            self.handle, 1.0, x.desc, x.data, y.desc, y.grad, self.desc, 0.0,
            self.filter_desc, self.dw,
        )  # fmt: skip
        libcudnn.cudnnConvolutionBackwardData(
            self.handle, 1.0, self.filter_desc, self.w, y.desc, y.grad, self.desc, 0.0,
            x.desc, x.grad,
        )  # fmt: skip

    def learn(self):
        self.speed = MOMENTUM * self.speed - RATE * self.dw
        self.w += self.speed
        self.bias.data -= RATE * self.bias.grad


class Network:
    """Convolution, max pooling, ReLU in place, a convolution as large as the image, softmax."""

    def __init__(self, handle, random):
        self.handle = handle
        self.x = Tensor(BATCH, 1, SIZE, SIZE)
        self.first = Convolution(handle, self.x, CHANNELS, WINDOW, random)
        self.pool = libcudnn.cudnnCreatePoolingDescriptor()
        libcudnn.cudnnSetPooling2dDescriptor(self.pool, MAX, 2, 2, 0, 0, 2, 2)
        self.pooled = Tensor(
            *libcudnn.cudnnGetPooling2dForwardOutputDim(self.pool, self.first.y.desc)
        )
        self.last = Convolution(handle, self.pooled, CLASSES, self.pooled.data.shape[2], random)
        self.probability = Tensor(BATCH, CLASSES, 1, 1)

    def forward(self, images):
        self.x.data[...] = images
        self.first.forward()
        y, p, out, score = self.first.y, self.pooled, self.probability, self.last.y
        libcudnn.cudnnPoolingForward(
            self.handle, self.pool, 1.0, y.desc, y.data, 0.0, p.desc, p.data
        )
        libcudnn.cudnnActivationForward(self.handle, RELU, 1.0, p.desc, p.data, 0.0, p.desc, p.data)
        self.last.forward()
        libcudnn.cudnnSoftmaxForward(
            self.handle, ACCURATE, INSTANCE, 1.0, score.desc, score.data, 0.0, out.desc, out.data
        )
        return out.data.reshape(BATCH, CLASSES)

    def backward(self, labels):
        y, p, out, score = self.first.y, self.pooled, self.probability, self.last.y
        out.grad[...] = 0
        at = np.arange(BATCH), labels, 0, 0
        out.grad[at] = -1.0 / (BATCH * np.maximum(out.data[at], 1e-6))  # of the mean log loss
        libcudnn.cudnnSoftmaxBackward(
            self.handle, ACCURATE, INSTANCE, 1.0, out.desc, out.data, out.desc, out.grad, 0.0,
            score.desc, score.grad,
        )  # fmt: skip
        self.last.backward()
        libcudnn.cudnnActivationBackward(
            self.handle, RELU, 1.0, p.desc, p.data, p.desc, p.grad, p.desc, p.data, 0.0,
            p.desc, p.grad,
        )  # fmt: skip
        libcudnn.cudnnPoolingBackward(
            self.handle, self.pool, 1.0, p.desc, p.data, p.desc, p.grad, y.desc, y.data, 0.0,
            y.desc, y.grad,
        )  # fmt: skip
        self.first.backward()
        self.first.learn()
        self.last.learn()


def stripes(random):
    """Images of stripes that run across, down, or along either diagonal, in noise."""
    labels = random.integers(0, CLASSES, BATCH)
    row, column = np.mgrid[:SIZE, :SIZE]
    along = np.stack([row, column, row + column, row - column])[labels]
    phase = random.integers(0, 4, (BATCH, 1, 1))
    images = ((along + phase) % 4 < 2) * 2.0 - 1.0 + random.normal(0, 0.5, along.shape)
    return images[:, None], labels


def main():
    """Train, and return the share of unseen images that are told right."""
    random = np.random.default_rng(0)
    handle = libcudnn.cudnnCreate()
    network = Network(handle, random)
    for step in range(STEPS):
        images, labels = stripes(random)
        probability = network.forward(images)
        loss = -np.log(probability[np.arange(BATCH), labels]).mean()
        network.backward(labels)
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss:.3f}")
    right = 0.0
    for _ in range(8):
        images, labels = stripes(random)
        right += (network.forward(images).argmax(axis=1) == labels).mean() / 8
    print(f"unseen images told right: {right:.1%}")
    libcudnn.cudnnDestroy(handle)
    return right


if __name__ == "__main__":
    main()
