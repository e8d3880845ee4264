_base_ = [
    '../_base_/models/laplacianformer/large.py',
    '../_base_/models/laplacianformer_classifier.py',
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_384.py',
    '../_base_/schedules/imagenet_bs512_adamw_finetune.py',
    '../_base_/runtimes/mmpretrain.py',
]

model = dict(
    backbone=_base_.backbone,
    head=dict(in_channels=_base_.embed_dims[-1]),
    train_cfg=dict(augments=None))
load_from = _base_.checkpoint

# ConvNeXt decays by 0.7 over 12 groups of layers, 0.014 in all; over the
# 50 depths of this size that is 0.92 for each.
optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.92))
