_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

# AdamW, lr 1e-4 at batch 16 and weight decay 0.05 of Swin (arXiv 2103.14030);
# PVT (2102.12122) has the same lr. No decay on norms, biases and gains.
optim_wrapper = dict(
    type='AmpOptimWrapper',
    optimizer=dict(
        _delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0))
