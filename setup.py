"""Package metadata. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# Two import packages from one repository. `kernels/` is a source root and never a package of its own: a
# top-level `kernels` would shadow Hugging Face's package of that name (see tests/test_packaging.py).
packages = find_packages(include=["fastrlhf", "fastrlhf.*"])
packages += find_packages("kernels", include=["fastrlhf_kernels", "fastrlhf_kernels.*"])

setup(
    name="fastrlhf",
    version="0.1.0",
    description="A lean, exact and fast PPO-RLHF trainer with fused kernels",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=packages,
    package_dir={"fastrlhf": "fastrlhf", "fastrlhf_kernels": "kernels/fastrlhf_kernels"},
    package_data={"fastrlhf": ["py.typed", "configs/*.yaml"], "fastrlhf_kernels": ["py.typed"]},
    install_requires=[
        "torch>=2.8",
        "triton>=3.4; platform_system == 'Linux'",
        "transformers>=4.57,<6",
        "tokenizers>=0.22",
        "datasets>=3",
        "safetensors>=0.5",
        "pyarrow>=15",
        "numpy>=1.26",
        "pyyaml>=6",
        "jinja2>=3.1",
        "jsonargparse>=4.40,<5",
        "docstring-parser>=0.16",
        "rich>=13",
        "tensorboard>=2.15",
        "rouge-score>=0.1.2",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100"],
        "lint": ["ruff>=0.9", "mypy>=1.14", "types-PyYAML"],
        "wandb": ["wandb>=0.19"],
        "trackio": ["trackio>=0.2"],
    },
    entry_points={"console_scripts": ["fastrlhf=fastrlhf.cli:main"]},
)
