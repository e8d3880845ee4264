"""Runs Python with the CUDA operators compiled for the host.

    python tests/emulation/run.py -m pytest -p emulation_plugin -k native ...

They are compiled with sanitizers, where torch's cache of extensions does not
have them yet, and serve CPU tensors; see emulation_plugin.py.
"""
import hashlib
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mmlaplace.ops import build

FOLDER = Path(__file__).resolve().parent
OPS = FOLDER.parents[1] / 'ops'
TORCH = Path(torch.__file__).parent
# Newer headers of torch need the later one.
STANDARD = 'c++20' if torch.__version__ >= '2.14' else 'c++17'
FLAGS = (f'-std={STANDARD}', '-O1', '-g1', '-fPIC', '-Wall', '-Wextra',
         '-Wno-missing-field-initializers',
         '-Wno-unknown-pragmas', '-fsanitize=address,undefined',
         '-fno-sanitize-recover=undefined',
         '-DMMLAPLACE_BUILD_TAG="emulation"',
         f'-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}',
         f'-I{FOLDER}', f'-I{OPS}',
         '-isystem', str(TORCH / 'include'), '-isystem',
         str(TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'),
         '-isystem', sysconfig.get_path('include'))


def find_library():
    """Returns where the library of the present sources has its place."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(FOLDER.rglob('*')):
        if path.suffix in ('.cpp', '.cuh', '.h'):
            digest.update(path.read_bytes())
    tag = {**build.make_tag(OPS, 'cuda'), 'emulation': digest.hexdigest()}
    return build._cache_directory(tag) / 'emulation.so'


def compile_to(library):
    """Compiles the operators."""
    compiler = build.find_compiler()
    sources = [FOLDER / 'emulator.cpp', *OPS.glob('*.cpp'),
               *OPS.glob('cuda/*.cu')]
    objects = [library.with_name(f'{path.name}.o') for path in sources]

    def compile_one(source, made):
        subprocess.run([
            *compiler, *FLAGS, '-x', 'c++', '-c', str(source), '-o', str(made)
        ], check=True)

    library.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    partial = library.with_suffix('.part')
    subprocess.run([
        *compiler, *FLAGS, '-shared', *map(str, objects), f'-L{TORCH / "lib"}',
        '-ltorch_cpu', '-lc10', '-o', str(partial)
    ], check=True)
    os.replace(partial, library)


def find_runtimes():
    """Returns what has to be loaded before Python itself."""
    return ' '.join(
        subprocess.run([*build.find_compiler(), f'-print-file-name={name}'],
                       stdout=subprocess.PIPE, text=True,
                       check=True).stdout.strip()
        for name in ('libasan.so', 'libubsan.so'))


def main():
    library = find_library()
    if not library.is_file():
        compile_to(library)
    os.execve(
        sys.executable, [sys.executable, *sys.argv[1:]], {
            **os.environ,
            'LD_PRELOAD': find_runtimes(),
            # Python frees little at its end. Memory comes full of NaN.
            'ASAN_OPTIONS': 'detect_leaks=0:malloc_fill_byte=255:'
                            'max_malloc_fill_size=1000000000',
            'MMLAPLACE_EMULATION': str(library),
            'PYTHONPATH': str(FOLDER),
        })


if __name__ == '__main__':
    main()
