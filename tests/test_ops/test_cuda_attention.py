"""The fused attention for CUDA, emulated on the host, with sanitizers."""
import subprocess
import sys

ORDINARY = ('test_empty', 'without_channels', 'any_memory_layout',
            'nan_of_a_query', 'gain_broadcasts', 'gain_keeps_its_dtype',
            'dtypes_unite', 'far_from_the_origin')


def run_emulated(pytestconfig, *arguments):
    done = subprocess.run(
        [sys.executable, 'tests/emulation/run.py', '-m', 'pytest', '-q',
         '-p', 'emulation_plugin', '-p', 'no:cacheprovider',
         '-o', 'pythonpath=tests/test_ops', *arguments],
        cwd=pytestconfig.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True)
    assert done.returncode == 0, done.stdout


def test_emulated_attention(pytestconfig):
    run_emulated(pytestconfig, 'tests/emulation/laplacian_attention.py')


def test_emulated_attention_as_other_backends(pytestconfig):
    run_emulated(pytestconfig, 'tests/test_ops/test_laplacian_attention.py',
                 '-k', f'native and ({" or ".join(ORDINARY)})')
