"""What the native operators are built from, how, and how a build is known.

`setup.py` loads this file by its path, hence it imports nothing of mmlaplace
and torch only where it is needed.
"""
import contextlib
import hashlib
import importlib.util
import logging
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence

PACKAGE = Path(__file__).resolve().parents[1]
MODES = ('auto', 'cpu', 'cuda', 'none')
REINSTALL = 'pip install --no-build-isolation . in a checkout'

# Python's own flags, which setuptools adds, may ask for debug information.
_FLAGS = ('-O3', '-g0', '-fno-math-errno')
_SUFFIXES = {'.cpp', '.cu', '.cuh', '.h'}
_TAG_START = b'mmlaplace build tag: '
_JOB_BYTES = 2 * 2**30
# Tensor cores for float64 and TF32, and asynchronous copies.
_MIN_CUDA_MAJOR = 8

Tag = Dict[str, str]


class BuildError(RuntimeError):
    """Tells why there are no native operators, and what would help."""


def read_choice(variable: str, allowed: Sequence[str]) -> str:
    """Return the value of an environment variable; the first is the default.

    Raises:
        ValueError: If the value is not allowed.
    """
    value = os.environ.get(variable) or allowed[0]
    if value not in allowed:
        raise ValueError(f'{variable} must be one of '
                         f'{", ".join(map(repr, allowed))}, got {value!r}')
    return value


def source_folder() -> Path:
    """Return the folder of the C++ sources.

    It is `.mim/ops` where mmlaplace is installed, and `ops` beside the
    package in a bare checkout.
    """
    for folder in (PACKAGE / '.mim' / 'ops', PACKAGE.parent / 'ops'):
        if (folder / 'library.cpp').is_file():
            return folder
    raise BuildError(f'the C++ sources are missing from {PACKAGE}; install '
                     'mmlaplace again')


def find_sources(folder: Path, device: str) -> List[Path]:
    """List what is compiled for a device; a CUDA build has the CPU too."""
    sources = sorted([*folder.glob('*.cpp'), *folder.glob('cpu/*.cpp')])
    if device == 'cuda':
        sources += sorted(folder.glob('cuda/*.cu'))
    return sources


def has_cuda_sources() -> bool:
    """Tell whether this version has CUDA operators at all."""
    try:
        return any(source_folder().glob('cuda/*.cu'))
    except BuildError:
        return False


def make_tag(folder: Path, device: str) -> Tag:
    """Describe the build of the sources in ``folder`` for this machine.

    That for the CPU does not depend on the sources of CUDA.
    """
    import torch
    tag = {
        'sources': _hash_sources(folder, skip='cuda'),
        'torch': str(torch.__version__),
        'python': sysconfig.get_config_var('SOABI'),
        'machine': platform.machine(),
        'device': device,
    }
    if device == 'cuda':
        tag['cuda_sources'] = _hash_sources(folder / 'cuda')
    return tag


