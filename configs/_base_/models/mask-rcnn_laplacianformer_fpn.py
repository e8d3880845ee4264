_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

# A size of `laplacianformer/` gives the rest of the backbone and the channels
# of the neck. Batch norms keep the statistics of ImageNet, as mmdet's ResNet
# does; no stage is frozen, after PVT (arXiv 2102.12122) and Swin (2103.14030).
model = dict(
    backbone=dict(
        _delete_=True,
        out_indices=(0, 1, 2, 3),
        norm_eval=True,
        init_cfg=dict(type='Pretrained', prefix='backbone.')))
