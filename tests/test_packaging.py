"""Tests of what the wheel, the sdist and the editable install hold."""
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import mmlaplace
from mmlaplace.ops import build

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ('.gitignore', 'LICENSE', 'MANIFEST.in', 'Makefile', 'README.md',
           'configs', 'mmlaplace', 'model-index.yml', 'ops', 'pyproject.toml',
           'requirements', 'setup.py', 'tests', 'tools')
MIM = ['configs', 'model-index.yml', 'ops', 'tools']

# Stands for a machine without the packages; tells about guarded imports too.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked}:
            print('tried', name)
            raise ModuleNotFoundError(f'{{name}} is blocked', name=name)

sys.meta_path.insert(0, Blocker())
import {module}
print('imported', {module}.__name__)
"""


def attempt(*command, mode='none', **kwargs):
    """Runs a command that may build the native operators."""
    command = [str(part) for part in command]
    environment = {**os.environ, 'MMLAPLACE_BUILD': mode}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, **kwargs)


def run(*command, **kwargs):
    """Returns what a command prints; its complaint fails the test."""
    done = attempt(*command, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(target):
    target.mkdir()
    junk = shutil.ignore_patterns('.mim', '__pycache__', '*.so')
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=junk)
        elif source.exists():
            shutil.copy2(source, target)
    return target


def hook_code(hook, target, before=''):
    """Returns code that calls a build hook as pip does."""
    return (f'{before}\nfrom setuptools import build_meta\n'
            f'build_meta.{hook}({str(target)!r})')


def call_backend(hook, source, target, before='', mode='none'):
    """Runs a build hook and returns the file that it made."""
    target.mkdir()
    code = hook_code(hook, target, before)
    run(sys.executable, '-c', code, cwd=source, mode=mode)
    (made, ) = target.iterdir()
    return made


def build_wheel(source, target, mode='none'):
    run(sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-index',
        '--no-build-isolation', '--wheel-dir', target, source, mode=mode)
    (wheel, ) = target.iterdir()
    return wheel


def read_wheel(wheel):
    """Maps the names of the files in a wheel to what they hold."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def without_metadata(contents):
    return {
        name: data
        for name, data in contents.items() if '.dist-info/' not in name
    }


def files_under(folder):
    return (path for path in folder.rglob('*') if path.is_file())


def expected_contents(source):
    contents = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in (source / 'mmlaplace').rglob('*.py')
    }
    resources = [source / 'model-index.yml']
    for name in ('configs', 'ops', 'tools'):
        resources += files_under(source / name)
    for path in resources:
        name = path.relative_to(source).as_posix()
        contents[f'mmlaplace/.mim/{name}'] = path.read_bytes()
    return contents


NO_TORCH = 'import sys; sys.modules["torch"] = None'
NO_COMPILER = 'import os; os.environ["CXX"] = "no-such-compiler"'
BROKEN_SOURCE = 'open("ops/library.cpp", "w").write("nonsense")'


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    return copy_sources(tmp_path_factory.mktemp('packaging') / 'source')


@pytest.fixture(scope='module')
def wheel(source, tmp_path_factory):
    return build_wheel(source, tmp_path_factory.mktemp('packaging') / 'wheel')


@pytest.fixture
def fresh_source(tmp_path):
    return copy_sources(tmp_path / 'fresh')


def test_wheel_holds_package_and_mim_resources(source, wheel):
    assert without_metadata(read_wheel(wheel)) == expected_contents(source)


def test_wheel_without_operators_serves_every_platform(wheel):
    assert wheel.name.endswith('-py3-none-any.whl')


@pytest.fixture
def tiny_source(fresh_source):
    """A checkout whose operators compile in an instant."""
    shutil.rmtree(fresh_source / 'ops')
    (fresh_source / 'ops').mkdir()
    (fresh_source / 'ops' / 'library.cpp').write_text("""
extern "C" {
extern const char mmlaplace_build_tag[] =
    "mmlaplace build tag: " MMLAPLACE_BUILD_TAG;
}
""")
    return fresh_source


