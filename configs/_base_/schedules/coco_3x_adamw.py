_base_ = './coco_1x_adamw.py'

# Three times as long, with the steps of Swin (arXiv 2103.14030).
train_cfg = dict(max_epochs=36)
param_scheduler = [
    dict(
        type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(
        type='MultiStepLR',
        begin=0,
        end=36,
        by_epoch=True,
        milestones=[27, 33],
        gamma=0.1),
]
