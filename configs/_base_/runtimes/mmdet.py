_base_ = 'mmdet::_base_/default_runtime.py'

default_hooks = dict(
    checkpoint=dict(type='mmlaplace.AtomicCheckpointHook'),
    solver_monitor=dict(type='mmlaplace.SolverMonitorHook', interval=50))