@pytest.mark.needs_compiler
@pytest.mark.parametrize('mode', ['auto', 'cpu'])
def test_wheel_with_operators(tiny_source, tmp_path, mode):
    wheel = build_wheel(tiny_source, tmp_path / 'wheel', mode)
    platform = re.sub('[-.]', '_', sysconfig.get_platform())
    assert wheel.name.endswith(f'-{platform}.whl')
    contents = read_wheel(wheel)
    (name, ) = [name for name in contents if name.endswith('.so')]
    suffix = sysconfig.get_config_var('EXT_SUFFIX')
    assert name == f'mmlaplace/_C{suffix}'
    binary = tmp_path / 'binary'
    binary.write_bytes(contents[name])
    wanted = build.make_tag(tiny_source / 'ops', 'cpu')
    assert build.read_tag(binary) == wanted


@pytest.mark.needs_compiler
def test_editable_install_has_operators_in_place(tiny_source, tmp_path):
    call_backend('build_editable', tiny_source, tmp_path / 'wheel', mode='cpu')
    (binary, ) = (tiny_source / 'mmlaplace').glob('_C*.so')
    wanted = build.make_tag(tiny_source / 'ops', 'cpu')
    assert build.read_tag(binary) == wanted


def test_auto_goes_without_operators_that_do_not_compile(
        tiny_source, tmp_path):
    (tiny_source / 'ops' / 'library.cpp').write_text('nonsense')
    wheel = build_wheel(tiny_source, tmp_path / 'wheel', 'auto')
    assert wheel.name.endswith('-py3-none-any.whl')
    assert without_metadata(read_wheel(wheel)) == expected_contents(
        tiny_source)


def test_auto_needs_no_torch(fresh_source, wheel, tmp_path):
    without = call_backend(
        'build_wheel', fresh_source, tmp_path / 'wheel', NO_TORCH, 'auto')
    assert without.name == wheel.name


@pytest.mark.parametrize('mode, before, complaint', [
    ('gpu', '', "MMLAPLACE_BUILD must be one of 'auto', 'cpu', 'cuda', 'none"),
    ('cpu', NO_TORCH, 'use pip install --no-build-isolation'),
    pytest.param(
        'cpu',
        BROKEN_SOURCE,
        'MMLAPLACE_BUILD=cpu, but compiling failed',
        marks=pytest.mark.needs_compiler),
    ('cpu', NO_COMPILER, 'no C++ compiler was found'),
    ('cuda', '', 'no CUDA sources'),
], ids=['invalid', 'no-torch', 'broken', 'no-compiler', 'no-cuda'])
def test_operators_that_were_asked_for_or_no_installation(
        tiny_source, tmp_path, mode, before, complaint):
    code = hook_code('build_wheel', tmp_path, before)
    done = attempt(sys.executable, '-c', code, cwd=tiny_source, mode=mode)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_wheel_metadata(wheel):
    (metadata, ) = [
        data.decode() for name, data in read_wheel(wheel).items()
        if name.endswith('.dist-info/METADATA')
    ]
    assert f'\nVersion: {mmlaplace.__version__}\n' in metadata
    requires = re.findall('^Requires-Dist: ([A-Za-z0-9_-]+)', metadata, re.M)
    assert 'mmengine' in requires
    assert not {'torch', 'torchvision'} & set(requires)


def test_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    sdist = call_backend('build_sdist', source, tmp_path / 'sdist')
    shutil.unpack_archive(sdist, tmp_path / 'unpacked')
    (unpacked, ) = (tmp_path / 'unpacked').iterdir()
    assert not (unpacked / 'mmlaplace' / '.mim').exists()
    again = build_wheel(unpacked, tmp_path / 'wheel')
    assert again.name == wheel.name
    assert read_wheel(again) == read_wheel(wheel)


