"""Build step of the wheel: the client library and the command, made by cargo, go into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling."""

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        """Builds what is native and names where it goes."""
        workspace = HERE.parents[1]
        if not (workspace / "proto").is_dir():
            raise RuntimeError("the wheel is built from a checkout of stitchd: `pip install client/python` in its root")
        if shutil.which("cargo") is None:
            raise RuntimeError("building stitchd takes Rust (cargo), 1.88 or newer: see https://rustup.rs")
        built = Path(os.environ.get("CARGO_TARGET_DIR") or workspace / "target") / "release"
        # Not --workspace: what tests need is not for people.
        subprocess.run(
            ["cargo", "build", "--release", "--locked", "-p", "stitchd", "-p", "stitchd-client"], cwd=workspace, check=True
        )
        build_data["force_include"][str(built / "libstitchd_client.so")] = "stitchd/lib/libstitchd_client.so"
        build_data["shared_scripts"][str(built / "stitchd")] = "stitchd"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
