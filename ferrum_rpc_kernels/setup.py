"""Builds the library: plain C that knows no Python, so that one wheel serves every CPython of a platform.

Without a compiler the package is made empty, and the log of `ferrum-rpc serve` says so.
"""

import re
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-Wno-psabi"]


class BuildLibrary(build_ext):
    """Names the library without Python's version."""

    def get_ext_filename(self, fullname: str) -> str:
        """A path below the folder of packages."""
        return f"{fullname.replace('.', '/')}.so"


class PlatformWheel(bdist_wheel):
    """For every Python 3, and on Linux for every glibc that has the functions that the library calls (PEP 600)."""

    def get_tag(self) -> tuple[str, str, str]:
        """Tags of Python, ABI and platform."""
        platform = super().get_tag()[2]
        libraries = [path.read_bytes() for path in Path(self.bdist_dir).glob("*/*.so")]
        minors = [int(minor) for data in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", data)]
        if minors:
            platform = platform.replace("linux", f"manylinux_2_{max(17, *minors)}", 1)
        return "py3", "none", platform


library = Extension(
    "ferrum_rpc_kernels.kernels",
    sorted(glob("src/*.c")),
    depends=glob("src/*.h"),
    extra_compile_args=FLAGS,
    optional=True,
)
setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
