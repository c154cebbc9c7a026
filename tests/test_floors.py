"""An import only ever points down a floor, and layout arithmetic needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"launcher", "hf"},
    {"engine"},
    {"pipe", "checkpoint", "ledger"},
    {"zero"},
    {"parallel"},
    {"config_schemas"},
    {"errors", "environment", "version"},
]
FACES = {"utils", "ops", "runtime", "__init__", "__main__"}  # names only, over all floors
HEIGHT = {name: len(FLOORS) - i for i, floor in enumerate(FLOORS) for name in floor}


def imports_of(path: Path):
    """Yield the top folder (or root module) that each relative import of a file reaches."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            if target:
                yield target[0]
            else:
                yield from (alias.name for alias in node.names)


def test_imports_point_down():
    bad = []
    for folder in HEIGHT:
        for path in [*sorted((ROOT / folder).rglob("*.py")), *ROOT.glob(f"{folder}.py")]:
            for target in imports_of(path):
                if target == folder:
                    continue
                if target in FACES or HEIGHT.get(target, 0) > HEIGHT[folder]:
                    bad.append(f"{path.relative_to(ROOT)} imports {target}")
    assert not bad, "\n".join(bad)


def test_the_check_sees_an_upward_import(tmp_path):
    """Negative control."""
    assert "engine" in set(imports_of(ROOT / "engine" / "initialize.py")) or HEIGHT["engine"] > HEIGHT["zero"]
    assert {"parallel", "config_schemas", "zero"} <= set(imports_of(ROOT / "engine" / "initialize.py"))


def run_in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_arithmetic_needs_no_torch():
    code = "import sys, stateroom.zero.layout, stateroom.zero.placement, stateroom.ledger; print('torch' in sys.modules)"
    assert run_in_fresh_process(code) == "False"


def test_importing_the_package_loads_nothing_heavy_and_says_nothing():
    code = "import sys, stateroom; print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'hjson', 'psutil'} & set(sys.modules)))"
    assert run_in_fresh_process(code) == "[]"


def test_every_public_name_resolves():
    code = "import stateroom; print([n for n in stateroom.__all__ if getattr(stateroom, n, None) is None])"
    assert run_in_fresh_process(code) == "[]"


def test_environment_is_read_in_one_place():
    """No module of the package but environment.py reads os.environ (writing a child's environment is something else)."""
    bad = []
    for path in ROOT.rglob("*.py"):
        top = path.relative_to(ROOT).parts[0]
        if top in {"tests", "benchmarks", "examples", "build", "docs"} or top.startswith(".") or path.name == "environment.py":
            continue
        text = path.read_text()
        if "os.environ" in text or "getenv(" in text:
            bad.append(str(path.relative_to(ROOT)))
    assert not bad, bad
