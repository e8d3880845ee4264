_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

# As mask-rcnn_laplacianformer_fpn.py. RetinaNet starts at stride 8: the first
# stage has no output, so its norm is not built and none lacks a gradient.
model = dict(
    backbone=dict(
        _delete_=True,
        out_indices=(1, 2, 3),
        norm_eval=True,
        init_cfg=dict(type='Pretrained', prefix='backbone.')),
    neck=dict(start_level=0))
