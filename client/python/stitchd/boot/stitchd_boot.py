"""Lets ``import torch`` find stitchd where it is not installed: ``stitchd run`` puts this directory at the end of PYTHONPATH."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def autoload() -> None:
    """What the package does, from the package that this directory is of unless another is installed. Never raises."""
    try:
        package = Path(__file__).resolve().parents[1]
        if "stitchd" not in sys.modules and not _is_package(importlib.util.find_spec("stitchd")):
            spec = importlib.util.spec_from_file_location(
                "stitchd", package / "__init__.py", submodule_search_locations=[str(package)]
            )
            if spec is None or spec.loader is None:
                return
            module = importlib.util.module_from_spec(spec)
            sys.modules["stitchd"] = module
            spec.loader.exec_module(module)
        from stitchd._autoload import autoload as of_package

        of_package()
    except Exception as error:  # noqa: BLE001 - an exception here would make `import torch` fail
        try:
            print(f"stitchd: PyTorch keeps its own allocator: {error!r}", file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001
            pass


def _is_package(spec: Any) -> bool:
    """Whether it is the package that is installed, and not just a directory of that name."""
    return spec is not None and spec.origin is not None and Path(spec.origin).with_name("_autoload.py").is_file()
