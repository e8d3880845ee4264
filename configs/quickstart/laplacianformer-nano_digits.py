_base_ = [
    '../_base_/models/laplacianformer/nano.py',
    '../_base_/datasets/digits_classification.py',
    '../_base_/schedules/quickstart.py',
    '../_base_/runtimes/mmpretrain.py',
]

model = dict(
    type='ImageClassifier',
    backbone=_base_.backbone,
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=_base_.embed_dims[-1],
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1)))

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=32)
randomness = dict(seed=0)
