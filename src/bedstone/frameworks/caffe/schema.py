"""Caffe's protobuf messages as Python classes, made from `schema_table` at import.

`schema.NetParameter()`, `schema.SolverParameter()`, ... are ordinary protobuf messages; they live
in a descriptor pool of their own, so that another copy of the schema in the same process (OpenCV's,
Caffe's own) does no harm. Enumeration values: `schema.TRAIN`, `schema.TEST`; `enum_name` names the
value of a field.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from bedstone.frameworks.caffe.schema_table import ENUMS, MESSAGES

PACKAGE = "caffe"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
_FIELD = re.compile(r"(\w+) (\d+) (\w+)(\*packed|\*|!)?(?:=(.*))?")


def _add_enum(enum: Any, words: list[str]) -> None:
    enum.name = words[0]
    for word in words[1:]:
        name, _, value = word.partition("=")
        enum.value.add(name=name, number=int(value))


def _add_field(message: Any, text: str, file_enums: set[str]) -> None:
    match = _FIELD.fullmatch(text)
    if match is None:
        raise ValueError(f"schema table, message {message.name}: cannot read field {text!r}")
    name, number, kind, mark, default = match.groups()
    field = message.field.add(name=name, number=int(number))
    repeated = (mark or "").startswith("*")
    field.label = (
        _Field.LABEL_REPEATED if repeated
        else _Field.LABEL_REQUIRED if mark == "!" else _Field.LABEL_OPTIONAL
    )  # fmt: skip
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    elif kind in file_enums:
        field.type, field.type_name = _Field.TYPE_ENUM, f".{PACKAGE}.{kind}"
    elif any(enum.name == kind for enum in message.enum_type):
        field.type, field.type_name = _Field.TYPE_ENUM, f".{PACKAGE}.{message.name}.{kind}"
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if mark == "*packed":
        field.options.packed = True
    if default is not None:
        field.default_value = default


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="bedstone_caffe.proto", package=PACKAGE, syntax="proto2"
    )
    for line in ENUMS.strip().splitlines():
        _add_enum(file.enum_type.add(), line.split())
    file_enums = {enum.name for enum in file.enum_type}
    for block in re.split(r"\n(?=\w)", MESSAGES.strip()):
        name, _, body = block.partition(":")
        message = file.message_type.add(name=name)
        for part in body.split(";"):
            words = part.split()
            if words and words[0] == "enum":
                _add_enum(message.enum_type.add(), words[1:])
            elif words:
                _add_field(message, " ".join(words), file_enums)
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
_descriptor = _pool.FindFileByName("bedstone_caffe.proto")
CLASSES: dict[str, Any] = {
    name: message_factory.GetMessageClass(message)
    for name, message in _descriptor.message_types_by_name.items()
}
TRAIN, TEST = (_descriptor.enum_types_by_name["Phase"].values_by_name[p].number
               for p in ("TRAIN", "TEST"))  # fmt: skip


def __getattr__(name: str) -> Any:
    """The message class of that name: schema.NetParameter, schema.BlobProto, ..."""
    try:
        return CLASSES[name]
    except KeyError:
        raise AttributeError(f"Caffe's schema has no message {name!r}") from None


def enum_name(message: Any, field: str) -> str:
    """The name of an enumeration field's value: enum_name(param.pooling_param, "pool") -> "MAX"."""
    descriptor = message.DESCRIPTOR.fields_by_name[field].enum_type
    return descriptor.values_by_number[getattr(message, field)].name  # type: ignore[no-any-return]
