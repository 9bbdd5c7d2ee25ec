"""The rooms of the house: who imports whom, how long a file may be, what no file contains."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bedstone"
FILES = sorted(SOURCE.rglob("*.py"))
LINES_MAX = 600

# Room -> what it may import of bedstone, besides itself. spec <- arrays <- plan <- backends.
ALLOWED = {
    "spec": (),
    "version": (),
    "arrays": ("spec",),
    "plan": ("spec", "arrays", "version"),
    "functional": ("spec", "arrays", "plan"),
    "testing": ("spec", "arrays", "plan"),
    "backends.reference": ("spec", "plan"),
    "backends.cpu": ("spec", "plan", "version"),
    "backends.triton": ("spec", "plan", "version"),
    "backends.gluon": ("spec", "plan", "version", "backends.triton"),
    # The outer rooms use what is public: the package's own names, the problems and the arrays.
    "frameworks": ("", "spec", "arrays", "functional", "version"),
    # (The C library's builder asks the registry for the backend that emits it.)
    "compat": ("", "spec", "arrays", "functional", "version", "plan"),
    # Tools that measure, explain and test look into planning as well.
    "bench": ("", "spec", "arrays", "functional", "version", "plan", "testing"),
    "demo": ("", "spec", "arrays", "functional", "version", "bench", "frameworks"),
    "__main__": ("cli",),
    "cli": ("", "spec", "arrays", "functional", "version", "plan", "testing", "bench",
            "frameworks", "demo", "compat"),
}  # fmt: skip
# What takes long to import, or may not be there: never imported by these rooms' modules at once.
HEAVY = {"torch", "jax", "paddle", "triton", "llvmlite", "onnx", "onnxruntime", "scipy", "numba"}
LIGHT_ROOMS = ("", "spec", "plan", "arrays", "functional", "version", "testing", "cli")


def module_of(path: Path) -> str:
    """ "plan.handle", "" for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module belongs to: its first name, two for a backend."""
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "backends" else parts[:1])


def imports(tree: ast.AST, module: str, package: bool):
    """Absolute names of everything that a module imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["bedstone", *filter(None, module.split("."))]
                here = here[: len(here) - node.level + (1 if package else 0)]
                base = ".".join([*here, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                path = SOURCE.joinpath(*inner.split(".")[1:])
                known = path.is_dir() or path.with_suffix(".py").exists()
                yield node, inner if base.startswith("bedstone") and known else base


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def identify(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_arrows(path):
    module = module_of(path)
    room = room_of(module)
    if room in ("", "backends"):  # the package's door, and the folder of the backends
        return
    assert room in ALLOWED, f"{room}: a new room needs a row in ALLOWED"
    for node, name in imports(parsed(path), module, path.name == "__init__.py"):
        if name.split(".")[0] != "bedstone":
            continue
        target = room_of(name.partition(".")[2])
        assert target == room or target in ALLOWED[room], (
            f"{identify(path)}:{node.lineno} imports {name}; {room} may import {ALLOWED[room]}"
        )


def test_only_the_registry_finds_backends():
    for path in FILES:
        if room_of(module_of(path)).startswith("backends"):
            continue
        names = [name for _, name in imports(parsed(path), module_of(path), True)]
        assert not [n for n in names if n.startswith("bedstone.backends.")], identify(path)


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_light_rooms_import_nothing_heavy(path):
    if room_of(module_of(path)) not in LIGHT_ROOMS:
        return
    for statement in parsed(path).body:  # (a function may import: it is called when needed)
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        for node, name in imports(statement, module_of(path), path.name == "__init__.py"):
            assert name.split(".")[0] not in HEAVY, f"{identify(path)}:{node.lineno} {name}"


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_style(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_MAX
    assert path.stem not in ("utils", "util", "helpers", "misc", "common")
    assert path.parent.name not in ("old", "legacy")
    tree = parsed(path)
    assert ast.get_docstring(tree), "a module opens by saying what it computes"
    asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not asserts, f"assert in lines {asserts}: raise InvalidDescriptor instead"


def test_the_rules_can_fail(tmp_path):
    tree = ast.parse("from bedstone.backends.cpu import builder\nfrom ..plan import handle")
    found = [name for _, name in imports(tree, "spec.tensor", False)]
    assert found == ["bedstone.backends.cpu.builder", "bedstone.plan.handle"]
    assert room_of("backends.cpu.builder") == "backends.cpu" not in ALLOWED["spec"]
    assert room_of(module_of(SOURCE / "__init__.py")) == ""
