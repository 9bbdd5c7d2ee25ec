"""PyTorch's own operators that bedstone takes the place of, a module a kind."""

from bedstone.frameworks.torch.overrides.convolution import OPERATORS as CONVOLUTION
from bedstone.frameworks.torch.overrides.normalization import OPERATORS as NORMALIZATION
from bedstone.frameworks.torch.overrides.pointwise import OPERATORS as POINTWISE
from bedstone.frameworks.torch.overrides.pooling import OPERATORS as POOLING

OPERATORS = (*CONVOLUTION, *POOLING, *POINTWISE, *NORMALIZATION)
