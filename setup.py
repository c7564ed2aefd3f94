"""What pyproject.toml cannot say: a wheel has the benchmarks, as `onepass.benchmarks`, for `onepass bench`."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NEED_TESTS = ("prices.py", "candidates.py", "calibrate.py", "results", "__pycache__")


class WithBenchmarks(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "onepass" / "benchmarks"
            shutil.copytree("benchmarks", target, ignore=shutil.ignore_patterns(*NEED_TESTS), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithBenchmarks})
