"""bedstone: open deep-learning primitives, written in Python.

Convolution, pooling, softmax, activations, normalisation and tensor operations, forward and
backward, on any strides, compiled at run time for the machine they run on. Three levels:

    bedstone.convolution(x, w, padding=1)                     arrays in, array out
    bedstone.Handle().plan(problem).execute(x, w, y)          descriptors, the caller's buffers
    bedstone.Handle().plan(problem)(x_pointer, w_pointer, y_pointer)

Importing bedstone imports NumPy and nothing heavier; compilers come in with the first plan.
"""

from bedstone.plan.config import (
    config,
    get_num_threads,
    num_threads_address,
    set_default_num_threads,
    set_num_threads,
)
from bedstone.plan.device import Device
from bedstone.plan.handle import Handle, default_handle
from bedstone.plan.plan import Plan, PreparedPlan
from bedstone.plan.registry import backends as backend_names
from bedstone.spec.activation import ActivationDesc, ActivationProblem
from bedstone.spec.convolution import (
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
    convolution_problem,
)
from bedstone.spec.dropout import DropoutProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import BedstoneError, InvalidDescriptor, NotSupported
from bedstone.spec.normalization import LrnProblem, NormalizationProblem
from bedstone.spec.pooling import PoolingDesc, PoolingProblem
from bedstone.spec.problem import Problem, parse_problem
from bedstone.spec.softmax import SoftmaxProblem
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem
from bedstone.version import __version__

# isort: split
from bedstone.functional import (
    activation,
    activation_backward,
    add,
    convolution,
    convolution_backward_bias,
    convolution_backward_data,
    convolution_backward_filter,
    pool,
    pool_backward,
    scale,
    set_to,
    softmax,
    softmax_backward,
    transform,
)

__all__ = [
    "ActivationDesc",
    "ActivationProblem",
    "BedstoneError",
    "BiasGradientProblem",
    "ConvolutionDesc",
    "ConvolutionProblem",
    "DType",
    "Device",
    "DropoutProblem",
    "Epilogue",
    "Handle",
    "InvalidDescriptor",
    "LrnProblem",
    "NormalizationProblem",
    "NotSupported",
    "Plan",
    "PoolingDesc",
    "PoolingProblem",
    "PreparedPlan",
    "Problem",
    "SoftmaxProblem",
    "TensorDesc",
    "TensorOpProblem",
    "__version__",
    "activation",
    "activation_backward",
    "add",
    "backend_names",
    "config",
    "convolution",
    "convolution_backward_bias",
    "convolution_backward_data",
    "convolution_backward_filter",
    "convolution_problem",
    "default_handle",
    "get_num_threads",
    "num_threads_address",
    "parse_problem",
    "pool",
    "pool_backward",
    "scale",
    "set_default_num_threads",
    "set_num_threads",
    "set_to",
    "softmax",
    "softmax_backward",
    "transform",
]
