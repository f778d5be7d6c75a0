"""Modules import only from their own layer and the layers below."""

import ast
from pathlib import Path

import accel_ft

PACKAGE = Path(accel_ft.__file__).parent
LAYERS = [
    "commands",
    "reporting",
    "diagnosis",
    "engine",
    "checkpoint",
    "model",
    "data",
    "runtime",
    "metrics",
    "settings",
    "config",
    "errors",
]
FREE_OF_DISTRIBUTED = ["data/plan.py", "metrics.py", "engine/step.py", "model/optim.py"]


def layer_of(module: str) -> int:
    name = module.split(".")[1] if "." in module else ""
    return LAYERS.index(name) if name in LAYERS else 0


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_point_downwards() -> None:
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("accel_ft", *path.relative_to(PACKAGE).with_suffix("").parts))
        for name in imports(path):
            if (
                name.startswith("accel_ft.")
                and name != "accel_ft.__version__"
                and path.name != "__init__.py"
            ):
                assert layer_of(module) <= layer_of(name), f"{module} imports {name}"
                if layer_of(name) == 0:
                    raise AssertionError(f"{module} imports the command {name}")


def test_numeric_code_knows_nothing_of_processes() -> None:
    for file in FREE_OF_DISTRIBUTED:
        for name in imports(PACKAGE / file):
            assert not name.startswith(("torch.distributed", "accelerate")), (
                f"{file} imports {name}"
            )


def test_the_loop_fits_on_a_screen() -> None:
    assert len((PACKAGE / "engine/loop.py").read_text().splitlines()) <= 60
