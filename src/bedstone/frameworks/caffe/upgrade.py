"""Networks of any age in today's form: V0 and V1 layers, `input` fields, old data transforms."""

from __future__ import annotations

from typing import Any

from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.layer import wrong
from bedstone.spec.errors import InvalidDescriptor

# V1's enumeration of layer types -> names of today. The rest: words joined in capitals.
V1_TYPES = {
    "ABSVAL": "AbsVal", "ARGMAX": "ArgMax", "BNLL": "BNLL", "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output", "LRN": "LRN", "MVN": "MVN", "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss", "TANH": "TanH",
}  # fmt: skip
# V0's types -> (today's, the message of their parameters).
V0_TYPES = {
    "accuracy": ("Accuracy", ""), "bnll": ("BNLL", ""), "concat": ("Concat", "concat_param"),
    "conv": ("Convolution", "convolution_param"), "data": ("Data", "data_param"),
    "dropout": ("Dropout", "dropout_param"), "euclidean_loss": ("EuclideanLoss", ""),
    "flatten": ("Flatten", ""), "hdf5_data": ("HDF5Data", "hdf5_data_param"),
    "hdf5_output": ("HDF5Output", "hdf5_output_param"), "im2col": ("Im2col", "convolution_param"),
    "images": ("ImageData", "image_data_param"),
    "innerproduct": ("InnerProduct", "inner_product_param"), "lrn": ("LRN", "lrn_param"),
    "infogain_loss": ("InfogainLoss", "infogain_loss_param"),
    "multinomial_logistic_loss": ("MultinomialLogisticLoss", ""),
    "pool": ("Pooling", "pooling_param"), "relu": ("ReLU", ""), "sigmoid": ("Sigmoid", ""),
    "softmax": ("Softmax", ""), "softmax_loss": ("SoftmaxWithLoss", ""), "split": ("Split", ""),
    "tanh": ("TanH", ""), "window_data": ("WindowData", "window_data_param"),
}  # fmt: skip
# V0's field -> the field of the parameter message that takes it (the first that exists).
V0_FIELDS = {
    "num_output": ("num_output",), "biasterm": ("bias_term",), "weight_filler": ("weight_filler",),
    "bias_filler": ("bias_filler",), "pad": ("pad",), "kernelsize": ("kernel_size",),
    "group": ("group",), "stride": ("stride",), "pool": ("pool",),
    "dropout_ratio": ("dropout_ratio",), "local_size": ("local_size",), "alpha": ("alpha",),
    "beta": ("beta",), "k": ("k",), "source": ("source",), "batchsize": ("batch_size",),
    "rand_skip": ("rand_skip",), "new_height": ("new_height",), "new_width": ("new_width",),
    "shuffle_images": ("shuffle",), "concat_dim": ("concat_dim",),
    "det_fg_threshold": ("fg_threshold",), "det_bg_threshold": ("bg_threshold",),
    "det_fg_fraction": ("fg_fraction",), "det_context_pad": ("context_pad",),
    "det_crop_mode": ("crop_mode",),
}  # fmt: skip
V0_TRANSFORM = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size",
                "mirror": "mirror"}  # fmt: skip
TRANSFORM_FIELDS = ("scale", "mean_file", "crop_size", "mirror")
DATA_PARAMS = ("data_param", "image_data_param", "window_data_param")


def upgrade_net(net: Any, name: str = "network") -> Any:
    """The NetParameter in today's form: layers in `layer`, inputs as Input layers. Raises
    InvalidDescriptor for layers that have no form of today."""
    if net.layers:
        if net.layer:
            raise InvalidDescriptor(name, "`layers` and `layer`", "layers of one form only")
        for old in net.layers:
            new = net.layer.add()
            if old.HasField("layer"):
                _from_v0(old, new)
            else:
                _from_v1(old, new)
        del net.layers[:]
        _merge_padding(net)
    for layer in net.layer:
        _move_transform(layer)
    if net.input:
        _inputs(net, name)
    return net


def _from_v1(old: Any, new: Any) -> None:
    kind = schema.enum_name(old, "type")
    new.name, new.bedstone_place = old.name, old.bedstone_place
    new.type = V1_TYPES.get(kind, "".join(word.capitalize() for word in kind.split("_")))
    for field in ("bottom", "top", "loss_weight", "blobs", "include", "exclude"):
        getattr(new, field).extend(getattr(old, field))
    for field, value in old.ListFields():
        if field.name.endswith("_param"):
            getattr(new, field.name).CopyFrom(value)
    _rates(old, new)
    for i, shared in enumerate(old.param):
        _spec(new, i).name = shared
    for i, mode in enumerate(old.blob_share_mode):
        _spec(new, i).share_mode = mode


