"""The solver: trains a network as a Caffe solver file says.

    solver = Solver("solver.prototxt")
    solver.step(100)
    solver.net.params["conv1"][0].data, solver.iter

One iteration: gradients of `iter_size` batches add up, are clipped, averaged and decayed, an update
rule (`solvers_rules`) makes a step of them. Around it: tests, the log, snapshots. The names and the
order are pycaffe's and Caffe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import snapshots, solvers_log, solvers_rules, wire
from bedstone.frameworks.caffe.net import Net
from bedstone.frameworks.caffe.solvers_log import Log, Pace, number
from bedstone.frameworks.caffe.solvers_param import check, nets_of, read_solver
from bedstone.frameworks.caffe.spaces import HOST, Host, device_space
from bedstone.spec.errors import BedstoneError, InvalidDescriptor

# What may be asked of a running solver, between iterations and between test batches.
NONE, SNAPSHOT, STOP = "none", "snapshot", "stop"


class Solver:
    """A network in training, its test networks, and where the training stands.

    param   a SolverParameter, or the path of a solver's .prototxt
    engine  the engine of layers that name none (as for Net)
    dtype   of the networks: float32 or float64
    gpu, math  where and how to compute, as for Net; where `gpu` is None, `solver_mode: GPU` takes
            the GPU of `device_id` if there is one, and says so if there is none
    log     where messages go; by default nowhere but warnings
    Attributes: net, test_nets, iter, lr, param, loss (smoothed over average_loss iterations).
    """

    def __init__(
        self, param: Any, *, engine: str | None = None, log: Log | None = None,
        dtype: str = "float32", gpu: int | Host | None = None, math: str = "ieee",
    ) -> None:  # fmt: skip
        self.param, self._folder = read_solver(param)
        self.rule, self.policy = check(self.param)
        self.log = log or Log(quiet=True)
        if gpu is None and self.param.HasField("solver_mode"):
            gpu = self._space_of_mode()
        train, tests = nets_of(self.param, self._folder)
        self.net: Net = train.build(engine, dtype, gpu, math)
        self.log.info(f"Creating training net from {train.origin}")
        self.test_nets: list[Net] = []
        for number_, test in enumerate(tests):
            self.log.info(f"Creating test net (#{number_}) from {test.origin}")
            self.test_nets.append(test.build(engine, dtype, gpu, math))
            self.test_nets[-1].share_trained_layers_with(self.net)
        self.iter, self.loss = 0, 0.0
        self._losses: list[float] = []
        self._start = 0
        blobs = self.net.learnable_params
        zeros = self.net.space.zeros
        self.history = [zeros(b.shape, b.dtype) for _ in range(self.rule.histories) for b in blobs]
        self._callbacks: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
        self.requested: Callable[[], str] = lambda: NONE
        self._stopped = False
        self._pace = Pace()
        for path in self.param.weights:
            self.copy_weights(path)

    def _space_of_mode(self) -> Host:
        """Where `solver_mode` says, or the CPU and a warning."""
        if self.param.solver_mode != self.param.GPU:
            return HOST
        try:
            return device_space(self.param.device_id)
        except BedstoneError as error:
            reason = str(error).splitlines()[0]
            self.log.warning(f"solver_mode: GPU: running on the CPU, since {reason}")
            return HOST

    # -- what pycaffe's solvers have ------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the coming iteration."""
        return self.policy.rate(self.iter)

    def add_callback(
        self, on_start: Callable[[], Any], on_gradients_ready: Callable[[], Any]
    ) -> None:
        """Call the first before each iteration's forward pass, the second before its update."""
        self._callbacks.append((on_start, on_gradients_ready))

    def copy_weights(self, path: str | Path) -> None:
        """Start from the weights of a .caffemodel; layers are found by name."""
        self.log.info(f"Finetuning from {path}")
        for net in (self.net, *self.test_nets):
            net.copy_trained_layers_from(str(path))

    def solve(self, resume: str | Path | None = None) -> None:
        """Train up to max_iter, with tests and snapshots; `resume` is a .solverstate."""
        self.log.info(f"Solving {self.net.name}", solvers_log.SOLVER)
        self.log.info(f"Learning Rate Policy: {self.param.lr_policy}")
        self._stopped = False
        if resume is not None:
            self.restore(resume)
        self.step(self.param.max_iter - self.iter)
        every = self.param.snapshot
        if self.param.snapshot_after_train and not (every and self.iter % every == 0):
            self.snapshot()
        if self._stopped:
            self.log.info("Optimization stopped early.")
            return
        if self.param.display and self.iter % self.param.display == 0:
            self.net.forward()
            self._smooth(float(self.net.loss))
            self.log.info(f"Iteration {self.iter}, loss = {number(self.loss)}")
        if self._test_is_due():
            self.test_all()
        self.log.info("Optimization Done.")

    def step(self, iterations: int) -> None:
        """Train for so many iterations (fewer if a stop is requested)."""
        self._losses, self._start, self.loss = [], self.iter, 0.0
        stop = self.iter + iterations
        self._pace = Pace()
        try:
            while self.iter < stop and not self._stopped:
                self._iteration(stop)
        finally:
            self.log.end_progress()

    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Test every test network; the mean of each of its outputs."""
        return [] if self._stopped else [self.test(i) for i in range(len(self.test_nets))]

    def test(self, index: int = 0) -> dict[str, np.ndarray]:
        """Run test_iter[index] batches of one test network; returns the outputs' means."""
        self.log.info(f"Iteration {self.iter}, Testing net (#{index})", solvers_log.TEST)
        net, count = self.test_nets[index], self.param.test_iter[index]
        net.share_trained_layers_with(self.net)
        sums, loss = run_test(net, count, self._go_on)
        if self._stopped:
            self.log.info("Test interrupted.")
            return sums
        if self.param.test_compute_loss:
            self.log.info(f"Test loss: {number(loss)}", solvers_log.TEST)
        for line in output_lines(net, sums, "Test"):
            self.log.info(line, solvers_log.TEST)
        self._pace.skip()
        return sums

    # -- an iteration -----------------------------------------------------------------------------

    def _iteration(self, stop: int) -> None:
        self.net.clear_param_diffs()
        if self._test_is_due():
            self.test_all()
            if self._stopped:
                return
        for on_start, _ in self._callbacks:
            on_start()
        loss = 0.0
        for _ in range(self.param.iter_size):
            outputs = self.net.forward()
            self.net.backward()
            loss += float(self.net.loss)
        self._smooth(loss / self.param.iter_size)
        if self.param.display and self.iter % self.param.display == 0:
            self.log.info(f"Iteration {self.iter}{self._speed()}, loss = {number(self.loss)}")
            for line in output_lines(self.net, outputs, "Train"):
                self.log.info(line)
        for _, on_gradients_ready in self._callbacks:
            on_gradients_ready()
        self.apply_update()
        self.iter += 1
        self._pace.tick()
        images = self.param.iter_size * batch_of(self.net)
        self.log.progress(self._pace.line(self.iter, stop, self.loss, self.lr, images))
        self._after_iteration()

    def apply_update(self) -> None:
        """One step of every parameter, from the gradients that are in its diff."""
        param, rate = self.param, self.lr
        if param.display and self.iter % param.display == 0:
            self.log.info(f"Iteration {self.iter}, lr = {number(rate)}", solvers_log.RATE)
        space, blobs = self.net.space, self.net.learnable_params
        views = [blob.on(space) for blob in blobs]
        if param.clip_gradients >= 0:
            limit = param.clip_gradients
            norm, scale = solvers_rules.clip([view.diff for view in views], limit)
            if scale != 1:
                self.log.info(
                    f"Gradient clipping: scaling down gradients (L2 norm {number(norm)} > "
                    f"{number(limit)}) by scale factor {number(scale)}", solvers_log.RATE,
                )  # fmt: skip
        for i, view in enumerate(views):
            step = solvers_rules.Step(
                rate * self.net.params_lr[i], param.momentum, param.momentum2, param.rms_decay,
                param.delta, self.iter, space.xp,
            )  # fmt: skip
            solvers_rules.update(
                self.rule, view.data, view.diff, self.history[i :: len(blobs)], step,
                decay=param.weight_decay * self.net.params_weight_decay[i],
                regularization=param.regularization_type, scale=1.0 / param.iter_size,
            )  # fmt: skip
            view.wrote("data")
            view.wrote("diff")

    def _after_iteration(self) -> None:
        every = self.param.snapshot
        if every and self.iter % every == 0:
            self.snapshot()
        self._go_on()

    def _go_on(self) -> bool:
        """Do what was requested meanwhile; False after a stop."""
        action = self.requested()
        if action == SNAPSHOT:
            self.snapshot()
        self._stopped = self._stopped or action == STOP
        return not self._stopped

    def _test_is_due(self) -> bool:
        every = self.param.test_interval
        return bool(every and self.iter % every == 0 and self.test_nets) and (
            self.iter > 0 or self.param.test_initialization
        )

    def _smooth(self, loss: float) -> None:
        """The mean of the last average_loss losses."""
        self._losses = [*self._losses, loss][-self.param.average_loss :]
        self.loss = sum(self._losses) / len(self._losses)

    def _speed(self) -> str:
        seconds = self._pace.seconds
        return f" ({number(1 / seconds)} iter/s)" if seconds else ""

    # -- snapshots ------------------------------------------------------------------------------

    def snapshot(self) -> Path:
        """Write the weights, then the state; returns the state's path."""
        hdf5 = self.param.snapshot_format == self.param.HDF5
        name = f"{self.param.snapshot_prefix or 'snapshot'}_iter_{self.iter}"
        model, state = (f"{name}.{kind}" + (".h5" if hdf5 else "")
                        for kind in ("caffemodel", "solverstate"))  # fmt: skip
        kind = "HDF5" if hdf5 else "binary proto"
        source = solvers_log.SNAPSHOT
        self.log.info(f"Snapshotting to {kind} file {model}", source)
        snapshots.write_model(model, self.net, self.param.snapshot_diff)
        self.log.info(f"Snapshotting solver state to {kind} file {state}", source)
        ours = {
            "train": snapshots.net_state(self.net),
            "test": [snapshots.net_state(net) for net in self.test_nets],
        }
        step = self.policy.step(self.iter)
        history = [self.net.space.on_host(h) for h in self.history]
        snapshots.write_state(state, self.iter, model, step, history, ours)
        self._pace.skip()
        return Path(state)

    def restore(self, path: str | Path) -> None:
        """Go on from a .solverstate: its weights, histories, iteration, and data positions."""
        self.log.info(f"Restoring previous solver status from {path}")
        iteration, learned_net, history, ours = snapshots.read_state(path)
        shapes, expected = ([tuple(h.shape) for h in each] for each in (history, self.history))
        if shapes != expected:
            if len(shapes) != len(expected):
                got, wanted = f"{len(shapes)} histories", f"{len(expected)} as this solver keeps"
            else:
                i = next(i for i, shape in enumerate(shapes) if shape != expected[i])
                got, wanted = f"history {i} of shape {shapes[i]}", f"{expected[i]}"
            raise InvalidDescriptor(f"snapshot {path}", got, wanted)
        if learned_net:
            self.net.copy_trained_layers_from(str(_beside(learned_net, path)))
            for net in self.test_nets:
                net.share_trained_layers_with(self.net)
        for stored, mine in zip(history, self.history):
            values = np.empty(tuple(mine.shape), self.net.dtype)
            wire.copy_into(stored, values)
            self.net.space.upload(values, mine)
        self.iter = iteration
        if ours is None:
            self.log.warning(
                "the snapshot has no data positions: the data start from the beginning"
            )
            return
        snapshots.restore_net_state(self.net, ours["train"])
        for net, state in zip(self.test_nets, ours["test"]):
            snapshots.restore_net_state(net, state)


