_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    '../_base_/models/laplacianformer/nano.py',
    '../_base_/datasets/digits_instance.py',
    '../_base_/schedules/quickstart.py',
    '../_base_/runtimes/mmdet.py',
]

# mmdet's Mask R-CNN with narrow heads. They are trained from scratch, so they
# carry norms, as in mmdet's own configs for training from scratch.
norm_cfg = dict(type='GN', num_groups=8, requires_grad=True)
model = dict(
    backbone=dict(
        _delete_=True, **_base_.backbone, out_indices=(0, 1, 2, 3)),
    neck=dict(
        in_channels=_base_.embed_dims,
        out_channels=64,
        norm_cfg=norm_cfg),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        bbox_head=dict(
            type='ConvFCBBoxHead',
            num_shared_convs=2,
            num_shared_fcs=1,
            in_channels=64,
            conv_out_channels=64,
            fc_out_channels=256,
            num_classes=10,
            reg_class_agnostic=True,
            norm_cfg=norm_cfg),
        mask_roi_extractor=dict(out_channels=64),
        mask_head=dict(
            num_convs=2,
            in_channels=64,
            conv_out_channels=64,
            num_classes=10,
            class_agnostic=True,
            norm_cfg=norm_cfg)),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=250),
        rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=250, max_per_img=250)))

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=4)
randomness = dict(seed=0)
