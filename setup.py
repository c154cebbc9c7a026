"""Install Stateroom: the repository root is the package `stateroom`."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SKIP = {"tests", "docs", "benchmarks", "examples", "build", "dist"}


def packages() -> list[str]:
    """Return `stateroom` and each folder below the root that has an __init__.py."""
    found = ["stateroom"]
    for init in sorted(ROOT.glob("*/**/__init__.py")):
        parts = init.relative_to(ROOT).parent.parts
        if parts[0] not in SKIP and not parts[0].startswith("."):
            found.append(".".join(("stateroom", *parts)))
    return found


def version() -> str:
    """Return the version text that `version.py` states."""
    return (ROOT / "version.py").read_text().split('"')[-2]


EXTRAS = {
    "deepspeed": ["deepspeed>=0.19,<0.20", "ninja"],
    "hf": ["transformers", "accelerate", "peft"],
    "data": ["tokenizers"],
    "tensorboard": ["tensorboard"],
    "test": ["pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "diffusers", "pyyaml"],
    "bench": ["matplotlib"],
}

setup(
    name="stateroom",
    version=version(),
    description="A training engine for PyTorch: ZeRO, offload, pipelines and checkpoints behind one config",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"stateroom": "."},
    packages=packages(),
    package_data={"stateroom": ["py.typed"]},
    install_requires=[
        "torch>=2.11,<2.15",
        "pydantic>=2.7",
        "hjson",
        "psutil",
        "py-cpuinfo",
        "rich",
        "safetensors",
        "numpy",
        "isal>=1.7",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "stateroom = stateroom.__main__:main",
            "launcher = stateroom.launcher.cli:main",
            "ckpt-to-universal = stateroom.checkpoint.ds_to_universal:main",
        ]
    },
)
