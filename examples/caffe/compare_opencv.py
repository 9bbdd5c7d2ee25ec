"""Forward passes of the networks here, on bedstone and on OpenCV's own reader of Caffe networks.

    pip install --target .venv-opencv --no-deps 'opencv-python-headless<5'
    python examples/caffe/compare_opencv.py --iterations 7

Both read the same .prototxt, .caffemodel (random weights) and input; every layer's output is
compared, and the two take turns at passes for the times. OpenCV 5 reads no Caffe networks, so an
older one lies in a folder of its own (`--opencv`) and runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bedstone.frameworks.caffe import Net
from bedstone.frameworks.caffe.snapshots import write_model

HERE = Path(__file__).parent
NETWORKS = {
    "caffenet": "caffenet/deploy.prototxt",
    "alexnet": "alexnet/deploy.prototxt",
    "googlenet": "googlenet/deploy.prototxt",
    "lenet": "lenet_digits/deploy.prototxt",
    "cifar10_quick": "cifar10/quick_deploy.prototxt",
    "cifar10_full": "cifar10/full_deploy.prototxt",
}
# Threads of the side that has just run spin for some milliseconds.
SETTLE = 0.03


@dataclass
class Comparison:
    """One network: differences of the output and, relative to its largest element, of the layer
    that differs most; medians of the passes' milliseconds."""

    network: str
    batch: int
    opencv: str
    output_error: float
    layer_error: float
    worst_layer: str
    layers: int
    bedstone_ms: float
    opencv_ms: float


def random_weights(net: Net, rng: np.random.Generator) -> None:
    """Weights with which signals neither fade nor grow: of variance 2 / inputs, as by He et al."""
    for blob in net.learnable_params:
        spread = 0.1 if blob.data.ndim < 2 else math.sqrt(2 / math.prod(blob.shape[1:]))
        blob.data[...] = rng.standard_normal(blob.shape) * spread


def last_layers(net: Net) -> dict[str, str]:
    """The layer that gives each blob its last values, by the name it has in the file."""
    writers = {}
    for layer in net.layers:
        if layer.type not in ("Input", "Split"):
            writers |= dict.fromkeys(layer.param.top, layer.name)
    return writers


def compare(network: str, opencv: str | Path, iterations: int = 0, seed: int = 0) -> Comparison:
    """Run one of NETWORKS on both sides. Times are nan without iterations."""
    prototxt, rng = HERE / NETWORKS[network], np.random.default_rng(seed)
    net = Net(prototxt, "TEST")
    random_weights(net, rng)
    (name,) = net.inputs
    image = rng.standard_normal(net.blobs[name].shape).astype(np.float32)
    net.forward(**{name: image})
    writers = last_layers(net)
    with tempfile.TemporaryDirectory() as folder:
        model, given, out = (os.path.join(folder, f) for f in ("m.caffemodel", "x.npy", "y.npz"))
        write_model(model, net)
        np.save(given, image)
        script = str(HERE / "opencv_forward.py")
        files = [str(prototxt), model, given, out]
        command = [sys.executable, script, *files, ",".join(writers.values())]
        environment = {**os.environ, "PYTHONPATH": str(opencv)}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE) as process:  # fmt: skip
            words = process.stdout.readline().split()
            if words[:1] != ["ready"]:
                raise SystemExit(f"{network}: OpenCV's side failed (its message is above)")
            errors = {}
            with np.load(out) as theirs:
                for blob, layer in writers.items():
                    ours, other = net.blobs[blob].data, theirs[layer]
                    errors[layer] = float(np.abs(ours - other.reshape(ours.shape)).max())
                    errors[layer] /= float(np.abs(ours).max())
                last, layer = list(writers.items())[-1]
                output = np.abs(net.blobs[last].data - theirs[layer].reshape(net.blobs[last].shape))
            sides = _times(net, process, iterations)
    worst = max(errors, key=errors.__getitem__)
    return Comparison(network, image.shape[0], words[1], float(output.max()), errors[worst], worst,
                      len(errors), *sides)  # fmt: skip


def _times(net: Net, process: subprocess.Popen, iterations: int) -> tuple[float, float]:
    """Medians of both sides' passes, in turns; a first turn does not count."""
    ours, theirs = [], []
    for i in range(iterations + 1 if iterations else 0):
        time.sleep(SETTLE)
        start = time.perf_counter()
        net.forward()
        taken = 1e3 * (time.perf_counter() - start)
        time.sleep(SETTLE)
        process.stdin.write("forward\n")
        process.stdin.flush()
        other = float(process.stdout.readline())
        if i:
            ours.append(taken)
            theirs.append(other)
    if not iterations:
        return math.nan, math.nan
    return statistics.median(ours), statistics.median(theirs)


def table(found: list[Comparison]) -> str:
    """The comparisons as a table in Markdown."""
    lines = ["| network | batch | largest difference of the output | of a layer, relative | "
             "OpenCV ms | bedstone ms | ratio |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for c in found:
        lines.append(
            f"| {c.network} | {c.batch} | {c.output_error:.1e} | {c.layer_error:.1e} "
            f"({c.worst_layer}) | {c.opencv_ms:.1f} | {c.bedstone_ms:.1f} | "
            f"{c.opencv_ms / c.bedstone_ms:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)} (default all)")
    parser.add_argument("--opencv", default=str(HERE.parents[1] / ".venv-opencv"), metavar="DIR",
                        help="the folder that holds OpenCV's package")  # fmt: skip
    parser.add_argument("--iterations", type=int, default=7, metavar="N", help="(default 7)")
    parser.add_argument("--json", metavar="F", help="write the measurement")
    args = parser.parse_args()
    unknown = set(args.networks) - set(NETWORKS)
    if unknown:
        parser.error(f"networks: got {', '.join(unknown)}; expected some of {', '.join(NETWORKS)}")
    if args.iterations < 1:
        parser.error(f"--iterations: got {args.iterations}; expected 1 or more")
    if not (Path(args.opencv) / "cv2").is_dir():
        parser.error(f"--opencv: got {args.opencv}; expected a folder with cv2 in it, by pip "
                     "install --target")  # fmt: skip
    found = []
    for network in args.networks or NETWORKS:
        found.append(compare(network, args.opencv, args.iterations))
        print(table(found[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(found)}")
    if args.json:
        content = [asdict(each) for each in found]
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
