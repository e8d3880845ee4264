"""Decides at run time whether an op runs natively or in plain torch."""
import threading
import warnings
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from . import build

BACKENDS = ('auto', 'native', 'reference')
DEVICES = ('cpu', 'cuda')

_lock = threading.Lock()
_decisions: Dict[str, bool] = {}
_library: Optional['Library'] = None


class Library(NamedTuple):
    """The native operators of this process, or why there are none.

    Attributes:
        binary (Path, optional): The file that was loaded.
        tag (dict): What it was built from and for.
        problems (dict[str, str]): By device, why an attempt failed.
        notes (list[str]): Why installed binaries were passed over.
        asked (bool): Whether MMLAPLACE_BUILD names a device.
    """
    binary: Optional[Path]
    tag: build.Tag
    problems: Dict[str, str]
    notes: List[str]
    asked: bool

    @property
    def devices(self) -> Tuple[str, ...]:
        """The devices that have native operators."""
        if self.binary is None:
            return ()
        return DEVICES if self.tag['device'] == 'cuda' else ('cpu', )

    def explain(self, device: str) -> str:
        """Tell why a device has no native operators and what would help."""
        if device in self.problems:
            return self.problems[device]
        try:
            build.check_machine(build.source_folder(), 'cuda')
        except build.BuildError as error:
            return str(error)
        return self.problems.get('cpu') or (
            'they were built without CUDA; install them by '
            f'MMLAPLACE_BUILD=cuda {build.REINSTALL}')


def _use_native(device_type: str) -> bool:
    """Tell whether the ops run natively for tensors of a device.

    The first call loads the native operators and compiles them if need be;
    later ones look its answer up. MMLAPLACE_BACKEND is read at the first.
    Under ``torch.jit.trace`` and ``torch.onnx.export`` the answer is no: what
    is recorded then holds torch's own operators, which load anywhere, convert
    to ONNX and are counted by analyses.

    Args:
        device_type (str): Such as 'cpu', from ``tensor.device.type``.

    Raises:
        RuntimeError: If MMLAPLACE_BACKEND or MMLAPLACE_BUILD asks for native
            operators that cannot be had.
        ValueError: If a variable has a value that is not allowed.
    """
    if torch.jit.is_tracing() or _is_exporting_to_onnx():
        return False
    native = _decisions.get(device_type)
    if native is None:
        with _lock:
            # Another thread may have decided, and warned, meanwhile.
            if device_type not in _decisions:
                _decisions[device_type] = _decide(device_type)
            native = _decisions[device_type]
    return native


# What torch.compiler.assume_constant_result does, less its import of the
# whole compiler, which takes as long as that of torch itself.
_use_native._dynamo_marked_constant = True

# Torch 2.4 stores that constant as a global of the function it compiles, under
# the name in the definition, where it would replace an imported `use_native`.
use_native = _use_native


def status() -> Dict[str, object]:
    """Load the native operators as an op does, and tell what came of it.

    Returns:
        dict: ``backend``, the value of MMLAPLACE_BACKEND; ``binary``, the
        file or None; ``torch``, the version that it was built for;
        ``devices`` with native operators; ``cpu_capability``, the instruction
        set used; ``problems``, by device why it has none; ``notes``, why
        binaries were passed over.
    """
    backend = build.read_choice('MMLAPLACE_BACKEND', BACKENDS)
    if backend == 'reference':
        reason = 'MMLAPLACE_BACKEND=reference keeps them from being loaded'
        library = Library(None, {}, dict.fromkeys(DEVICES, reason), [], False)
    else:
        with _lock:
            library = _get_library()
    return {
        'backend': backend,
        'binary': library.binary,
        'torch': library.tag.get('torch'),
        'devices': library.devices,
        'cpu_capability': (torch.ops.mmlaplace.cpu_capability()
                           if library.binary else None),
        'problems': {
            device: library.explain(device)
            for device in DEVICES if device not in library.devices
        },
        'notes': library.notes,
    }


def _is_exporting_to_onnx() -> bool:
    # The first condition spares the time that the second takes.
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


def _decide(device_type: str) -> bool:
    backend = build.read_choice('MMLAPLACE_BACKEND', BACKENDS)
    if backend == 'reference' or device_type == 'meta':
        return False
    if device_type not in DEVICES:
        if backend == 'native':
            raise RuntimeError(
                'MMLAPLACE_BACKEND=native serves the devices '
                f'{" and ".join(DEVICES)}, got a tensor on {device_type}')
        return False
    library = _get_library()
    if device_type in library.devices:
        return True
    message = (f'mmlaplace has no native operators for {device_type}: '
               f'{library.explain(device_type)}')
    if backend == 'native' or library.asked and library.binary is None:
        raise RuntimeError(message)
    if device_type == 'cpu' or build.has_cuda_sources():
        warnings.warn(
            f'{message}. Plain torch takes their place, which is slower; '
            'MMLAPLACE_BACKEND=reference asks for that without a warning.',
            RuntimeWarning,
            stacklevel=4)
    return False


def _get_library() -> Library:
    global _library
    if _library is None:
        _library = _open_library()
    return _library


def _open_library() -> Library:
    mode = build.read_choice('MMLAPLACE_BUILD', build.MODES)
    binary, problems, notes = None, {}, []
    try:
        binary = (_open_installed(mode, notes)
                  or _open_compiled(mode, problems))
    except build.BuildError as error:
        problems['cpu'] = '; '.join([*notes, str(error)])
    tag = build.read_tag(binary) if binary else {}
    return Library(binary, tag, problems, notes, asked=mode in DEVICES)


def _open_installed(mode: str, notes: List[str]) -> Optional[Path]:
    """Load what the installation built, if it fits."""
    for binary in build.find_installed():
        tag = build.read_tag(binary) or {}
        # What has CUDA operators has to have the present ones.
        wanted = build.make_tag(
            build.source_folder(),
            'cuda' if 'cuda' in (mode, tag.get('device')) else 'cpu')
        problem = build.explain_mismatch(tag or None, wanted)
        if problem is not None:
            notes.append(f'{binary} {problem}')
            continue
        try:
            return _load(binary)
        except build.BuildError as error:
            notes.append(str(error))
    return None


def _open_compiled(mode: str, problems: Dict[str, str]) -> Path:
    """Load what the first use compiled, now or earlier."""
    if mode == 'none':
        raise build.BuildError(
            'MMLAPLACE_BUILD=none keeps them from being compiled; unset it, '
            f'or install them by MMLAPLACE_BUILD=cpu {build.REINSTALL}')
    if mode != 'auto':
        return _load(build.compile_at_first_use(mode))
    if (build.choose_device(build.source_folder()) == 'cuda'
            and torch.cuda.device_count() > 0):
        try:
            return _load(build.compile_at_first_use('cuda'))
        except build.BuildError as error:
            problems['cuda'] = str(error)
    return _load(build.compile_at_first_use('cpu'))


def _load(binary: Path) -> Path:
    try:
        torch.ops.load_library(str(binary))
    except OSError as error:
        raise build.BuildError(
            f'{binary} does not load: {error.__cause__ or error}') from error
    from . import native  # noqa: F401
    return binary
