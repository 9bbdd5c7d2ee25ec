"""Layers that arrange, combine and reduce blobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.registry import register


@register("Split")
class Split(Layer):
    """As many views of the bottom as there are tops; their gradients add up."""

    tops = (1, None)
    host_only = None
    shows_bottom = True

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob in top:
            blob.reshape(*bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob in top:
            blob.share_data(bottom[0])

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        self.xp.copyto(bottom[0].diff, top[0].diff)
        for blob in top[1:]:
            bottom[0].diff[...] += blob.diff


class Viewing(Layer):
    """A top that shows the bottom's memory in another shape."""

    host_only = None
    shows_bottom = True

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].share_data(bottom[0])

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff.reshape(bottom[0].shape)


@register("Flatten")
class Flatten(Viewing):
    """The axes from `axis` to `end_axis` made one."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape, param = bottom[0].shape, self.param.flatten_param
        first = self.axis_of(param.axis, len(shape))
        last = self.axis_of(param.end_axis, len(shape), "end_axis")
        if last < first:
            raise self.wrong("end_axis", param.end_axis, f"axis {first} or one behind it")
        top[0].reshape(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


@register("Reshape")
class Reshape(Viewing):
    """Another shape for some axes: 0 keeps the bottom's extent, -1 is what is left over."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape, param = bottom[0].shape, self.param.reshape_param
        rank = len(shape)
        start = param.axis if param.axis >= 0 else rank + param.axis + 1
        if not 0 <= start <= rank:
            raise self.wrong("axis", param.axis, f"{-rank - 1} to {rank}")
        end = rank if param.num_axes == -1 else start + param.num_axes
        if param.num_axes < -1 or end > rank:
            raise self.wrong("num_axes", param.num_axes, f"-1 to {rank - start}")
        dims = list(param.shape.dim)
        for i, dim in enumerate(dims):
            if dim < -1:
                raise self.wrong("dim", dim, "0 (keep), -1 (what is left) or an extent")
            if dim == 0:
                if start + i >= rank:
                    raise self.wrong("dim", dims, f"a 0 for axes below {rank} only")
                dims[i] = shape[start + i]
        if dims.count(-1) > 1:
            raise self.wrong("dim", dims, "at most one -1")
        inner = math.prod(shape[start:end])
        if -1 in dims:
            known = math.prod(d for d in dims if d != -1)
            if not known or inner % known:
                raise self.wrong("dim", dims, f"extents that divide {inner}")
            dims[dims.index(-1)] = inner // known
        found = (*shape[:start], *dims, *shape[end:])
        if math.prod(found) != bottom[0].count:
            raise self.wrong("dim", dims, f"{inner} elements, as the bottom has there")
        top[0].reshape(*found)