def test_earlier_installs_do_not_leak(source, fresh_source, tmp_path):
    stale = fresh_source / 'mmlaplace' / '.mim' / 'configs' / 'stale.py'
    stale.parent.mkdir(parents=True)
    stale.write_text('')
    (stale.parent / 'dangling').symlink_to('nowhere')
    built = fresh_source / 'build' / 'lib' / 'mmlaplace' / 'removed.py'
    built.parent.mkdir(parents=True)
    built.write_text('')

    sdist = call_backend('build_sdist', fresh_source, tmp_path / 'sdist')
    shutil.unpack_archive(sdist, tmp_path / 'unpacked')
    names = {path.name for path in files_under(tmp_path / 'unpacked')}
    assert 'version.py' in names
    assert not {'stale.py', 'removed.py'} & names

    wheel = build_wheel(fresh_source, tmp_path / 'wheel')
    assert without_metadata(read_wheel(wheel)) == expected_contents(source)

    call_backend('build_editable', fresh_source, tmp_path / 'editable')
    assert not stale.exists()
    assert sorted(os.listdir(fresh_source / 'mmlaplace' / '.mim')) == MIM


def test_editable_install_sees_the_sources(fresh_source, tmp_path):
    run('git', 'init', '--quiet', cwd=fresh_source)
    run('git', 'add', '.', cwd=fresh_source)
    before = run('git', 'status', '--porcelain', cwd=fresh_source)

    wheel = call_backend('build_editable', fresh_source, tmp_path / 'wheel')
    run(sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'venv')
    scripts = 'Scripts' if os.name == 'nt' else 'bin'
    python = tmp_path / 'venv' / scripts / 'python'
    run(sys.executable, '-m', 'pip', '--python', python, 'install',
        '--no-deps', '--no-index', wheel)

    new = fresh_source / 'configs' / 'written_after_the_install.py'
    new.write_text('')
    code = ('import os, mmlaplace\n'
            'mim = os.path.join(os.path.dirname(mmlaplace.__file__), ".mim")\n'
            'print(*sorted(os.listdir(mim)))\n'
            'print(*os.listdir(os.path.join(mim, "configs")))')
    printed = run(python, '-I', '-c', code, cwd=tmp_path)
    resources, configs = printed.splitlines()
    assert resources.split() == MIM
    assert new.name in configs.split()
    new.unlink()
    assert run('git', 'status', '--porcelain', cwd=fresh_source) == before


def test_editable_install_copies_where_links_fail(
        source, fresh_source, tmp_path):
    call_backend('build_editable', fresh_source, tmp_path / 'wheel', before="""
import os

def symlink(*args, **kwargs):
    raise OSError('a required privilege is not held')

os.symlink = symlink
""")
    mim = fresh_source / 'mmlaplace' / '.mim'
    assert not any((mim / name).is_symlink() for name in MIM)
    contents = {
        f'mmlaplace/.mim/{path.relative_to(mim).as_posix()}': path.read_bytes()
        for path in files_under(mim)
    }
    expected = expected_contents(source)
    assert contents == {
        name: data
        for name, data in expected.items() if '/.mim/' in name
    }


@pytest.mark.parametrize('module, blocked', [
    ('mmlaplace.ops', {'mmengine', 'mmcv', 'mmdet', 'mmpretrain'}),
    ('mmlaplace.models', {'mmdet', 'mmpretrain', 'pycocotools'}),
], ids=['ops', 'models'])
def test_import_needs_no_more_than_promised(module, blocked):
    code = BLOCKER.format(module=module, blocked=blocked)
    printed = run(sys.executable, '-c', code, cwd=ROOT)
    assert printed.splitlines() == [f'imported {module}']


def test_sources_avoid_what_breaks_elsewhere(source):
    # The first left setuptools; the second fails on a machine without a GPU.
    banned = re.compile(r'\bpkg_' r'resources\b|\.cuda' r'\(\)')
    scripts = [
        path for path in files_under(source)
        if path.suffix in {'.py', '.sh', '.toml', '.txt'}
    ]
    assert source / 'setup.py' in scripts
    assert not [
        path for path in scripts if banned.search(path.read_text('utf-8'))
    ]
