"""Write the C++ flags of setup.py in the format that clang-tidy reads, and the names of the translation units.

python tests/compile_flags.py FOLDER      FOLDER/compile_flags.txt, FOLDER/units
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import setup

folder = Path(sys.argv[1])
extension = setup.extension(torch, cpp_extension)
# clang-tidy has no omp.h, which PyTorch's headers include under -fopenmp.
flags = [flag if flag != "-fopenmp" else "-fopenmp-simd" for flag in extension.extra_compile_args["cxx"]]
macros = [*extension.define_macros, ("TORCH_EXTENSION_NAME", "_C")]
includes = [*extension.include_dirs, sysconfig.get_path("include")]
lines = [
    "-std=c++20",
    *flags,
    *(f"-D{name}={value}" for name, value in macros),
    *(f"-isystem{path}" for path in includes),
]
folder.mkdir(parents=True, exist_ok=True)
(folder / "compile_flags.txt").write_text("\n".join(lines) + "\n")
(folder / "units").write_text("\n".join(extension.sources) + "\n")