@register("Concat")
class Concat(Layer):
    """The bottoms one after another along an axis."""

    bottoms = (1, None)
    host_only = None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.concat_param
        axis = param.concat_dim if param.HasField("concat_dim") else param.axis
        self.axis = self.axis_of(axis, len(bottom[0].shape))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = list(bottom[0].shape)
        for blob in bottom[1:]:
            other = list(blob.shape)
            if len(other) != len(shape) or any(
                a != b for i, (a, b) in enumerate(zip(shape, other)) if i != self.axis
            ):
                expected = f"{tuple(shape)} but for axis {self.axis}"
                raise self.wrong("bottom's shape", blob.shape, expected)
        shape[self.axis] = sum(blob.shape[self.axis] for blob in bottom)
        top[0].reshape(*shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.xp.concatenate([blob.data for blob in bottom], self.axis, out=top[0].data)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        ends = np.cumsum([blob.shape[self.axis] for blob in bottom])[:-1]
        parts = self.xp.split(top[0].diff, ends, self.axis)
        for part, down, blob in zip(parts, propagate_down, bottom):
            if down:
                blob.diff[...] = part


@register("Slice")
class Slice(Layer):
    """The bottom cut along an axis, at `slice_point` or into equal parts."""

    tops = (1, None)
    host_only = None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.slice_param
        axis = param.slice_dim if param.HasField("slice_dim") else param.axis
        self.axis = self.axis_of(axis, len(bottom[0].shape))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape, points = list(bottom[0].shape), list(self.param.slice_param.slice_point)
        size, parts = shape[self.axis], len(top)
        if not points:
            if size % parts:
                raise self.wrong("bottom's shape", bottom[0].shape, f"{parts} equal parts")
            points = [size // parts * i for i in range(1, parts)]
        elif len(points) != parts - 1:
            raise self.wrong("slice_point", points, f"{parts - 1} of them for {parts} tops")
        edges = [0, *points, size]
        if any(a >= b for a, b in zip(edges, edges[1:])):
            raise self.wrong("slice_point", points, f"growing, above 0 and below {size}")
        self._points = points
        for blob, a, b in zip(top, edges, edges[1:]):
            shape[self.axis] = b - a
            blob.reshape(*shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob, part in zip(top, self.xp.split(bottom[0].data, self._points, self.axis)):
            blob.data[...] = part

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if propagate_down[0]:
            self.xp.concatenate([blob.diff for blob in top], self.axis, out=bottom[0].diff)


@register("Eltwise")
class Eltwise(Layer):
    """Product, weighted sum or maximum of the bottoms."""

    bottoms = (2, None)
    host_only = None
    in_place = True

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.eltwise_param
        self.operation = schema.enum_name(param, "operation")
        coefficients = list(param.coeff)
        if coefficients and (self.operation != "SUM" or len(coefficients) != len(bottom)):
            expected = f"none, or with SUM one for each of {len(bottom)} bottoms"
            raise self.wrong("coeff", coefficients, expected)
        self.coefficients = coefficients or [1.0] * len(bottom)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.same_shape(bottom)
        if top[0] is not bottom[0]:
            top[0].reshape(*bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        y, arrays = top[0].data, [blob.data for blob in bottom]
        if self.operation == "SUM":
            total = arrays[0] * self.coefficients[0]
            for factor, array in zip(self.coefficients[1:], arrays[1:]):
                total += array if factor == 1 else array * factor
            y[...] = total
        elif self.operation == "PROD":
            if top[0] is bottom[0]:
                self._kept = self.xp.copy(arrays[0])
            y[...] = arrays[0]
            for array in arrays[1:]:
                y *= array
        else:
            stacked = self.xp.stack(arrays)
            self._largest = stacked.argmax(0)
            y[...] = self.xp.amax(stacked, 0)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        dy = self.xp.copy(top[0].diff) if top[0] is bottom[0] else top[0].diff
        for i, (down, blob) in enumerate(zip(propagate_down, bottom)):
            if not down:
                continue
            if self.operation == "SUM":
                self.xp.multiply(dy, self.coefficients[i], out=blob.diff)
            elif self.operation == "PROD":
                others = [
                    self._kept if other is top[0] else other.data
                    for j, other in enumerate(bottom) if j != i
                ]  # fmt: skip
                blob.diff[...] = dy
                for array in others:
                    blob.diff[...] *= array
            else:
                blob.diff[...] = self.xp.where(self._largest == i, dy, self.dtype.type(0))


@register("Crop")
class Crop(Layer):
    """The first bottom cut to the second's extents from `axis` on, at offsets."""

    bottoms = 2
    host_only = None
    no_gradient = (1,)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, shape, wanted = self.param.crop_param, bottom[0].shape, bottom[1].shape
        if len(shape) != len(wanted):
            raise self.wrong("second bottom's shape", wanted, f"{len(shape)} extents")
        axis = self.axis_of(param.axis, len(shape))
        offsets = list(param.offset) or [0]
        if len(offsets) not in (1, len(shape) - axis):
            raise self.wrong("offset", offsets, f"one, or {len(shape) - axis}")
        if len(offsets) == 1:
            offsets *= len(shape) - axis
        found, where = list(shape), [slice(None)] * len(shape)
        for a, offset in zip(range(axis, len(shape)), offsets):
            if offset + wanted[a] > shape[a]:
                raise self.wrong("offset", offset, f"at most {shape[a] - wanted[a]} on axis {a}")
            found[a], where[a] = wanted[a], slice(offset, offset + wanted[a])
        self._where = tuple(where)
        top[0].reshape(*found)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].data[...] = bottom[0].data[self._where]

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if propagate_down[0]:
            bottom[0].diff[...] = 0
            bottom[0].diff[self._where] = top[0].diff


@register("Reduction")
class Reduction(Layer):
    """coeff times the sum, sum of magnitudes, sum of squares or mean of all from `axis` on."""

    host_only = None

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, shape = self.param.reduction_param, bottom[0].shape
        self.operation = schema.enum_name(param, "operation")
        axis = self.axis_of(param.axis, len(shape)) if shape else 0
        self._rows = (math.prod(shape[:axis]), math.prod(shape[axis:]))
        mean = self.operation == "MEAN"
        self._factor = param.coeff / (self._rows[1] if mean else 1)
        top[0].reshape(*shape[:axis])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x = bottom[0].data.reshape(self._rows)
        xp = self.xp
        terms = {"ASUM": xp.abs, "SUMSQ": xp.square}.get(self.operation, xp.asarray)(x)
        top[0].data[...] = (terms.sum(1) * self._factor).reshape(top[0].shape)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        x = bottom[0].data.reshape(self._rows)
        dy = top[0].diff.reshape(-1, 1) * self._factor
        dx = bottom[0].diff.reshape(self._rows)
        dx[...] = dy
        if self.operation == "ASUM":
            dx *= self.xp.sign(x)
        elif self.operation == "SUMSQ":
            dx *= 2 * x


@register("ArgMax")
class ArgMax(Layer):
    """The indices of the top_k largest elements (of an axis, or of each image), or with
    out_max_val the elements too; no gradient."""

    no_gradient = (0,)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, shape = self.param.argmax_param, bottom[0].shape
        self.axis = self.axis_of(param.axis, len(shape)) if param.HasField("axis") else None
        classes = shape[self.axis] if self.axis is not None else math.prod(shape[1:])
        if not 1 <= param.top_k <= classes:
            raise self.wrong("top_k", param.top_k, f"1 to {classes}")
        if self.axis is not None:
            found = list(shape)
            found[self.axis] = param.top_k
        else:
            found = [shape[0], 2 if param.out_max_val else 1, param.top_k]
        top[0].reshape(*found)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, x = self.param.argmax_param, bottom[0].data
        axis = 1 if self.axis is None else self.axis
        if self.axis is None:
            x = x.reshape(x.shape[0], -1)
        order = np.argsort(-x, axis, kind="stable")
        best = np.take(order, np.arange(param.top_k), axis)
        values = np.take_along_axis(x, best, axis)
        if self.axis is not None:
            top[0].data[...] = values if param.out_max_val else best
        else:
            top[0].data[:, 0] = best
            if param.out_max_val:
                top[0].data[:, 1] = values


@register("Tile")
class Tile(Layer):
    """The bottom repeated along an axis."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, shape = self.param.tile_param, list(bottom[0].shape)
        self.axis = self.axis_of(param.axis, len(shape))
        if param.tiles < 1:
            raise self.wrong("tiles", param.tiles, "1 or more")
        shape[self.axis] *= param.tiles
        top[0].reshape(*shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        tiles = self.param.tile_param.tiles
        np.concatenate([bottom[0].data] * tiles, self.axis, out=top[0].data)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if propagate_down[0]:
            parts = np.split(top[0].diff, self.param.tile_param.tiles, self.axis)
            bottom[0].diff[...] = np.sum(parts, 0)


@register("Silence")
class Silence(Layer):
    """Reads blobs that nobody else does; their gradients are 0."""

    bottoms = (1, None)
    tops = 0
    host_only = None

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """There is no top."""

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """There is nothing to compute."""

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        for down, blob in zip(propagate_down, bottom):
            if down:
                blob.diff[...] = 0
