"""Builds mmlaplace; pyproject.toml holds the settings of the tools.

MMLAPLACE_BUILD tells whether the native operators are built: 'auto' where
that is possible, 'cpu' and 'cuda' or not at all, 'none' never. What is not
built here is compiled when it is first used.
"""
import importlib.util
import os
import re
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# mim and mmengine look for these in the folder .mim of an installed package.
MIM_RESOURCES = ('configs', 'ops', 'tools', 'model-index.yml')


def read_version():
    """Reads the version without importing the package."""
    text = (ROOT / 'mmlaplace' / 'version.py').read_text(encoding='utf-8')
    return re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE).group(1)


def read_requirements(name):
    """Returns the lines of a requirements file without the comments."""
    text = (ROOT / 'requirements' / f'{name}.txt').read_text(encoding='utf-8')
    lines = (line.split('#')[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def copy(source, target):
    """Copies a file or a folder."""
    if source.is_dir():
        shutil.copytree(
            source, target, ignore=shutil.ignore_patterns('__pycache__'))
    else:
        shutil.copy2(source, target)


def link(source, target):
    """Links target to source; copies it where the system forbids links."""
    try:
        target.symlink_to(
            os.path.relpath(source, target.parent),
            target_is_directory=source.is_dir())
    except OSError:
        copy(source, target)


def fill_mim(package, place):
    """Fills the folder .mim of a package afresh.

    Args:
        package (Path): The folder of the package.
        place (callable): Either ``copy`` or ``link``.
    """
    folder = package / '.mim'
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name in MIM_RESOURCES:
        place(ROOT / name, folder / name)


class BuildPy(build_py):
    """Adds .mim: files in a wheel, links to the sources in an editable one."""

    def run(self):
        # Setuptools before 64 has no editable wheels, hence no such attribute.
        if getattr(self, 'editable_mode', False):
            super().run()
            fill_mim(ROOT / 'mmlaplace', link)
            return
        built = Path(self.build_lib, 'mmlaplace')
        # An earlier build may have left files that the sources no longer have.
        if built.exists():
            shutil.rmtree(built)
        super().run()
        fill_mim(built, copy)


def load_build():
    """Loads mmlaplace/ops/build.py without the package, which needs torch."""
    spec = importlib.util.spec_from_file_location(
        'build_operators', ROOT / 'mmlaplace' / 'ops' / 'build.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fail(reason):
    """Ends an installation that cannot have what MMLAPLACE_BUILD asks for."""
    raise SystemExit(f'error: MMLAPLACE_BUILD={MODE}, but {reason}')


def leave_out(reason):
    """Says why the native operators are not built."""
    print('mmlaplace: the native operators are not built now but when they '
          f'are first used: {reason}')


def refusal(reason):
    """Returns a build_ext that fails, and leaves other commands alone."""

    class Refusal(build_ext):

        def run(self):
            fail(reason)

    return Refusal


def native_build_ext():
    """Returns torch's build_ext, which goes without the operators in auto."""
    from torch.utils.cpp_extension import BuildExtension

    class NativeBuildExt(BuildExtension):

        def finalize_options(self):
            super().finalize_options()
            # Another torch makes another binary of the same sources.
            self.force = True

        def run(self):
            try:
                super().run()
            except Exception as error:
                if MODE != 'auto':
                    fail(f'compiling failed, see above: {error}')
                leave_out(error)
                self.extensions = []
                self.distribution.ext_modules = None
                # Decided before the build, hence no longer true.
                wheel = self.distribution.get_command_obj('bdist_wheel', False)
                if wheel:
                    wheel.root_is_pure = True

    return NativeBuildExt


def plan_operators():
    """Chooses what is built of the native operators.

    Returns:
        tuple: The list of extensions and the class of build_ext.
    """
    if MODE == 'none':
        return [], build_ext
    try:
        extension = build.make_extension(ROOT, MODE)
    except build.BuildError as error:
        if MODE == 'auto':
            leave_out(error)
            return [], build_ext
        return [Extension('mmlaplace._C', [])], refusal(error)
    return [extension], native_build_ext()


build = load_build()
MODE = build.read_choice('MMLAPLACE_BUILD', build.MODES)
extensions, build_ext_class = plan_operators()
commands = {'build_py': BuildPy, 'build_ext': build_ext_class}
try:
    from setuptools.command.develop import develop
except ImportError:  # Deprecated; a setuptools without it has editable wheels.
    pass
else:

    class Develop(develop):
        """Adds .mim where an old setuptools makes the editable install."""

        def run(self):
            fill_mim(ROOT / 'mmlaplace', link)
            super().run()

    commands['develop'] = Develop

extras = {
    name: read_requirements(name)
    for name in ('classification', 'detection', 'export', 'quickstart',
                 'tests')
}
extras['mim'] = read_requirements('mminstall')
extras['all'] = sorted(set().union(*extras.values()))

setup(
    name='mmlaplace',
    version=read_version(),
    description='LaplacianFormer, a linear attention backbone, for OpenMMLab',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.9',
    packages=find_packages(include=['mmlaplace', 'mmlaplace.*']),
    install_requires=read_requirements('runtime'),
    extras_require=extras,
    ext_modules=extensions,
    cmdclass=commands,
    zip_safe=False)
