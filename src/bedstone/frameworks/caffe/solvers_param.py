"""Reading and checking a solver file: which rule, which policy, which networks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.net import Net
from bedstone.frameworks.caffe.solvers_rules import DECAYS, RULES, Policy, Rule
from bedstone.spec.errors import InvalidDescriptor


@dataclass(frozen=True)
class NetSource:
    """A network that a solver file names or holds, and the state in which to build it."""

    param: Any
    origin: str
    phase: str
    level: int
    stages: tuple[str, ...]
    seed: int | None

    def build(self, engine: str | None, dtype: str, gpu: Any, math: str) -> Net:
        return Net(
            self.param, self.phase, engine=engine, level=self.level, stages=self.stages,
            seed=self.seed, dtype=dtype, gpu=gpu, math=math,
        )  # fmt: skip


def read_solver(param: Any) -> tuple[Any, Path]:
    """A SolverParameter of one's own, and its file's folder (a message has the current one)."""
    if isinstance(param, (str, Path)):
        path = Path(param)
        read = io.read_text(path, schema.SolverParameter)
        if not read.snapshot_prefix:
            read.snapshot_prefix = str(path.with_suffix(""))
        folder = path.parent
    else:
        read, folder = schema.SolverParameter(), Path()
        read.CopyFrom(param)
    if read.HasField("solver_type") and not read.HasField("type"):  # the older of the two fields
        older = schema.enum_name(read, "solver_type")
        read.type = {name.upper(): name for name in RULES}[older]
    return read, folder


def check(param: Any) -> tuple[Rule, Policy]:
    """The update rule and the learning-rate policy; InvalidDescriptor where the file is wrong."""
    if param.type not in RULES:
        raise InvalidDescriptor("solver type", param.type, " or ".join(RULES))
    rule = RULES[param.type]
    if param.momentum and not rule.takes_momentum:
        raise InvalidDescriptor("momentum", param.momentum, f"0 or none with {param.type}")
    for name in ("momentum", "momentum2", "rms_decay"):
        if not 0 <= getattr(param, name) < 1:
            raise InvalidDescriptor(name, getattr(param, name), "at least 0 and below 1")
    if param.regularization_type not in DECAYS:
        raise InvalidDescriptor(
            "regularization_type", param.regularization_type, " or ".join(DECAYS)
        )
    for name, least in (("iter_size", 1), ("average_loss", 1), ("max_iter", 0), ("snapshot", 0),
                        ("test_interval", 0), ("display", 0)):  # fmt: skip
        if getattr(param, name) < least:
            raise InvalidDescriptor(name, getattr(param, name), f"{least} or more")
    policy = Policy(
        param.lr_policy, param.base_lr, param.gamma, param.power, param.stepsize,
        tuple(param.stepvalue), param.max_iter,
    )  # fmt: skip
    return rule, policy


def find(name: str, folder: Path) -> str:
    """A file named in a solver: from the current folder as in Caffe, else beside the solver."""
    if Path(name).exists():
        return name
    if (folder / name).exists():
        return str(folder / name)
    expected = "a file that exists, from the current folder or from the solver's"
    raise InvalidDescriptor("net", name, expected)


def nets_of(param: Any, folder: Path) -> tuple[NetSource, list[NetSource]]:
    """The training network and the test networks of a solver."""
    fields = [n for n in ("train_net", "train_net_param", "net", "net_param") if param.HasField(n)]
    if len(fields) != 1:
        expected = "exactly one of train_net, train_net_param, net and net_param"
        raise InvalidDescriptor("solver", " and ".join(fields) or "no network", expected)

    def source(field: str, value: Any, phase: str, state: Any, number: int = 0) -> NetSource:
        is_file = isinstance(value, str)
        # Every network draws numbers of its own; Caffe's -1 means another seed each time.
        seed = None if param.random_seed < 0 else param.random_seed + number
        return NetSource(
            find(value, folder) if is_file else value,
            f"{field} file: {value}" if is_file else f"the solver's {field}",
            phase, state.level, tuple(state.stage), seed,
        )  # fmt: skip

    field = fields[0]
    train = source(field, getattr(param, field), "TRAIN", param.train_state)
    named = [("test_net_param", value) for value in param.test_net_param]
    named += [("test_net", value) for value in param.test_net]
    count = len(param.test_iter)
    if field in ("net", "net_param"):  # the same network, as often as there are counts left over
        named += [(field, getattr(param, field))] * (count - len(named))
    if count != len(named):
        raise InvalidDescriptor(
            "test_iter", list(param.test_iter), f"one number for each of {len(named)} test networks"
        )
    if param.test_state and len(param.test_state) != count:
        expected = f"none, or one for each of {count} test networks"
        raise InvalidDescriptor("test_state", f"{len(param.test_state)} states", expected)
    if count and param.test_interval < 1:
        raise InvalidDescriptor(
            "test_interval", param.test_interval, "1 or more with test networks"
        )
    for iterations in param.test_iter:
        if iterations < 1:
            raise InvalidDescriptor("test_iter", iterations, "1 or more")
    states = list(param.test_state) or [schema.NetState()] * count
    return train, [
        source(field, value, "TEST", state, number)
        for number, ((field, value), state) in enumerate(zip(named, states), 1)
    ]
