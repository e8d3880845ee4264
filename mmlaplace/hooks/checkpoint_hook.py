"""Checkpoints that stay whole whenever training is interrupted."""
import os
import os.path as osp
from pathlib import Path
from typing import List, Union

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.runner import Runner

from ..registry import HOOKS


@register_backend('mmlaplace.atomic')
class AtomicBackend(LocalBackend):
    """Writes a local file whole or not at all.

    The content goes to ``FILE.partial``, which takes the name of the file
    once it is on the disk. A kill leaves at most this partial file, which the
    next attempt overwrites.
    """

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        """Write bytes.

        Args:
            obj (bytes): Content.
            filepath (str or Path): File, in a folder that exists or not.

        Raises:
            OSError: If it cannot be written, as on a full disk. The former
                file is untouched then.
        """
        partial = Path(f'{filepath}.partial')
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open('wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(filepath)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(error.errno, f'cannot save: {error.strerror}',
                          str(filepath)) from error

    def put_text(self,
                 obj: str,
                 filepath: Union[str, Path],
                 encoding: str = 'utf-8') -> None:
        """Write text, else as :meth:`put`."""
        self.put(obj.encode(encoding), filepath)


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's checkpoint hook, safe from kills and full disks.

    mmengine removes what ``max_keep_ckpts`` no longer allows, then writes the
    checkpoint and the file ``last_checkpoint`` in place. Here both are
    written by :class:`AtomicBackend`, and only then the outdated ones are
    removed: at any moment ``last_checkpoint`` names a whole checkpoint. The
    disk needs room for one more than ``max_keep_ckpts``. Checkpoints in
    another storage, with ``backend_args`` or ``://`` in ``out_dir``, are
    written as mmengine does.

    Arguments are those of :class:`mmengine.hooks.CheckpointHook`.
    """

    def before_train(self, runner: Runner) -> None:
        """Choose how files are written."""
        local = '://' not in str(self.out_dir or runner.work_dir)
        if local and not (self.backend_args or self.file_client_args):
            self.backend_args = dict(backend='mmlaplace.atomic')
        super().before_train(runner)

    def _save_checkpoint_with_step(self, runner: Runner, step: int,
                                   meta: dict) -> None:
        outdated = self._keep(runner, step)
        filename = self.filename_tmpl.format(step)
        self.last_ckpt = self.file_backend.join_path(self.out_dir, filename)
        runner.message_hub.update_info('last_ckpt', self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir,
            filename,
            self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args)
        if is_main_process():
            AtomicBackend().put_text(
                self.last_ckpt, osp.join(runner.work_dir, 'last_checkpoint'))
            for old in outdated:
                self._remove(old)

    def _keep(self, runner: Runner, step: int) -> List[int]:
        """Note a step to keep; return those that it outdates."""
        if self.max_keep_ckpts <= 0 or step in self.keep_ckpt_ids:
            return []
        # The checkpoint lists the outdated ones too: should a kill prevent
        # their removal, the resumed run makes up for it.
        steps = [*self.keep_ckpt_ids, step]
        runner.message_hub.update_info('keep_ckpt_ids', steps)
        self.keep_ckpt_ids.append(step)
        return steps[:-self.max_keep_ckpts]

    def _remove(self, step: int) -> None:
        path = self.file_backend.join_path(self.out_dir,
                                           self.filename_tmpl.format(step))
        if self.file_backend.isfile(path):
            self.file_backend.remove(path)
        elif self.file_backend.isdir(path):  # as deepspeed saves
            self.file_backend.rmtree(path)