def _spec(layer: Any, number: int) -> Any:
    while len(layer.param) <= number:
        layer.param.add()
    return layer.param[number]


def _rates(old: Any, new: Any) -> None:
    for i, rate in enumerate(old.blobs_lr):
        _spec(new, i).lr_mult = rate
    for i, decay in enumerate(old.weight_decay):
        _spec(new, i).decay_mult = decay


def _from_v0(connection: Any, new: Any) -> None:
    old = connection.layer
    new.name, new.bedstone_place = old.name, connection.bedstone_place
    if old.type not in V0_TYPES and old.type != "padding":
        raise wrong(new, "type", old.type, "a layer type of V0")
    new.type, message = V0_TYPES.get(old.type, ("Padding", "convolution_param"))
    new.bottom.extend(connection.bottom)
    new.top.extend(connection.top)
    new.blobs.extend(old.blobs)
    _rates(old, new)
    for field, value in old.ListFields():
        if field.name in V0_TRANSFORM:
            setattr(new.transform_param, V0_TRANSFORM[field.name], value)
        elif field.name in V0_FIELDS and message:
            _set(getattr(new, message), V0_FIELDS[field.name][0], value, new)
        elif field.name == "hdf5_output_param":
            new.hdf5_output_param.CopyFrom(value)


def _set(message: Any, field: str, value: Any, layer: Any) -> None:
    descriptor = message.DESCRIPTOR.fields_by_name.get(field)
    if descriptor is None:
        raise wrong(layer, field, value, f"no such field in {message.DESCRIPTOR.name}")
    current = getattr(message, field)
    if hasattr(current, "CopyFrom"):
        current.CopyFrom(value)
    elif hasattr(current, "append"):
        current.append(value)
    else:
        setattr(message, field, value)


def _merge_padding(net: Any) -> None:
    """V0's padding layers: their pad goes to the layers that read them."""
    pads = {layer.top[0]: layer for layer in net.layer if layer.type == "Padding"}
    if not pads:
        return
    kept = [layer for layer in net.layer if layer.type != "Padding"]
    for layer in kept:
        for i, bottom in enumerate(layer.bottom):
            if bottom in pads:
                padding = pads[bottom]
                pad = padding.convolution_param.pad[0] if padding.convolution_param.pad else 0
                if layer.type == "Convolution":
                    layer.convolution_param.pad[:] = [pad]
                elif layer.type == "Pooling":
                    layer.pooling_param.pad = pad
                layer.bottom[i] = padding.bottom[0]
    copies = [type(layer)() for layer in kept]
    for copy, layer in zip(copies, kept):
        copy.CopyFrom(layer)
    del net.layer[:]
    net.layer.extend(copies)


def _move_transform(layer: Any) -> None:
    """Transform fields of a data parameter go to transform_param."""
    for name in DATA_PARAMS:
        if not layer.HasField(name):
            continue
        param = getattr(layer, name)
        for field in TRANSFORM_FIELDS:
            if param.HasField(field):
                setattr(layer.transform_param, field, getattr(param, field))
                param.ClearField(field)


def _inputs(net: Any, name: str) -> None:
    """The fields input and input_shape (or input_dim, four each) become one Input layer."""
    count = len(net.input)
    if len(net.input_shape) not in (0, count) or (
        net.input_dim and len(net.input_dim) != 4 * count
    ):
        shapes = f"{len(net.input_shape)} input_shape, {len(net.input_dim)} input_dim"
        raise InvalidDescriptor(f"{name}: inputs", shapes, f"a shape for each of {count} inputs")
    layer = schema.LayerParameter(name="input", type="Input", top=list(net.input))
    for i in range(count):
        dims = net.input_shape[i].dim if net.input_shape else net.input_dim[4 * i : 4 * i + 4]
        layer.input_param.shape.add().dim.extend(dims)
    rest = [type(old)() for old in net.layer]
    for copy, old in zip(rest, net.layer):
        copy.CopyFrom(old)
    for field in ("layer", "input", "input_shape", "input_dim"):
        net.ClearField(field)
    net.layer.extend([layer, *rest])