def _hash_sources(folder: Path, skip: Optional[str] = None) -> str:
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder)
        if path.suffix in _SUFFIXES and name.parts[0] != skip:
            digest.update(name.as_posix().encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def format_tag(tag: Tag) -> str:
    """Write a tag as it stands in a binary."""
    return ','.join(f'{name}={value}' for name, value in tag.items())


def read_tag(binary: Path) -> Optional[Tag]:
    """Read the tag from the bytes of a binary, which is not loaded."""
    with contextlib.suppress(OSError, ValueError), open(binary, 'rb') as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = content.find(_TAG_START)
            if start >= 0:
                start += len(_TAG_START)
                text = content[start:content.find(b'\0', start)].decode()
                return dict(part.split('=', 1) for part in text.split(','))
    return None


def explain_mismatch(found: Optional[Tag], wanted: Tag) -> Optional[str]:
    """Tell why a binary is not to be loaded; None if it fits."""
    if found is None:
        return 'is no build of mmlaplace'
    if found.get('sources') != wanted['sources']:
        return 'was built from other sources'
    for name in ('torch', 'python', 'machine'):
        if found.get(name) != wanted[name]:
            return (f'was built for {name} {found.get(name)}, '
                    f'this is {wanted[name]}')
    if wanted['device'] == 'cuda' != found.get('device'):
        return 'was built without CUDA'
    if (wanted['device'] == 'cuda'
            and found.get('cuda_sources') != wanted['cuda_sources']):
        return 'was built from other sources'
    return None


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise BuildError(
            f'torch cannot be imported where mmlaplace is built ({error}); '
            'install torch first and use pip install --no-build-isolation'
        ) from error


def find_compiler() -> List[str]:
    """Return the command of the C++ compiler that torch will call."""
    command = shlex.split(os.environ.get('CXX', 'c++')) or ['']
    if shutil.which(command[0]) is None:
        raise BuildError(f'no C++ compiler was found ({command[0]!r} is not '
                         'on PATH); install GCC or Clang, or name it in CXX')
    return command


def check_machine(folder: Path, device: str) -> None:
    """Require all that compiling for a device needs.

    Raises:
        BuildError: If something is missing.
    """
    if device == 'cuda' and not any(folder.glob('cuda/*.cu')):
        raise BuildError('this version of mmlaplace has no CUDA sources for '
                         'MMLAPLACE_BUILD=cuda to build')
    if sys.platform == 'win32':
        raise BuildError('the C++ sources need GCC or Clang, and MSVC is not '
                         'supported')
    if importlib.util.find_spec('setuptools') is None:
        raise BuildError('torch compiles with setuptools, which is missing; '
                         'pip install setuptools')
    find_compiler()
    headers = sysconfig.get_path('include')
    if not Path(headers, 'Python.h').is_file():
        raise BuildError(f'there is no Python.h in {headers}; install the '
                         'development files of Python, such as python3-dev')
    if device == 'cuda':
        _check_cuda()


def _check_cuda() -> None:
    import torch
    if torch.version.cuda is None:
        raise BuildError(f'torch {torch.__version__} was built without CUDA; '
                         'install a torch with CUDA')
    from torch.utils.cpp_extension import CUDA_HOME
    if CUDA_HOME is None or not Path(CUDA_HOME, 'bin', 'nvcc').is_file():
        raise BuildError(f'no CUDA toolkit with nvcc was found; install that '
                         f'of CUDA {torch.version.cuda} and set CUDA_HOME')


def choose_device(folder: Path) -> str:
    """Choose what is compiled for where nothing is asked for.

    Returns:
        str: 'cuda' where that is possible and there is a card, or
        TORCH_CUDA_ARCH_LIST names some; else 'cpu'.
    """
    try:
        check_machine(folder, 'cuda')
    except BuildError:
        return 'cpu'
    import torch
    wanted = (os.environ.get('TORCH_CUDA_ARCH_LIST')
              or torch.cuda.device_count() > 0)
    return 'cuda' if wanted else 'cpu'


def search_path() -> str:
    """Return PATH with the scripts of this Python, activated or not."""
    path = os.environ.get('PATH', os.defpath)
    return os.pathsep.join([path, sysconfig.get_path('scripts')])


def build_variables(device: str) -> Dict[str, str]:
    """Return the environment variables to build with.

    One compiler for each core, as long as each has 2 GiB of memory; messages
    in English; for CUDA on a machine without a GPU, code for all that torch
    serves.
    """
    import torch
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    jobs = max(1, min(os.cpu_count() or 1, memory // _JOB_BYTES))
    variables = {
        'MAX_JOBS': os.environ.get('MAX_JOBS') or str(jobs),
        'LC_ALL': 'C',
        'PATH': search_path(),
    }
    if device == 'cuda' and torch.cuda.device_count() == 0:
        # torch.cuda.get_arch_list() is empty without a GPU.
        served = re.findall(r'sm_(\d+)(\d)\b', torch._C._cuda_getArchFlags())
        variables['TORCH_CUDA_ARCH_LIST'] = os.environ.get(
            'TORCH_CUDA_ARCH_LIST') or ';'.join(
                f'{major}.{minor}' for major, minor in served
                if int(major) >= _MIN_CUDA_MAJOR)
    return variables


def _openmp_flags() -> List[str]:
    """Return what makes at::parallel_for run in parallel, where possible."""
    probe = [*find_compiler(), '-fopenmp', '-fsyntax-only', '-x', 'c++', '-']
    done = subprocess.run(
        probe, input=b'#include <omp.h>\n', stderr=subprocess.DEVNULL)
    return ['-fopenmp'] if done.returncode == 0 else []


def _link_flags(device: str) -> List[str]:
    """Return where nvcc's own libraries are.

    Torch takes the folder above that of nvcc for the toolkit, which a script
    of this name may not be in.
    """
    if device == 'cpu':
        return []
    from torch.utils.cpp_extension import CUDA_HOME
    told = subprocess.run(
        [os.path.join(CUDA_HOME, 'bin', 'nvcc'), '--dryrun', 'none.cu'],
        stderr=subprocess.PIPE, text=True).stderr
    top = re.search(r'^#\$ TOP=(.*)$', told, re.MULTILINE)
    root = os.path.normpath(top.group(1)) if top else CUDA_HOME
    return [f'-L{root}/lib64']


def make_extension(root: Path, mode: str):
    """Make the extension `mmlaplace._C` for setuptools.

    The environment of this process, which is the build's, is prepared too.

    Args:
        root (Path): The checkout, which is the working directory.
        mode (str): 'auto', 'cpu' or 'cuda'.

    Returns:
        setuptools.Extension: To be built by torch's BuildExtension.

    Raises:
        BuildError: If the machine lacks something.
    """
    _check_torch()
    from torch.utils import cpp_extension
    folder = root / 'ops'
    device = choose_device(folder) if mode == 'auto' else mode
    check_machine(folder, device)
    os.environ.update(build_variables(device))
    openmp = _openmp_flags()
    kind = (cpp_extension.CUDAExtension
            if device == 'cuda' else cpp_extension.CppExtension)
    return kind(
        'mmlaplace._C',
        [os.path.relpath(path, root) for path in find_sources(folder, device)],
        include_dirs=[str(folder)],
        define_macros=[('MMLAPLACE_BUILD_TAG',
                        f'"{format_tag(make_tag(folder, device))}"')],
        extra_compile_args={
            'cxx': [*_FLAGS, *openmp],
            'nvcc': ['-O3']
        },
        extra_link_args=[*openmp, *_link_flags(device)])


def find_installed() -> List[Path]:
    """List the binaries that an installation left in the package."""
    return sorted(PACKAGE.glob('_C*.so'))


def compile_at_first_use(device: str) -> Path:
    """Return the operators from torch's cache, compiled where missing.

    Args:
        device (str): 'cpu' or 'cuda'.

    Returns:
        Path: A binary that fits; one just compiled is loaded already.

    Raises:
        BuildError: If it cannot be had.
    """
    folder = source_folder()
    tag = make_tag(folder, device)
    directory = _cache_directory(tag)
    binary = directory / 'operators.so'
    if explain_mismatch(read_tag(binary), tag) is None:
        return binary
    check_machine(folder, device)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / 'compile.lock'):
            # Another process may have been faster.
            if explain_mismatch(read_tag(binary), tag) is not None:
                _compile(folder, tag, binary)
    except OSError as error:
        raise BuildError(f'{directory} cannot be written ({error}); name '
                         'another folder in TORCH_EXTENSIONS_DIR') from error
    return binary


def _cache_directory(tag: Tag) -> Path:
    # This is torch.utils.cpp_extension.get_default_build_root, whose module
    # is slow to import and speaks up where a toolkit has no GPU.
    from torch import _appdirs
    root = os.environ.get('TORCH_EXTENSIONS_DIR') or (
        _appdirs.user_cache_dir(appname='torch_extensions'))
    key = hashlib.sha256(format_tag(tag).encode()).hexdigest()[:16]
    return Path(root, f'mmlaplace_{key}').absolute()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases if the process dies."""
    import fcntl
    with open(path, 'a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _environment(variables: Dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _compile(folder: Path, tag: Tag, binary: Path) -> None:
    """Compile, load and put into place what is complete only.

    Each attempt has a fresh folder: neither what a killed one left there nor
    a compiler that outlived it is met again.
    """
    for rest in binary.parent.glob('build-*'):
        shutil.rmtree(rest, ignore_errors=True)
    device = tag['device']
    with _environment(build_variables(device)), \
            tempfile.TemporaryDirectory(
                prefix='build-', dir=binary.parent) as scratch:
        if shutil.which('ninja') is None:
            raise BuildError('ninja is missing; pip install ninja')
        # Python shows this on stderr where nothing handles the log.
        time = 'some minutes' if device == 'cuda' else 'about a minute'
        logging.getLogger('mmlaplace').warning(
            'mmlaplace: compiling its %s operators once (%s) into %s',
            device.upper(), time, binary.parent)
        _compile_and_load(folder, tag, scratch, binary.parent / 'compile.log')
        (made, ) = Path(scratch).glob('*.so')
        os.replace(made, binary)


def _compile_and_load(folder: Path, tag: Tag, scratch: str,
                      log: Path) -> None:
    from torch.utils import cpp_extension
    openmp, device = _openmp_flags(), tag['device']
    # Torch hands flags to a shell as they are.
    include = shlex.quote(f'-I{folder}')
    define = shlex.quote(f'-DMMLAPLACE_BUILD_TAG="{format_tag(tag)}"')
    try:
        cpp_extension.load(
            f'mmlaplace_{device}',
            [str(path) for path in find_sources(folder, device)],
            extra_cflags=[*_FLAGS, *openmp, include, define],
            extra_cuda_cflags=['-O3', include],
            extra_ldflags=[*openmp, *map(shlex.quote, _link_flags(device))],
            build_directory=scratch,
            is_python_module=False)
    except OSError as error:
        raise BuildError(f'the operators were compiled but do not load: '
                         f'{error.__cause__ or error}') from error
    except Exception as error:
        output = str(error) or repr(error)
        log.write_text(output, encoding='utf-8')
        lines = output.splitlines()
        first = next((line for line in lines if 'error:' in line), lines[0])
        raise BuildError(f'compiling failed ({first.strip()}); the whole '
                         f'output is in {log}') from error
