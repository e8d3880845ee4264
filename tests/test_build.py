"""Tests of how the native operators are built, found and chosen."""
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import mmlaplace
from mmlaplace.ops import backend, build

PACKAGE = Path(mmlaplace.__file__).parent

# Operators that compile in an instant: the binary holds its tag alone.
LIBRARY = """
extern "C" {
extern const char mmlaplace_build_tag[] =
    "mmlaplace build tag: " MMLAPLACE_BUILD_TAG;
}
"""
NATIVE = """
import torch

library = torch.library.Library('mmlaplace', 'DEF')
library.define('cpu_capability() -> str')
library.impl('cpu_capability', lambda: 'AVX2', 'CompositeImplicitAutograd')
"""
USE = """
from mmlaplace.ops import backend
print(backend.use_native('cpu'), backend.status())
"""
EXPORT = """
import torch
from mmlaplace.ops.backend import use_native

class Sign(torch.nn.Module):
    def forward(self, x):
        return x + 1 if use_native(x.device.type) else x - 1

x = torch.zeros(1)
print(torch.compile(Sign(), fullgraph=True, backend='eager')(x).item())
for strict in (True, False):
    program = torch.export.export(Sign(), (x, ), strict=strict)
    print(program.module()(x).item())
print(torch.jit.trace(Sign(), x)(x).item())
"""


