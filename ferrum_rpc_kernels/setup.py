"""Builds the library: plain C that knows no Python, so that one wheel serves every CPython of a platform.

Without a compiler that can build C with OpenMP the package is made empty, and the log of `ferrum-rpc serve` says so.
With one, sources that it cannot build are an error.
"""

import re
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi"]
"""What is fused is written out (`fma` in simd.h): no compiler decides about bits."""


PROBE = "#include <stdlib.h>\nint probe(int number) { return abs(number); }\n"


class BuildLibrary(build_ext):
    """Names the library without Python's version."""

    def build_extensions(self) -> None:
        """Build the library if there is a compiler, else nothing. Raises CompileError and LinkError."""
        if reason := self.obstacle():
            self.warn(f"the package is made without its library: {reason}")
            self.extensions = []
        super().build_extensions()

    def obstacle(self) -> str:
        """Why no C can be built here; or nothing."""
        with TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(PROBE, encoding="utf-8")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=FLAGS)
                self.compiler.link_shared_object(objects, str(Path(folder, "probe.so")))
            except (CompileError, ExecError, LinkError) as error:
                return str(error)
        return ""

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
)
setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