def _beside(name: str, other: str | Path) -> Path:
    """A file by its name, or, where the folder was moved, the one beside `other`."""
    return Path(name) if Path(name).exists() else Path(other).with_name(Path(name).name)


def run_test(
    net: Net, count: int, go_on: Callable[[], bool] = lambda: True
) -> tuple[dict[str, np.ndarray], float]:
    """The means of a network's outputs and of its loss over `count` batches."""
    sums: dict[str, np.ndarray] = {}
    loss, done = 0.0, 0
    for _ in range(count):
        if not go_on():
            break
        outputs = net.forward()
        loss += float(net.loss)
        for name, value in outputs.items():
            # In double, so that the mean of a long test is good to all digits printed.
            sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
        done += 1
    return {name: total / max(done, 1) for name, total in sums.items()}, loss / max(done, 1)


def output_lines(net: Net, outputs: dict[str, np.ndarray], phase: str) -> Sequence[str]:
    """`    Train net output #0: loss = 0.5 (* 1 = 0.5 loss)`, a line for each value."""
    lines = []
    for name, values in outputs.items():
        weight = net.loss_weights.get(name, 0.0)
        for value in np.ravel(values):
            share = f" (* {number(weight)} = {number(weight * value)} loss)" if weight else ""
            lines.append(f"    {phase} net output #{len(lines)}: {name} = {number(value)}{share}")
    return lines


def batch_of(net: Net) -> int:
    """The images of a forward pass: the first extent of the first blob."""
    shape = next(iter(net.blobs.values())).shape
    return int(shape[0]) if shape else 1
