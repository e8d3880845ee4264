"""Prints what a report of a problem should tell about the environment.

    python -m mmlaplace.collect_env

loads the native operators as a call of one does; it needs torch alone.
"""
import os
import platform
import shlex
import shutil
import subprocess
from importlib import metadata

import torch

from mmlaplace import __version__
from mmlaplace.ops import backend, build

HOSTS = ('mmengine', 'mmcv', 'mmdet', 'mmpretrain')


def program_version(*command):
    """Returns the first line that a program prints about its version."""
    program = shutil.which(command[0], path=build.search_path())
    if program is None:
        return f'not found ({command[0]})'
    done = subprocess.run([program, *command[1:], '--version'],
                          stdout=subprocess.PIPE,
                          text=True)
    first_line = done.stdout.partition('\n')[0]
    return f'{first_line} ({program})'


def package_version(name):
    """Returns the version of a package without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return 'not installed'


def describe_gpus():
    """Returns the names of the visible GPUs."""
    names = [
        torch.cuda.get_device_name(index)
        for index in range(torch.cuda.device_count())
    ]
    return ', '.join(names) or 'none'


def describe_native_ops():
    """Yields whether each device has native operators, or why not."""
    status = backend.status()
    for device in backend.DEVICES:
        if device in status['devices']:
            answer = (f'yes, {status["binary"]}, '
                      f'built for torch {status["torch"]}')
            if device == 'cpu':
                answer += f', instruction set {status["cpu_capability"]}'
        else:
            answer = f'no: {status["problems"][device]}'
        yield f'{device} operators', answer
    for note in status['notes']:
        yield 'not loaded', note


def collect_env():
    """Yields pairs of a name and what is to be said about it."""
    yield 'mmlaplace', __version__
    yield 'Python', platform.python_version()
    yield 'platform', platform.platform()
    yield 'torch', f'{torch.__version__}, CUDA {torch.version.cuda}'
    yield 'GPUs', describe_gpus()
    compiler = shlex.split(os.environ.get('CXX', 'c++')) or ['']
    yield 'compiler', program_version(*compiler)
    yield 'ninja', program_version('ninja')
    for name in HOSTS:
        yield name, package_version(name)
    for name in sorted(os.environ):
        if name.startswith('MMLAPLACE_'):
            yield name, os.environ[name]
    yield from describe_native_ops()


def main():
    for name, text in collect_env():
        print(f'{name}: {text}')


if __name__ == '__main__':
    main()
