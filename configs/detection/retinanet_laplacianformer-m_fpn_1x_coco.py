_base_ = [
    '../_base_/models/laplacianformer/medium.py',
    '../_base_/models/retinanet_laplacianformer_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/runtimes/mmdet.py',
]

model = dict(
    backbone=dict(
        **_base_.backbone, init_cfg=dict(checkpoint=_base_.checkpoint)),
    neck=dict(in_channels=_base_.embed_dims[1:]))
