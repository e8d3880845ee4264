_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    '../_base_/models/laplacianformer/nano.py',
    '../_base_/datasets/digits_instance.py',
    '../_base_/schedules/quickstart.py',
    '../_base_/runtimes/mmdet.py',
]

# mmdet's RetinaNet with a quarter of the width and half the depth of heads.
# The first stage has no output: RetinaNet starts at stride 8.
model = dict(
    backbone=dict(_delete_=True, **_base_.backbone, out_indices=(1, 2, 3)),
    neck=dict(
        in_channels=_base_.embed_dims[1:],
        start_level=0,
        out_channels=64),
    bbox_head=dict(
        num_classes=10, in_channels=64, stacked_convs=2, feat_channels=64))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale_factor=1.0),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(metric='bbox')
test_evaluator = val_evaluator

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=4)
randomness = dict(seed=0)
