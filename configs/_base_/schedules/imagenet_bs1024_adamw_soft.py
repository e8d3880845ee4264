# From here: AdamW with lr 5e-4 * batch / 512 and weight decay 0.05, as DeiT
# (arXiv 2012.12877), PVT (2102.12122) and SOFT (2110.11945) have; 300 epochs;
# no decay on norms, biases and other one-dimensional parameters.
_base_ = 'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py'

# Gradient clipping, warm-up and last lr of SOFT++ (its config/*_norm.yaml).
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        by_epoch=True,
        end=10,
        convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=5e-5, by_epoch=True, begin=10),
]

# EMA of decay 0.99996, as DeiT's training script, on which PVT's and SOFT's
# build, has it.
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
