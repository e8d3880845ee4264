_base_ = [
    '../_base_/models/laplacianformer/medium.py',
    '../_base_/models/laplacianformer_classifier.py',
    '../_base_/datasets/imagenet_bs128_224.py',
    '../_base_/schedules/imagenet_bs1024_adamw_soft.py',
    '../_base_/runtimes/mmpretrain.py',
]

model = dict(
    backbone=_base_.backbone, head=dict(in_channels=_base_.embed_dims[-1]))
