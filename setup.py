"""Builds mmlaplace; pyproject.toml holds the settings of the tools."""
import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# mim and mmengine look for these in the folder .mim of an installed package.
MIM_RESOURCES = ('configs', 'tools', 'model-index.yml')


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


commands = {'build_py': BuildPy}
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
    for name in ('classification', 'detection', 'quickstart', 'tests')
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
    cmdclass=commands,
    zip_safe=False)