class Tree:
    """A checkout whose operators compile in an instant."""

    def __init__(self, root):
        self.root = root
        self.package = root / 'mmlaplace'
        self.cache = root / 'cache'
        for name in ('__init__.py', 'version.py', 'collect_env.py',
                     'ops/build.py', 'ops/backend.py'):
            (self.package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PACKAGE / name, self.package / name)
        self.write('mmlaplace/ops/__init__.py', '')
        self.write('mmlaplace/ops/native.py', NATIVE)
        self.write('ops/library.cpp', LIBRARY)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding='utf-8')
        return path

    def start(self, *arguments, **variables):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith('MMLAPLACE_')
        }
        environment.update({
            'PYTHONPATH': str(self.root),
            'PYTHONIOENCODING': 'utf-8',
            'TORCH_EXTENSIONS_DIR': str(self.cache),
            **variables
        })
        return subprocess.Popen([sys.executable, *arguments],
                                env=environment,
                                cwd=self.root,
                                encoding='utf-8',
                                stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    def run(self, *arguments, **variables):
        """Returns what a script prints to stdout and to stderr."""
        process = self.start(*arguments, **variables)
        printed, complaint = process.communicate()
        assert process.returncode == 0, printed + complaint
        return printed, complaint

    def compiled(self):
        return list(self.cache.glob('*/operators.so'))

    def install(self):
        """Puts the compiled operators where an installation has them."""
        (binary, ) = self.compiled()
        installed = self.package / '_C.so'
        os.replace(binary, installed)
        return installed


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / 'zwölf Bäume')


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Makes this process one that has not chosen a backend yet."""
    for name in ('MMLAPLACE_BACKEND', 'MMLAPLACE_BUILD'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'cache'))
    monkeypatch.setattr(backend, '_library', None)
    monkeypatch.setattr(backend, '_decisions', {})
    monkeypatch.setattr(build, 'find_installed', lambda: [])
    return monkeypatch


@pytest.fixture
def no_compiler(fresh):
    fresh.setenv('CXX', 'no-such-compiler')
    return fresh


@pytest.fixture
def sources(fresh, tmp_path):
    """Stands in for the folder of sources."""
    folder = tmp_path / 'ops'
    folder.mkdir()
    (folder / 'library.cpp').write_text(LIBRARY)
    fresh.setattr(build, 'source_folder', lambda: folder)
    return folder


@pytest.fixture
def cuda_sources(sources):
    (sources / 'cuda').mkdir()
    (sources / 'cuda' / 'op.cu').write_text('')
    return sources


@pytest.mark.parametrize('variable, allowed', [
    ('MMLAPLACE_BACKEND', backend.BACKENDS),
    ('MMLAPLACE_BUILD', build.MODES),
])
def test_variables_name_what_they_allow(fresh, variable, allowed):
    assert build.read_choice(variable, allowed) == 'auto'
    for value in allowed:
        fresh.setenv(variable, value)
        assert build.read_choice(variable, allowed) == value
    fresh.setenv(variable, 'gpu')
    with pytest.raises(ValueError, match=f"{variable} .*'auto'.*got 'gpu'"):
        backend.use_native('cpu')


def test_tag_changes_with_the_sources(sources):
    before = build.make_tag(sources, 'cpu')
    assert before == build.make_tag(sources, 'cpu')
    assert build.explain_mismatch(before, before) is None
    (sources / 'cpu').mkdir()
    (sources / 'cpu' / 'op.h').write_text('')
    after = build.make_tag(sources, 'cpu')
    reason = build.explain_mismatch(before, after)
    assert reason == 'was built from other sources'
    (sources / 'README.md').write_text('')
    assert after == build.make_tag(sources, 'cpu')


@pytest.mark.parametrize('name, value, reason', [
    ('torch', '2.4.0', f'was built for torch 2.4.0, this is '
     f'{torch.__version__}'),
    ('python', 'cpython-39', 'was built for python cpython-39'),
    ('machine', 'abacus', 'was built for machine abacus'),
    ('device', 'cpu', 'was built without CUDA'),
])
def test_foreign_tag_is_explained(sources, name, value, reason):
    wanted = build.make_tag(sources, 'cuda')
    found = {**wanted, name: value}
    assert build.explain_mismatch(found, wanted).startswith(reason)


def test_cuda_build_serves_where_cpu_is_wanted(sources):
    wanted = build.make_tag(sources, 'cpu')
    found = build.make_tag(sources, 'cuda')
    assert build.explain_mismatch(found, wanted) is None


def test_cuda_sources_count_in_a_cuda_build(cuda_sources):
    before = {
        device: build.make_tag(cuda_sources, device)
        for device in ('cpu', 'cuda')
    }
    (cuda_sources / 'cuda' / 'op.cu').write_text('changed')
    assert build.make_tag(cuda_sources, 'cpu') == before['cpu']
    after = build.make_tag(cuda_sources, 'cuda')
    reason = build.explain_mismatch(before['cuda'], after)
    assert reason == 'was built from other sources'


@pytest.mark.parametrize('cards, variable, device', [
    (0, '', 'cpu'),
    (0, '8.0;9.0+PTX', 'cuda'),
    (1, '', 'cuda'),
])
def test_cuda_is_built_for_cards_at_hand_or_named(
        cuda_sources, monkeypatch, cards, variable, device):
    monkeypatch.setattr(build, 'find_compiler', lambda: ['c++'])
    monkeypatch.setattr(build, '_check_cuda', lambda: None)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: cards)
    monkeypatch.setenv('TORCH_CUDA_ARCH_LIST', variable)
    assert build.choose_device(cuda_sources) == device


def test_tag_is_read_from_the_bytes(sources, tmp_path):
    tag = build.make_tag(sources, 'cpu')
    binary = tmp_path / 'binary'
    assert build.read_tag(binary) is None
    for content in (b'', b'\x7fELF', b'mmlaplace build tag: \xff\0'):
        binary.write_bytes(content)
        assert build.read_tag(binary) is None
    binary.write_bytes(b'\x7fELF mmlaplace build tag: ' +
                       build.format_tag(tag).encode() + b'\0\xff')
    assert build.read_tag(binary) == tag


def test_missing_compiler_is_told_once(no_compiler):
    with pytest.warns(RuntimeWarning, match="'no-such-compiler' is not on") \
            as caught:
        assert not backend.use_native('cpu')
        assert not backend.use_native('cpu')
    assert len(caught) == 1


@pytest.mark.parametrize('variable, value', [
    ('MMLAPLACE_BACKEND', 'native'),
    ('MMLAPLACE_BUILD', 'cpu'),
])
def test_missing_compiler_fails_what_was_asked(no_compiler, variable, value):
    no_compiler.setenv(variable, value)
    for _ in range(2):
        with pytest.raises(RuntimeError, match='no C.. compiler was found'):
            backend.use_native('cpu')


def test_build_for_cuda_needs_its_sources(fresh, sources):
    fresh.setenv('MMLAPLACE_BUILD', 'cuda')
    with pytest.raises(RuntimeError, match='for cpu: .* no CUDA sources'):
        backend.use_native('cpu')


def test_reference_loads_nothing(fresh):
    fresh.setenv('MMLAPLACE_BACKEND', 'reference')
    fresh.delattr(backend, '_open_library')
    assert not backend.use_native('cpu')
    assert backend.status()['devices'] == ()


def test_threads_that_start_together_load_once(fresh):
    calls = []

    def open_library():
        calls.append(None)
        time.sleep(0.1)
        return backend.Library(Path(), {'device': 'cuda'}, {}, [], False)

    fresh.setattr(backend, '_open_library', open_library)
    with ThreadPoolExecutor(8) as pool:
        devices = ['cpu', 'cuda'] * 4
        assert all(pool.map(backend.use_native, devices))
    assert len(calls) == 1


def test_jobs_are_bounded_by_cores_and_memory(fresh):
    fresh.delenv('MAX_JOBS', raising=False)
    fresh.setattr(os, 'cpu_count', lambda: 64)
    fresh.setattr(os, 'sysconf', {
        'SC_PAGE_SIZE': 4096,
        'SC_PHYS_PAGES': 9 * 2**30 // 4096
    }.get)
    assert build.build_variables('cpu')['MAX_JOBS'] == '4'
    fresh.setattr(os, 'cpu_count', lambda: 2)
    assert build.build_variables('cpu')['MAX_JOBS'] == '2'
    fresh.setenv('MAX_JOBS', '7')
    assert build.build_variables('cpu')['MAX_JOBS'] == '7'


def test_build_none_compiles_nothing(fresh):
    fresh.setenv('MMLAPLACE_BUILD', 'none')
    fresh.delattr(build, 'compile_at_first_use')
    with pytest.warns(RuntimeWarning, match='MMLAPLACE_BUILD=none'):
        assert not backend.use_native('cpu')


def test_cuda_without_sources_is_no_surprise(no_compiler, sources, recwarn):
    assert not backend.use_native('cuda')
    assert not recwarn.list


def test_cuda_with_sources_is_missed(no_compiler, cuda_sources):
    with pytest.warns(RuntimeWarning, match='for cuda: no C.. compiler'):
        assert not backend.use_native('cuda')


def test_native_backend_needs_cuda_operators(no_compiler, sources):
    no_compiler.setenv('MMLAPLACE_BACKEND', 'native')
    with pytest.raises(RuntimeError, match='MMLAPLACE_BUILD=cuda'):
        backend.use_native('cuda')


def test_other_devices_use_the_reference(fresh):
    fresh.delattr(backend, '_open_library')
    assert not backend.use_native('mps')
    fresh.setattr(backend, '_decisions', {})
    fresh.setenv('MMLAPLACE_BACKEND', 'native')
    assert not backend.use_native('meta')
    with pytest.raises(RuntimeError, match='cpu and cuda, got .* mps'):
        backend.use_native('mps')


@pytest.mark.parametrize('target, value, reason', [
    ('sys.platform', 'win32', 'MSVC is not supported'),
    ('importlib.util.find_spec', lambda name: None, 'install setuptools'),
    ('sysconfig.get_path', lambda name: 'nowhere', 'no Python.h in nowhere'),
    ('shutil.which', lambda name: None, "no C.. compiler was found .'c..'"),
], ids=['windows', 'setuptools', 'headers', 'compiler'])
def test_what_the_machine_lacks_is_told(fresh, sources, target, value, reason):
    fresh.delenv('CXX', raising=False)
    if target != 'shutil.which':
        # Whether there is a compiler here or not.
        fresh.setattr(build, 'find_compiler', lambda: ['c++'])
    fresh.setattr(f'mmlaplace.ops.build.{target}', value)
    with pytest.raises(build.BuildError, match=reason):
        build.check_machine(sources, 'cpu')


@pytest.mark.needs_compiler
def test_what_cuda_lacks_is_told(fresh, cuda_sources):
    fresh.setattr(torch.version, 'cuda', None)
    with pytest.raises(build.BuildError, match='was built without CUDA'):
        build.check_machine(cuda_sources, 'cuda')
    fresh.setattr(torch.version, 'cuda', '13.0')
    fresh.setattr('torch.utils.cpp_extension.CUDA_HOME', None)
    with pytest.raises(build.BuildError, match='nvcc.*CUDA 13.0.*CUDA_HOME'):
        build.check_machine(cuda_sources, 'cuda')


@pytest.mark.needs_compiler
def test_missing_ninja_is_told(fresh, sources):
    which = shutil.which
    fresh.setattr(shutil, 'which', lambda name, **options: None
                  if name == 'ninja' else which(name, **options))
    with pytest.raises(build.BuildError, match='pip install ninja'):
        build.compile_at_first_use('cpu')


@pytest.mark.needs_compiler
def test_cache_that_cannot_be_written_is_told(fresh, sources, tmp_path):
    # A file in the way stops root too.
    (tmp_path / 'file').write_text('')
    fresh.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'file'))
    with pytest.raises(build.BuildError, match='TORCH_EXTENSIONS_DIR'):
        build.compile_at_first_use('cpu')


def test_cache_is_that_of_torch(tree):
    printed, _ = tree.run(
        '-c', 'import torch\n'
        'from mmlaplace.ops import build\n'
        'print(build._cache_directory({}).parent)\n'
        'from torch.utils import cpp_extension\n'
        'print(cpp_extension.get_default_build_root())',
        TORCH_EXTENSIONS_DIR='')
    ours, theirs = printed.splitlines()
    assert ours == theirs


@pytest.mark.needs_compiler
def test_home_that_cannot_be_written_is_told(tree):
    home = tree.write('home', '')  # a file stops root too
    variables = dict(HOME=str(home), XDG_CACHE_HOME=str(home / '.cache'))
    printed, complaint = tree.run(
        '-c', USE, TORCH_EXTENSIONS_DIR='', **variables)
    assert printed.startswith('False')
    assert 'name another folder in TORCH_EXTENSIONS_DIR' in complaint
    printed, _ = tree.run('-c', USE, **variables)
    assert printed.startswith('True')


@pytest.mark.needs_compiler
def test_compiler_error_is_told(fresh, sources, tmp_path):
    (sources / 'library.cpp').write_text('int nonsense = whatever;')
    before = dict(os.environ)
    with pytest.raises(build.BuildError, match="error: 'whatever' was") as e:
        build.compile_at_first_use('cpu')
    (log, ) = (tmp_path / 'cache').glob('*/compile.log')
    assert str(log) in str(e.value)
    assert 'nonsense' in log.read_text('utf-8')
    assert dict(os.environ) == before
    assert not list((tmp_path / 'cache').glob('*/build-*'))


@pytest.mark.needs_compiler
def test_compiled_operators_that_do_not_load_are_told(fresh, sources):
    (sources / 'library.cpp').write_text(
        f'{LIBRARY}\nvoid missing();\nvoid call() {{ missing(); }}')
    with pytest.raises(build.BuildError, match='do not load: .*missing'):
        build.compile_at_first_use('cpu')


@pytest.mark.needs_compiler
def test_first_use_compiles_and_later_ones_load(tree):
    printed, complaint = tree.run('-c', USE)
    assert printed.startswith('True')
    assert complaint.count('compiling its CPU operators once') == 1
    (binary, ) = tree.compiled()
    assert str(binary.parent) in complaint
    printed, complaint = tree.run('-c', USE, CXX='no-such-compiler')
    assert printed.startswith('True')
    assert complaint == ''


@pytest.mark.needs_compiler
def test_processes_that_start_together_compile_once(tree):
    processes = [tree.start('-c', USE) for _ in range(3)]
    ends = [process.communicate() for process in processes]
    assert all(printed.startswith('True') for printed, _ in ends), ends
    complaints = ''.join(complaint for _, complaint in ends)
    assert complaints.count('compiling') == 1


@pytest.mark.needs_compiler
def test_killed_compile_leaves_nothing_behind(tree):
    marker = tree.root / 'compiling'
    slow = tree.write('slow compiler', f"""#!/bin/sh
