"""Hooks for mmengine's runner."""
from .checkpoint_hook import AtomicBackend, AtomicCheckpointHook
from .solver_monitor_hook import SolverMonitorHook

__all__ = ['AtomicBackend', 'AtomicCheckpointHook', 'SolverMonitorHook']
