import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax

ROOT = Path(__file__).parent.parent
MAX_FUNCTION, MAX_MODULE = 60, 450

# Modules of dflash_jax that each may import; a folder stands for all in it.
ALLOWED = {
    "array_typing": set(),
    "config": {"array_typing", "config"},
    "cache": {"array_typing"},
    "ops": {"array_typing", "config", "ops"},
    "models": {"array_typing", "config", "cache", "ops", "models", "sampling", "sharding"},
    "acceptance": {"array_typing", "sampling"},
    "sampling": {"array_typing", "sharding"},
    "decode": {"array_typing", "cache", "acceptance", "sampling"},
    "checkpoint": {"array_typing", "config", "cache", "models", "checkpoint"},
    "pair": {"array_typing", "config", "checkpoint", "sharding"},
    "lookup": {"array_typing", "cache", "sampling"},
    "adapters": {"array_typing", "config", "cache", "decode", "lookup", "sampling", "models", "pair", "sharding"},
    "states": {"cache", "decode", "lookup", "models", "pair", "sampling", "sharding"},
    "jobs": {"adapters", "decode", "pair", "sampling", "states"},
    "generation": {"decode", "jobs", "pair", "sampling"},
    "bench": {"adapters", "array_typing", "config", "cache", "decode", "sampling", "models", "pair", "generation", "states"},
    "text": set(),
    "command": set(),
    "cli": {"bench", "checkpoint", "cli", "command", "decode", "generation", "pair", "sampling", "text"},
    "sharding": {"array_typing", "config", "cache"},
    "__init__": {"pair", "generation", "sampling", "text", "config"},
}  # fmt: skip
SLOW_OR_OPTIONAL = {"torch", "transformers", "orbax", "gguf", "huggingface_hub", "tokenizers"}


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """(module, whether it is imported when the file is) of every import in the file."""
    tree = ast.parse(path.read_text())
    inner = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} has a relative import"
            # `from dflash_jax import pair` imports dflash_jax.pair.
            yield from ((f"{node.module}.{alias.name}", node not in inner) for alias in node.names)


def under(module, package):
    return module == package or module.startswith(package + ".")


def part_of(module):
    """The module or folder of dflash_jax that an import names, or None."""
    parts = module.split(".")
    if parts[0] != "dflash_jax" or len(parts) < 2:
        return None
    exists = [ROOT / "dflash_jax" / parts[1], ROOT / "dflash_jax" / f"{parts[1]}.py"]
    return parts[1] if any(path.exists() for path in exists) else "__init__"


@pytest.mark.parametrize("path", sources("dflash_jax"), ids=name_of)
def test_imports_go_one_way(path):
    inside = path.relative_to(ROOT / "dflash_jax")
    owner = inside.parts[0].removesuffix(".py")
    found = {part_of(module) for module, _ in imports(path)} - {None}
    assert found <= ALLOWED[owner], f"{name_of(path)} imports {sorted(found - ALLOWED[owner])}"


@pytest.mark.parametrize(
    "path", sources("dflash_jax", "convert", "train", "benchmarks"), ids=name_of
)
def test_outside_packages_are_imported_where_they_belong(path):
    name = name_of(path)
    for module, at_import in imports(path):
        # Benchmarks measure what the PyTorch packages do too, where those are installed.
        if not (name.startswith("benchmarks/") and not at_import):
            assert not under(module, "torch"), f"{name} imports torch"
        if under(module, "flax.linen"):
            assert name.startswith("dflash_jax/models/"), f"{name} imports flax.linen"
        if name.startswith("dflash_jax/"):
            assert not under(module, "train"), f"{name} imports train"
            assert not under(module, "convert"), f"{name} imports convert"
            assert not under(module, "benchmarks"), f"{name} imports benchmarks"
            late = any(under(module, package) for package in SLOW_OR_OPTIONAL)
            assert not (late and at_import), f"{name} imports {module} outside a function"


def test_importing_the_package_loads_nothing_slow_or_optional():
    code = "import sys, dflash_jax; print(*{m.split('.')[0] for m in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "dflash_jax" in run.stdout.split()
    assert not (SLOW_OR_OPTIONAL | {"jax"}) & set(run.stdout.split())


def test_every_public_name_is_there():
    for name in dflash_jax.__all__:
        assert getattr(dflash_jax, name).__name__ == name


@pytest.mark.parametrize(
    "path", sources("dflash_jax", "convert", "train", "benchmarks"), ids=name_of
)
def test_functions_and_modules_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_MODULE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{node.name} has {lines} lines"