case "$*" in *' -c '*) touch '{marker}'; sleep 5 ;; esac
exec c++ "$@"
""")
    slow.chmod(0o755)
    process = tree.start('-c', USE, CXX=f"'{slow}'")
    while not marker.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (scratch, ) = tree.cache.glob('*/build-*')
    assert (scratch / 'lock').exists(), 'torch left no lock to trip over'
    # What a linker may leave, and the lock of a torch in the same place.
    tag = build.format_tag(build.make_tag(tree.root / 'ops', 'cpu'))
    (scratch / 'mmlaplace_cpu.so').write_text(f'mmlaplace build tag: {tag}\0')
    (scratch.parent / 'lock').write_text('')

    printed, complaint = tree.run('-c', USE)
    assert printed.startswith('True'), complaint
    assert not scratch.exists()


@pytest.mark.needs_compiler
def test_installed_operators_are_loaded_if_they_fit(tree):
    tree.run('-c', USE)
    binary = tree.install()
    printed, _ = tree.run('-c', USE, MMLAPLACE_BUILD='none')
    assert printed.startswith('True') and str(binary) in printed

    content = binary.read_bytes()
    version = torch.__version__.encode()
    assert content.count(b'torch=' + version) == 1
    foreign = b'9' * len(version)
    binary.write_bytes(content.replace(b'torch=' + version,
                                       b'torch=' + foreign))
    printed, complaint = tree.run('-c', USE, MMLAPLACE_BUILD='none')
    assert printed.startswith('False')
    assert (f'_C.so was built for torch {foreign.decode()}, this is '
            f'{version.decode()}; MMLAPLACE_BUILD=none') in complaint

    binary.write_bytes(content)
    tree.write('ops/library.cpp', f'{LIBRARY}\n// changed')
    printed, complaint = tree.run('-c', USE)
    assert printed.startswith('True') and str(tree.cache) in printed
    assert '_C.so was built from other sources' in printed


def test_installed_operators_that_do_not_load_are_passed_over(tree):
    tag = build.format_tag(build.make_tag(tree.root / 'ops', 'cpu'))
    tree.write('mmlaplace/_C.so', f'mmlaplace build tag: {tag}\0')
    printed, complaint = tree.run('-c', USE, MMLAPLACE_BUILD='none')
    assert printed.startswith('False')
    assert '_C.so does not load: ' in complaint


@pytest.mark.needs_compiler
def test_choice_is_a_constant_to_compilers(tree):
    printed, _ = tree.run('-c', EXPORT)
    assert printed.split() == ['1.0'] * 3 + ['-1.0'], 'a trace is portable'


@pytest.mark.needs_compiler
def test_collect_env_tells_what_runs(tree):
    printed, _ = tree.run('-m', 'mmlaplace.collect_env')
    (binary, ) = tree.compiled()
    assert (f'cpu operators: yes, {binary}, built for torch '
            f'{torch.__version__}, instruction set AVX2\n') in printed
    assert 'cuda operators: no: this version of mmlaplace has no' in printed
    for name in ('mmlaplace', 'Python', 'platform', 'torch', 'GPUs',
                 'compiler', 'ninja', 'mmengine'):
        assert f'\n{name}: ' in f'\n{printed}'


@pytest.mark.parametrize('variables, reason', [
    ({'CXX': 'no-such-compiler'}, 'no C++ compiler was found'),
    ({'MMLAPLACE_BACKEND': 'reference'}, 'MMLAPLACE_BACKEND=reference'),
], ids=['no-compiler', 'reference'])
def test_collect_env_tells_what_is_missing(tree, variables, reason):
    printed, _ = tree.run('-m', 'mmlaplace.collect_env', **variables)
    assert f'cpu operators: no: {reason}' in printed
    name, value = variables.popitem()
    assert f'{name}: {value}' in printed or f'not found ({value})' in printed
