"""A Caffe network on OpenCV, one forward pass for each line read: the other side of
compare_opencv.py, in a process of its own, since it needs an OpenCV older than 5.

    python opencv_forward.py deploy.prototxt net.caffemodel input.npy outputs.npz layer,layer,...

The first pass writes the outputs of the named layers; later ones only the last layer's. Each prints
its milliseconds.
"""

from __future__ import annotations

import sys
import time

import cv2
import numpy as np


def main(prototxt: str, caffemodel: str, given: str, out: str, names: str) -> None:
    layers = names.split(",")
    image = np.load(given)
    net = cv2.dnn.readNetFromCaffe(prototxt, caffemodel)
    net.setInput(image)
    outputs = net.forward(layers)
    np.savez(out, **dict(zip(layers, outputs)))
    # Another network: one that has handed out inner layers has not fused them.
    net = cv2.dnn.readNetFromCaffe(prototxt, caffemodel)
    print("ready", cv2.__version__, cv2.getNumThreads(), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        net.setInput(image)
        net.forward(layers[-1])
        print(1e3 * (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
