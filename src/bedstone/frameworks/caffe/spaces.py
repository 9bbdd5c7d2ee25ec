"""Where a network's arrays lie and are computed with: NumPy on the host, PyTorch on a device.

A layer says `self.xp` where it would say `np`: numpy itself on the host; on a device `TorchNames`,
the same names by PyTorch. Plans get addresses and a stream. The device of most is a GPU ("cuda:0");
PyTorch's own CPU arrays will do as well, with the CPU's plans, and where Triton interprets its
kernels they are the memory of the GPU that it plays.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

import bedstone
from bedstone.spec.errors import InvalidDescriptor

MATHS = ("ieee", "tf32")
# Elements of a product that NumPy adds to a matrix: the whole of it may be as large as all the
# network's weights, and new memory costs as much time as the product.
PART = 1 << 20


class Host:
    """NumPy's arrays, and the CPU's plans."""

    name = plans = "cpu"
    xp: Any = np

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """An array, not initialised."""
        return np.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """An array of zeros."""
        return np.zeros(shape, dtype)

    def on_host(self, array: Any) -> np.ndarray:
        """An array of this space as the host's: itself, or a copy."""
        return array

    def upload(self, source: np.ndarray, to: Any) -> None:
        """Copy the host's array to an array of this space."""
        to[...] = source

    def download(self, source: Any, to: np.ndarray) -> None:
        """Copy an array of this space to the host's array."""
        to[...] = source

    def matmul(self, a: Any, b: Any, out: Any, math: str) -> None:
        """out = a b, with products of a math mode where there is a choice."""
        np.matmul(a, b, out=out)

    def add_product(self, a: Any, b: Any, total: Any, math: str) -> None:
        """total += a b, of matrices."""
        rows = max(1, PART // max(total.shape[1], 1))
        part = np.empty((min(rows, len(total)), total.shape[1]), total.dtype)
        for i in range(0, len(total), rows):
            some = total[i : i + rows]
            some += np.matmul(a[i : i + rows], b, out=part[: len(some)])

    def address(self, array: Any) -> int:
        """Where an array lies."""
        return array.__array_interface__["data"][0]

    def stream(self) -> int:
        """The stream on which work is queued."""
        return 0

    def synchronize(self) -> None:
        """Wait for all work that was queued."""


HOST = Host()


class Torch(Host):
    """PyTorch's arrays on a device, and the plans of that device.

    device  "cuda:N"; or "cpu": PyTorch's arrays in the host's memory
    plans   the device of the plans; by default the same
    """

    def __init__(self, device: str, plans: str | None = None) -> None:
        self._torch: Any = importlib.import_module("torch")
        self.device = self._torch.device(device)
        self.name, self.plans = f"torch {device}", plans or device
        self.xp = TorchNames(self._torch, self.device)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.xp.zeros(shape, dtype)

    def on_host(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def upload(self, source: np.ndarray, to: Any) -> None:
        to.copy_(self._torch.from_numpy(source))

    def download(self, source: Any, to: np.ndarray) -> None:
        self._torch.from_numpy(to).copy_(source)

    def matmul(self, a: Any, b: Any, out: Any, math: str) -> None:
        with self._mode(math):
            self._torch.matmul(a, b, out=out)

    def add_product(self, a: Any, b: Any, total: Any, math: str) -> None:
        with self._mode(math):
            total.addmm_(a, b)

    @contextmanager
    def _mode(self, math: str) -> Iterator[None]:
        """PyTorch's products in that mode."""
        modes = self._torch.backends.cuda.matmul
        before, modes.allow_tf32 = modes.allow_tf32, math == "tf32"
        try:
            yield
        finally:
            modes.allow_tf32 = before

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        return self._torch.cuda.current_stream(self.device).cuda_stream

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """A point in the device's time, once the work that is queued is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.device))
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds from one mark to another; both must have been passed."""
        return 1e3 * (last - first) if isinstance(first, float) else first.elapsed_time(last)

    def versions(self) -> str:
        """PyTorch's, CUDA's and cuDNN's."""
        cudnn = self._torch.backends.cudnn.version() if self.device.type == "cuda" else None
        return f"{self._torch.__version__}, CUDA {self._torch.version.cuda}, cuDNN {cudnn}"


class TorchNames:
    """NumPy's names for what layers compute, by PyTorch on one device; names that PyTorch has with
    the same meaning are its own."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def _dtype(self, dtype: Any) -> Any:
        return getattr(self._torch, np.dtype(dtype).name)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=self._dtype(dtype), device=self._device)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._torch.zeros(tuple(shape), dtype=self._dtype(dtype), device=self._device)

    def asarray(self, values: Any, dtype: Any = None) -> Any:
        """An array here, of what is here already or of the host's values."""
        found = self._torch.as_tensor(values, device=self._device)
        return found if dtype is None else found.to(self._dtype(dtype))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        a, b = (float(v) if isinstance(v, np.generic) else v for v in (a, b))
        return self._torch.where(condition, a, b)

    def copy(self, x: Any) -> Any:
        return x.clone()

    def copyto(self, to: Any, source: Any) -> None:
        to.copy_(source)

    def maximum(self, x: Any, other: Any, out: Any = None) -> Any:
        if isinstance(other, self._torch.Tensor):
            return self._torch.maximum(x, other, out=out)
        return self._torch.clamp(x, min=other, out=out)

    def minimum(self, x: Any, other: Any) -> Any:
        return self._torch.clamp(x, max=other)

    def power(self, x: Any, exponent: float) -> Any:
        return self._torch.pow(x, exponent)

    def concatenate(self, arrays: Sequence[Any], axis: int, out: Any) -> Any:
        return self._torch.cat(tuple(arrays), axis, out=out)

    def split(self, x: Any, ends: Sequence[int], axis: int) -> Any:
        return self._torch.tensor_split(x, [int(end) for end in ends], axis)

    def take_along_axis(self, x: Any, index: Any, axis: int) -> Any:
        return self._torch.take_along_dim(x, index, axis)

    def put_along_axis(self, x: Any, index: Any, values: Any, axis: int) -> None:
        x.scatter_(axis, index, values)


@lru_cache
def device_space(index: int) -> Torch:
    """The space of GPU number `index`.

    Raises InvalidDescriptor where PyTorch or the device is missing, NotSupported where no backend
    has plans for it.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidDescriptor("gpu", index, "PyTorch installed, whose arrays hold the blobs")
    plans = f"cuda:{index}"
    bedstone.default_handle(plans)
    torch = importlib.import_module("torch")
    # Plans without a device of PyTorch's: Triton's interpreter, over the host's memory.
    return Torch(plans if torch.cuda.is_available() else "cpu", plans)


_mode: dict[str, Any] = {"gpu": False, "index": 0}


def set_mode_cpu() -> None:
    """Networks that are made from now on compute on the CPU, unless they are told otherwise."""
    _mode["gpu"] = False


def set_mode_gpu() -> None:
    """Networks that are made from now on compute on the GPU of `set_device` (the first if none)."""
    device_space(_mode["index"])
    _mode["gpu"] = True


def set_device(index: int) -> None:
    """Which GPU `set_mode_gpu` means."""
    if not isinstance(index, int) or index < 0:
        raise InvalidDescriptor("device", index, "the number of a GPU, from 0 on")
    _mode["index"] = index


def current_device() -> int:
    """The number given to `set_device`."""
    return int(_mode["index"])


def space_of(gpu: int | Host | None) -> Host:
    """The space that `gpu` means: a GPU's number, a space, or None for what the mode is."""
    if isinstance(gpu, Host):
        return gpu
    if gpu is None:
        return device_space(_mode["index"]) if _mode["gpu"] else HOST
    if not isinstance(gpu, int) or gpu < 0:
        raise InvalidDescriptor("gpu", gpu, "the number of a GPU, from 0 on")
    return device_space(gpu)
